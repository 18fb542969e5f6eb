"""Notice a model that repeats itself: failing calls, failing tools, equal results, cycles of calls.

A pure controller: `observe` takes a frozen state and one finished call, and returns the next state.
Failures count until a tool that changes something succeeds: a test that fails after each of several
edits is work, not a loop. Of the calls of a program only failures count (`observe_inner`), since
its own loops are none of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import msgspec

MAX_PERIOD = 4
"""Calls of the longest cycle that is noticed."""
_KEPT = 16
"""Calls whose failures are counted at once."""

Kind = Literal["failing_call", "failing_tool", "repeat", "cycle"]
_encode = msgspec.json.Encoder(order="sorted").encode


class LoopState(msgspec.Struct, frozen=True):
    """What is remembered of a run's calls. Equal states come from equal histories."""

    recent: tuple[tuple[str, str], ...] = ()
    """Digests of the last calls and their results, at most `MAX_PERIOD`, the latest last."""
    matched: tuple[int, ...] = (0,) * MAX_PERIOD
    """For each period, how many of the last calls in a row equal the one a period before them."""
    failing: tuple[tuple[str, int], ...] = ()
    """Digest of a call -> its failures since a tool that changes something succeeded."""
    failures: tuple[tuple[str, int], ...] = ()
    """Tool -> its failures since then, or since it succeeded."""


@dataclass(frozen=True)
class Bounds:
    """Counts that are reached; None never is."""

    failing_call: int | None
    """Failures of one call with the same arguments."""
    failing_tool: int | None
    """Failures of one tool."""
    repeats: int | None
    """One call with one result in a row."""
    cycles: int | None
    """Runs of one cycle of calls in a row."""


WARN = Bounds(failing_call=2, failing_tool=3, repeats=2, cycles=2)
"""When the model is warned."""


@dataclass(frozen=True)
class Finding:
    """What a model repeats."""

    kind: Kind
    count: int
    """How often it happened."""
    period: int = 1
    """Calls of the cycle."""

    def warning(self, tool: str, *, inner: bool = False) -> str:
        """What the model reads behind the result of its last call.

        Args:
            inner: a program that it wrote made the call.
        """
        call = f"a call of {tool} in your programs" if inner else "this call"
        return "\n\n[Warning: " + _WARNINGS[self.kind].format(
            call=call, tool=tool, count=self.count, period=self.period
        )


_WARNINGS: dict[Kind, str] = {
    "failing_call": (
        "{call} with the same arguments has failed {count} times. Do not repeat it: find out "
        "why it fails, or try another approach.]"
    ),
    "failing_tool": (
        "{tool} has failed {count} times and nothing has succeeded in between. Look at the errors "
        "above and change your approach.]"
    ),
    "repeat": (
        "this call has returned the same result {count} times in a row. Use the result, or do "
        "something else.]"
    ),
    "cycle": (
        "your last calls repeat a cycle of {period} calls with the same results, {count} times "
        "so far. Change your approach, or give your answer.]"
    ),
}


def observe(
    state: LoopState, *, tool: str, arguments: str, result: str, ok: bool, changes: bool
) -> LoopState:
    """The state after one more call.

    Args:
        arguments: as the model wrote them; the order of keys and spaces do not matter.
        changes: the tool may change something; its success is progress.
    """
    this = (_digest_of_call(tool, arguments), _digest(result.encode("utf-8", "surrogatepass")))
    matched = tuple(
        count + 1 if len(state.recent) >= period and state.recent[-period] == this else 0
        for period, count in enumerate(state.matched, 1)
    )
    recent = (*state.recent, this)[-MAX_PERIOD:]
    counted = observe_inner(state, tool=tool, arguments=arguments, ok=ok, changes=changes)
    return LoopState(recent, matched, counted.failing, counted.failures)


def observe_inner(
    state: LoopState, *, tool: str, arguments: str, ok: bool, changes: bool
) -> LoopState:
    """The state after one more call of a program. See `observe` for the arguments."""
    call = _digest_of_call(tool, arguments)
    if not ok:
        failing = _counted(state.failing, call)
        failures = _counted(state.failures, tool)
    elif changes:
        failing, failures = (), ()
    else:
        failing = tuple(pair for pair in state.failing if pair[0] != call)
        failures = tuple(pair for pair in state.failures if pair[0] != tool)
    return LoopState(state.recent, state.matched, failing, failures)


def find_loop(
    state: LoopState, tool: str, bounds: Bounds, *, inner: str | None = None
) -> Finding | None:
    """What the last call has reached, the most specific first.

    Args:
        tool: of that call.
        inner: the arguments, if a program made the call; repetitions are none of it then.
    """
    if inner is None:
        call, repeats = state.recent[-1][0] if state.recent else "", state.matched
    else:
        call, repeats = _digest_of_call(tool, inner), ()
    found = (
        (bounds.failing_call, Finding("failing_call", dict(state.failing).get(call, 0))),
        *((bounds.repeats, Finding("repeat", count + 1)) for count in repeats[:1]),
        *(
            (bounds.cycles, Finding("cycle", count // period + 1, period))
            for period, count in enumerate(repeats[1:], 2)
        ),
        (bounds.failing_tool, Finding("failing_tool", dict(state.failures).get(tool, 0))),
    )
    return next((f for bound, f in found if bound is not None and f.count >= bound), None)


def _digest_of_call(tool: str, arguments: str) -> str:
    return _digest(f"{tool} ".encode() + _normal(arguments))


def _normal(arguments: str) -> bytes:
    """The arguments with sorted keys and without spaces; as they are if they cannot be read."""
    try:
        return _encode(msgspec.json.decode(arguments))
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        return arguments.encode("utf-8", "surrogatepass")


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()


def _counted(counts: tuple[tuple[str, int], ...], name: str) -> tuple[tuple[str, int], ...]:
    """The counts with one more of a name, which comes last; the oldest names are forgotten."""
    before = dict(counts)
    count = before.pop(name, 0)
    return (*before.items(), (name, count + 1))[-_KEPT:]
