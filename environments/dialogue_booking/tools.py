"""The agent's tools. They only enforce opening times and seats: the agent must keep the rules."""

from __future__ import annotations

import json
from typing import Any

from environments.dialogue_booking import bookings
from environments.dialogue_booking.bookings import DAYS, REASONS, TIMES
from hermes_rl.rl import ToolContext, ToolResult, tool

_TOOLSET = "dialogue_booking"
_DAY = {"type": "string", "enum": ["Monday", *DAYS]}
_TIME = {"type": "string", "enum": list(TIMES)}
_PEOPLE = {"type": "integer", "minimum": 1}
_CODE = {"type": "string", "description": "Code of a booking: three letters or digits."}


def _object(needed: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": needed}


@tool(
    name="search",
    description="Get the number of free seats on a day, by time.",
    parameters=_object(["day"], day=_DAY),
    toolset=_TOOLSET,
)
async def search(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Return the free seats at each time."""
    if args["day"] not in DAYS:
        return ToolResult(text="Closed.")
    entries = ctx.env["bookings"]
    seats = {time: bookings.free(entries, args["day"], time) for time in TIMES}
    return ToolResult(text=json.dumps(seats))


@tool(
    name="look_up",
    description="Get a booking by its code.",
    parameters=_object(["code"], code=_CODE),
    toolset=_TOOLSET,
)
async def look_up(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Return the booking."""
    return ToolResult(text=json.dumps(bookings.find(ctx.env["bookings"], args["code"])))


@tool(
    name="book",
    description="Make a booking.",
    parameters=_object(
        ["name", "day", "time", "people"],
        name={"type": "string"},
        day=_DAY,
        time=_TIME,
        people=_PEOPLE,
    ),
    toolset=_TOOLSET,
)
async def book(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Return the new booking with its code."""
    made = bookings.book(ctx.env, args["name"], args["day"], args["time"], args["people"])
    return ToolResult(text=json.dumps(made))


@tool(
    name="change",
    description="Change the day, time or number of people of a booking.",
    parameters=_object(["code"], code=_CODE, day=_DAY, time=_TIME, people=_PEOPLE),
    toolset=_TOOLSET,
)
async def change(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Return the changed booking."""
    new: dict[str, Any] = {k: args[k] for k in ("day", "time", "people") if k in args}
    return ToolResult(text=json.dumps(bookings.change(ctx.env, args["code"], new)))


@tool(
    name="cancel",
    description="Cancel a booking.",
    parameters=_object(["code"], code=_CODE),
    toolset=_TOOLSET,
)
async def cancel(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Confirm the cancellation."""
    gone = bookings.cancel(ctx.env, args["code"])
    return ToolResult(text=f"Booking {gone['code']} is cancelled.")


@tool(
    name="hand_over",
    description="Hand the guest over to a colleague, for requests that you must not handle.",
    parameters=_object(["reason"], reason={"type": "string", "enum": list(REASONS)}),
    toolset=_TOOLSET,
)
async def hand_over(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Record the reason."""
    ctx.env["handed_over"].append(args["reason"])
    return ToolResult(text="A colleague will call the guest.")


TOOLS = (search, look_up, book, change, cancel, hand_over)
