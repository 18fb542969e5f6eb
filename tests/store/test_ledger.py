"""The compact ledger agrees with a plain implementation, for any order of attempts."""

from collections import defaultdict
from typing import Any

import msgspec
import scripted_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl.errors import CAUSES
from hermes_rl.store import BatchSummary, Commit, Ledger

causes = st.sampled_from([None, *CAUSES])
histories = st.dictionaries(st.integers(0, 400), st.lists(causes, min_size=1, max_size=5))


def expected(history: list[str | None], max_attempts: int) -> str:
    """The rule of the design."""
    if None in history:
        return "done"
    counted = sum(CAUSES[c].counted for c in history if c)
    lost = history.count("worker_lost")
    last = history[-1]
    refused = last is not None and not CAUSES[last].retry
    return "given_up" if refused or counted >= max_attempts or lost >= 3 else "open"


def fatal(attempt: int, cause: str | None) -> str | None:
    """The tool call under which a sandbox died."""
    return f"call-{attempt % 2}" if cause == "sandbox_died" else None


def commit_of(attempts: list[tuple[int, int, str | None]]) -> Commit:
    tally = BatchSummary()
    rows: dict[str | None, Any] = {}
    for number, attempt, cause in attempts:
        if cause not in rows:
            rows[cause] = msgspec.to_builtins(scripted_rows.make_row(number, cause=cause))
        key = {"unit_id": scripted_rows.unit_id(number), "epoch": 1, "attempt": attempt}
        fatal_command = fatal(attempt, cause)
        tally.add({"key": key, "row": rows[cause], "fatal_command": fatal_command})
    return tally.commit("1-0-0")


def apply(ledger: Ledger, attempts: list[tuple[int, int, str | None]]) -> None:
    for number, attempt, cause in attempts:
        ledger.apply(
            scripted_rows.unit_id(number),
            attempt,
            done=cause is None,
            cause=cause,
            fatal_command=fatal(attempt, cause),
        )


@settings(max_examples=40, deadline=None)
@given(history=histories, max_attempts=st.integers(1, 4), order=st.randoms(use_true_random=False))
def test_ledger_agrees_with_the_rule(
    history: dict[int, list[str | None]], max_attempts: int, order: Any
) -> None:
    attempts = [(n, i, cause) for n, tries in history.items() for i, cause in enumerate(tries)]
    order.shuffle(attempts)
    half = len(attempts) // 2
    loaded = Ledger(max_attempts)
    twice = loaded.load([commit_of(attempts[:half])])
    apply(loaded, attempts[half:])
    whole = Ledger(max_attempts)
    again = whole.load([commit_of(attempts[:half])])
    more = whole.load([commit_of(attempts[half:])])

    counts: dict[str, int] = defaultdict(int)
    for number, tries in history.items():
        unit, judged = scripted_rows.unit_id(number), expected(tries, max_attempts)
        counts[judged] += 1
        for ledger in (loaded, whole):
            assert ledger.disposition(unit) == judged
            assert ledger.next_attempt(unit) == len(tries)
            assert ledger.lost_workers(unit) == tries.count("worker_lost")
            known = ledger.fatal_commands(unit)
            assert set(known) == {f for i, cause in enumerate(tries) if (f := fatal(i, cause))}
            assert len(known) == len(set(known))
    for ledger in (loaded, whole):
        assert (ledger.done, ledger.given_up) == (counts["done"], counts["given_up"])
        assert len(ledger) == len(history)
        assert dict(ledger.units()) == {
            scripted_rows.unit_id(n): expected(t, max_attempts) for n, t in history.items()
        }
    finished_twice = {scripted_rows.unit_id(n) for n, t in history.items() if t.count(None) > 1}
    assert again == twice  # each load returns those that it found
    assert {*again, *more} == finished_twice
    assert whole.reopen_given_up() == counts["given_up"]
    assert whole.given_up == 0
    opened = [n for n, tries in history.items() if expected(tries, max_attempts) == "given_up"]
    assert all(whole.fatal_commands(scripted_rows.unit_id(n)) == () for n in opened)


def test_unknown_units_are_open() -> None:
    ledger = Ledger()
    assert ledger.disposition(scripted_rows.unit_id(1)) == "open"
    assert ledger.next_attempt(scripted_rows.unit_id(1)) == 0
    assert ledger.fatal_commands(scripted_rows.unit_id(1)) == ()
