"""Decoding a stream of the Messages API: its events are gathered into the blocks of a body."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from hermes_rl.models.base import Completion
from hermes_rl.models.wire.anthropic.answer import (
    Call,
    Content,
    Envelope,
    arguments_of,
    completion,
    error_in,
    opaque,
)
from hermes_rl.models.wire.anthropic.blocks import THINKING
from hermes_rl.models.wire.decoding import EventDecoder, Reading
from hermes_rl.models.wire.lenient import decode_json, encode_json
from hermes_rl.models.wire.sse import DONE


class StreamDecoder(EventDecoder):
    """A stream is complete when it says so: by `message_stop` or a stop reason. Unknown events,
    pings among them, are of no interest."""

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        self._all = Envelope()
        self._usage: dict[str, Any] = {}
        self._counted = False
        self._blocks: dict[int, _Block] = {}
        self._takers: dict[Any, Callable[[Mapping[str, Any]], None]] = {
            "message_start": self._start,
            "content_block_start": self._open,
            "content_block_delta": self._grow,
            "message_delta": self._change,
            "message_stop": self._stop,
            "error": self._fail,
        }

    @property
    def in_call(self) -> bool:
        """Whether a tool call has begun."""
        return any(block.is_call for block in self._blocks.values())

    def _answer(self) -> Completion:
        whole = self._all
        if whole.stop_reason is None:
            raise self._reading.unfinished()
        if not self._counted:  # the count at the start was of the first token only
            self._usage.pop("output_tokens", None)
        if self._usage:
            whole.usage = msgspec.Raw(encode_json(self._usage))
        contents = (self._blocks[index].content() for index in sorted(self._blocks))
        told = [content for content in contents if content is not None]
        return completion(whole, told, self._reading)

    def _take(self, data: bytes) -> None:
        if data.strip() == DONE:  # some servers end every stream in OpenAI's way
            return
        form = self._reading.parse(decode_json, data)
        if not isinstance(form, Mapping):
            return
        kind = "error" if form.get("error") else form.get("type")
        take = self._takers.get(kind) if isinstance(kind, str) else None
        if take is not None:
            take(form)

    def _start(self, form: Mapping[str, Any]) -> None:
        message = _part(form, "message")
        self._all.id, self._all.model = message.get("id"), message.get("model")
        self._usage.update(_known(_part(message, "usage")))

    def _open(self, form: Mapping[str, Any]) -> None:
        block = _Block(_part(form, "content_block"))
        self._blocks[_index(form)] = block
        self._reading.tell(block.opening)

    def _grow(self, form: Mapping[str, Any]) -> None:
        block = self._blocks.get(_index(form))
        if block is None:  # some servers leave the start of a block out
            block = self._blocks[_index(form)] = _Block({})
        self._reading.tell(block.add(_part(form, "delta")))

    def _change(self, form: Mapping[str, Any]) -> None:
        """Usage here is of the whole answer so far: it replaces what was said before."""
        delta = _part(form, "delta")
        if delta.get("stop_reason") is not None:
            self._all.stop_reason = delta["stop_reason"]
            self._all.stop_details = delta.get("stop_details")
        told = _known(_part(form, "usage"))
        for name, value in told.items():
            # What came in never gets less: a 0 behind a count says nothing.
            if value != 0 or name == "output_tokens" or not self._usage.get(name):
                self._usage[name] = value
        self._counted = self._counted or "output_tokens" in told

    def _stop(self, form: Mapping[str, Any]) -> None:
        self.done = True
        self._all.stop_reason = self._all.stop_reason or "end_turn"

    def _fail(self, form: Mapping[str, Any]) -> None:
        raise error_in(form.get("error"), self._reading)


class _Block:
    """One content block, delta by delta."""

    def __init__(self, form: Mapping[str, Any]) -> None:
        self._form = dict(form)
        self._pieces: dict[str, list[str]] = {}
        text = form.get("text")
        self.opening = text if isinstance(text, str) and form.get("type") == "text" else ""

    def add(self, delta: Mapping[str, Any]) -> str:
        """Take one delta; returns its visible text."""
        for name, kind in (
            ("text", "text"),
            ("thinking", "thinking"),
            ("signature", "thinking"),
            ("partial_json", "tool_use"),
        ):
            piece = delta.get(name)
            if isinstance(piece, str):
                self._form.setdefault("type", kind)
                self._pieces.setdefault(name, []).append(piece)
        text = delta.get("text")
        return text if isinstance(text, str) else ""

    @property
    def is_call(self) -> bool:
        """Whether it is a tool call, as far as it has come."""
        return self._form.get("type") == "tool_use"

    def content(self) -> Content | None:
        """What the block holds; None for blocks that only tools of the provider make."""
        form = self._form
        kind = form.get("type")
        if kind == "text":
            return self.opening + self._joined("text")
        if kind == "tool_use":
            text = self._joined("partial_json") or arguments_of(form.get("input") or {})
            return Call(form.get("id"), form.get("name"), text)
        if kind not in THINKING:
            return None
        opening = form.get("thinking")
        out = dict(form)
        if "thinking" in self._pieces:
            out["thinking"] = (opening if isinstance(opening, str) else "") + self._joined(
                "thinking"
            )
        if "signature" in self._pieces:
            out["signature"] = self._pieces["signature"][-1]  # it comes whole
        return opaque(out)

    def _joined(self, name: str) -> str:
        return "".join(self._pieces.get(name, ()))


def _index(form: Mapping[str, Any]) -> int:
    index = form.get("index")
    return index if isinstance(index, int) else 0


def _part(form: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = form.get(name)
    return value if isinstance(value, Mapping) else {}


def _known(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that are null say nothing: what stood before them stays."""
    return {k: v for k, v in usage.items() if v is not None}
