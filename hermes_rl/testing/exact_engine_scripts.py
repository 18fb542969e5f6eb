"""What the token-exact fake engine says: scripts, and how their texts become tokens.

A script stands in a line that begins with `SCRIPT: [...]`, as for `fake_server`; the turn is the
number of assistant headers in the prompt but for the last. A step is text, or an object:

    {"reasoning": "...", "text": "...",            # <think> and text
     "run": "ls", "calls": [{"name": ..., "arguments": {...} or "any text"}],
     "raw": "...",                                 # as it is; special tokens in it are such
     "plain": "... <|im_end|> ...",                # as it is, in ordinary tokens only
     "ids": [1, 2],                                # these very tokens
     "split": "random",                            # or canonical: how texts are cut into tokens
     "lookalike": true,                            # markup in ordinary tokens too
     "end": false,                                 # no end token; or the text of another one
     "cut": 7,                                     # as if the limit were 7 tokens
     "fault": "reset", "finish": "abort"}

A step that is a list has one for each time that this turn is asked for. After its last step a
script answers `done`; a prompt without a script is answered by the toy policy itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any, Literal

import msgspec

from hermes_rl.testing.exact_engine_sampler import Lexicon

Split = Literal["canonical", "random"]
CallStyle = Literal["hermes", "qwen3_coder"]
_Spelling = Literal["markup", "added", "plain"]
"""Added tokens in a text: those that are markup become tokens; special ones too; none does."""

_MARK = re.compile(r"(?:^|(?<=[>\]])|(?<=[>\]] ))SCRIPT:\s*(?=\[)", re.MULTILINE)
"""A script begins here: on a new line, or behind what a template opens a turn with."""
_DECODER = json.JSONDecoder()


class BadScript(ValueError):
    """A script cannot be played; the engine answers 400 with this text."""


@dataclass(frozen=True)
class Heard:
    """A request, to whoever decides what is said."""

    prompt: tuple[int, ...]
    lexicon: Lexicon
    header: str
    """How an assistant turn begins in the prompt."""
    times: int
    """How often this very prompt was asked before."""
    n: int
    """1-based number of the request."""
    call_id: str | None

    @cached_property
    def text(self) -> str:
        """The prompt as text, special tokens shown."""
        return self.lexicon.text(self.prompt)

    @cached_property
    def turn(self) -> int:
        """How many assistant turns the prompt holds before the one that it opens."""
        return max(0, _without_scripts(self.text).count(self.header) - 1)


class Say(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to be said. All parts together are the answer, in this order."""

    reasoning: str | None = None
    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments text."""
    raw: str = ""
    plain: str = ""
    ids: tuple[int, ...] = ()
    split: Split | None = None
    """None is the engine's own way."""
    lookalike: bool = False
    end: bool | str = True
    cut: int | None = None
    fault: str | None = None
    finish: str | None = None


Speaker = Callable[[Heard], Say | None]
"""Decides what is said; None leaves it to the toy policy."""


def scripted(heard: Heard) -> Say | None:
    """What the script in a prompt says. Raises: BadScript."""
    found = _MARK.search(heard.text) if "SCRIPT:" in heard.text else None
    if found is None:
        return None
    try:
        steps, _ = _DECODER.raw_decode(heard.text, found.end())
    except ValueError as error:
        raise BadScript(f"SCRIPT is no JSON list: {error}") from None
    step = steps[heard.turn] if heard.turn < len(steps) else "done"
    if isinstance(step, list) and step:
        step = step[min(heard.times, len(step) - 1)]
    return say_of(step)


def _without_scripts(text: str) -> str:
    """A prompt without what its scripts say, in which headers of turns may stand."""
    kept, at = [], 0
    for mark in _MARK.finditer(text):
        if mark.start() < at:
            continue
        with suppress(ValueError):
            _, end = _DECODER.raw_decode(text, mark.end())
            kept.append(text[at : mark.start()])
            at = end
    return "".join(kept) + text[at:]


def say_of(step: Any) -> Say:
    """One step of a script. Raises: BadScript."""
    if isinstance(step, str):
        return Say(text=step)
    if not isinstance(step, dict):
        raise BadScript("a step of SCRIPT must be text or an object")
    fields = dict(step)
    listed = list(fields.pop("calls", ()))
    if "run" in fields:
        listed.insert(0, {"name": "terminal", "arguments": {"command": fields.pop("run")}})
    fields["calls"] = [[form.get("name", "terminal"), _arguments(form)] for form in listed]
    try:
        return msgspec.convert(fields, Say)
    except msgspec.ValidationError as error:
        raise BadScript(f"a step of SCRIPT: {error}") from None


def _arguments(form: dict[str, Any]) -> str:
    given = form.get("arguments", {})
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


@dataclass(frozen=True)
class Mouth:
    """How an engine turns what is to be said into tokens."""

    lexicon: Lexicon
    end_id: int
    split: Split = "canonical"
    style: CallStyle = "hermes"

    def tokens(self, say: Say, random: Random) -> list[int]:
        """The tokens of an answer, its end token included."""
        out = list(say.ids)
        for text, spelling in self._parts(say):
            out += self._spelled(text, spelling, say.split or self.split, random)
        if isinstance(say.end, str):
            if say.end not in self.lexicon.added:
                raise BadScript(f"end: {say.end!r} is no token of this vocabulary")
            out.append(self.lexicon.added[say.end])
        elif say.end:
            out.append(self.end_id)
        return out

    def _parts(self, say: Say) -> list[tuple[str, _Spelling]]:
        """Texts in order, and how each is spelled."""
        written = "" if say.reasoning is None else f"<think>\n{say.reasoning}\n</think>\n\n"
        written += say.text
        for name, arguments in say.calls:
            written += ("\n" if written else "") + self._call(name, arguments)
        own: _Spelling = "plain" if say.lookalike else "markup"
        parts: list[tuple[str, _Spelling]] = [
            (written, own),
            (say.raw, "plain" if say.lookalike else "added"),
            (say.plain, "plain"),
        ]
        return [(text, spelling) for text, spelling in parts if text]

    def _call(self, name: str, arguments: str) -> str:
        if self.style == "hermes":
            shown = json.dumps(name, ensure_ascii=False)
            return f'<tool_call>\n{{"name": {shown}, "arguments": {arguments}}}\n</tool_call>'
        given = json.loads(arguments)
        lines = "".join(
            f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in given.items()
        )
        return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"

    def _spelled(self, text: str, spelling: _Spelling, split: Split, random: Random) -> list[int]:
        chance = random if split == "random" else None
        lexicon = self.lexicon
        if spelling == "plain":
            return lexicon.plain(text, chance)
        out: list[int] = []
        for piece in _at_added(text, lexicon):
            known = lexicon.added.get(piece)
            if known is not None and (spelling == "added" or known not in lexicon.special):
                out.append(known)
            elif known is not None or chance is not None:
                out += lexicon.plain(piece, chance)
            else:
                out += lexicon.canonical(piece)
        return out


def _at_added(text: str, lexicon: Lexicon) -> list[str]:
    """The text cut before and behind each added token."""
    known = sorted(lexicon.added, key=len, reverse=True)
    if not known:
        return [text]
    pieces = re.split(f"({'|'.join(map(re.escape, known))})", text)
    return [piece for piece in pieces if piece]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
