"""From a chat request to one step of the engine: messages, prefill, grammar, sampling.

With tools, a step is a schema-constrained JSON object after an opened `<tool_call>`: a call of an
offered function, or of `finish`, whose argument is the final answer. Small models choose well among
these but hardly ever keep to the form by themselves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hermes_rl.models.local.schema import answer_schema, step_schema
from hermes_rl.models.local.wire import BadChatRequest, Call, ChatMessage, ChatRequest, OfferedTool

PREFILL = "<tool_call>\n"
_CALL_TOKENS = 512
"""Default limit of a constrained step: a call that is longer is a run-away repetition."""
_PLAIN_TOKENS = 1024


@dataclass(frozen=True)
class Step:
    """What the engine is asked to do for one request."""

    messages: list[dict[str, Any]]
    """For the model's own template."""
    tools: list[dict[str, Any]]
    """For the template; empty where it has no place for tools."""
    prefill: str
    """Text after the rendered prompt that the answer goes on from."""
    finish: str | None
    """Name of the function that ends the task; None if it is not offered."""
    calls: bool
    """Whether the answer is a call."""
    sampling: dict[str, Any]
    """The engine's own spelling of limits, sampling and grammar."""

    @property
    def constrained(self) -> bool:
        """Whether a grammar narrows the answer, so that logprobs are not the policy's."""
        return "json_schema" in self.sampling


def plan_step(request: ChatRequest, *, template_has_tools: bool) -> Step:
    """The step that serves a request.

    Raises:
        BadChatRequest: the request asks for something that this server cannot do.
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
    """The tools of this step after `tool_choice`, and the name that ends the task."""
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
    """The messages as plain text, earlier calls spelled as the model wrote them."""
    return [_plain(message, template_has_tools) for message in messages]


def _plain(message: ChatMessage, template_has_tools: bool) -> dict[str, Any]:
    if message.role == "assistant":
        pieces = [message.text()] if message.text() else []
        pieces += [spell_call(call) for call in message.tool_calls or []]
        return {"role": "assistant", "content": "\n".join(pieces)}
    if message.role == "tool" and not template_has_tools:
        shown = f"<tool_response>\n{message.text()}\n</tool_response>"
        return {"role": "user", "content": shown}
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": message.text()}


def spell_call(call: Call) -> str:
    """A call as it stood in the model's text: prefill, constrained JSON, closing tag."""
    name, arguments = json.dumps(call.function.name), call.function.arguments
    return f'{PREFILL}{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _with_tools_in_system(
    messages: list[dict[str, Any]], described: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The messages with the tools in the system message, for templates without a place for them."""
    listed = "\n".join(json.dumps(tool["function"]) for tool in described)
    told = (
        f"Functions, one JSON object per line:\n<tools>\n{listed}\n</tools>\n"
        'Call one per step, in this form: <tool_call>\n{"name": NAME, "arguments": OBJECT}\n'
        "</tool_call>"
    )
    if messages[0]["role"] == "system":
        head = {"role": "system", "content": f"{messages[0]['content']}\n\n{told}"}
        return [head, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]


def _sampling(
    request: ChatRequest, schema: dict[str, Any] | None, *, calls: bool
) -> dict[str, Any]:
    """The engine's parameters; what the request leaves open has the engine's own defaults."""
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
