"""A guest without a model: answers by rules, and is the same whenever the same is said to it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

PATIENCE = 12
"""Answers of the agent's after which a guest leaves."""
END = "[END]"
"""What a model that plays a guest writes when it leaves."""

_ASKED = {
    "code": ("code", "reference", "booking number"),
    "name": ("name",),
    "day": ("day", "date", "when"),
    "time": ("time", "when", "o'clock"),
    "people": ("how many", "people", "persons", "guests", "party"),
}
_TOLD = {
    "code": "the code is {}",
    "name": "the name is {}",
    "day": "{} please",
    "time": "at {}",
    "people": "we will be {}",
}
_DAY_OR_TIME = re.compile(r"\b(?:\d\d:\d\d|(?:mon|tues|wednes|thurs|fri|satur|sun)day)\b", re.I)
_FULL = ("full", "no table", "not available", "unavailable", "no seats", "another time", "taken")
_YES = ("Yes, please.", "Yes, do that.", "Yes, thank you.")


def reply(state: dict[str, Any], wishes: Sequence[Mapping[str, Any]], said: str) -> str | None:
    """What the guest says next; None when it leaves.

    Args:
        state: of this guest: `wish` (the place of the present one), `answers` so far, `tone`.
        said: by the agent.
    """
    state["answers"] += 1
    if state["answers"] > PATIENCE:
        return None
    if asks(said):
        return _to_question(state, wishes[state["wish"]], said)
    if state["wish"] + 1 < len(wishes):
        state["wish"] += 1
        return f"One more thing: {wishes[state['wish']]['says']}"
    return None


def asks(said: str) -> bool:
    """Whether the agent waits for an answer."""
    low = said.lower()
    return "?" in said or "please confirm" in low or "let me know" in low or "please tell" in low


def _to_question(state: Mapping[str, Any], wish: Mapping[str, Any], said: str) -> str:
    low = said.lower()
    other = wish.get("full")
    if other and other not in said and any(word in low for word in _FULL):
        return f"Then {other} would do."
    if _proposes(wish, said):
        return _YES[state["tone"] % len(_YES)]
    facts = dict(wish["facts"])
    if other and any(word in low for word in _FULL):
        facts["time"] = other
    wrong = re.search(r"\b\d\d:\d\d\b", said) is not None  # a proposal, and not the guest's
    asked = [key for key in facts if any(word in low for word in _ASKED[key])]
    told = [_TOLD[key].format(facts[key]) for key in (facts if wrong or not asked else asked)]
    text = ", ".join(told) + "."
    return f"No: {text}" if wrong else text[0].upper() + text[1:]


def _proposes(wish: Mapping[str, Any], said: str) -> bool:
    """It names all that the guest wants, and no other time."""
    named = {**wish["wanted"], **({"code": wish["code"]} if "code" in wish else {})}
    if wish["kind"] == "hand_over" or not names(said, named):
        return False
    times = set(re.findall(r"\b\d\d:\d\d\b", said))
    return "time" not in named or times <= {named["time"], wish["facts"]["time"]}


def offered(said: str) -> set[str]:
    """The days and times that a text names."""
    return {found.lower() for found in _DAY_OR_TIME.findall(said)}


def names(said: str, values: Mapping[str, Any]) -> bool:
    """Whether a text holds all these values of a booking, numbers of people as digits or words."""
    low = said.lower()
    for key, value in values.items():
        forms = [str(value).lower()]
        if key == "people" and isinstance(value, int) and 0 < value < len(_WORDS):
            forms.append(_WORDS[value])
        if key == "name":
            continue
        if not any(re.search(rf"(?<!\w){re.escape(form)}(?!\w)", low) for form in forms):
            return False
    return True


_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def persona(name: str, wishes: Sequence[Mapping[str, Any]]) -> str:
    """The system prompt of a model that plays the guest."""
    lines = []
    for number, wish in enumerate(wishes, 1):
        facts = ", ".join(f"{key}: {value}" for key, value in wish["facts"].items())
        other = f" If that is full, {wish['full']} will do." if "full" in wish else ""
        lines.append(f"{number}. {wish['says']} ({facts}){other}")
    return (
        f"You are {name}, a guest who writes to a restaurant. You want, one after the other:\n"
        + "\n".join(lines)
        + "\nWrite one short message at a time, as a guest does. Tell details only when you are "
        "asked for them, and invent none. Say yes to a proposal only if it is what you want. "
        f"When all is settled, or they cannot help you, write {END} and nothing else."
    )
