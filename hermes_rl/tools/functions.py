"""A Python function as a tool: its schema comes from its signature and docstring, by pydantic."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from typing import Any, get_type_hints

from hermes_rl.errors import ToolError, UserError
from hermes_rl.messages import TOOL_NAME
from hermes_rl.tools.base import Tool, ToolContext, ToolResult

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def function_tool(function: Callable[..., Any] | Tool) -> Tool:
    """Make a tool of a function, sync or async; a `Tool` stays as it is.

    A parameter with the annotation `ToolContext` is not part of the schema and gets the context.
    Sync functions run in a thread. A `ToolResult` or a text is returned as it is, anything else as
    JSON; an exception is reported to the model.

    Args:
        function: its parameters have names; `Annotated[int, Field(ge=1)]` and the like apply. The
            first paragraphs of its docstring describe the tool, its `Args:` the parameters.

    Raises: UserError for something else, or a signature that has no schema.
    """
    if isinstance(function, Tool):
        return function
    name = getattr(function, "__name__", type(function).__name__)
    if not callable(function) or not TOOL_NAME.fullmatch(name):
        raise UserError(f"tools: {name!r} cannot be a tool. Give a named function or a Tool")
    description, documented = _docstring(inspect.getdoc(function) or "")
    arguments, context = _arguments(function, name, documented)
    return Tool(
        name=name,
        description=description,
        parameters=_schema(arguments),
        handler=_handler(function, arguments, context),
        toolset="functions",
        needs_sandbox=False,
    )


def _arguments(
    function: Callable[..., Any], name: str, documented: dict[str, str]
) -> tuple[Any, str | None]:
    """The pydantic model of the arguments, and the parameter that takes the context."""
    from pydantic import ConfigDict, Field, create_model
    from pydantic.errors import PydanticUserError

    context: str | None = None
    fields: dict[str, Any] = {}
    extra = False
    try:
        called = function if inspect.isroutine(function) else type(function).__call__
        hints = get_type_hints(called, include_extras=True)
        for parameter in inspect.signature(function).parameters.values():
            kind, default = hints.get(parameter.name, Any), parameter.default
            if kind is ToolContext:
                context = parameter.name
            elif parameter.kind is parameter.VAR_KEYWORD:
                extra = True
            elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
                raise TypeError(f"the parameter {parameter.name} cannot be passed by name")
            else:
                value = ... if default is parameter.empty else default
                text = documented.get(parameter.name)
                # Behind an alias the model's own attributes cannot be hidden by a parameter's name.
                field = Field(value, alias=parameter.name, description=text)
                fields[f"p{len(fields)}"] = (kind, field)
        config = ConfigDict(extra="allow" if extra else "forbid", arbitrary_types_allowed=False)
        model = create_model(name, __config__=config, **fields)
        model.model_json_schema()
    except (TypeError, NameError, ValueError, PydanticUserError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"tools: {name} has no schema: {why}. Annotate its parameters") from None
    return model, context


def _schema(arguments: Any) -> dict[str, Any]:
    schema: dict[str, Any] = _without_titles(arguments.model_json_schema())
    return {"type": "object", "properties": {}} | schema


def _without_titles(schema: Any, *, names: bool = False) -> Any:
    """A schema without pydantic's titles, which cost tokens.

    Args:
        names: the keys are names of properties, not keywords.
    """
    if isinstance(schema, list):
        return [_without_titles(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_titles(value, names=not names and key in ("properties", "$defs"))
        for key, value in schema.items()
        if names or key != "title"
    }


def _handler(function: Callable[..., Any], arguments: Any, context_name: str | None) -> Any:
    from pydantic import ValidationError

    called = function if inspect.isroutine(function) else type(function).__call__

    async def handler(context: ToolContext, values: dict[str, Any]) -> ToolResult:
        try:
            read = arguments.model_validate(values)
        except ValidationError as error:
            raise ToolError(_fault(error)) from None
        fields = arguments.model_fields
        keywords = {field.alias: getattr(read, name) for name, field in fields.items()}
        keywords |= read.model_extra or {}
        if context_name is not None:
            keywords[context_name] = context
        try:
            async with asyncio.timeout(context.max_timeout_s) as limit:
                if inspect.iscoroutinefunction(called):
                    value = await function(**keywords)
                else:
                    value = await asyncio.to_thread(function, **keywords)
        except ToolError:
            raise
        except TimeoutError as error:
            if limit.expired():
                raise ToolError(f"timed out after {context.max_timeout_s:g} s") from None
            raise ToolError(f"TimeoutError: {error}") from error
        except Exception as error:  # the user's code: the model reads what went wrong
            raise ToolError(f"{type(error).__name__}: {error}") from error
        return _result(value)

    return handler


def _result(value: Any) -> ToolResult:
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult(value)
    from pydantic import TypeAdapter

    try:
        return ToolResult(TypeAdapter(Any).dump_json(value).decode())
    except ValueError:  # it has no JSON form
        return ToolResult(str(value))


def _fault(error: Any) -> str:
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    places = (".".join(map(str, fault["loc"])) for fault in faults)
    return "; ".join(
        f"the argument '{at}': {fault['msg']}" for at, fault in zip(places, faults, strict=True)
    )


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description of a docstring, and of each parameter in its `Args:` (Google's form)."""
    described: list[str] = []
    documented: dict[str, str] = {}
    section, current, indent = "", "", 0
    for line in text.splitlines():
        if found := _SECTION.match(line):
            section, current = found[1], ""
        elif not section:
            described.append(line)
        elif section.startswith(("Arg", "Param")) and line.strip():
            depth = len(line) - len(line.lstrip())
            if (not current or depth <= indent) and (argument := _ARGUMENT.match(line.strip())):
                current, indent = argument[1], depth
                documented[current] = argument[2]
            elif current:
                documented[current] = f"{documented[current]} {line.strip()}".strip()
    return "\n".join(described).strip(), documented
