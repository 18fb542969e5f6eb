"""What the agent can do with the book. The tools keep no rule of the house but the number of seats:
to keep the others is the agent's task."""

from __future__ import annotations

import json
from typing import Any

from environments.dialogue_booking import book as books
from environments.dialogue_booking.book import DAYS, REASONS, TIMES
from hermes_rl.rl import ToolContext, ToolResult, tool

_TOOLSET = "dialogue_booking"
_DAY = {"type": "string", "enum": ["Monday", *DAYS]}
_TIME = {"type": "string", "enum": list(TIMES)}
_PEOPLE = {"type": "integer", "minimum": 1}
_CODE = {"type": "string", "description": "Of a booking: three letters and digits."}


def _object(needed: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": needed}


@tool(
    name="search",
    description="Seats that are free on a day, by time.",
    parameters=_object(["day"], day=_DAY),
    toolset=_TOOLSET,
)
async def search(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Free seats at each time."""
    if args["day"] not in DAYS:
        return ToolResult(text="Closed.")
    bookings = ctx.env["bookings"]
    seats = {time: books.free(bookings, args["day"], time) for time in TIMES}
    return ToolResult(text=json.dumps(seats))


@tool(
    name="look_up",
    description="A booking by its code.",
    parameters=_object(["code"], code=_CODE),
    toolset=_TOOLSET,
)
async def look_up(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """The booking."""
    return ToolResult(text=json.dumps(books.find(ctx.env["bookings"], args["code"])))


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
    """The booking with its code."""
    made = books.book(ctx.env, args["name"], args["day"], args["time"], args["people"])
    return ToolResult(text=json.dumps(made))


@tool(
    name="change",
    description="Give a booking another day, time or number of people.",
    parameters=_object(["code"], code=_CODE, day=_DAY, time=_TIME, people=_PEOPLE),
    toolset=_TOOLSET,
)
async def change(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """The booking as it is now."""
    new: dict[str, Any] = {k: args[k] for k in ("day", "time", "people") if k in args}
    return ToolResult(text=json.dumps(books.change(ctx.env, args["code"], new)))


@tool(
    name="cancel",
    description="Cancel a booking.",
    parameters=_object(["code"], code=_CODE),
    toolset=_TOOLSET,
)
async def cancel(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Says that it is gone."""
    gone = books.cancel(ctx.env, args["code"])
    return ToolResult(text=f"Booking {gone['code']} is cancelled.")


@tool(
    name="hand_over",
    description="Have a colleague call the guest, for what you may not do yourself.",
    parameters=_object(["reason"], reason={"type": "string", "enum": list(REASONS)}),
    toolset=_TOOLSET,
)
async def hand_over(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Notes the reason."""
    ctx.env["handed_over"].append(args["reason"])
    return ToolResult(text="A colleague will call the guest.")


TOOLS = (search, look_up, book, change, cancel, hand_over)
