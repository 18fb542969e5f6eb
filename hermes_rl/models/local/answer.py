"""From what the engine generated to a chat completion, whole or as a stream of chunks.

Both forms are made from the same parts, so a stream adds up to the whole.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.models.local.prompt import Step
from hermes_rl.models.local.wire import ChatRequest

_HEAD = re.compile(r'\{"name": "(?:[^"\\]|\\.)*", "arguments": ')


@dataclass
class Generation:
    """What the engine has generated for one step, gathered piece by piece."""

    prompt_ids: list[int] | None = None
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    probabilities: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    """The engine's closing report."""

    def take(self, piece: dict[str, Any]) -> str:
        """Adds one piece and returns its text."""
        text = str(piece.get("content") or "")
        self.text += text
        self.tokens += piece.get("tokens") or []
        self.probabilities += piece.get("completion_probabilities") or []
        if piece.get("stop"):
            self.last = piece
        return text

    def usage(self) -> dict[str, Any]:
        """Token counts in the OpenAI form: the prompt includes what came from the cache."""
        prompt = int(self.last.get("tokens_evaluated", 0))
        completion = int(self.last.get("tokens_predicted", 0))
        cached = int((self.last.get("timings") or {}).get("cache_n", 0))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


@dataclass(frozen=True)
class Outcome:
    """A finished step, read."""

    finish_reason: str
    content: str | None
    call: tuple[str, str] | None = None
    """Name and arguments; the arguments' text is the model's own."""


def read_outcome(step: Step, generation: Generation) -> Outcome:
    """What the model decided: a call, the final answer, or a text that was cut."""
    text = generation.text
    cut = "length" if generation.last.get("stop_type") == "limit" else "stop"
    if not step.calls:
        return Outcome(cut, text)
    call = read_call(text)
    if call is None:
        return Outcome("length", text)
    name, arguments = call
    if name == step.finish:
        return Outcome("stop", str(json.loads(arguments).get("answer", "")))
    return Outcome("tool_calls", None, call)


def read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments text of a whole call; None if the JSON was cut."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call["arguments"]
    except (ValueError, TypeError, KeyError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    head = _HEAD.match(text.strip())
    if head is None:
        return name, json.dumps(arguments, ensure_ascii=False)
    return name, text.strip()[head.end() : -1]


class Writer:
    """Writes one completion, whole or in chunks."""

    def __init__(self, request: ChatRequest, step: Step, model: str) -> None:
        self._request = request
        self._step = step
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The body of a completion that is not streamed."""
        outcome = read_outcome(self._step, generation)
        message: dict[str, Any] = {"role": "assistant", "content": outcome.content}
        if outcome.call is not None:
            message["tool_calls"] = [_call(outcome.call)]
        choice = {"index": 0, "message": message, "finish_reason": outcome.finish_reason}
        body = {**self._head, "object": "chat.completion", "usage": generation.usage()}
        return body | {"choices": [choice | self._evidence(generation)]} | self._prompt(generation)

    def opening(self) -> dict[str, Any]:
        """The first chunk of a stream."""
        return self._chunk({"role": "assistant", "content": "" if not self._step.calls else None})

    def delta(self, text: str) -> dict[str, Any]:
        """A chunk with a piece of plain text."""
        return self._chunk({"content": text})

    def closing(self, generation: Generation) -> Iterator[dict[str, Any]]:
        """The last chunks: a call or answer that was held back, the end, the usage."""
        outcome = read_outcome(self._step, generation)
        if outcome.call is not None:
            yield self._chunk({"tool_calls": [{"index": 0, **_call(outcome.call)}]})
        elif self._step.calls and outcome.content:
            yield self.delta(outcome.content)
        end = self._chunk({}, outcome.finish_reason)
        end["choices"][0] |= self._evidence(generation)
        yield end | self._prompt(generation)
        if self._request.include_usage:
            yield {**self._chunk({}), "choices": [], "usage": generation.usage()}

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _evidence(self, generation: Generation) -> dict[str, Any]:
        """Token ids and logprobs, if asked for.

        The logprobs are the model's raw ones, before temperature and grammar; `logprobs_kind` says
        whether a grammar was in force, so that they are not those of the policy that sampled.
        """
        evidence: dict[str, Any] = {}
        if self._request.return_token_ids:
            evidence["token_ids"] = generation.tokens
        if self._request.logprobs:
            shown = self._request.top_logprobs or 0
            evidence["logprobs"] = {
                "content": [
                    {**one, "top_logprobs": (one.get("top_logprobs") or [])[:shown]}
                    for one in generation.probabilities
                ]
            }
        if evidence:
            evidence["logprobs_kind"] = "constrained" if self._step.constrained else "raw"
        return evidence

    def _prompt(self, generation: Generation) -> dict[str, Any]:
        if generation.prompt_ids is None:
            return {}
        return {"prompt_token_ids": generation.prompt_ids}


def _call(call: tuple[str, str]) -> dict[str, Any]:
    name, arguments = call
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
