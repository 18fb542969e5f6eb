"""What the exact engine answers: scripts, or a toy policy over a real vocabulary, true logprobs.

The policy is a pure function of the tokens before a position. It gives weight to a handful of
tokens, drawn from a hash of the prefix, and to the one that a script wants. So its logprobs are
exact, differ at every position (a shift by one shows), and cost a microsecond, not a pass over the
vocabulary. Log-softmax at temperature T: l_i/T - log(sum_j exp(l_j/T)).

A script is a line of the prompt that begins with `SCRIPT: [...]`, as for `fake_server`; the turn is
the number of assistant headers in the prompt without the last. A step is text, or an object:

    {"reasoning": "...", "text": "...",            # <think> and text
     "run": "ls", "calls": [{"name": ..., "arguments": {...} or "any text"}],
     "raw": "...",                                 # as it is; special tokens become tokens
     "plain": "... <|im_end|> ...",                # as it is, in ordinary tokens only
     "ids": [1, 2],                                # exactly these tokens
     "split": "random",                            # or canonical: how texts are cut into tokens
     "lookalike": true,                            # markup in ordinary tokens too
     "end": false,                                 # no end token; or the text of another
     "cut": 7,                                     # as if the limit were 7 tokens
     "fault": "reset", "finish": "abort"}

A step that is a list has one step for each repetition of this turn's request. After its last step a
script answers `done`; the toy policy answers a prompt without a script.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LogprobsOf = Literal["raw", "scaled", "processed"]
"""The logprobs that an engine reports: of the model before temperature (vLLM's default), of the
scaled distribution (SGLang), or of what filters leave of it (llama.cpp; vLLM if set so)."""

CANDIDATES = 16
"""Tokens that have weight at each position, besides a scripted one."""

CUT_OFF = -9999.0
"""vLLM's value for minus infinity."""

END_LOGIT = 0.5
_SPREAD = 5.0
"""Width of the band around 0 with the logits of candidates."""
_FREE_TOKENS = 64
"""Maximum tokens of an answer without a limit."""


class Vocabulary:
    """A byte-level vocabulary: ids, their bytes, and many ways to tokenize one text.

    Args:
        tokenizer: byte-level BPE, as of Qwen, Llama 3 or GPT-2.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        form = msgspec.json.decode(tokenizer.to_str())
        added = {entry["content"]: entry for entry in form["added_tokens"]}
        self._tokenizer = tokenizer
        self.added: dict[str, int] = {text: entry["id"] for text, entry in added.items()}
        """Added tokens by text: special ones and markup such as `<tool_call>`."""
        self.special = frozenset(e["id"] for e in added.values() if e["special"])
        back = {char: byte for byte, char in byte_letters().items()}
        plain = {t: i for t, i in form["model"]["vocab"].items() if t not in added}
        self._bytes = {i: bytes(back[c] for c in t) for t, i in plain.items()}
        self._bytes |= {i: t.encode() for t, i in self.added.items()}
        self._pieces = {self._bytes[i]: i for i in plain.values()}
        self._longest = max(map(len, self._pieces))
        self.ordinary = tuple(sorted(plain.values()))
        """Ids of tokens that are not added ones."""

    def __contains__(self, token: int) -> bool:
        return token in self._bytes

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return self._bytes[token]

    def text(self, tokens: Iterable[int], *, skip_special: bool = False) -> str:
        """Decode tokens; invalid UTF-8 is replaced."""
        kept = (t for t in tokens if not (skip_special and t in self.special))
        return b"".join(map(self._bytes.__getitem__, kept)).decode("utf-8", "replace")

    def canonical(self, text: str) -> list[int]:
        """Tokenize a text as the tokenizer does; markup becomes added tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def plain(self, text: str, random: Random | None = None) -> list[int]:
        """Tokenize a text into ordinary tokens only, `<|im_end|>` included.

        Args:
            random: takes pieces of random length, unlike the tokenizer; None takes the longest
                piece at each position.
        """
        data, out, at = text.encode("utf-8", "surrogatepass"), [], 0
        while at < len(data):
            most = min(self._longest, len(data) - at)
            lengths = [n for n in range(1, most + 1) if data[at : at + n] in self._pieces]
            length = random.choice(lengths) if random else lengths[-1]
            out.append(self._pieces[data[at : at + length]])
            at += length
        return out


def byte_letters() -> dict[int, str]:
    """Return byte -> letter of byte-level vocabularies (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in shown}
    hidden = (byte for byte in range(256) if byte not in letters)
    return letters | {byte: chr(256 + n) for n, byte in enumerate(hidden)}


@dataclass(frozen=True)
class Params:
    """Sampling parameters."""

    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or less is unlimited."""
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop_ids: frozenset[int] = frozenset()
    """The end tokens of the engine and of the request."""


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens with their logprobs."""

    ids: tuple[int, ...]
    raw: tuple[float, ...]
    """Logprobs of the model, before temperature."""
    scaled: tuple[float, ...]
    """Logprobs at the request's temperature: of the sampling policy, unless top-p, top-k or min-p
    removed tokens."""
    processed: tuple[float, ...] = ()
    """Logprobs after the filters; `CUT_OFF` for a scripted token that they removed."""
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """The likeliest tokens of each position with their raw logits, best first."""
    finish: str = "stop"
    """stop, length or abort."""
    stop_id: int | None = None

    def part(self, start: int, end: int | None) -> Sampled:
        """Return some of the tokens."""
        span, lists = slice(start, end), ("ids", "raw", "scaled", "processed", "top")
        return msgspec.structs.replace(self, **{name: getattr(self, name)[span] for name in lists})


class Policy:
    """The toy policy.

    Args:
        seed: each seed is another model.
        end_id: the end token of free answers.
        end_logit: its logit.
        whole: no token has a part of a character.
    """

    def __init__(
        self, vocabulary: Vocabulary, seed: int, end_id: int, end_logit: float = END_LOGIT,
        *, whole: bool = False,
    ) -> None:  # fmt: skip
        self._ordinary, self._end, self._end_logit = vocabulary.ordinary, end_id, end_logit
        if whole:
            texts = ((token, vocabulary.text([token])) for token in self._ordinary)
            self._ordinary = tuple(token for token, text in texts if "\ufffd" not in text)
        self._key = struct.pack("<q", seed)

    def start(self, prompt: Sequence[int]) -> bytes:
        """Return the state before the first token."""
        data = struct.pack(f"<{len(prompt)}I", *prompt)
        return hashlib.blake2b(data, digest_size=16, key=self._key).digest()

    def after(self, state: bytes, token: int) -> bytes:
        """Return the state after one more token."""
        return hashlib.blake2b(state + struct.pack("<I", token), digest_size=16).digest()

    def logits(self, state: bytes, forced: int | None = None) -> dict[int, float]:
        """Return token -> logit at a position.

        Args:
            forced: a token that must have weight there.
        """
        drawn = hashlib.blake2b(state, digest_size=4 * CANDIDATES).digest()
        found: dict[int, float] = {self._end: self._end_logit}
        for number, height in struct.iter_unpack("<HH", drawn):
            found.setdefault(self._ordinary[number % len(self._ordinary)], _logit(height))
        if forced is not None and forced not in found:
            digest = hashlib.blake2b(state + struct.pack("<I", forced), digest_size=2).digest()
            found[forced] = _logit(int.from_bytes(digest, "little"))
        return found


def _logit(height: int) -> float:
    return (height / 65536 - 0.5) * _SPREAD


def log_softmax(logits: Mapping[int, float], temperature: float = 1.0) -> dict[int, float]:
    """Return logprobs at a temperature other than 0."""
    scaled = {token: value / temperature for token, value in logits.items()}
    most = max(scaled.values())
    total = most + math.log(sum(math.exp(value - most) for value in scaled.values()))
    return {token: value - total for token, value in scaled.items()}


def pick(logits: Mapping[int, float], params: Params, chance: float) -> int:
    """Sample a token.

    Args:
        chance: uniform in [0, 1).
    """
    kept = filter_logits(logits, params)
    left = chance
    for token, logprob in kept.items():
        left -= math.exp(logprob)
        if left < 0:
            return token
    return list(kept)[-1]


def filter_logits(logits: Mapping[int, float], params: Params) -> dict[int, float]:
    """Return the logprobs of the tokens that temperature and filters leave, likeliest first."""
    ranked = sorted(logits, key=lambda t: (-logits[t], t))
    if params.temperature <= 0:
        return {ranked[0]: 0.0}
    logprobs = log_softmax(logits, params.temperature)
    weights = [math.exp(logprobs[token]) for token in ranked]
    most = params.top_k if params.top_k > 0 else len(ranked)
    kept, mass = 0, 0.0
    while kept < min(most, len(ranked)) and (not kept or mass < params.top_p):
        if weights[kept] < params.min_p * weights[0]:
            break
        mass += weights[kept]
        kept += 1
    return {token: min(0.0, logprobs[token] - math.log(mass)) for token in ranked[:kept]}


def sample(
    policy: Policy,
    prompt: Sequence[int],
    params: Params,
    random: Random,
    *,
    wanted: Sequence[int] | None = None,
    top: int = 0,
) -> Sampled:
    """Sample an answer, scripted or from the policy.

    Args:
        wanted: the tokens of the answer, with the end token, if any; None samples freely.
        top: likeliest tokens to report at each position.
    """
    state = policy.start(prompt)
    limit = params.max_tokens
    count = (_FREE_TOKENS if wanted is None else len(wanted)) if limit is None else limit
    if wanted is not None:
        count = min(count, len(wanted))
    ids: list[int] = []
    raw, scaled, processed = list[float](), list[float](), list[float]()
    likely: list[tuple[tuple[int, float], ...]] = []
    while len(ids) < count and not (ids and ids[-1] in params.stop_ids):
        forced = None if wanted is None else wanted[len(ids)]
        logits = policy.logits(state, forced)
        token = pick(logits, params, random.random()) if forced is None else forced
        state = policy.after(state, token)
        ids.append(token)
        raw.append(log_softmax(logits)[token])
        warm = params.temperature > 0
        scaled.append(log_softmax(logits, params.temperature)[token] if warm else 0.0)
        processed.append(filter_logits(logits, params).get(token, CUT_OFF))
        if top:
            likely.append(tuple(sorted(logits.items(), key=lambda pair: (-pair[1], pair[0]))))
    stop_id = ids[-1] if ids and ids[-1] in params.stop_ids else None
    complete = wanted is not None and len(ids) == len(wanted)  # with an end token or without
    return Sampled(
        ids=tuple(ids),
        raw=tuple(raw),
        scaled=tuple(scaled),
        processed=tuple(processed),
        top=tuple(likely),
        finish="stop" if stop_id is not None or complete else "length",
        stop_id=stop_id,
    )


def reported(
    logits: Sequence[tuple[int, float]], kind: LogprobsOf, params: Params, most: int
) -> list[tuple[int, float]]:
    """Return the likeliest tokens of a position with the logprobs that an engine reports."""
    if kind == "processed":
        return list(filter_logits(dict(logits), params).items())[:most]
    scale = params.temperature if kind == "scaled" and params.temperature > 0 else 1.0
    logprobs = log_softmax(dict(logits), scale)
    return [(token, logprobs[token]) for token, _ in logits[:most]]


# Scripts

Split = Literal["canonical", "random"]
_Spelling = Literal["markup", "added", "plain"]
"""Which added tokens in a text become tokens: those that are markup; special ones too; none."""

_MARK = re.compile(r"(?:^|(?<=[>\]])|(?<=[>\]] ))SCRIPT:\s*(?=\[)", re.MULTILINE)
"""The start of a script: on a new line, or after what a template opens a turn with."""
_DECODER = json.JSONDecoder()


class InvalidScript(ValueError):
    """A script that cannot be played; the engine answers 400 with this text."""


@dataclass(frozen=True)
class PromptView:
    """A request, as a speaker sees it."""

    prompt: tuple[int, ...]
    vocabulary: Vocabulary
    header: str
    """The text that opens an assistant turn in the prompt."""
    times: int
    """How often this exact prompt was sent before."""
    n: int
    """1-based number of the request."""
    call_id: str | None

    @cached_property
    def text(self) -> str:
        """The prompt as text, with special tokens."""
        return self.vocabulary.text(self.prompt)

    @cached_property
    def turn(self) -> int:
        """The number of assistant turns before the one that the prompt opens."""
        return max(0, _without_scripts(self.text).count(self.header) - 1)


class ScriptedAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An answer in parts, which are joined in this order."""

    reasoning: str | None = None
    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments text."""
    raw: str = ""
    plain: str = ""
    ids: tuple[int, ...] = ()
    split: Split | None = None
    """None is the engine's default."""
    lookalike: bool = False
    end: bool | str = True
    cut: int | None = None
    fault: str | None = None
    finish: str | None = None


Speaker = Callable[[PromptView], ScriptedAnswer | None]
"""Chooses the answer to a request; None leaves it to the toy policy."""


def scripted(view: PromptView) -> ScriptedAnswer | None:
    """Return the step of the script in a prompt. Raises: InvalidScript."""
    found = _MARK.search(view.text) if "SCRIPT:" in view.text else None
    if found is None:
        return None
    try:
        steps, _ = _DECODER.raw_decode(view.text, found.end())
    except ValueError as error:
        raise InvalidScript(f"SCRIPT is not a JSON list: {error}") from None
    step = steps[view.turn] if view.turn < len(steps) else "done"
    if isinstance(step, list) and step:
        step = step[min(view.times, len(step) - 1)]
    return parse_scripted(step)


def _without_scripts(text: str) -> str:
    """Return a prompt without its scripts, which may contain headers of turns."""
    kept, at = [], 0
    for mark in _MARK.finditer(text):
        if mark.start() < at:
            continue
        with suppress(ValueError):
            _, end = _DECODER.raw_decode(text, mark.end())
            kept.append(text[at : mark.start()])
            at = end
    return "".join(kept) + text[at:]


def parse_scripted(step: Any) -> ScriptedAnswer:
    """Parse one step of a script. Raises: InvalidScript."""
    if isinstance(step, str):
        return ScriptedAnswer(text=step)
    if not isinstance(step, dict):
        raise InvalidScript("a step of SCRIPT must be text or an object")
    fields = dict(step)
    listed = list(fields.pop("calls", ()))
    if "run" in fields:
        listed.insert(0, {"name": "terminal", "arguments": {"command": fields.pop("run")}})
    fields["calls"] = [[form.get("name", "terminal"), _arguments(form)] for form in listed]
    try:
        return msgspec.convert(fields, ScriptedAnswer)
    except msgspec.ValidationError as error:
        raise InvalidScript(f"a step of SCRIPT: {error}") from None


def _arguments(form: dict[str, Any]) -> str:
    arguments = form.get("arguments", {})
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


@dataclass(frozen=True)
class AnswerTokenizer:
    """Turns scripted answers into tokens."""

    vocabulary: Vocabulary
    end_id: int
    split: Split = "canonical"

    def tokens(self, say: ScriptedAnswer, random: Random) -> list[int]:
        """Return the tokens of an answer with its end token."""
        out = list(say.ids)
        for text, spelling in self._parts(say):
            out += self._spelled(text, spelling, say.split or self.split, random)
        if isinstance(say.end, str):
            if say.end not in self.vocabulary.added:
                raise InvalidScript(f"end: {say.end!r} is not a token of this vocabulary")
            out.append(self.vocabulary.added[say.end])
        elif say.end:
            out.append(self.end_id)
        return out

    def _parts(self, say: ScriptedAnswer) -> list[tuple[str, _Spelling]]:
        """Return the texts of an answer in order, with their spelling."""
        written = "" if say.reasoning is None else f"<think>\n{say.reasoning}\n</think>\n\n"
        written += say.text
        for name, arguments in say.calls:
            shown = json.dumps(name, ensure_ascii=False)
            written += "\n" if written else ""
            written += f'<tool_call>\n{{"name": {shown}, "arguments": {arguments}}}\n</tool_call>'
        spelling: _Spelling = "plain" if say.lookalike else "markup"
        parts: list[tuple[str, _Spelling]] = [
            (written, spelling),
            (say.raw, "plain" if say.lookalike else "added"),
            (say.plain, "plain"),
        ]
        return [(text, spelling) for text, spelling in parts if text]

    def _spelled(self, text: str, spelling: _Spelling, split: Split, random: Random) -> list[int]:
        chance = random if split == "random" else None
        vocabulary = self.vocabulary
        if spelling == "plain":
            return vocabulary.plain(text, chance)
        out: list[int] = []
        for piece in _split_at_added(text, vocabulary):
            known = vocabulary.added.get(piece)
            if known is not None and (spelling == "added" or known not in vocabulary.special):
                out.append(known)
            elif known is not None or chance is not None:
                out += vocabulary.plain(piece, chance)
            else:
                out += vocabulary.canonical(piece)
        return out


def _split_at_added(text: str, vocabulary: Vocabulary) -> list[str]:
    """Split a text before and after each added token."""
    known = sorted(vocabulary.added, key=len, reverse=True)
    if not known:
        return [text]
    pieces = re.split(f"({'|'.join(map(re.escape, known))})", text)
    return [piece for piece in pieces if piece]
