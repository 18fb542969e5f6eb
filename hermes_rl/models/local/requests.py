"""From a chat request to one step of the engine: messages, prefill, grammar and sampling.

With tools, a step is a JSON object after an opened `<tool_call>`, constrained by a schema: a call
of an offered function, or of `finish`, whose argument is the final answer. Small models choose well
among these but rarely keep to the format on their own.

The engine does not refuse a schema with a keyword that it cannot compile: it drops the grammar, and
the model writes freely. So schemas are reduced to the keywords that the grammar supports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
Unit = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class BadChatRequest(Exception):
    """The request cannot be served. The response is an error in OpenAI's format.

    Args:
        message: one line for the caller.
        code: the machine-readable code, if OpenAI has one.
        status: HTTP status.
    """

    def __init__(self, message: str, *, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a message's content; only text is supported."""

    type: str
    text: str = ""


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """Name and arguments (JSON text) of a call."""

    name: str
    arguments: str = "{}"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of an earlier step."""

    function: CalledFunction


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the history."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[Call] | None = None

    def text(self) -> str:
        """Return the content as one string.

        Raises:
            BadChatRequest: a part is not text.
        """
        if isinstance(self.content, list):
            for part in self.content:
                if part.type != "text":
                    raise BadChatRequest(f"content of type {part.type!r}: only text is supported")
            return "".join(part.text for part in self.content)
        return self.content or ""


class OfferedFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None


class OfferedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as offered in the request."""

    type: Literal["function"]
    function: OfferedFunction


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream carries besides the deltas."""

    include_usage: bool = False


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/chat/completions`; fields that are not listed are ignored."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    model: str = ""
    tools: list[OfferedTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=5)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Unit | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: Positive | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


_DECODER = msgspec.json.Decoder(ChatRequest)


def read_request(body: bytes) -> ChatRequest:
    """Parse the body of a request.

    Raises:
        BadChatRequest: it is not JSON, or not of this form; the message names the field.
    """
    try:
        request = _DECODER.decode(body)
    except msgspec.ValidationError as error:
        raise BadChatRequest(f"bad request: {error}") from error
    except msgspec.DecodeError as error:
        raise BadChatRequest(f"the body is not JSON: {error}") from error
    if request.n not in (None, 1):
        raise BadChatRequest("n: this server gives one choice per request")
    return request


PREFILL = "<tool_call>\n"
_CALL_TOKENS = 512
"""Default limit of a constrained step: a longer call is endless repetition."""
_PLAIN_TOKENS = 1024


@dataclass(frozen=True)
class Step:
    """The work of the engine for one request."""

    messages: list[dict[str, Any]]
    """For the model's own template."""
    tools: list[dict[str, Any]]
    """For the template; empty if it does not support tools."""
    prefill: str
    """Text after the rendered prompt, which the answer continues."""
    finish: str | None
    """Name of the function that ends the task; None if it is not offered."""
    calls: bool
    """Whether the answer is a call."""
    sampling: dict[str, Any]
    """Limits, sampling and grammar as fields of the engine's API."""

    @property
    def constrained(self) -> bool:
        """Whether a grammar constrains the answer, so that logprobs are not those of the policy."""
        return "json_schema" in self.sampling


def plan_step(request: ChatRequest, *, template_has_tools: bool) -> Step:
    """Return the step that serves a request.

    Raises:
        BadChatRequest: the request asks for something that this server does not support.
    """
    offered, finish = _offered(request)
    functions = [
        {"name": f.name, "description": f.description, "parameters": f.parameters or _NO_PARAMETERS}
        for f in offered
    ]
    if finish is not None:
        functions.append({"name": finish, **_FINISH})
    messages = [_plain(message, template_has_tools) for message in request.messages]
    if functions and not template_has_tools:
        messages = _with_tools_in_system(messages, functions)
    tools = [{"type": "function", "function": function} for function in functions]
    return Step(
        messages=messages,
        tools=tools if template_has_tools else [],
        prefill=PREFILL if functions else "",
        finish=finish,
        calls=bool(functions),
        sampling=_sampling(request, _schema(request, functions), calls=bool(functions)),
    )


_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_FINISH: dict[str, Any] = {
    "description": "End the task. Call this once everything is done.",
    "parameters": {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "the answer to the user"}},
        "required": ["answer"],
    },
}
"""The function that ends a task."""


def _offered(request: ChatRequest) -> tuple[list[OfferedFunction], str | None]:
    """Return the functions of this step after `tool_choice`, and the name of the one that ends the
    task."""
    functions = [tool.function for tool in request.tools or []]
    choice = request.tool_choice
    if choice == "none" or not functions:
        return [], None
    names = {function.name for function in functions}
    if choice is None or choice == "auto":
        ends = ("finish", "final_answer", "end_of_task")
        return functions, next(name for name in ends if name not in names)
    if choice == "required":
        return functions, None
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        wanted = choice["function"].get("name")
        if wanted not in names:
            raise BadChatRequest(f"tool_choice: no tool is called {wanted!r}")
        return [function for function in functions if function.name == wanted], None
    raise BadChatRequest("tool_choice: give none, auto, required or one function by name")


def _schema(request: ChatRequest, functions: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the grammar of the answer: a call of one of the functions, or what the request's
    response format says."""
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
        return {"anyOf": calls, "x-guidance": _COMPACT}
    form = request.response_format or {"type": "text"}
    inner = form.get("json_schema")
    if form.get("type") == "text":
        return None
    if form.get("type") == "json_object":
        return {"type": "object", "x-guidance": _COMPACT}
    if form.get("type") == "json_schema" and isinstance(inner, dict) and "schema" in inner:
        return {**simplify(inner["schema"]), "x-guidance": _COMPACT}
    raise BadChatRequest("response_format: give text, json_object or json_schema with a schema")


def _plain(message: ChatMessage, template_has_tools: bool) -> dict[str, Any]:
    """Return a message as plain text, with earlier calls as the model wrote them: prefill,
    constrained JSON, closing tag."""
    text, role = message.text(), message.role
    if role == "assistant":
        pieces = [text] if text else []
        for call in message.tool_calls or []:
            name, arguments = json.dumps(call.function.name), call.function.arguments
            pieces.append(f'{PREFILL}{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
        return {"role": role, "content": "\n".join(pieces)}
    if role == "tool" and not template_has_tools:
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    return {"role": "system" if role == "developer" else role, "content": text}


def _with_tools_in_system(
    messages: list[dict[str, Any]], functions: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
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


def _sampling(
    request: ChatRequest, schema: dict[str, Any] | None, *, calls: bool
) -> dict[str, Any]:
    """Return the engine's parameters. What the request leaves out gets the engine's defaults."""
    limit = request.max_completion_tokens or request.max_tokens
    options: dict[str, Any] = {
        "n_predict": limit or (_CALL_TOKENS if calls else _PLAIN_TOKENS),
        "temperature": 0.7 if request.temperature is None else request.temperature,
        "cache_prompt": True,
        "return_tokens": True,
    }
    for name in ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"):
        if (value := getattr(request, name)) is not None:
            options[name] = value
    if request.seed is not None:
        options["seed"] = request.seed % 2**32  # the engine's seeds have 32 bits
    if request.stop and not calls:  # a stop string would cut a call in two
        options["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop
    if request.logprobs:
        options["n_probs"] = max(1, request.top_logprobs or 0)
    if schema is not None:
        options["json_schema"] = schema
    return options


_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_COMPACT = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""The white space that chat templates write when they render earlier calls."""


def arguments_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
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


def simplify(schema: object) -> dict[str, Any]:
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
