"""CPU per turn, and time at a model that takes its time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from setting import TURNS, Bench, Cost, Row, median, per_turn_ms, spread

AGENTS = 64
LATENCY_S = 0.2


class Pair(NamedTuple):
    """One measurement of ours beside one of the bare loop."""

    own: float
    bare: float
    whole_s: float
    """CPU of our larger run as a whole: what a marginal figure is the difference of."""

    @property
    def ratio(self) -> float:
        """Without a sense where the runs are so small that the bare figure is noise."""
        return self.own / self.bare if self.bare else math.inf


def _pairs(bench: Bench, url: str, ours: str, bare: str, agents: int = AGENTS) -> Iterator[Pair]:
    """Marginal CPU per turn, ours and the bare loop's, measured in turn."""
    rows = (bench.sizes.small, bench.sizes.large)
    for _ in range(bench.sizes.repeats):
        theirs = [bench.bare(url, n, agents, bare) for n in rows]
        mine = [bench.ours(url, n, agents, ours) for n in rows]
        pair = Pair(per_turn_ms(*mine, rows), per_turn_ms(*theirs, rows), mine[1].cpu_s)
        bench.say(f"sandbox {ours}: {pair.own:.2f} ms a turn, bare {pair.bare:.2f}")
        yield pair


def _data(pairs: Sequence[Pair]) -> dict[str, Any]:
    return {
        "ours_ms": [pair.own for pair in pairs],
        "bare_ms": [pair.bare for pair in pairs],
        "ratio": median([pair.ratio for pair in pairs]),
        "whole_s": [pair.whole_s for pair in pairs],
    }


def turn_none(bench: Bench) -> Row:
    """Sandbox `none` against a bare loop with a bash."""
    with bench.server() as url:
        pairs = list(_pairs(bench, url, "none", "bash"))
    ratio = median([pair.ratio for pair in pairs])
    own, bare = [pair.own for pair in pairs], [pair.bare for pair in pairs]
    return Row(
        "CPU per agent turn, sandbox none, 64 agents",
        f"{spread(own)} ms = {ratio:.1f} x",
        "3 x the bare loop",
        ratio <= 3.0,
        f"bare {spread(bare)} ms; atropos 3.5; mini-swe-agent 8; inspect_ai 14; hermes-agent 54",
        data=_data(pairs),
    )


def turn_bubblewrap(bench: Bench) -> Row:
    """A bubblewrap per trajectory against a bare loop that starts the same."""
    with bench.server() as url:
        pairs = list(_pairs(bench, url, "bubblewrap", "bwrap"))
    ratio = median([pair.ratio for pair in pairs])
    own, bare = [pair.own for pair in pairs], [pair.bare for pair in pairs]
    return Row(
        "the same with a bubblewrap sandbox per trajectory",
        f"{spread(own)} ms = {ratio:.1f} x",
        "1.2 ms and 2 x the bare loop with the same bwrap",
        ratio <= 2.0 and median(own) <= 1.2,
        f"bare with bwrap {spread(bare)} ms",
        data=_data(pairs),
    )


def turn_agents(bench: Bench) -> Row:
    """256 agents against 16."""
    rows = (max(bench.sizes.small, min(256, bench.sizes.large // 2)), bench.sizes.large)
    few: list[float] = []
    many: list[float] = []
    with bench.server() as url:
        for _ in range(bench.sizes.repeats):
            for agents, found in ((16, few), (256, many)):
                costs = [bench.ours(url, n, agents, "bubblewrap") for n in rows]
                found.append(per_turn_ms(costs[0], costs[1], rows))
            bench.say(f"16 agents: {few[-1]:.2f} ms a turn, 256 agents: {many[-1]:.2f}")
    ratio = median([m / f for m, f in zip(many, few, strict=True)])
    return Row(
        "the same at 256 agents against 16",
        f"{ratio:.2f} x",
        "1.3 x",
        ratio <= 1.3,
        f"{spread(few)} ms at 16, {spread(many)} ms at 256",
        data={"at_16_ms": few, "at_256_ms": many, "ratio": ratio},
    )


def wall(bench: Bench) -> Row:
    """Time against the time that a model of 200 ms needs."""
    rows = bench.sizes.small
    ideal = math.ceil(rows / AGENTS) * TURNS * LATENCY_S

    def over(cost: Cost) -> float:
        return cost.wall_s / ideal

    own: list[float] = []
    boxed: list[float] = []
    bare: list[float] = []
    with bench.server("--latency", str(LATENCY_S)) as url:
        for _ in range(bench.sizes.repeats):
            bare.append(over(bench.bare(url, rows, AGENTS, "bash")))
            own.append(over(bench.ours(url, rows, AGENTS, "none")))
            boxed.append(over(bench.ours(url, rows, AGENTS, "bubblewrap")))
            bench.say(
                f"wall / ideal: {own[-1]:.2f}, bubblewrap {boxed[-1]:.2f}, bare {bare[-1]:.2f}"
            )
    ratio = median([a / b for a, b in zip(own, bare, strict=True)])
    with_box = median([a / b for a, b in zip(boxed, bare, strict=True)])
    return Row(
        f"wall / ideal at 200 ms, {AGENTS} agents, {rows} trajectories, start-up included",
        f"{spread(own)} = {ratio:.2f} x (bubblewrap {spread(boxed)} = {with_box:.2f} x)",
        "1.2 x the bare loop",
        ratio <= 1.2,
        f"bare {spread(bare)}; peers 3.8 to 42",
        data={"ours": own, "bubblewrap": boxed, "bare": bare, "ratio": ratio},
    )
