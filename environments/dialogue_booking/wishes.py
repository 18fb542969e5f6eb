"""Guests and their wishes by seed: bookings, one or two wishes, and a solution."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from environments.dialogue_booking.bookings import DAYS, LARGEST, SEATS, TIMES, Booking, free
from environments.dialogue_booking.rules import SYSTEM_PROMPT
from hermes_rl.rl import Task, make_task

NAMES = (
    *("Abara", "Berg", "Cohen", "Diallo", "Eriksen", "Fontana", "Gupta", "Hansen", "Ivanova"),
    *("Jansen", "Kimura", "Lopez", "Moreau", "Novak", "Okafor", "Park", "Quist", "Rossi", "Silva"),
    *("Tanaka", "Usman", "Vogel", "Weber", "Yilmaz", "Zhang"),
)
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
EVAL_OF = 8
"""One scene in this many belongs to the split `eval`, by the hash of the scene."""

Step = str | dict[str, Any]
Drawn = tuple[dict[str, Any], list[Step]]
"""A wish (`kind`, `says`, `facts`, `wanted`, optional `full`, `code`), and the oracle's steps."""


@dataclass(frozen=True)
class Scene:
    """The content of a task."""

    name: str
    today: str
    bookings: list[Booking]
    wishes: list[dict[str, Any]]
    steps: list[Step]

    @property
    def digest(self) -> str:
        """sha256 of everything except the solution."""
        seen = [self.name, self.today, self.bookings, self.wishes]
        return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()

    @property
    def split(self) -> str:
        """`train` or `eval`."""
        return "eval" if int(self.digest[:8], 16) % EVAL_OF == 0 else "train"


class _SceneBuilder:
    """The bookings of a scene under construction."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.name = random.choice(NAMES)
        self.today = random.choice(DAYS)
        self.bookings: list[Booking] = []
        self.codes: set[str] = set()
        self.slots: set[tuple[str, str]] = set()
        """Used by a wish or a booking; no two share one."""
        for _ in range(random.randint(5, 9)):
            self.add(random.choice([n for n in NAMES if n != self.name]))

    def code(self) -> str:
        """Return a new code."""
        while (made := "".join(self.random.choices(_LETTERS, k=3))) in self.codes:
            pass
        self.codes.add(made)
        return made

    def slot(self, *, day: str | None = None) -> tuple[str, str]:
        """Return an unused day and time, not today."""
        later = [d for d in DAYS if d != self.today]
        while True:
            found = (day or self.random.choice(later), self.random.choice(TIMES))
            if found not in self.slots:
                self.slots.add(found)
                return found

    def add(self, name: str, *, day: str | None = None, people: int | None = None) -> Booking:
        """Add a booking."""
        found, time = self.slot(day=day)
        made: Booking = {"code": self.code(), "name": name, "day": found, "time": time}
        made["people"] = people or self.random.randint(1, LARGEST - 2)
        self.bookings.append(made)
        return made

    def fill(self, day: str, time: str) -> None:
        """Book all seats of a day and time."""
        while left := free(self.bookings, day, time):
            people = min(left, LARGEST)
            made = {"code": self.code(), "name": self.random.choice(NAMES[:-1])}
            self.bookings.append({**made, "day": day, "time": time, "people": people})
        assert left <= SEATS


def _book(builder: _SceneBuilder) -> Drawn:
    day, time = builder.slot()
    people = builder.random.randint(1, LARGEST)
    wanted = {"name": builder.name, "day": day, "time": time, "people": people}
    says = builder.random.choice(("I would like to book a table.", "Do you have a table for us?"))
    wish = {"kind": "book", "says": f"{says} It is for {day}.", "facts": wanted, "wanted": wanted}
    return wish, [_QUESTION, _proposal(wanted), _call("book", wanted), "It is booked."]


def _book_full(builder: _SceneBuilder) -> Drawn:
    day, first = builder.slot()
    _, time = builder.slot(day=day)
    builder.fill(day, first)
    people = builder.random.randint(1, LARGEST)
    wanted = {"name": builder.name, "day": day, "time": time, "people": people}
    wish = {
        "kind": "book",
        "says": f"We would like to come on {day} at {first}.",
        "facts": {**wanted, "time": first},
        "full": time,
        "wanted": wanted,
    }
    steps: list[Step] = [_QUESTION, _call("search", {"day": day})]
    steps.append(f"{first} is fully booked on {day}. Is there another time that would do?")
    return wish, [*steps, _proposal(wanted), _call("book", wanted), "It is booked."]


def _change(builder: _SceneBuilder) -> Drawn:
    old = builder.add(builder.name, people=builder.random.randint(2, LARGEST - 2))
    new: dict[str, Any] = {}
    if builder.random.random() < 0.5:
        new["people"] = old["people"] + builder.random.choice((-1, 1, 2))
    else:
        new["day"], new["time"] = builder.slot()
    says = "I have to change my booking."
    facts = {"code": old["code"], "name": builder.name, **new}
    wish = {"kind": "change", "says": says, "facts": facts, "code": old["code"], "wanted": new}
    values = ", ".join(f"{key} {value}" for key, value in new.items())
    ask = "What is the code of the booking, the name, and what shall it be: day, time, people?"
    steps: list[Step] = [ask, f"Booking {old['code']} becomes: {values}. Shall I change it so?"]
    return wish, [*steps, _call("change", {"code": old["code"], **new}), "It is changed."]


def _cancel(builder: _SceneBuilder) -> Drawn:
    old = builder.add(builder.name)
    facts = {"code": old["code"], "name": builder.name}
    says = builder.random.choice(("We cannot come after all.", "I have to cancel our table."))
    wish = {"kind": "cancel", "says": says, "facts": facts, "code": old["code"], "wanted": {}}
    steps: list[Step] = ["What is the code of your booking?"]
    steps.append(f"Shall I cancel the booking {old['code']}?")
    return wish, [*steps, _call("cancel", {"code": old["code"]}), "It is cancelled."]


def _large(builder: _SceneBuilder) -> Drawn:
    day, time = builder.slot()
    people = builder.random.randint(LARGEST + 1, SEATS - 4)
    facts = {"name": builder.name, "day": day, "time": time, "people": people}
    says = f"I need a table for a party on {day}."
    wanted = {"reason": "large party"}
    wish = {"kind": "hand_over", "says": says, "facts": facts, "wanted": wanted}
    return wish, [_QUESTION, _call("hand_over", wanted), "A colleague will call you."]


def _same_day(builder: _SceneBuilder) -> Drawn:
    old = builder.add(builder.name, day=builder.today)
    facts = {"code": old["code"], "name": builder.name}
    says = builder.random.choice(("We cannot come, please cancel.", "Please cancel our table."))
    wanted = {"reason": "same day"}
    wish = {"kind": "hand_over", "says": says, "facts": facts, "wanted": wanted}
    steps: list[Step] = ["What is the code of your booking?"]
    steps.append(_call("look_up", {"code": old["code"]}))
    return wish, [*steps, _call("hand_over", wanted), "A colleague will call you."]


_QUESTION = "What name is it for, on which day, at what time, and for how many people?"
_KINDS: tuple[Callable[[_SceneBuilder], Drawn], ...] = (
    _book,
    _book_full,
    _change,
    _cancel,
    _large,
    _same_day,
)


def scenes(split: str, seed: int) -> Iterator[Scene]:
    """Yield the scenes of a split, endlessly and without a repeat."""
    random = Random(f"dialogue_booking/{seed}")
    seen: set[str] = set()
    while True:
        builder = _SceneBuilder(random)
        kinds = random.sample(_KINDS, random.choice((1, 1, 2)))
        drawn = [kind(builder) for kind in kinds]
        bookings = sorted(builder.bookings, key=lambda b: str(b["code"]))
        steps = [step for _, steps in drawn for step in steps]
        scene = Scene(builder.name, builder.today, bookings, [wish for wish, _ in drawn], steps)
        if scene.split == split and scene.digest not in seen:
            seen.add(scene.digest)
            yield scene


def make_scene_task(scene: Scene) -> Task:
    """Make the task of a scene; the oracle asks, proposes and acts."""
    return make_task(
        f"Good day, this is {scene.name}. {scene.wishes[0]['says']}",
        id=scene.digest[:16],
        system=SYSTEM_PROMPT.format(today=scene.today),
        oracle=json.dumps(scene.steps),
        guest=scene.name,
        today=scene.today,
        bookings=scene.bookings,
        wishes=scene.wishes,
    )


def _proposal(wanted: dict[str, Any]) -> str:
    day, time, people = wanted["day"], wanted["time"], wanted["people"]
    return f"A table on {day} at {time} for {people}, name {wanted['name']}. Shall I book it?"


def _call(name: str, arguments: Mapping[str, Any]) -> Step:
    return {"calls": [{"name": name, "arguments": dict(arguments)}]}
