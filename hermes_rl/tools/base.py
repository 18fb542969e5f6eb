"""The contract of tools: a schema, an async handler and limits (DESIGN 5.10).

A handler returns a `ToolResult`; a failure that the model should see is a `ToolError`. Everything
else that a handler raises ends the attempt.

`read_arguments` checks what a model wrote. What cannot be read is a `ToolError` that says what is
wrong and where; it never runs as `{}`. Coercion is gentle: a number or a truth value that came as
text is taken for what the schema asks.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from hermes_rl.errors import ToolError
from hermes_rl.messages import Message
from hermes_rl.sandboxes import Sandbox

if TYPE_CHECKING:
    from hermes_rl.tools.memory_lists import Memory
    from hermes_rl.tools.skill_folders import Skills

Clarify = Callable[[str, Sequence[str]], Any]
"""Called with a question and at most four choices; returns the answer or an awaitable of it, None
for no answer. A plain function is called on a thread of its own."""


class ChildTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task for a sub-agent."""

    goal: str
    context: str = ""
    """What the sub-agent has to know."""

    @property
    def prompt(self) -> str:
        """The sub-agent's first message."""
        return f"{self.goal}\n\nContext:\n{self.context}" if self.context.strip() else self.goal


class ChildResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of it, as the parent's model reads it."""

    task: int
    """1-based place in the call."""
    status: str
    """completed; exhausted (a limit of turns, tokens or time); failed; timeout."""
    end_reason: str
    turns: int
    summary: str | None = None
    """The sub-agent's answer."""
    error: str | None = None


class Delegate(Protocol):
    """Runs sub-agents."""

    async def __call__(self, call_id: str, tasks: Sequence[ChildTask]) -> Sequence[ChildResult]:
        """Run a sub-agent on each task; the results in the order of the tasks.

        Args:
            call_id: of the tool call that gives the tasks.
        """
        ...


class Look(Protocol):
    """A model that sees."""

    async def __call__(self, image_url: str, question: str) -> str:
        """Return its answer to a question about an image.

        Args:
            image_url: a `data:` URL.

        Raises: ToolError, for the agent's model, when there is no answer; what ends the run.
        """
        ...


class Conversations(Protocol):
    """Earlier conversations: `hermes_rl.sessions.SessionStore`."""

    def search(self, query: str, limit: int = 20) -> Sequence[Any]:
        """Messages with all words of a query, as `Hit`s, the newest first."""
        ...

    def sessions(self, limit: int = 0) -> Sequence[Any]:
        """The last used ones, as `SessionInfo`s."""
        ...

    def find(self, wanted: str) -> Any:
        """One by its name or the beginning of its id, as `SessionInfo`. Raises: UserError."""
        ...

    def load(self, number: int) -> Sequence[Message]:
        """The messages of the one with that `SessionInfo.id`."""
        ...


@dataclass(frozen=True)
class Services:
    """What tools of the agent itself work with; what is None is not kept outside the rollout."""

    memory: Memory | None = None
    skills: Skills | None = None
    """None has the bundled ones."""
    sessions: Conversations | None = None
    """Earlier conversations; None where there are none."""
    clarify: Clarify | None = None
    """Asks the user; None where nobody can answer."""


class OpenParts(dict[str, Any]):
    """What tools keep open for a rollout, such as connections, by names that they choose."""

    async def aclose(self) -> None:
        """Close all of it, the latest first."""
        while self:
            _, part = self.popitem()
            await part.aclose()


@dataclass(frozen=True)
class ToolContext:
    """What a tool may use: given by the agent for each rollout."""

    sandbox: Sandbox | None
    state: dict[str, Any] = field(default_factory=dict)
    """State of this rollout's tools (read markers, todo lists); dies with the rollout."""
    max_timeout_s: float = 600.0
    """What is left of the rollout's active time, at most the tool's own limit."""
    env: dict[str, Any] = field(default_factory=dict)
    """State of the environment's rollout (`hermes_rl.rl.RolloutContext.state`)."""
    opened: OpenParts = field(default_factory=OpenParts)
    """What tools opened; closed at the end of the rollout."""
    call_id: str = ""
    """The call that runs, where `delegate` is there."""
    delegate: Delegate | None = None
    """Runs sub-agents; None where there are none."""
    look: Look | None = None
    """Answers questions about images; None where no model does."""
    shows_images: bool = False
    """The agent's model sees the images of results."""
    reaches_web: bool = False
    """The agent has the toolset `web`: its other tools may fetch public addresses too."""
    services: Services = field(default_factory=Services)
    """What tools of the agent itself work with."""
    call_tool: Callable[[str, str], Awaitable[ToolResult]] | None = None
    """Calls an offered tool by its name and arguments as JSON, as the model would; only for tools
    with `calls_tools`."""
    parameters: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The parameters of the offered tools, in order; also only for those."""


@dataclass(frozen=True)
class ToolResult:
    """What a tool gives back."""

    text: str
    """For the model."""
    ok: bool = True
    data: Mapping[str, Any] | None = None
    """Structured form, for programs."""
    raw_text: str | None = None
    """What the tool returned, where a hook replaced it."""
    untrusted: bool = False
    """This result has text of others than the user, though the tool itself is trusted."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Name -> `data:` URL of images that the model is to see; only with `shows_images`."""


Handler = Callable[[ToolContext, dict[str, Any]], Awaitable[ToolResult]]


@dataclass(frozen=True)
class Tool:
    """A tool as registered."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments, an object."""
    handler: Handler
    toolset: str
    parallel: bool = False
    """Changes nothing, so that it may run beside other parallel tools of the same turn."""
    needs_sandbox: bool = True
    max_chars: int = 100_000
    """Characters of the result that the model sees; a longer one is spilled or cut."""
    path_argument: str | None = None
    """The argument that names the one file it works on: it may run beside calls that work on other
    files."""
    writes: bool = False
    """It changes that file."""
    command_argument: str | None = None
    """The argument that is a shell command: it is checked against `tools.approval`."""
    refunds_turn: bool = False
    """A turn whose calls are all of such tools does not count against the limit of turns."""
    answers: bool = False
    """Its calls are the agent's answer: the turn that makes one is the last, and none is run."""
    calls_tools: bool = False
    """It gets `ToolContext.call_tool`."""
    untrusted: bool = False
    """Its results come from others than the user, such as web pages: they are fenced."""
    missing: Callable[[], str | None] | None = None
    """Says what the tool lacks on this machine, with the remedy, such as `no key: set KEY`; None
    when nothing is missing. A tool that lacks something is not offered to the model."""
    present: Callable[[], str] | None = None
    """Says what lets it be offered where `missing` finds nothing, such as `KEY is set`."""
    programs: tuple[str, ...] = ()
    """Names and patterns of paths of programs of which it needs one in the sandbox."""
    install: str = ""
    """How to install one, such as `apt-get install chromium`."""

    @property
    def schema(self) -> dict[str, Any]:
        """The OpenAI function schema."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.parameters,
            },
        }


@cache
def _schemas() -> dict[str, dict[str, dict[str, Any]]]:
    text = Path(__file__).with_name("schemas.json").read_bytes()
    read: dict[str, dict[str, dict[str, Any]]] = msgspec.json.decode(text)
    return read


def schema(name: str, wording: int | None = None) -> dict[str, Any]:
    """Return the description and the parameters of a tool of this package, as `tool` takes them.

    They are texts that models read, and part of a run's identity: schemas.json keeps every wording,
    of which each has the tools that it changed. A tool that is newer than a wording has its first.

    Args:
        wording: a key of schemas.json; None is the latest.
    """
    wordings = sorted((int(key), texts) for key, texts in _schemas().items())
    known = [texts[name] for key, texts in wordings if key <= (wording or key) and name in texts]
    return known[-1] if known else next(texts[name] for _, texts in wordings if name in texts)


def tool(
    *,
    name: str,
    description: str,
    parameters: dict[str, Any],
    toolset: str,
    parallel: bool = False,
    max_chars: int = 100_000,
    path_argument: str | None = None,
    writes: bool = False,
    command_argument: str | None = None,
) -> Callable[[Handler], Tool]:
    """Make a `Tool` of an async handler that works in the sandbox; `registry` lists it by name.

    Args:
        parameters: JSON schema of the arguments.
        parallel: changes nothing: may run beside other parallel tools of the same turn.
        max_chars: characters of the result that the model sees.
        path_argument: the argument that names the one file it works on.
        writes: it changes that file.
        command_argument: the argument that is a shell command.
    """

    def make(handler: Handler) -> Tool:
        return Tool(
            name=name,
            description=description,
            parameters=parameters,
            handler=handler,
            toolset=toolset,
            parallel=parallel,
            max_chars=max_chars,
            path_argument=path_argument,
            writes=writes,
            command_argument=command_argument,
        )

    return make


def answer_tool(form: Mapping[str, Any]) -> Tool:
    """Make a tool with which a model answers.

    Args:
        form: `name`, `description` and `parameters`, a JSON schema.
    """

    async def refuse(context: ToolContext, arguments: dict[str, Any]) -> ToolResult:
        raise ToolError("this tool can only be called by the final answer")

    return Tool(
        name=form["name"],
        description=form.get("description", ""),
        parameters=form["parameters"],
        handler=refuse,
        toolset="answer",
        needs_sandbox=False,
        answers=True,
    )


Schema = Mapping[str, Any]

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_EXCERPT = 30


def read_arguments(text: str, schema: Schema) -> dict[str, Any]:
    """The arguments of a call, checked against the tool's schema.

    Args:
        text: the model's text. Empty text counts as `{}` where nothing is required.

    Raises: ToolError, for the model: bad JSON, no object, a missing, unknown or wrong argument.
    """
    if not text.strip():
        if required := schema.get("required"):
            raise ToolError(f"no arguments given; required: {', '.join(required)}")
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise ToolError(_what_is_wrong(text, error)) from None
    if not isinstance(value, dict):
        raise ToolError(f"the arguments must be a JSON object, not {_kind(value)}")
    return _object(value, schema, "")


def _what_is_wrong(text: str, error: Exception) -> str:
    try:
        json.loads(text)
    except json.JSONDecodeError as found:
        line = f"line {found.lineno}, column {found.colno}"
        if not text[found.pos :].strip():
            return f"the arguments are not valid JSON: unexpected end at {line}"
        near = text[max(0, found.pos - _EXCERPT) : found.pos + _EXCERPT]
        what = found.msg.removesuffix(" at")
        return f"the arguments are not valid JSON: {what} at {line}, near {near!r}"
    except RecursionError:
        return "the arguments are not valid JSON: nested too deeply"
    return f"the arguments are not valid JSON: {error}"


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "a boolean"
    if value is None:
        return "null"
    names = {
        str: "a string",
        int: "a number",
        float: "a number",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def _object(value: dict[str, Any], schema: Schema, path: str) -> dict[str, Any]:
    properties: Mapping[str, Schema] = schema.get("properties") or {}
    required = schema.get("required") or ()
    for name in required:
        if name not in value:
            raise ToolError(f"missing argument '{path}{name}'{_known(properties)}")
    out = {}
    for name, inner in value.items():
        if name not in properties:
            if schema.get("additionalProperties", False) is False and (properties or not path):
                raise ToolError(f"unknown argument '{path}{name}'{_known(properties)}")
            out[name] = inner
        elif inner is not None or name in required or "null" in _types(properties[name]):
            out[name] = _value(inner, properties[name], path + name)
    return out


def _known(properties: Mapping[str, Any]) -> str:
    return (
        f" (arguments: {', '.join(properties)})"
        if properties
        else " (this tool takes no arguments)"
    )


def _types(schema: Schema) -> tuple[str, ...]:
    kinds = schema.get("type", ())
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def _value(value: Any, schema: Schema, path: str) -> Any:
    kinds = _types(schema)
    if kinds and not _fits(value, kinds):
        coerced = _coerced(value, kinds)
        if coerced is _NOTHING:
            wanted = " or ".join(kinds)
            raise ToolError(f"the argument '{path}' must be of type {wanted}, not {_kind(value)}")
        value = coerced
    if "enum" in schema and value not in schema["enum"]:
        allowed = ", ".join(json.dumps(v) for v in schema["enum"])
        raise ToolError(f"the argument '{path}' must be one of {allowed}, not {value!r}")
    _check_range(value, schema, path)
    if isinstance(value, dict):
        return _object(value, schema, f"{path}.")
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        return [_value(v, schema["items"], f"{path}[{i}]") for i, v in enumerate(value)]
    return value


def _fits(value: Any, kinds: tuple[str, ...]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    return any(isinstance(value, _TYPES.get(kind, (object,))) for kind in kinds)


_NOTHING = object()


def _coerced(value: Any, kinds: tuple[str, ...]) -> Any:
    """The value as one of these types, or `_NOTHING`."""
    if "integer" in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    if "string" in kinds and isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value)
    if not isinstance(value, str):
        return _NOTHING
    text = value.strip()
    if "boolean" in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        read = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return _NOTHING
    if isinstance(read, float) and read.is_integer() and "number" not in kinds:
        read = int(read)
    return read if not isinstance(read, bool) and _fits(read, kinds) else _NOTHING


def _check_range(value: Any, schema: Schema, path: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if "minimum" in schema and value < schema["minimum"]:
        raise ToolError(f"the argument '{path}' must be at least {schema['minimum']}, not {value}")
    if "maximum" in schema and value > schema["maximum"]:
        raise ToolError(f"the argument '{path}' must be at most {schema['maximum']}, not {value}")
