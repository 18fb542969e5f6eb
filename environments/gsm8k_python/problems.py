"""Arithmetic word problems by seed: text and exact answer from the same numbers.

Every family draws numbers so that its answer has at most two decimals. The answer is computed in
exact fractions, never parsed from the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from random import Random

EVAL_OF = 8
"""One problem in this many belongs to the split `eval`, by the hash of its text, so that the splits
share no problem for any seeds."""

NAMES = (
    *("Amara", "Bodil", "Chen", "Dario", "Elif", "Femi", "Greta", "Hana"),
    *("Ivo", "Jun", "Keira", "Lucia", "Mateo", "Nadia", "Omar", "Priya"),
    *("Quinn", "Rosa", "Stefan", "Tariq", "Uma", "Viktor", "Wanda", "Ximena"),
    *("Yusuf", "Zofia"),
)
GOODS = (
    *("notebooks", "pencils", "lanterns", "candles", "apples", "jars", "tiles", "ropes"),
    *("mugs", "stickers", "marbles", "bricks", "tickets", "postcards", "bolts", "seedlings"),
)
PLACES = ("a market", "a school fair", "a harbour shop", "a garden centre", "a museum", "a station")


@dataclass(frozen=True)
class Problem:
    """A question and its answer."""

    family: str
    text: str
    answer: Fraction

    @property
    def digest(self) -> str:
        """sha256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def split(self) -> str:
        """`train` or `eval`."""
        return "eval" if int(self.digest[:8], 16) % EVAL_OF == 0 else "train"


def format_number(number: Fraction) -> str:
    """Format a number as `12` or `3.5`. Raises: ValueError for more than two decimals."""
    if number.denominator == 1:
        return str(number.numerator)
    cents = number * 100
    if cents.denominator != 1:
        raise ValueError(f"{number} has more than two decimals")
    sign = "-" if cents < 0 else ""
    whole, rest = divmod(abs(cents.numerator), 100)
    return f"{sign}{whole}.{rest:02d}".rstrip("0")


def problems(split: str, seed: int) -> Iterator[Problem]:
    """Yield the problems of a split, endlessly and without a repeat."""
    random = Random(f"gsm8k_python/{seed}")
    families = list(FAMILIES)
    seen: set[bytes] = set()
    while True:
        family = random.choice(families)
        text, answer = FAMILIES[family](random)
        problem = Problem(family, text, answer)
        key = bytes.fromhex(problem.digest[:32])
        if problem.split == split and key not in seen:
            seen.add(key)
            yield problem


Made = tuple[str, Fraction]


def _shopping(r: Random) -> Made:
    who, good, other = r.choice(NAMES), *r.sample(GOODS, 2)
    each, more = Fraction(r.randint(3, 60), 4), Fraction(r.randint(2, 40), 2)
    count, extra, off = r.randint(3, 24), r.randint(2, 12), r.choice((5, 10, 20, 25, 50))
    total = count * each + extra * more
    answer = total * (100 - off) / 100
    if (answer * 100).denominator != 1:
        return _shopping(r)
    text = (
        f"At {r.choice(PLACES)}, {who} buys {count} {good} at {format_number(each)} dollars each "
        f"and {extra} {other} at {format_number(more)} dollars each. A voucher takes {off} percent "
        "off the whole bill. How many dollars does the purchase cost?"
    )
    return text, answer


def _journey(r: Random) -> Made:
    who = r.choice(NAMES)
    first, second = r.randint(4, 18) * 5, r.randint(4, 24) * 5
    hours, half_hours, pause = r.randint(2, 6), r.randint(1, 9), r.randint(1, 3) * 20
    distance = first * hours + second * Fraction(half_hours, 2)
    minutes = 60 * hours + 30 * half_hours + pause
    text = (
        f"{who} drives {hours} hours at {first} km per hour, rests for {pause} minutes, and then "
        f"drives {half_hours * 30} minutes at {second} km per hour. "
    )
    if r.random() < 0.5:
        return text + "How many kilometres is the whole journey?", distance
    return text + "How many minutes does the whole journey take, the rest included?", Fraction(
        minutes
    )


def _sharing(r: Random) -> Made:
    one, two, three = r.sample(NAMES, 3)
    good = r.choice(GOODS)
    parts = r.sample(range(1, 9), 3)
    unit = r.randint(3, 30)
    total, given_away = unit * sum(parts), r.randint(2, unit * parts[0])
    text = (
        f"{one}, {two} and {three} share {total} {good} in the ratio {parts[0]} to {parts[1]} to "
        f"{parts[2]}. Then {one} gives {given_away} of them away. "
        f"How many {good} does {one} have left?"
    )
    return text, Fraction(unit * parts[0] - given_away)


def _savings(r: Random) -> Made:
    who = r.choice(NAMES)
    start, weekly, weeks = r.randint(10, 300), r.randint(5, 60), r.randint(4, 30)
    raised, later = r.randint(2, 10), r.randint(2, weeks - 1)
    saved = start + weekly * weeks + raised * (weeks - later)
    spent = r.randint(5, saved)
    text = (
        f"{who} has {start} dollars and puts {weekly} dollars aside each week for {weeks} weeks. "
        f"After the first {later} weeks it is {raised} dollars more each week. In the end {who} "
        f"spends {spent} dollars. How many dollars are left?"
    )
    return text, Fraction(saved - spent)


def _ages(r: Random) -> Made:
    young, old = r.sample(NAMES, 2)
    age, times, years = r.randint(3, 15), r.randint(2, 5), r.randint(2, 20)
    answer = age * times + years + age + years
    text = (
        f"{old} is {times} times as old as {young}, who is {age}. What will be the sum of their "
        f"ages in {years} years?"
    )
    return text, Fraction(answer)


def _work(r: Random) -> Made:
    good = r.choice(GOODS)
    fast, slow = r.randint(6, 40), r.randint(3, 30)
    machines, others, hours = r.randint(2, 9), r.randint(2, 9), r.randint(3, 12)
    stop = r.randint(2, hours)
    made = hours * (machines * fast + others * slow) - fast * (hours - stop)
    text = (
        f"A workshop has {machines} machines that make {fast} {good} an hour each and {others} "
        f"that make {slow} an hour each. All start together, but one of the faster ones breaks "
        f"after {stop} hours. How many {good} are made in {hours} hours?"
    )
    return text, Fraction(made)


def _recipe(r: Random) -> Made:
    who = r.choice(NAMES)
    serves, people = r.choice((2, 4, 5, 8, 10)), r.randint(3, 40)
    grams, price = r.randint(4, 40) * 25, r.randint(1, 8) * 2
    needed = Fraction(grams * people, serves)
    cost = needed / 1000 * price
    if (cost * 100).denominator != 1:
        return _recipe(r)
    text = (
        f"A recipe for {serves} people takes {grams} grams of flour. Flour costs {price} dollars a "
        f"kilogram. How many dollars does the flour cost that {who} needs for {people} people?"
    )
    return text, cost


def _tank(r: Random) -> Made:
    size, full = r.randint(10, 90) * 20, r.choice((10, 20, 25, 40, 50, 60))
    inflow, outflow, minutes = r.randint(8, 40), r.randint(1, 7), r.randint(5, 40)
    level = Fraction(size * full, 100) + (inflow - outflow) * minutes
    if level > size:
        return _tank(r)
    text = (
        f"A tank holds {size} litres and is {full} percent full. A pipe brings {inflow} litres a "
        f"minute while a leak loses {outflow} litres a minute. How many litres are missing to a "
        f"full tank after {minutes} minutes?"
    )
    return text, size - level


def _seats(r: Random) -> Made:
    rows, seats = r.randint(8, 40), r.randint(8, 30)
    sold, child = r.randint(10, 90), r.choice((20, 25, 40, 50))
    price = r.randint(3, 15) * 2
    taken = Fraction(rows * seats * sold, 100)
    children = taken * child / 100
    if taken.denominator != 1 or children.denominator != 1:
        return _seats(r)
    text = (
        f"A theatre has {rows} rows of {seats} seats, and {sold} percent of them are sold. "
        f"{child} percent of those who come are children and pay half of the {price} dollars that "
        "a ticket costs. How many dollars are taken?"
    )
    return text, (taken - children) * price + children * Fraction(price, 2)


def _garden(r: Random) -> Made:
    length, width, path = r.randint(6, 40), r.randint(5, 30), r.randint(1, 4)
    price = r.randint(2, 20)
    around = (length + 2 * path) * (width + 2 * path) - length * width
    text = (
        f"A garden is {length} m long and {width} m wide. A path {path} m wide runs all around it, "
        f"outside. Paving costs {price} dollars a square metre. How many dollars does the path "
        "cost?"
    )
    return text, Fraction(around * price)


FAMILIES: dict[str, Callable[[Random], Made]] = {
    "shopping": _shopping,
    "journey": _journey,
    "sharing": _sharing,
    "savings": _savings,
    "ages": _ages,
    "work": _work,
    "recipe": _recipe,
    "tank": _tank,
    "seats": _seats,
    "garden": _garden,
}
"""Name -> function that draws a problem."""
