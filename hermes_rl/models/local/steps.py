"""From a model request to one step of the engine: messages, prefill, grammar and sampling.

With tools, a step is a JSON object after an opened `<tool_call>`, constrained by a schema: a call
of an offered function, or of `finish`, whose argument is the final answer. Small models choose well
among these but rarely keep to the format on their own.

The engine does not refuse a schema with a keyword that it cannot compile: it drops the grammar, and
the model writes freely. So schemas are reduced to the keywords that the grammar supports.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_rl.errors import BadRequest
from hermes_rl.messages import AssistantMessage, Message, to_openai
from hermes_rl.models.base import LogprobsKind, ModelRequest
from hermes_rl.models.prepare import prepare_request
from hermes_rl.models.wire import read_tool_call, split_reasoning

Json = dict[str, Any]

PREFILL = "<tool_call>\n"
_HEAD = re.compile(r'\{"name": "(?:[^"\\]|\\.)*", "arguments": ')
_CALL_TOKENS = 512
"""Default limit of a constrained step: a longer call is endless repetition."""
_PLAIN_TOKENS = 1024


@dataclass(frozen=True)
class Step:
    """The work of the engine for one request."""

    messages: list[Json]
    """For the model's own template."""
    tools: list[Json]
    """For the template; empty if it does not support tools."""
    calls: bool
    """Whether the answer is a call, which continues `PREFILL`."""
    finish: str | None
    """Name of the function that ends the task; None if it is not offered."""
    body: Json
    """Limits, sampling and grammar: the fields of the engine's `/completion`, without the
    prompt."""

    @property
    def logprobs_kind(self) -> LogprobsKind:
        """Under a grammar, logprobs are not those of the policy."""
        return "constrained" if self.body.keys() & {"json_schema", "grammar"} else "raw"

    def outcome(
        self, text: str, finish_reason: str | None, salt: str = ""
    ) -> tuple[AssistantMessage, str | None]:
        """Return the message that the answer is (a call, the final answer, or a text that was cut),
        and its finish reason. The arguments of a call are the model's text, unchanged.

        Args:
            salt: makes ids of calls differ between turns.
        """
        if not self.calls:
            content, thought, raw = split_reasoning(text)
            message = AssistantMessage(content=content, reasoning_content=thought, raw_content=raw)
            return message, finish_reason
        try:
            call = json.loads(text)
        except ValueError:
            call = None
        match call:
            case {"name": str(name), "arguments": dict(arguments)}:
                pass
            case _:  # cut, or the engine dropped the grammar
                return AssistantMessage(content=text), "length"
        if name == self.finish:
            return AssistantMessage(content=str(arguments.get("answer", ""))), "stop"
        head = _HEAD.match(text.strip())
        exact = text.strip()[head.end() : -1] if head else arguments
        called = read_tool_call(name, exact, (), (), salt)
        return AssistantMessage(tool_calls=(called,)), "tool_calls"


def plan_step(request: ModelRequest, *, template_has_tools: bool) -> Step:
    """Return the step that serves a request.

    Of `request.extra`, `tool_choice` and `response_format` have their meaning in Chat Completions;
    other fields are passed to the engine.

    Raises:
        BadRequest: the request asks for something that is not supported.
    """
    extra = dict(request.extra)
    functions, finish = _offered(request.tools, extra.pop("tool_choice", None))
    schema = _schema(functions, extra.pop("response_format", None))
    messages = [
        _plain(message, template_has_tools) for message in prepare_request(request).messages
    ]
    if functions and not template_has_tools:
        messages = _with_tools_in_system(messages, functions)
    return Step(
        messages=messages,
        tools=[{"type": "function", "function": f} for f in functions if template_has_tools],
        calls=bool(functions),
        finish=finish,
        body={**extra, **_sampling(request, calls=bool(functions)), **schema},
    )


_NO_PARAMETERS: Json = {"type": "object", "properties": {}}
_FINISH: Json = {
    "description": "End the task. Call this once everything is done.",
    "parameters": {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "the answer to the user"}},
        "required": ["answer"],
    },
}
"""The function that ends a task."""


def _offered(tools: Sequence[Json], choice: object) -> tuple[list[Json], str | None]:
    """Return the functions of this step after `tool_choice`, and the name of the one that ends the
    task."""
    functions = [
        {
            "name": function["name"],
            "description": function.get("description") or "",
            "parameters": function.get("parameters") or _NO_PARAMETERS,
        }
        for function in (tool["function"] for tool in tools)
    ]
    if choice == "none" or not functions:
        return [], None
    names = {function["name"] for function in functions}
    if choice in (None, "auto"):
        ends = ("finish", "final_answer", "end_of_task")
        finish = next(name for name in ends if name not in names)
        return [*functions, {"name": finish, **_FINISH}], finish
    if choice == "required":
        return functions, None
    named = choice.get("function") if isinstance(choice, dict) else None
    wanted = named.get("name") if isinstance(named, dict) else None
    if wanted not in names:
        raise BadRequest(f"tool_choice {choice!r}: give none, auto, required or an offered tool")
    return [function for function in functions if function["name"] == wanted], None


def _schema(functions: Sequence[Json], form: object) -> Json:
    """Return the grammar of the answer as a field of the engine: a call of one of the functions, or
    what the response format says; empty for free text."""
    if functions:
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    "arguments": arguments_schema(function["parameters"]),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for function in functions
        ]
        return {"json_schema": {"anyOf": calls, "x-guidance": _COMPACT}}
    match form:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_schema": {"type": "object", "x-guidance": _COMPACT}}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"json_schema": {**simplify(schema), "x-guidance": _COMPACT}}
    raise BadRequest("response_format: give text, json_object or json_schema with a schema")


def _plain(message: Message, template_has_tools: bool) -> Json:
    """Return a message as plain text, with earlier calls as the model wrote them: prefill,
    constrained JSON, closing tag."""
    form = to_openai(message)
    role, content = form["role"], form["content"] or ""
    if not isinstance(content, str):
        if other := [part["type"] for part in content if part["type"] != "text"]:
            raise BadRequest(f"content of type {other[0]!r}: the embedded model reads only text")
        content = "".join(part["text"] for part in content)
    if role == "assistant":
        pieces = [content] if content else []
        for call in (call["function"] for call in form.get("tool_calls", ())):
            name, arguments = json.dumps(call["name"]), call["arguments"]
            pieces.append(f'{PREFILL}{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
        content = "\n".join(pieces)
    if role == "tool" and not template_has_tools:
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    return {"role": role, "content": content}


def _with_tools_in_system(messages: list[Json], functions: Sequence[Json]) -> list[Json]:
    """Return the messages with tools in the system message, for templates without tool support."""
    listed = "\n".join(map(json.dumps, functions))
    text = (
        f"Functions, one JSON object per line:\n<tools>\n{listed}\n</tools>\n"
        'Call one per step, in this form: <tool_call>\n{"name": NAME, "arguments": OBJECT}\n'
        "</tool_call>"
    )
    if messages[0]["role"] == "system":
        head = {"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}
        return [head, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _sampling(request: ModelRequest, *, calls: bool) -> Json:
    """Return the engine's parameters. What the request leaves out gets the engine's defaults."""
    sampling = request.sampling
    body: Json = {
        "n_predict": sampling.max_tokens or (_CALL_TOKENS if calls else _PLAIN_TOKENS),
        "temperature": 0.7 if sampling.temperature is None else sampling.temperature,
        "cache_prompt": True,
        "return_tokens": True,
    }
    for name in ("top_p", "top_k", "min_p"):
        if (value := getattr(sampling, name)) is not None:
            body[name] = value
    if sampling.seed is not None:
        body["seed"] = sampling.seed % 2**32  # the engine's seeds have 32 bits
    if sampling.stop and not calls:  # a stop string would cut a call in two
        body["stop"] = list(sampling.stop)
    if request.logprobs:
        body["n_probs"] = 1
    return body


_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_COMPACT = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""The white space that chat templates write when they render earlier calls."""


def arguments_schema(parameters: Mapping[str, Any]) -> Json:
    """Return the schema of a function's arguments: only the required ones, if any is required.

    Models this small fill in every optional argument, with defaults copied from its description.
    That doubles the tokens of a call and adds mistakes.
    """
    simple = simplify(parameters)
    if simple.get("type") != "object":
        return {"type": "object"}
    if not simple.get("required"):
        return simple
    needed = {name: simple["properties"][name] for name in simple["required"]}
    return {**simple, "properties": needed, "additionalProperties": False}


def simplify(schema: object) -> Json:
    """Return the schema with only the keywords that the grammar supports."""
    if not isinstance(schema, Mapping):
        return {}
    for choice in ("anyOf", "oneOf"):
        options = schema.get(choice)
        if isinstance(options, list) and options:
            return {"anyOf": [simplify(option) for option in options]}
    if isinstance(values := schema.get("enum"), list) and values:
        return {"enum": values}
    if "const" in schema:
        return {"const": schema["const"]}
    kind = schema.get("type", "object" if "properties" in schema else None)
    known = kind if isinstance(kind, list) else [kind]
    if not known or not all(isinstance(one, str) and one in _TYPES for one in known):
        return {}
    if kind == "array":
        return {"type": "array", "items": simplify(schema.get("items"))}
    properties = schema.get("properties")
    if kind != "object" or not isinstance(properties, Mapping) or not properties:
        return {"type": kind}
    required = schema.get("required")
    return {
        "type": "object",
        "properties": {name: simplify(inner) for name, inner in properties.items()},
        "required": [n for n in required if n in properties] if isinstance(required, list) else [],
        # Further properties are allowed only if the schema says so.
        "additionalProperties": bool(schema.get("additionalProperties", False)),
    }
