"""A guest without a model: it answers by rules, and the same messages get the same answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

PATIENCE = 12
"""Messages of the agent after which a guest leaves."""
END = "[END]"
"""Text that a model that plays a guest writes to leave."""

_QUESTION_WORDS = {
    "code": ("code", "reference", "booking number"),
    "name": ("name",),
    "day": ("day", "date", "when"),
    "time": ("time", "when", "o'clock"),
    "people": ("how many", "people", "persons", "guests", "party"),
}
_ANSWERS = {
    "code": "the code is {}",
    "name": "the name is {}",
    "day": "{} please",
    "time": "at {}",
    "people": "we will be {}",
}
_DAY_OR_TIME = re.compile(r"\b(?:\d\d:\d\d|(?:mon|tues|wednes|thurs|fri|satur|sun)day)\b", re.I)
_FULL = ("full", "no table", "not available", "unavailable", "no seats", "another time", "taken")
_YES = ("Yes, please.", "Yes, do that.", "Yes, thank you.")


def reply(state: dict[str, Any], wishes: Sequence[Mapping[str, Any]], message: str) -> str | None:
    """Return the next message of the guest; None if it leaves.

    Args:
        state: `wish` (index of the current one), `answers` so far, `tone`.
        message: of the agent.
    """
    state["answers"] += 1
    if state["answers"] > PATIENCE:
        return None
    if is_question(message):
        return _answer_question(state, wishes[state["wish"]], message)
    if state["wish"] + 1 < len(wishes):
        state["wish"] += 1
        return f"One more thing: {wishes[state['wish']]['says']}"
    return None


def is_question(message: str) -> bool:
    """Whether a message of the agent waits for an answer."""
    low = message.lower()
    return "?" in message or "please confirm" in low or "let me know" in low or "please tell" in low


def _answer_question(state: Mapping[str, Any], wish: Mapping[str, Any], message: str) -> str:
    low = message.lower()
    other = wish.get("full")
    if other and other not in message and any(phrase in low for phrase in _FULL):
        return f"Then {other} would do."
    if _is_proposal(wish, message):
        return _YES[state["tone"] % len(_YES)]
    facts = dict(wish["facts"])
    if other and any(phrase in low for phrase in _FULL):
        facts["time"] = other
    wrong = re.search(r"\b\d\d:\d\d\b", message) is not None  # a proposal of another time
    keys = [key for key in facts if any(phrase in low for phrase in _QUESTION_WORDS[key])]
    answers = [_ANSWERS[key].format(facts[key]) for key in (facts if wrong or not keys else keys)]
    text = ", ".join(answers) + "."
    return f"No: {text}" if wrong else text[0].upper() + text[1:]


def _is_proposal(wish: Mapping[str, Any], message: str) -> bool:
    """Whether a message names everything that the guest wants, and no other time."""
    named = {**wish["wanted"], **({"code": wish["code"]} if "code" in wish else {})}
    if wish["kind"] == "hand_over" or not mentions(message, named):
        return False
    times = set(re.findall(r"\b\d\d:\d\d\b", message))
    return "time" not in named or times <= {named["time"], wish["facts"]["time"]}


def mentioned_slots(message: str) -> set[str]:
    """Return the days and times in a text."""
    return {found.lower() for found in _DAY_OR_TIME.findall(message)}


def mentions(message: str, values: Mapping[str, Any]) -> bool:
    """Whether a text contains these values of a booking; people as digits or as a word."""
    low = message.lower()
    for key, value in values.items():
        forms = [str(value).lower()]
        if key == "people" and isinstance(value, int) and 0 < value < len(_NUMBER_WORDS):
            forms.append(_NUMBER_WORDS[value])
        if key == "name":
            continue
        if not any(re.search(rf"(?<!\w){re.escape(form)}(?!\w)", low) for form in forms):
            return False
    return True


_NUMBER_WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
)


def persona(name: str, wishes: Sequence[Mapping[str, Any]]) -> str:
    """Return the system prompt of a model that plays the guest."""
    lines = []
    for number, wish in enumerate(wishes, 1):
        facts = ", ".join(f"{key}: {value}" for key, value in wish["facts"].items())
        other = f" If that is full, {wish['full']} will do." if "full" in wish else ""
        lines.append(f"{number}. {wish['says']} ({facts}){other}")
    return (
        f"You are {name}, a guest who writes to a restaurant. You want, in this order:\n"
        + "\n".join(lines)
        + "\nWrite one short message at a time. Give details only when you are asked for them, "
        "and do not invent any. Accept a proposal only if it is what you want. When everything "
        f"is arranged, or they cannot help you, write {END} and nothing else."
    )
