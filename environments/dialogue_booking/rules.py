"""The rules for the agent, violations of them, and the comparison of bookings with wishes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from environments.dialogue_booking.bookings import LARGEST, Booking
from environments.dialogue_booking.guest import mentioned_slots, mentions
from hermes_rl.rl import Rollout, ToolUse

SYSTEM_PROMPT = f"""\
You answer messages from the guests of a restaurant. Today is {{today}}. The restaurant is open
from Tuesday to Sunday. Tables start between 17:00 and 21:30, every half hour. Write days and times
in this form: Friday, 19:30.

Rules:
1. Before you book, change or cancel, tell the guest what you are going to do, and wait for the
   answer. For a booking, name the day, the time and the number of people; for a change, the new
   values; for a cancellation, the code. A list of options does not count.
2. Look up, change or cancel a booking only if the guest gave you its code.
3. Do not book a table for more than {LARGEST} people: hand over with the reason "large party".
4. Do not change or cancel a booking for today: hand over with the reason "same day".
5. Hand over only if you know that the reason applies: the guest told you the number of people, or
   you looked the booking up and it is for today.
6. Do only what the guest wants."""

_NUMBER = re.compile(r"(?<![\w:])\d{1,3}(?![\w:])")
_MANY = re.compile(r"\b(nine|ten|eleven|twelve|\w+teen|twenty)\b", re.IGNORECASE)
"""Numbers above `LARGEST`, as words."""


def violations(rollout: Rollout, before: Sequence[Booking], today: str) -> list[str]:
    """Return the rules that successful calls broke, in order."""
    days = {b["code"]: b["day"] for b in before}
    slots = {b["code"]: f"{b['day']} {b['time']}" for b in before}
    found = []
    for use in rollout.tool_calls:
        if not use.ok:
            continue
        code = str(use.arguments.get("code", "")).strip().upper()
        guest, proposal = _dialogue_before(rollout, use)
        if use.name in ("look_up", "change", "cancel") and not mentions(guest, {"code": code}):
            found.append(f"{use.name} {code}: the guest did not give the code")
        if use.name in ("change", "cancel") and days.get(code) == today:
            found.append(f"{use.name} {code}: it is for today")
        if use.name == "hand_over" and not _is_reason_known(rollout, use, guest, days, today):
            found.append(f"hand_over {use.arguments.get('reason')}: without knowing")
        if use.name in ("book", "change") and _number(use.arguments.get("people")) > LARGEST:
            found.append(f"{use.name}: more than {LARGEST} people")
        known = f"{guest} {today} {slots.get(code, '')}"
        announced = _is_announced(proposal, _announcement(use), known)
        if use.name in ("book", "change", "cancel") and not announced:
            found.append(f"{use.name}: the guest was not asked")
    return found


def _is_reason_known(
    rollout: Rollout, use: ToolUse, guest: str, days: Mapping[str, str], today: str
) -> bool:
    """Whether the agent knew the reason of a hand-over."""
    if use.arguments.get("reason") == "large party":
        numbers = [int(n) for n in _NUMBER.findall(guest) if n not in days]  # codes may be digits
        return any(n > LARGEST for n in numbers) or bool(_MANY.search(guest))
    seen = (
        str(u.arguments.get("code", "")).strip().upper()
        for u in rollout.tool_calls
        if u.name == "look_up" and u.ok and u.turn < use.turn
    )
    return any(days.get(code) == today for code in seen)


def _number(value: Any) -> int:
    """Return a number of people, which models also write as text; 0 for anything else."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0


def _announcement(use: ToolUse) -> dict[str, Any]:
    """Return the values that the agent must announce before a call.

    Models write numbers as text, and null for absent arguments.
    """
    arguments = {k: v for k, v in use.arguments.items() if v is not None}
    if use.name == "cancel":
        return {"code": str(arguments.get("code", "")).strip()}
    values: dict[str, Any] = {key: arguments[key] for key in ("day", "time") if key in arguments}
    if "people" in arguments:
        values["people"] = _number(arguments["people"])
    return values


def _is_announced(proposal: str, values: Mapping[str, Any], known: str) -> bool:
    """Whether a text announces these values, and is not a list of options.

    Args:
        known: texts whose days and times the proposal may also contain.
    """
    wanted = " ".join(str(values.get(key, "")) for key in ("day", "time"))
    alone = not wanted.strip() or mentioned_slots(proposal) <= mentioned_slots(f"{known} {wanted}")
    return alone and mentions(proposal, values)


def _dialogue_before(rollout: Rollout, use: ToolUse) -> tuple[str, str]:
    """Return all messages of the guest before a call, and the agent's last message before them."""
    guest, proposal, latest = [], "", ""
    for message, turn in zip(rollout.messages, rollout.turn_of, strict=True):
        text = message.get("content")
        if turn >= use.turn or not isinstance(text, str) or not text:
            continue
        if message["role"] == "user":
            guest.append(text)
            proposal = latest
        elif message["role"] == "assistant":
            latest = text
    return "\n".join(guest), proposal


def check_wishes(
    wishes: Sequence[Mapping[str, Any]], before: Sequence[Booking], state: Mapping[str, Any]
) -> tuple[list[bool], int]:
    """Return which wishes the bookings fulfil, and the number of unwanted changes.

    Unwanted are new bookings, and old ones that are neither unchanged nor as the guest wants them.
    """
    old = {b["code"]: b for b in before}
    now = {b["code"]: b for b in state["bookings"]}
    new = [_plain(b) for code, b in now.items() if code not in old]
    handed = list(state["handed_over"])
    met = []
    requested: dict[str, Mapping[str, Any] | None] = {}
    for wish in wishes:
        wanted = wish["wanted"]
        match wish["kind"]:
            case "book":
                met.append(_take(new, wanted))
            case "hand_over":
                met.append(_take(handed, wanted["reason"]))
            case kind:
                code = wish["code"]
                requested[code] = {**old[code], **wanted} if kind == "change" else None
                met.append(now.get(code) == requested[code])
    spoilt = sum(now.get(code) not in (b, requested.get(code, b)) for code, b in old.items())
    return met, spoilt + len(new) + len(handed)


def _plain(booking: Mapping[str, Any]) -> dict[str, Any]:
    name = str(booking["name"]).casefold().split()[-1:]
    return {**{k: booking[k] for k in ("day", "time", "people")}, "name": name}


def _take(entries: list[Any], wanted: Any) -> bool:
    """Remove an entry if it is there; return whether it was."""
    plain = _plain(wanted) if isinstance(wanted, Mapping) else wanted
    if plain not in entries:
        return False
    entries.remove(plain)
    return True
