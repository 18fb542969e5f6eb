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


def error_body(message: str, *, status: int, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


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
    tools, finish = _offered(request)
    described = [_described(tool) for tool in tools]
    if finish is not None:
        described.append(_finish_tool(finish))
    schema = _schema(request, described)
    messages = _history(request.messages, template_has_tools)
    if described and not template_has_tools:
        messages = _with_tools_in_system(messages, described)
    return Step(
        messages=messages,
        tools=described if template_has_tools else [],
        prefill=PREFILL if described else "",
        finish=finish,
        calls=bool(described),
        sampling=_sampling(request, schema, calls=bool(described)),
    )


def _offered(request: ChatRequest) -> tuple[list[OfferedTool], str | None]:
    """Return the tools of this step after `tool_choice`, and the function that ends the task."""
    tools, choice = list(request.tools or []), request.tool_choice
    if choice == "none" or not tools:
        return [], None
    names = {tool.function.name for tool in tools}
    if choice is None or choice == "auto":
        return tools, next(
            name for name in ("finish", "final_answer", "end_of_task") if name not in names
        )
    if choice == "required":
        return tools, None
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        wanted = choice["function"].get("name")
        chosen = [tool for tool in tools if tool.function.name == wanted]
        if not chosen:
            raise BadChatRequest(f"tool_choice: no tool is called {wanted!r}")
        return chosen, None
    raise BadChatRequest("tool_choice: give none, auto, required or one function by name")


def _described(tool: OfferedTool) -> dict[str, Any]:
    function = tool.function
    return _function(function.name, function.description, function.parameters)


def _finish_tool(name: str) -> dict[str, Any]:
    answer = {"type": "string", "description": "the answer to the user"}
    return _function(
        name,
        "End the task. Call this once everything is done.",
        {"type": "object", "properties": {"answer": answer}, "required": ["answer"]},
    )


def _function(name: str, description: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    schema = parameters or {"type": "object", "properties": {}}
    inner = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": inner}


def _schema(request: ChatRequest, described: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    if described:
        functions = [tool["function"] for tool in described]
        return step_schema({inner["name"]: inner["parameters"] for inner in functions})
    form = request.response_format or {"type": "text"}
    if form.get("type") == "text":
        return None
    if form.get("type") == "json_object":
        return answer_schema({"type": "object"})
    inner = form.get("json_schema")
    if form.get("type") == "json_schema" and isinstance(inner, dict) and "schema" in inner:
        return answer_schema(inner["schema"])
    raise BadChatRequest("response_format: give text, json_object or json_schema with a schema")


def _history(messages: Sequence[ChatMessage], template_has_tools: bool) -> list[dict[str, Any]]:
    """Return the messages as plain text, with earlier calls as the model wrote them."""
    return [_plain(message, template_has_tools) for message in messages]


def _plain(message: ChatMessage, template_has_tools: bool) -> dict[str, Any]:
    if message.role == "assistant":
        pieces = [message.text()] if message.text() else []
        pieces += [write_call(call) for call in message.tool_calls or []]
        return {"role": "assistant", "content": "\n".join(pieces)}
    if message.role == "tool" and not template_has_tools:
        shown = f"<tool_response>\n{message.text()}\n</tool_response>"
        return {"role": "user", "content": shown}
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": message.text()}


def write_call(call: Call) -> str:
    """Return a call as the model wrote it: prefill, constrained JSON, closing tag."""
    name, arguments = json.dumps(call.function.name), call.function.arguments
    return f'{PREFILL}{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _with_tools_in_system(
    messages: list[dict[str, Any]], described: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the messages with tools in the system message, for templates without tool support."""
    listed = "\n".join(json.dumps(tool["function"]) for tool in described)
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


def step_schema(offered: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the schema of one step: a call of one of the offered functions.

    Args:
        offered: the parameters' schema of each function, by name.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": arguments_schema(parameters)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, parameters in offered.items()
    ]
    return {"anyOf": calls, "x-guidance": _COMPACT}


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


def answer_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a structured answer."""
    return {**simplify(schema), "x-guidance": _COMPACT}


def simplify(schema: object) -> dict[str, Any]:
    """Return the schema with only the keywords that the grammar supports."""
    if not isinstance(schema, Mapping):
        return {}
    for choice in ("anyOf", "oneOf"):
        if options := _options(schema.get(choice)):
            return {"anyOf": options}
    if isinstance(values := schema.get("enum"), list) and values:
        return {"enum": values}
    if "const" in schema:
        return {"const": schema["const"]}
    kind = _kind(schema)
    if kind == "object":
        return _object(schema)
    if kind == "array":
        return {"type": "array", "items": simplify(schema.get("items"))}
    return {} if kind is None else {"type": kind}


def _options(options: object) -> list[dict[str, Any]]:
    if not isinstance(options, Sequence) or isinstance(options, str):
        return []
    return [simplify(option) for option in options]


def _kind(schema: Mapping[str, Any]) -> str | list[str] | None:
    """Return the type: a known name, a list of known names, or None for any."""
    kind = schema.get("type")
    if kind is None and "properties" in schema:
        return "object"
    if isinstance(kind, list) and all(isinstance(one, str) for one in kind):
        known = [one for one in kind if one in _TYPES]
        return known if known == kind and known else None
    return kind if isinstance(kind, str) and kind in _TYPES else None


def _object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object schema; further properties are allowed only if the schema says so."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        return {"type": "object"}
    required = schema.get("required")
    named = required if isinstance(required, list) else []
    return {
        "type": "object",
        "properties": {name: simplify(inner) for name, inner in properties.items()},
        "required": [name for name in named if name in properties],
        "additionalProperties": bool(schema.get("additionalProperties", False)),
    }
