"""Decoding a stream of Chat Completions: deltas are gathered into the message that a body would
hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hermes_rl.models.base import Completion
from hermes_rl.models.wire.chat.answer import (
    Envelope,
    capture_of,
    completion,
    end_of,
    first_choice,
    message_of,
    open_envelope,
)
from hermes_rl.models.wire.decoding import EventDecoder, Reading
from hermes_rl.models.wire.lenient import encode_json
from hermes_rl.models.wire.reasoning import flatten, merge_details, reasoning_of
from hermes_rl.models.wire.sse import DONE


class StreamDecoder(EventDecoder):
    """A stream is complete when it says so: by `[DONE]` or a finish reason."""

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        self._all = Envelope()
        self._gathered = Gathered()

    @property
    def in_call(self) -> bool:
        """Whether a tool call has begun."""
        return self._gathered.in_call

    def _answer(self) -> Completion:
        gathered = self._gathered
        if not self.done and gathered.finish_reason is None:
            raise self._reading.unfinished()
        form = gathered.message()
        message = message_of(form, self._reading.salt)
        tokens = capture_of(self._all, gathered.choice())
        reason = end_of(form, gathered.finish_reason)
        return completion(self._reading, self._all, message, reason, tokens)

    def _take(self, data: bytes) -> None:
        if data.strip() == DONE:
            self.done = True
            return
        chunk = open_envelope(data, self._reading)
        whole = self._all
        whole.id = whole.id or chunk.id
        whole.model = whole.model or chunk.model
        whole.prompt_token_ids = whole.prompt_token_ids or chunk.prompt_token_ids
        whole.policy_version = chunk.policy_version or whole.policy_version
        if bytes(chunk.usage) not in (b"null", b"{}"):
            # Some servers send running totals: the last object is the one that counts. The copy
            # lets the chunk's buffer go.
            whole.usage = msgspec.Raw(bytes(chunk.usage))
        choice = first_choice(chunk.choices)
        if choice is not None:
            self._reading.tell(self._gathered.add(choice))


class Gathered:
    """The first choice of a stream, delta by delta."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._refusal: list[str] = []
        self._details: list[Any] = []
        self._calls: list[_Call] = []
        self._choice: dict[str, Any] = {}
        self._token_ids: list[Any] | None = None
        self._logprobs: list[Any] | None = None

    @property
    def in_call(self) -> bool:
        """Whether a tool call has begun."""
        return bool(self._calls)

    def add(self, choice: Mapping[str, Any]) -> str:
        """Take one delta; returns its visible text."""
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self.finish_reason = reason
        self._add_tokens(choice)
        delta = choice.get("delta")
        if not isinstance(delta, Mapping):
            delta = choice.get("message")  # a whole message where a delta was due
        if not isinstance(delta, Mapping):
            return ""
        text, thought = flatten(delta.get("content"))
        self._content.append(text)
        self._reasoning.append(reasoning_of(delta) or thought or "")
        if isinstance(delta.get("refusal"), str):
            self._refusal.append(delta["refusal"])
        merge_details(self._details, delta.get("reasoning_details"))
        self._add_calls(delta)
        return text

    def message(self) -> dict[str, Any]:
        """The message as a body would hold it."""
        return {
            "content": "".join(self._content),
            "reasoning_content": "".join(self._reasoning) or None,
            "refusal": "".join(self._refusal) or None,
            "reasoning_details": self._details or None,
            "tool_calls": [call.form() for call in self._calls],
        }

    def choice(self) -> dict[str, Any]:
        """The choice's token fields as a body would hold them."""
        return {
            **self._choice,
            "token_ids": self._token_ids,
            "logprobs": None if self._logprobs is None else {"content": self._logprobs},
        }

    def _add_tokens(self, choice: Mapping[str, Any]) -> None:
        for name in ("prompt_token_ids", "logprobs_kind"):
            if choice.get(name) is not None:
                self._choice[name] = choice[name]
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            self._token_ids = (self._token_ids or []) + ids
        logprobs = choice.get("logprobs")
        content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
        if isinstance(content, list):
            self._logprobs = (self._logprobs or []) + content

    def _add_calls(self, delta: Mapping[str, Any]) -> None:
        pieces = delta.get("tool_calls")
        if isinstance(delta.get("function_call"), Mapping):  # the form before tool calls
            pieces = [{"index": 0, "function": delta["function_call"]}]
        for piece in pieces if isinstance(pieces, list) else ():
            if isinstance(piece, Mapping):
                self._call_for(piece).add(piece)

    def _call_for(self, piece: Mapping[str, Any]) -> _Call:
        """The call that a piece continues, or a new one.

        By index; where servers leave it out, or give every call the same, a new id with a name
        begins a new call, and a piece without either goes on with the last one.
        """
        index, given = piece.get("index"), piece.get("id")
        named = bool(_function(piece).get("name"))
        known: _Call | None = None
        if isinstance(index, int):
            known = next((c for c in reversed(self._calls) if c.index == index), None)
        elif given:
            known = next((c for c in self._calls if c.id == given), None)
        elif self._calls and not named:
            known = self._calls[-1]
        if known is not None and not (named and given and known.id and known.id != given):
            return known
        call = _Call(index if isinstance(index, int) else None)
        self._calls.append(call)
        return call


class _Call:
    def __init__(self, index: int | None) -> None:
        self.index = index
        self.id: str | None = None
        self._name = ""
        self._arguments: list[str] = []

    def add(self, piece: Mapping[str, Any]) -> None:
        given = piece.get("id")
        if isinstance(given, str) and given:
            self.id = given
        function = _function(piece)
        name = function.get("name")
        if isinstance(name, str) and name != self._name:  # some repeat it in every piece
            self._name += name
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            self._arguments.append(arguments)
        elif arguments is not None:
            self._arguments.append(encode_json(arguments).decode())

    def form(self) -> dict[str, Any]:
        function = {"name": self._name, "arguments": "".join(self._arguments)}
        return {"id": self.id, "function": function}


def _function(piece: Mapping[str, Any]) -> Mapping[str, Any]:
    function = piece.get("function")
    return function if isinstance(function, Mapping) else {}
