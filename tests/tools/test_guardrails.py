"""The controller that notices a model that repeats itself, against a plain reading of its rules."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.tools import WARN, Bounds, Finding, LoopState, find_loop, observe

STOP = Bounds(failing_call=5, failing_tool=8, repeats=5, cycles=5)


class Seen(NamedTuple):
    """One finished call."""

    tool: str
    arguments: str
    result: str
    ok: bool
    changes: bool


def after(calls: list[Seen]) -> LoopState:
    state = LoopState()
    for call in calls:
        state = observe(state, **call._asdict())
    return state


def reached(calls: list[Seen], bounds: Bounds) -> Finding | None:
    return find_loop(after(calls), calls[-1].tool, bounds)


def expected(calls: list[Seen], bounds: Bounds) -> tuple[str, int, int] | None:
    """The rules, read over the whole history."""
    last = calls[-1]
    progress = [n for n, c in enumerate(calls) if c.ok and c.changes]
    recent = calls[progress[-1] + 1 :] if progress else calls

    def streak(same: list[Seen]) -> int:
        ends = [n for n, c in enumerate(same) if c.ok]
        return len(same[ends[-1] + 1 :] if ends else same)

    this = [c for c in recent if (c.tool, c.arguments) == (last.tool, last.arguments)]
    found = [("failing_call", streak(this), 1, bounds.failing_call)]
    pairs = [(c.tool, c.arguments, c.result) for c in calls]
    for period in range(1, 5):
        matched = 0
        while matched + period < len(pairs) and pairs[-1 - matched] == pairs[-1 - matched - period]:
            matched += 1
        kind, bound = ("repeat", bounds.repeats) if period == 1 else ("cycle", bounds.cycles)
        found.append((kind, matched // period + 1, period, bound))
    failing = streak([c for c in recent if c.tool == last.tool])
    found.append(("failing_tool", failing, 1, bounds.failing_tool))
    return next(((k, n, p) for k, n, p, bound in found if bound is not None and n >= bound), None)


CALLS = st.builds(
    lambda tool, n, result, ok: Seen(tool, json.dumps({"n": n}), result, ok, tool == "act"),
    st.sampled_from(["act", "look"]),
    st.integers(0, 1),
    st.sampled_from(["x", "y"]),
    st.booleans(),
)
CYCLES = st.builds(
    lambda before, cycle, times: before + cycle * times,
    st.lists(CALLS, max_size=4),
    st.lists(CALLS, min_size=1, max_size=5),
    st.integers(1, 6),
)


@given(CYCLES, st.sampled_from([WARN, STOP]))
def test_any_history_is_judged_by_the_rules(calls: list[Seen], bounds: Bounds) -> None:
    for end in range(1, len(calls) + 1):
        found = reached(calls[:end], bounds)
        plain = None if found is None else (found.kind, found.count, found.period)
        assert plain == expected(calls[:end], bounds)


@given(CYCLES)
def test_the_state_is_frozen_small_and_survives_being_stored(calls: list[Seen]) -> None:
    state = after(calls)
    stored = msgspec.json.decode(msgspec.json.encode(state), type=LoopState)
    assert stored == state
    assert observe(stored, **calls[0]._asdict()) == observe(state, **calls[0]._asdict())
    assert len(msgspec.json.encode(state)) < 2_000


def test_many_different_failing_calls_keep_the_state_small() -> None:
    calls = [Seen("act", json.dumps({"n": n}), "no", False, True) for n in range(500)]
    assert len(msgspec.json.encode(after(calls))) < 2_000
    assert reached(calls, STOP) == Finding("failing_tool", 500)


def test_the_order_of_keys_is_the_same_call_and_odd_arguments_count_too() -> None:
    one = Seen("act", '{"a": 1, "b": 2}', "x", True, True)
    assert reached([one, one._replace(arguments='{"b":2,"a":1}')], WARN) == Finding("repeat", 2)
    for arguments in ("", "{", "[1", "\ud800", '{"a": 1e999}', "9" * 400, "[" * 5000):
        odd = one._replace(arguments=arguments, ok=False)
        assert reached([odd, odd], WARN) == Finding("failing_call", 2)


def test_a_test_that_fails_after_each_of_several_edits_is_no_loop() -> None:
    test = Seen("terminal", '{"command": "pytest"}', "1 failed", False, True)
    work = []
    for n in range(12):
        work += [
            test._replace(result=f"failed in {n} s"),
            Seen("patch", f"[{n}]", "ok", True, True),
        ]
        assert reached(work, replace(STOP, failing_call=2, failing_tool=2)) is None
