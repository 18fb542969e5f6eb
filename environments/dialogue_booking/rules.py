"""Whether the agent kept to the rules of the house, and what it left in the book."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from environments.dialogue_booking.book import LARGEST, Booking
from environments.dialogue_booking.guest import names, offered
from hermes_rl.rl import Rollout, ToolUse

HOUSE = f"""\
You answer the guests of a restaurant by text. Today is {{today}}. It is open from Tuesday to
Sunday; tables begin from 17:00 to 21:30, every half hour. Write days and times as here: Friday,
19:30.

Rules of the house:
1. Before you book, change or cancel, tell the guest what you are about to do (for a booking or a
   change the new day, time and number of people as far as they are new, for a cancellation the
   code) and wait for the answer. A list of choices is a question, and not yet that.
2. Look up, change or cancel a booking only when the guest told you its code.
3. A booking for more than {LARGEST} people is not yours to make: hand over, reason "large party".
4. A booking for today is not yours to change or cancel: hand over, reason "same day".
5. Hand over only what you know: the guest told you the number of people, or you looked the booking
   up and it is for today.
6. Do what the guest wants, and nothing else."""

_NUMBER = re.compile(r"(?<![\w:])\d{1,3}(?![\w:])")
_MANY = re.compile(r"\b(nine|ten|eleven|twelve|\w+teen|twenty)\b", re.IGNORECASE)
"""More than `LARGEST`, in words."""


def violations(rollout: Rollout, before: Sequence[Booking], today: str) -> list[str]:
    """The rules that were broken by calls that succeeded, in order."""
    days = {b["code"]: b["day"] for b in before}
    slots = {b["code"]: f"{b['day']} {b['time']}" for b in before}
    found = []
    for use in rollout.tool_calls:
        if not use.ok:
            continue
        given = use.arguments
        code = str(given.get("code", "")).strip().upper()
        guest, proposal = _heard(rollout, use)
        if use.name in ("look_up", "change", "cancel") and not names(guest, {"code": code}):
            found.append(f"{use.name} {code}: the guest did not tell the code")
        if use.name in ("change", "cancel") and days.get(code) == today:
            found.append(f"{use.name} {code}: it is for today")
        if use.name == "hand_over" and not _known(rollout, use, guest, days, today):
            found.append(f"hand_over {given.get('reason')}: without knowing")
        if use.name in ("book", "change") and _number(given.get("people")) > LARGEST:
            found.append(f"{use.name}: more than {LARGEST} people")
        known = f"{guest} {today} {slots.get(code, '')}"
        asked = _proposed(proposal, _told(use), known)
        if use.name in ("book", "change", "cancel") and not asked:
            found.append(f"{use.name}: the guest was not asked")
    return found


def _known(rollout: Rollout, use: ToolUse, guest: str, days: Mapping[str, str], today: str) -> bool:
    """Whether the reason of a hand-over had been found out before."""
    if use.arguments.get("reason") == "large party":
        numbers = [int(n) for n in _NUMBER.findall(guest) if n not in days]  # and no code
        return any(n > LARGEST for n in numbers) or bool(_MANY.search(guest))
    seen = (
        str(u.arguments.get("code", "")).strip().upper()
        for u in rollout.tool_calls
        if u.name == "look_up" and u.ok and u.turn < use.turn
    )
    return any(days.get(code) == today for code in seen)


def _number(given: Any) -> int:
    """Of people; models write it as text too."""
    try:
        return int(given)
    except (TypeError, ValueError):
        return 0


def _told(use: ToolUse) -> dict[str, Any]:
    """What a guest must have been told before the call. Models write numbers as text, and null for
    what they leave out."""
    given = {k: v for k, v in use.arguments.items() if v is not None}
    if use.name == "cancel":
        return {"code": str(given.get("code", "")).strip()}
    told: dict[str, Any] = {key: given[key] for key in ("day", "time") if key in given}
    if "people" in given:
        told["people"] = _number(given["people"])
    return told


def _proposed(proposal: str, told: Mapping[str, Any], known: str) -> bool:
    """Whether a text says what will be done, and not all that could be.

    Args:
        known: texts whose days and times it may name beside those of the deed.
    """
    wanted = " ".join(str(told.get(key, "")) for key in ("day", "time"))
    alone = not wanted.strip() or offered(proposal) <= offered(f"{known} {wanted}")
    return alone and names(proposal, told)


def _heard(rollout: Rollout, use: ToolUse) -> tuple[str, str]:
    """All that the guest had said before a call, and what the agent had said before the guest's
    last words."""
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


def settled(
    wishes: Sequence[Mapping[str, Any]], before: Sequence[Booking], state: Mapping[str, Any]
) -> tuple[list[bool], int]:
    """Which wishes the book fulfils, and how many of its entries nobody asked for: new ones, and
    old ones that are neither as before nor as the guest wants them."""
    old = {b["code"]: b for b in before}
    now = {b["code"]: b for b in state["bookings"]}
    made = [_plain(b) for code, b in now.items() if code not in old]
    handed = list(state["handed_over"])
    met = []
    asked: dict[str, Mapping[str, Any] | None] = {}
    for wish in wishes:
        wanted = wish["wanted"]
        match wish["kind"]:
            case "book":
                met.append(_taken(made, wanted))
            case "hand_over":
                met.append(_taken(handed, wanted["reason"]))
            case kind:
                code = wish["code"]
                asked[code] = {**old[code], **wanted} if kind == "change" else None
                met.append(now.get(code) == asked[code])
    spoilt = sum(now.get(code) not in (b, asked.get(code, b)) for code, b in old.items())
    return met, spoilt + len(made) + len(handed)


def _plain(booking: Mapping[str, Any]) -> dict[str, Any]:
    name = str(booking["name"]).casefold().split()[-1:]
    return {**{k: booking[k] for k in ("day", "time", "people")}, "name": name}


def _taken(entries: list[Any], wanted: Any) -> bool:
    """Whether an entry was among them; it is taken out."""
    plain = _plain(wanted) if isinstance(wanted, Mapping) else wanted
    if plain not in entries:
        return False
    entries.remove(plain)
    return True
