"""The bookings of the restaurant: plain data that the agent's tools change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hermes_rl.rl import ToolError

DAYS = ("Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
"""Days on which the restaurant is open."""
TIMES = tuple(f"{hour}:{minute}" for hour in range(17, 22) for minute in ("00", "30"))
SEATS = 24
"""Seats at each time."""
LARGEST = 8
"""Most people in a booking that the agent may make."""
REASONS = ("large party", "same day")
"""Reasons to hand a guest over to a colleague."""

Booking = dict[str, Any]
"""code, name, day, time, people."""


class Refused(ToolError):
    """The change is not possible; the agent sees the reason."""


def free(bookings: Sequence[Booking], day: str, time: str) -> int:
    """Return the number of free seats."""
    taken = [int(b["people"]) for b in bookings if (b["day"], b["time"]) == (day, time)]
    return SEATS - sum(taken)


def find(bookings: Sequence[Booking], code: str) -> Booking:
    """Return a booking by its code. Raises: Refused."""
    for booking in bookings:
        if booking["code"] == code.strip().upper():
            return booking
    raise Refused(f"There is no booking {code}.")


def book(state: dict[str, Any], name: str, day: str, time: str, people: int) -> Booking:
    """Add a booking with the next code of the rollout. Raises: Refused."""
    if not name.strip():
        raise Refused("A booking needs a name.")
    _check(state["bookings"], day, time, people)
    if not state["codes"]:
        raise Refused("No more bookings can be made here today.")
    code = state["codes"].pop(0)
    booking = {"code": code, "name": name.strip(), "day": day, "time": time, "people": people}
    state["bookings"].append(booking)
    return booking


def change(state: dict[str, Any], code: str, new: Mapping[str, Any]) -> Booking:
    """Change the day, time or number of people of a booking. Raises: Refused."""
    old = find(state["bookings"], code)
    if not new:
        raise Refused("Name what to change: day, time or people.")
    wanted = {**old, **new}
    others = [b for b in state["bookings"] if b is not old]
    _check(others, wanted["day"], wanted["time"], wanted["people"])
    old.update(wanted)
    return old


def cancel(state: dict[str, Any], code: str) -> Booking:
    """Remove a booking. Raises: Refused."""
    old = find(state["bookings"], code)
    state["bookings"].remove(old)
    return old


def _check(bookings: Sequence[Booking], day: str, time: str, people: int) -> None:
    if day not in DAYS:
        raise Refused(f"The restaurant is closed on {day}.")
    if time not in TIMES:
        raise Refused(f"Tables start at {', '.join(TIMES)}.")
    left = free(bookings, day, time)
    if not 1 <= people <= left:
        raise Refused(f"On {day} at {time} there are {left} seats left, not {people}.")
