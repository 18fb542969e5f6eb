"""Memory of an agent, and how many fit on one machine."""

from __future__ import annotations

import json

import meter
from setting import HERE, Bench, Row

FEW, MANY = 16, 144
HELD_S = 4.0
"""The model's latency while memory is read."""


def per_agent(bench: Bench) -> Row:
    """PSS of a further agent: with a bubblewrap, with a plain shell, without either."""
    found: dict[str, float] = {}
    notes: list[str] = []
    few, many = (FEW, MANY) if bench.sizes.held[0] > FEW else (2, 8)
    with bench.server("--latency", str(HELD_S)) as url:
        for sandbox in ("bubblewrap", "none"):
            peaks = [_peak(bench, url, n, sandbox) for n in (few, 64, many)]
            found[sandbox] = (peaks[2] - peaks[0]) / (many - few)
            notes.append(f"{sandbox}: {peaks[1]:.0f} MB for the whole tree at 64 agents")
            bench.say(f"memory of an agent, {sandbox}: {found[sandbox]:.2f} MB")
    with bench.server("--hold-at", "1") as url:
        sizes = (bench.sizes.held[1] // 10, bench.sizes.held[1] // 2)
        alone = [_alone(url, n) for n in sizes]
    found["alone"] = (alone[1]["pss_mb"] - alone[0]["pss_mb"]) / (sizes[1] - sizes[0])
    return Row(
        "memory of a further agent (PSS), with a bubblewrap; without a sandbox",
        f"{found['bubblewrap']:.2f} MB; {found['alone']:.3f} MB",
        "3 MB; 0.3 MB",
        found["bubblewrap"] <= 3.0 and found["alone"] < 0.3,
        f"with a plain bash {found['none']:.2f} MB; hermes-agent 83-101, best peers 2-4",
        tuple(notes),
        {**found, "alone": alone},
    )


def at_once(bench: Bench) -> Row:
    """As many agents as asked for, all alive in one moment."""
    boxed, alone = bench.sizes.held
    with bench.server("--latency", str(2 * HELD_S)) as url:
        cost = bench.ours(url, boxed, boxed, "bubblewrap", "--model", "echo-1", sample_s=1.0)
    # A sandbox is a bubblewrap outside, one inside and a bash.
    sandboxes = int(cost.peak.processes - 2) // 3
    bench.say(f"{sandboxes} sandboxes at once")
    with bench.server("--hold-at", "1") as url:
        held = _alone(url, alone)
    return Row(
        "agents at once, with sandboxes; without",
        f"{sandboxes}; {int(held['agents'])}",
        f"{boxed}; {alone}",
        sandboxes >= boxed * 0.98 and held["agents"] >= alone,
        "hermes-agent about 200",
        (
            f"{cost.peak.pss_mb:.0f} MB in {cost.peak.processes} processes; {boxed} runs of two "
            f"turns took {cost.wall_s:.0f} s",
            f"{held['pss_mb']:.0f} MB without",
        ),
        {"sandboxes": sandboxes, "pss_mb": cost.peak.pss_mb, "without": held},
    )


def _peak(bench: Bench, url: str, agents: int, sandbox: str) -> float:
    cost = bench.ours(url, agents, agents, sandbox, "--model", "echo-1", sample_s=0.3)
    return cost.peak.pss_mb


def _alone(url: str, agents: int) -> dict[str, float]:
    line = meter.python(HERE / "held_agents.py", url, str(agents))
    found: dict[str, float] = json.loads(meter.measure(line, name="held").out)
    return found
