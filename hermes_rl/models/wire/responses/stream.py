"""Decoding a stream of the Responses API.

Items count as they are when they are done: an item that was only added may still lack text,
arguments, or a part of its encrypted content. Servers that leave the done events out give their
items in the last event; where that has none either, they are built from the deltas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hermes_rl.models.base import Completion
from hermes_rl.models.wire.decoding import EventDecoder, Reading
from hermes_rl.models.wire.responses.answer import Response, completion, open_response
from hermes_rl.models.wire.responses.items import CALL, MESSAGE, REASONING
from hermes_rl.models.wire.sse import DONE

_ENDS = {
    "response.completed": "completed",
    "response.done": "completed",
    "response.incomplete": "incomplete",
    "response.failed": "failed",
    "response.cancelled": "cancelled",
}
"""The last event of a stream -> the status that it means where the response does not say it."""

_GROWS = {
    "response.output_text": (MESSAGE, "text"),
    "response.refusal": (MESSAGE, "refusal"),
    "response.function_call_arguments": (CALL, "arguments"),
    "response.reasoning_summary_text": (REASONING, "summary"),
    "response.reasoning_text": (REASONING, "content"),
}
"""Events `….delta` and `….done` -> the kind of their item, and what grows in it."""


class _Event(msgspec.Struct):
    """What is read of an event's data."""

    type: Any = None
    response: msgspec.Raw = msgspec.Raw(b"null")
    item: Any = None
    output_index: Any = None
    delta: Any = None
    error: Any = None
    code: Any = None
    message: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class StreamDecoder(EventDecoder):
    """A stream is complete when it says so, by its last event; what follows that is left out."""

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        self._drafts: dict[int, _Draft] = {}
        self._response: Response | None = None
        """Of the last event; None while the stream goes on."""
        self._status = ""

    @property
    def in_call(self) -> bool:
        """Whether a tool call has begun."""
        return any(draft.is_call for draft in self._drafts.values())

    def _answer(self) -> Completion:
        response = self._response
        if response is None:
            raise self._reading.unfinished()
        response.status = response.status or self._status
        return completion(response, self._output(response), self._reading)

    def _take(self, data: bytes) -> None:
        if self.done or data.strip() == DONE:
            return
        event = self._reading.parse(_decode, data, "JSON object in the stream")
        kind = event.type if isinstance(event.type, str) else ""
        if kind == "error" or (event.error and not kind.startswith("response.")):
            error = event.error or {"code": event.code, "message": event.message}
            raise self._reading.fault(error)
        if kind in _ENDS:
            # The copy lets the event's buffer go.
            self._response = open_response(bytes(event.response), self._reading)
            self._response.usage = msgspec.Raw(bytes(self._response.usage))
            self._status = _ENDS[kind]
            self.done = True
        elif isinstance(event.output_index, int):
            self._grow(kind, event)
        elif kind == "response.output_item.done" and isinstance(event.item, Mapping):
            self._drafts.setdefault(max(self._drafts, default=-1) + 1, _Draft()).item = event.item

    def _grow(self, kind: str, event: _Event) -> None:
        draft = self._drafts.setdefault(event.output_index, _Draft())
        item = event.item if isinstance(event.item, Mapping) else None
        if kind == "response.output_item.done" and item is not None:
            draft.item = item
        elif kind == "response.output_item.added" and item is not None:
            draft.begun = item
        elif kind.endswith(".delta") and isinstance(event.delta, str):
            grows = _GROWS.get(kind.removesuffix(".delta"))
            if grows is not None:
                draft.add(*grows, event.delta)
            if kind == "response.output_text.delta":
                self._reading.tell(event.delta)

    def _output(self, response: Response) -> list[Any]:
        given = response.output if isinstance(response.output, list) else []
        if given and not all(d.item is not None for d in self._drafts.values()):
            return given
        if not self._drafts:
            return given
        return [self._drafts[index].form() for index in sorted(self._drafts)]


class _Draft:
    """One item while it comes in."""

    def __init__(self) -> None:
        self.item: Mapping[str, Any] | None = None
        """The item as it is when it is done."""
        self.begun: Mapping[str, Any] = {}
        self._kind = ""
        self._grown: dict[str, list[str]] = {}

    def add(self, kind: str, field: str, delta: str) -> None:
        """Take a delta of one of the fields in `_GROWS`."""
        self._kind = kind
        self._grown.setdefault(field, []).append(delta)

    @property
    def is_call(self) -> bool:
        """Whether it is a tool call, as far as it has come."""
        return CALL in (self._kind, self.begun.get("type"))

    def form(self) -> Mapping[str, Any]:
        """The item; built from its deltas where it never was done."""
        if self.item is not None:
            return self.item
        grown = {field: "".join(pieces) for field, pieces in self._grown.items()}
        form = {"type": self._kind, **self.begun}
        # What an added item says of its encrypted content may be half of it.
        form.pop("encrypted_content", None)
        if "arguments" in grown:
            form["arguments"] = grown["arguments"]
        if "text" in grown or "refusal" in grown:
            form["content"] = [{name: grown[name]} for name in ("text", "refusal") if name in grown]
        if "summary" in grown:
            form["summary"] = [{"text": grown["summary"]}]
        return form
