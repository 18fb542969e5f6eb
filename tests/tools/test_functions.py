"""A Python function as a tool."""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from hermes_rl.errors import ToolError, UserError
from hermes_rl.tools import Tool, ToolContext, ToolResult, function_tool, read_arguments


class Place(BaseModel):
    """A place."""

    title: str
    level: int = 0


def forecast(
    city: str,
    unit: Literal["c", "f"] = "c",
    days: Annotated[int, Field(ge=1, le=5)] = 1,
    place: Place | None = None,
) -> dict[str, Any]:
    """Look up the weather.

    Works offline.

    Args:
        city: its name,
            with the country.
        days (int): how many.

    Returns: what it will be.
    """
    return {"city": city, "unit": unit, "days": days, "place": place}


async def call(tool: Tool, text: str, **context: Any) -> ToolResult:
    """Call a tool as the agent does."""
    values = read_arguments(text, tool.parameters)
    return await tool.handler(ToolContext(sandbox=None, **context), values)


def test_the_schema_is_that_of_signature_and_docstring() -> None:
    tool = function_tool(forecast)
    assert (tool.name, tool.description) == ("forecast", "Look up the weather.\n\nWorks offline.")
    properties = tool.parameters["properties"]
    assert list(properties) == ["city", "unit", "days", "place"]
    assert properties["city"] == {"description": "its name, with the country.", "type": "string"}
    assert properties["unit"]["enum"] == ["c", "f"]
    assert properties["days"] == {
        "default": 1, "description": "how many.", "maximum": 5, "minimum": 1, "type": "integer",
    }  # fmt: skip
    assert tool.parameters["required"] == ["city"]
    assert set(tool.parameters["$defs"]["Place"]["properties"]) == {"title", "level"}
    json.dumps(tool.schema)


async def test_arguments_have_the_types_of_the_signature() -> None:
    tool = function_tool(forecast)
    result = await call(tool, '{"city": "Ulm", "days": "3", "place": {"title": "Town hall"}}')
    assert json.loads(result.text) == {
        "city": "Ulm", "unit": "c", "days": 3, "place": {"title": "Town hall", "level": 0},
    }  # fmt: skip
    assert (await call(tool, '{"city": "Ulm", "place": null}')).ok


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "missing argument 'city'"),
        ('{"city": "Ulm", "days": 9}', "must be at most 5"),
        ('{"city": "Ulm", "unit": "k"}', "must be one of"),
        ('{"city": "Ulm", "town": "x"}', "unknown argument 'town'"),
        ('{"city": "Ulm", "place": {"level": 1}}', r"'place.title': Field required"),
    ],
)
async def test_wrong_arguments_are_reported_to_the_model(text: str, reason: str) -> None:
    with pytest.raises(ToolError, match=reason):
        await call(function_tool(forecast), text)


async def test_what_functions_return() -> None:
    @dataclass
    class Point:
        x: int

    ring: list[Any] = []
    ring.append(ring)
    returned = {"text": "plain", "point": Point(1), "nothing": None, "ring": ring, "other": object}
    returned["result"] = ToolResult("no", ok=False)

    def give(name: str) -> Any:
        return returned[name]

    tool = function_tool(give)
    texts = {name: (await call(tool, json.dumps({"name": name}))).text for name in returned}
    assert texts.pop("ring").startswith("[[")
    assert "object" in texts.pop("other")
    assert texts == {"text": "plain", "point": '{"x":1}', "nothing": "null", "result": "no"}
    with pytest.raises(ToolError, match="KeyError: 'x'"):
        await call(tool, '{"name": "x"}')


async def test_the_context_is_passed_and_not_offered() -> None:
    async def note(text: str, context: ToolContext) -> list[str]:
        notes: list[str] = context.state.setdefault("notes", [])
        notes.append(text)
        return notes

    tool = function_tool(note)
    assert list(tool.parameters["properties"]) == ["text"]
    state: dict[str, Any] = {}
    await call(tool, '{"text": "a"}', state=state)
    assert (await call(tool, '{"text": "b"}', state=state)).text == '["a","b"]'


async def test_a_slow_function_blocks_nothing_and_ends_at_the_limit() -> None:
    async def forever() -> None:
        await asyncio.sleep(60)

    def sleep() -> str:
        time.sleep(0.2)
        return "slept"

    with pytest.raises(ToolError, match=r"timed out after 0\.05 s"):
        await call(function_tool(forever), "{}", max_timeout_s=0.05)
    sleeping = asyncio.create_task(call(function_tool(sleep), "{}"))
    await asyncio.sleep(0)
    assert not sleeping.done()
    assert (await sleeping).text == "slept"


async def test_any_name_of_a_parameter_and_further_ones() -> None:
    def odd(model_config: int, copy: str = "c", **more: int) -> dict[str, Any]:
        return {"model_config": model_config, "copy": copy, **more}

    result = await call(function_tool(odd), '{"model_config": 1, "further": 2}')
    assert json.loads(result.text) == {"model_config": 1, "copy": "c", "further": 2}


class Untyped:
    """A class that no JSON schema describes."""


def takes_untyped(value: Untyped) -> None:
    """Not a tool."""


def takes_many(*values: int) -> None:
    """Not a tool."""


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda: None, "'<lambda>' cannot be a tool. Give a named function"),
        (3, "'int' cannot be a tool"),
        (takes_many, "takes_many has no schema: the parameter values cannot be passed by name"),
        (takes_untyped, "takes_untyped has no schema: .*Untyped"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_in_one_line(function: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        function_tool(function)
    assert "\n" not in str(caught.value)
