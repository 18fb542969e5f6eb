"""What the token-exact fake engine samples: a toy policy over a real vocabulary, true logprobs.

The policy is a pure function of the tokens before a position. It gives weight to a handful of
tokens there, drawn from a hash of the prefix, and to one that a script asks for. So its logprobs
are exact, differ at every position (a shift by one is seen), and cost a microsecond, not a pass
over the vocabulary. Log-softmax at temperature T: l_i/T - log(sum_j exp(l_j/T)).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LogprobsOf = Literal["raw", "scaled", "processed"]
"""What an engine reports: the model's own, before temperature (vLLM's default), those of the
scaled distribution (SGLang), or of what filters leave of it (llama.cpp; vLLM where set so)."""

CANDIDATES = 16
"""Tokens that have weight at each position, besides one that is asked for."""

CUT_OFF = -9999.0
"""vLLM's word for minus infinity."""

_END_LOGIT = 0.5
_SPREAD = 5.0
"""Logits of candidates lie in a band of this width around 0."""
_FREE_TOKENS = 64
"""The most tokens of an answer that nobody limits."""


class Lexicon:
    """A byte-level vocabulary: ids, the bytes behind them, and many ways to spell one text.

    Args:
        tokenizer: byte-level BPE, as of Qwen, Llama 3 or GPT-2.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        form = msgspec.json.decode(tokenizer.to_str())
        added = {entry["content"]: entry for entry in form["added_tokens"]}
        self._tokenizer = tokenizer
        self.added: dict[str, int] = {text: entry["id"] for text, entry in added.items()}
        """Added tokens by their text: special ones and markup as `<tool_call>`."""
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
        """What a token stands for."""
        return self._bytes[token]

    def text(self, tokens: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of tokens; broken UTF-8 is replaced."""
        kept = (t for t in tokens if not (skip_special and t in self.special))
        return b"".join(map(self._bytes.__getitem__, kept)).decode("utf-8", "replace")

    def canonical(self, text: str) -> list[int]:
        """The tokens that the tokenizer itself makes of a text; markup becomes added tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def plain(self, text: str, random: Random | None = None) -> list[int]:
        """A text in ordinary tokens only, so that `<|im_end|>` stays what somebody wrote.

        Args:
            random: takes pieces of random length, so that another spelling than the tokenizer's
                own comes out; None takes the longest piece at each place.
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
    """The letters that byte-level vocabularies write bytes with (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in shown}
    hidden = (byte for byte in range(256) if byte not in letters)
    return letters | {byte: chr(256 + n) for n, byte in enumerate(hidden)}


@dataclass(frozen=True)
class Params:
    """How to sample."""

    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or less is all."""
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop_ids: frozenset[int] = frozenset()
    """The engine's own end tokens, and what a request adds to them."""


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """What was sampled, and how likely it was."""

    ids: tuple[int, ...]
    raw: tuple[float, ...]
    """Logprobs of the model, before temperature."""
    scaled: tuple[float, ...]
    """Logprobs at the request's temperature: of the policy that sampled, as long as nothing was
    cut off by top-p, top-k or min-p."""
    processed: tuple[float, ...] = ()
    """Logprobs of what the filters left; `CUT_OFF` for a token of a script that they had not."""
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """The likeliest tokens of each position with their raw logits, best first."""
    finish: str = "stop"
    """stop, length or abort."""
    stop_id: int | None = None


class Policy:
    """The toy policy.

    Args:
        seed: another one is another model.
        end_id: the end token that free answers stop at.
    """

    def __init__(self, lexicon: Lexicon, seed: int, end_id: int) -> None:
        self._words, self._end = lexicon.ordinary, end_id
        self._key = struct.pack("<q", seed)

    def start(self, prompt: Sequence[int]) -> bytes:
        """The state before the first token."""
        data = struct.pack(f"<{len(prompt)}I", *prompt)
        return hashlib.blake2b(data, digest_size=16, key=self._key).digest()

    def after(self, state: bytes, token: int) -> bytes:
        """The state behind one more token."""
        return hashlib.blake2b(state + struct.pack("<I", token), digest_size=16).digest()

    def logits(self, state: bytes, forced: int | None = None) -> dict[int, float]:
        """Token -> logit at a position.

        Args:
            forced: a token that must have weight there.
        """
        drawn = hashlib.blake2b(state, digest_size=4 * CANDIDATES).digest()
        found: dict[int, float] = {self._end: _END_LOGIT}
        for word, height in struct.iter_unpack("<HH", drawn):
            found.setdefault(self._words[word % len(self._words)], _logit(height))
        if forced is not None and forced not in found:
            own = hashlib.blake2b(state + struct.pack("<I", forced), digest_size=2).digest()
            found[forced] = _logit(int.from_bytes(own, "little"))
        return found


def _logit(height: int) -> float:
    return (height / 65536 - 0.5) * _SPREAD


def log_softmax(logits: Mapping[int, float], temperature: float = 1.0) -> dict[int, float]:
    """Logprobs at a temperature, not 0."""
    scaled = {token: value / temperature for token, value in logits.items()}
    most = max(scaled.values())
    total = most + math.log(sum(math.exp(value - most) for value in scaled.values()))
    return {token: value - total for token, value in scaled.items()}


def pick(logits: Mapping[int, float], params: Params, chance: float) -> int:
    """The token that is sampled.

    Args:
        chance: uniform in [0, 1).
    """
    kept = left_over(logits, params)
    left = chance
    for token, logprob in kept.items():
        left -= math.exp(logprob)
        if left < 0:
            return token
    return list(kept)[-1]


def left_over(logits: Mapping[int, float], params: Params) -> dict[int, float]:
    """What is sampled from: the tokens that temperature and filters leave, the likeliest first,
    with their logprobs there."""
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
    """An answer: what a script wants, or what the policy likes.

    Args:
        wanted: the tokens of the answer, end token included where it has one; None leaves it free.
        top: as many of the likeliest tokens of each position are told.
    """
    state = policy.start(prompt)
    out = _Answer(params, top)
    for token in _tokens(policy, state, params, random, wanted):
        out.add(token, policy.logits(state, token if wanted is not None else None))
        state = policy.after(state, token)
    return out.done(complete=wanted is not None and len(out.ids) == len(wanted))


def _tokens(
    policy: Policy,
    state: bytes,
    params: Params,
    random: Random,
    wanted: Sequence[int] | None,
) -> Iterable[int]:
    """The tokens one by one, up to a stop token or the limit."""
    most = params.max_tokens
    if most is None:
        most = _FREE_TOKENS if wanted is None else len(wanted)
    count = most if wanted is None else min(most, len(wanted))
    for place in range(count):
        if wanted is None:
            token = pick(policy.logits(state), params, random.random())
            state = policy.after(state, token)
        else:
            token = wanted[place]
        yield token
        if token in params.stop_ids:
            return


class _Answer:
    """Gathers one answer."""

    def __init__(self, params: Params, top: int) -> None:
        self.ids: list[int] = []
        self._params, self._most = params, top
        self._raw: list[float] = []
        self._scaled: list[float] = []
        self._processed: list[float] = []
        self._top: list[tuple[tuple[int, float], ...]] = []

    def add(self, token: int, logits: Mapping[int, float]) -> None:
        """One more token, sampled from `logits`."""
        self.ids.append(token)
        self._raw.append(log_softmax(logits)[token])
        warm = self._params.temperature > 0
        own = log_softmax(logits, self._params.temperature)[token] if warm else 0.0
        self._scaled.append(own)
        self._processed.append(left_over(logits, self._params).get(token, CUT_OFF))
        if self._most:
            ranked = sorted(logits.items(), key=lambda pair: (-pair[1], pair[0]))
            self._top.append(tuple(ranked))

    def done(self, *, complete: bool) -> Sampled:
        """The answer.

        Args:
            complete: all that was wanted is there, with an end token or without.
        """
        last = self.ids[-1] if self.ids else None
        stopped = last in self._params.stop_ids
        return Sampled(
            ids=tuple(self.ids),
            raw=tuple(self._raw),
            scaled=tuple(self._scaled),
            processed=tuple(self._processed),
            top=tuple(self._top),
            finish="stop" if stopped or complete else "length",
            stop_id=last if stopped else None,
        )


def reported(
    logits: Sequence[tuple[int, float]], kind: LogprobsOf, params: Params, most: int
) -> list[tuple[int, float]]:
    """The likeliest tokens of a position with their logprobs, as an engine tells them."""
    if kind == "processed":
        return list(left_over(dict(logits), params).items())[:most]
    scale = params.temperature if kind == "scaled" and params.temperature > 0 else 1.0
    logprobs = log_softmax(dict(logits), scale)
    return [(token, logprobs[token]) for token, _ in logits[:most]]
