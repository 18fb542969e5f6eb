"""What is measured: one function per row, by its name on the command line."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import meter
import pyarrow.parquet as pq
from setting import HERE, TURNS, Bench, Cost, Row, median, per_turn_ms, spread

AGENTS = 64
LATENCY_S = 0.2
HELD_S = 4.0
"""The model's latency while memory is read."""
BALLAST_MB = 400
VERB_RATIOS = {"start": 0.7, "builtin": 1.5, "external": 1.3}
"""Of the same without a harness (see `bare_verbs`), measured in turn."""
FORK_BAR_MS = 12.5
LEASES = ("start", "fork")
"""Verbs that lease a sandbox each time."""
TEXT_BYTES = 50_000
"""Of a prompt: its row holds it twice, as `task_prompt` and in `messages`."""
REWARD_S = 0.1
"""Of a processor, for each reward."""
LAG_FEW = 50
"""Agents of the run whose rewards are on the loop, which waits while they all compute."""


def run_program(name: str, *arguments: object) -> Any:
    """Run a program of this folder and return the JSON that it prints last."""
    line = meter.python(HERE / name, *map(str, arguments))
    return json.loads(meter.measure(line, name=Path(name).stem).out.strip().splitlines()[-1])


# CPU per turn, and time at a slow model


def layers(bench: Bench) -> Row:
    """What hints, guardrails, hooks and the like add to a turn of the agent alone."""
    found = run_program("layers.py", max(1, bench.sizes.verbs // 20))
    off, added = found["off"], {name: cost for name, cost in found.items() if name != "off"}
    default = added["all switches of datagen"]
    return Row(
        "what layers of the agent add to a turn, CPU without model and sandbox",
        "; ".join(f"{name} {cost:.0f}" for name, cost in added.items()) + " us",
        "all that is on by default: 100 us",
        default <= 100,
        f"the turn with all of them off {off:.0f} us",
        data=found,
    )


def turn_none(bench: Bench) -> Row:
    """Sandbox `none` against a bare loop with a bash."""
    figures, data = _per_turn(bench, "none", "bash")
    return Row(
        "CPU per agent turn, sandbox none, 64 agents",
        f"{spread(data['ours_ms'])} ms = {data['ratio']:.1f} x",
        "3 x the bare loop",
        data["ratio"] <= 3.0,
        f"bare {figures} ms; atropos 3.5; mini-swe-agent 8; inspect_ai 14; hermes-agent 54",
        data=data,
    )


def turn_bubblewrap(bench: Bench) -> Row:
    """A bubblewrap per trajectory against a bare loop that starts the same."""
    figures, data = _per_turn(bench, "bubblewrap", "bwrap")
    return Row(
        "the same with a bubblewrap sandbox per trajectory",
        f"{spread(data['ours_ms'])} ms = {data['ratio']:.1f} x",
        "1.2 ms and 2 x the bare loop with the same bwrap",
        data["ratio"] <= 2.0 and median(data["ours_ms"]) <= 1.2,
        f"bare with bwrap {figures} ms",
        data=data,
    )


def _per_turn(bench: Bench, sandbox: str, shell: str) -> tuple[str, dict[str, Any]]:
    """Marginal CPU per turn, of the harness and the bare loop's, measured in turn.

    Returns: the bare loop's figures, and all data; `whole_s` is the CPU of our larger run as a
        whole, `ratio` has no sense where the runs are so small that the bare figure is noise.
    """
    rows = (bench.sizes.small, bench.sizes.large)
    data: dict[str, Any] = {"ours_ms": [], "bare_ms": [], "whole_s": []}
    with bench.server() as url:
        for _ in range(bench.sizes.repeats):
            loop = [bench.bare(url, n, AGENTS, shell) for n in rows]
            harness = [bench.run(url, n, AGENTS, sandbox) for n in rows]
            data["ours_ms"].append(per_turn_ms(*harness, rows))
            data["bare_ms"].append(per_turn_ms(*loop, rows))
            data["whole_s"].append(harness[1].cpu_s)
            bench.say(
                f"sandbox {sandbox}: {data['ours_ms'][-1]:.2f} ms a turn, "
                f"bare {data['bare_ms'][-1]:.2f}"
            )
    pairs = zip(data["ours_ms"], data["bare_ms"], strict=True)
    data["ratio"] = median([a / b if b else math.inf for a, b in pairs])
    return spread(data["bare_ms"]), data


def turn_agents(bench: Bench) -> Row:
    """256 agents against 16."""
    rows = (max(bench.sizes.small, min(256, bench.sizes.large // 2)), bench.sizes.large)
    few: list[float] = []
    many: list[float] = []
    with bench.server() as url:
        for _ in range(bench.sizes.repeats):
            for agents, found in ((16, few), (256, many)):
                costs = [bench.run(url, n, agents, "bubblewrap") for n in rows]
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
    found: dict[str, list[float]] = {"bare": [], "ours": [], "bubblewrap": []}
    with bench.server("--latency", str(LATENCY_S)) as url:
        for _ in range(bench.sizes.repeats):
            found["bare"].append(bench.bare(url, rows, AGENTS, "bash").wall_s / ideal)
            found["ours"].append(bench.run(url, rows, AGENTS, "none").wall_s / ideal)
            found["bubblewrap"].append(bench.run(url, rows, AGENTS, "bubblewrap").wall_s / ideal)
            bench.say(f"wall / ideal: { ({k: round(v[-1], 2) for k, v in found.items()}) }")
    ratio, boxed = (
        median([a / b for a, b in zip(found[name], found["bare"], strict=True)])
        for name in ("ours", "bubblewrap")
    )
    return Row(
        f"wall / ideal at 200 ms, {AGENTS} agents, {rows} trajectories, start-up included",
        f"{spread(found['ours'])} = {ratio:.2f} x "
        f"(bubblewrap {spread(found['bubblewrap'])} = {boxed:.2f} x)",
        "1.2 x the bare loop",
        ratio <= 1.2,
        f"bare {spread(found['bare'])}; peers 3.8 to 42",
        data={**found, "ratio": ratio},
    )


def calls(bench: Bench) -> Row:
    """CPU of a model call by dialect: our transport against a bare aiohttp call."""
    with bench.server() as url:
        found = run_program("calls.py", url, max(16, bench.sizes.large // 8), 3)
    bare = found.pop("bare")
    worst = max(ms for name, ms in found.items() if " http" in name and "stream" not in name)
    return Row(
        "CPU per model call, client alone, worst dialect by `http`, not streamed",
        f"{worst:.2f} ms = {worst / bare:.1f} x",
        "3 x a bare aiohttp call",
        worst <= 3 * bare,
        f"bare {bare:.2f} ms",
        ("; ".join(f"{name} {ms:.2f} ms" for name, ms in found.items()),),
        {"bare": bare, **found},
    )


# Memory


def memory(bench: Bench) -> Row:
    """PSS of a further agent: with a bubblewrap, with a plain shell, without either."""
    found: dict[str, Any] = {}
    notes: list[str] = []
    few, many = (16, 144) if bench.sizes.held[0] > 16 else (2, 8)
    with bench.server("--latency", str(HELD_S)) as url:
        for sandbox in ("bubblewrap", "none"):
            peaks = [
                bench.run(url, n, n, sandbox, "--model", "echo-1", sample_s=0.3).peak.pss_mb
                for n in (few, 64, many)
            ]
            found[sandbox] = (peaks[2] - peaks[0]) / (many - few)
            notes.append(f"{sandbox}: {peaks[1]:.0f} MB for the whole tree at 64 agents")
            bench.say(f"memory of an agent, {sandbox}: {found[sandbox]:.2f} MB")
    sizes = (bench.sizes.held[1] // 10, bench.sizes.held[1] // 2)
    with bench.server("--hold-at", "1") as url:
        alone = [run_program("held_agents.py", url, n) for n in sizes]
    each = (alone[1]["pss_mb"] - alone[0]["pss_mb"]) / (sizes[1] - sizes[0])
    return Row(
        "memory of a further agent (PSS), with a bubblewrap; without a sandbox",
        f"{found['bubblewrap']:.2f} MB; {each:.3f} MB",
        "3 MB; 0.3 MB",
        found["bubblewrap"] <= 3.0 and each < 0.3,
        f"with a plain bash {found['none']:.2f} MB; hermes-agent 83-101, best peers 2-4",
        tuple(notes),
        {**found, "alone": alone},
    )


def run_concurrently(bench: Bench) -> Row:
    """As many agents as asked for, all alive in one moment."""
    boxed, alone = bench.sizes.held
    with bench.server("--latency", str(2 * HELD_S)) as url:
        cost = bench.run(url, boxed, boxed, "bubblewrap", "--model", "echo-1", sample_s=1.0)
    # A sandbox is a bash that waits, and one that takes commands.
    sandboxes = int(cost.peak.processes - 3) // 2
    bench.say(f"{sandboxes} sandboxes at once")
    with bench.server("--hold-at", "1") as url:
        held = run_program("held_agents.py", url, alone)
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


# Starting: sandboxes, runs, commands


def sandbox_verbs(bench: Bench) -> Row:
    """Start and stop, one builtin, one external command in a worker of 400 MB, each beside the
    same without a harness; a fork of 20 MB."""
    found: dict[str, list[float]] = {}
    for verb in (*VERB_RATIOS, "fork"):
        few = max(2, bench.sizes.verbs // (100 if verb in LEASES else 10))
        many = few + bench.sizes.verbs // (5 if verb in LEASES else 1)
        ways = {verb: (HERE / "sandbox_verbs.py", "bubblewrap", verb)}
        if verb in VERB_RATIOS:
            ways[f"bare {verb}"] = (HERE / "bare_verbs.py", verb)
        for _ in range(bench.sizes.repeats):
            for name, line in ways.items():
                lines = [meter.python(*line, str(n), str(BALLAST_MB)) for n in (few, many)]
                costs = [meter.measure(line, name="verb").cpu_s for line in lines]
                found.setdefault(name, []).append((costs[1] - costs[0]) / (many - few) * 1e3)
        bench.say(", ".join(f"sandbox {name}: {found[name][-1]:.2f} ms" for name in ways))
    ratios = {
        verb: median([a / b for a, b in zip(found[verb], found[f"bare {verb}"], strict=True)])
        for verb in VERB_RATIOS
    }
    met = all(ratios[verb] <= bar for verb, bar in VERB_RATIOS.items())
    bare = "; ".join(spread(found[f"bare {verb}"]) for verb in VERB_RATIOS)
    return Row(
        "sandbox start and stop at 400 MB; builtin; external command; fork of 20 MB",
        "; ".join(f"{spread(found[verb])} ms = {ratios[verb]:.2f} x" for verb in VERB_RATIOS)
        + f"; {spread(found['fork'])} ms",
        "; ".join(f"{bar} x" for bar in VERB_RATIOS.values()) + f"; {FORK_BAR_MS} ms of CPU",
        met and median(found["fork"]) <= FORK_BAR_MS,
        f"`bwrap` with the same options and `true`, a bash that reads, forks, runs and waits: "
        f"{bare} ms; docker run 250+ ms wall; SWE-ReX 120 ms a command",
        data=found,
    )


def containers(bench: Bench) -> Row:
    """Containers of docker and podman beside the engines' own commands."""
    starts, commands = max(2, bench.sizes.verbs // 50), max(20, bench.sizes.verbs)
    data = {
        name: {verb: [s * 1e3 for s in seconds] for verb, seconds in found.items()}
        for name in ("docker", "podman")
        for found in [run_program("container_verbs.py", name, starts, commands)]
    }
    return Row(
        "containers: start; command; grading",
        "; ".join(
            f"{name} {' / '.join(f'{median(verbs[v]):.1f}' for v in ('start', 'builtin', 'grade'))}"
            for name, verbs in data.items()
        )
        + " ms wall",
        "a command below a tenth of `exec`",
        all(median(verbs["builtin"]) <= median(verbs["exec"]) / 10 for verbs in data.values()),
        "; ".join(
            f"{name} run {median(verbs['run']):.0f}, exec {median(verbs['exec']):.0f} ms"
            for name, verbs in data.items()
        ),
        data=data,
    )


def remote(bench: Bench) -> Row:
    """Sandboxes over ssh to this machine, and in the fake of modal, beside ssh's own commands."""
    starts, commands = max(2, bench.sizes.verbs // 50), max(20, bench.sizes.verbs // 5)
    data = {
        name: {verb: [s * 1e3 for s in seconds] for verb, seconds in found.items()}
        for name in ("ssh", "modal")
        for found in [run_program("remote_verbs.py", name, starts, commands)]
    }
    ssh = {verb: median(times) for verb, times in data["ssh"].items()}
    return Row(
        "sandboxes elsewhere: start; command; grading",
        "; ".join(
            f"{name} {' / '.join(f'{median(verbs[v]):.1f}' for v in ('start', 'builtin', 'grade'))}"
            for name, verbs in data.items()
        )
        + " ms wall",
        "a command over ssh below that of asyncssh",
        ssh["builtin"] <= ssh["exec"],
        f"`ssh HOST true` {ssh['ssh']:.0f}, asyncssh `run` {ssh['exec']:.1f} ms",
        data=data,
    )


def start_up(bench: Bench) -> Row:
    """A run of one trajectory, without and with Ray, and Ray alone."""
    alone: list[float] = []
    with_ray: list[float] = []
    bare: list[float] = []
    with bench.server() as url:
        for _ in range(bench.sizes.repeats):
            alone.append(bench.run(url, 1, 1, "none").cpu_s)
            bare.append(meter.measure(meter.python(HERE / "bare_ray.py"), name="ray").cpu_s)
            with_ray.append(bench.run(url, 2, 2, "none", "--workers", "2").cpu_s)
            bench.say(f"start: {alone[-1]:.2f} s, Ray {with_ray[-1]:.1f} s, bare {bare[-1]:.1f} s")
    over = median([a - b for a, b in zip(with_ray, bare, strict=True)])
    slow = "rfc3987-syntax is installed, not by our lock: each process of Ray loads it, for 1 s"
    return Row(
        "start-up CPU without Ray; with Ray",
        f"{spread(alone)} s; {spread(with_ray, 1)} s = bare + {over:.1f} s",
        "1 s; bare ray.init and two actors + 2 s",
        median(alone) <= 1.0 and over <= 2.0,
        f"bare {spread(bare, 1)} s; inspect_ai 6; hermes-agent 41",
        () if find_spec("rfc3987_syntax") is None else (slow,),
        data={"without_s": alone, "with_ray_s": with_ray, "bare_ray_s": bare},
    )


def first_request(bench: Bench) -> Row:
    """From the command line to the first request of a run of 20 tasks by default settings."""
    waits: list[float] = []
    with bench.server() as url:
        for _ in range(bench.sizes.repeats):
            out = Path(tempfile.mkdtemp(dir=bench.folder)) / "run"
            how = [bench.dataset(20), "--out", out, "--model", "echo", "--base-url", url]
            began = time.time()
            meter.measure(meter.python("-m", "batch_runner", *how), name="run")
            calls = pq.read_table(out / "trajectories")["calls"].to_pylist()
            first = min(call["started_at"] for row in calls for call in row)
            waits.append(first.timestamp() - began)
            bench.say(f"first request: {waits[-1]:.2f} s")
    return Row(
        "first request of `run` on 20 tasks by default settings",
        f"{spread(waits)} s wall",
        "1.5 s",
        median(waits) <= 1.5,
        data={"wall_s": waits},
    )


def commands(bench: Bench) -> Row:
    """`hermes-rl --help` and `import hermes_rl`."""
    lines = {
        "help": [str(Path(meter.python()[0]).with_name("hermes-rl")), "--help"],
        "import": meter.python("-c", "import hermes_rl"),
        "python": meter.python("-c", "pass"),
    }
    found = {
        name: [meter.measure(line, name="start").cpu_s for _ in range(3 * bench.sizes.repeats)]
        for name, line in lines.items()
    }
    return Row(
        "`hermes-rl --help`; `import hermes_rl`, Python's own start included",
        f"{spread(found['help'])} s; {spread(found['import'], 3)} s",
        "0.3 s; 0.1 s CPU",
        median(found["help"]) < 0.3 and median(found["import"]) < 0.1,
        f"python alone {spread(found['python'], 3)} s",
        data=found,
    )


# The driver, Ray and the store


def per_trajectory(bench: Bench) -> Row:
    """Driver and Ray for a trajectory of 100 KB, and its Parquet."""
    few, many = max(1, bench.sizes.stored // 6), bench.sizes.stored
    text = "the quick brown fox jumps over a lazy dog and runs " * 1200
    path = bench.dataset(many, "Task {}: " + text[:TEXT_BYTES])
    first = path.with_name("few.jsonl")
    with path.open() as lines, first.open("w") as out:
        out.writelines(line for _, line in zip(range(few), lines, strict=False))
    found = []
    for rows, dataset in ((few, first), (many, path)):
        cost = bench.run(*("", rows, 16, "none", "--workers", "2"), sample_s=0.2, dataset=dataset)
        found.append(_without_workers(cost))
    driver_ms = (found[1] - found[0]) / (many - few) * 1e3
    store = run_program("parquet_cost.py", many, 2 * TEXT_BYTES)
    whole = driver_ms + store["parquet_ms"]
    bench.say(f"driver and Ray {driver_ms:.2f} ms, Parquet {store['parquet_ms']:.2f} ms")
    return Row(
        "driver and Ray per trajectory of 100 KB, Parquet included",
        f"{whole:.1f} ms = {driver_ms:.1f} + {store['parquet_ms']:.1f}",
        "3 ms CPU",
        whole <= 3.0,
        f"journal line {store['journal_ms']:.1f} ms, in the worker",
        data={"driver_and_ray_ms": driver_ms, **store},
    )


def _without_workers(cost: Cost) -> float:
    """CPU of all processes that make no rollouts."""
    tools = ("bash", "bwrap", "true", "sh")
    return sum(
        seconds
        for (_, name), seconds in cost.cpu_by_process.items()
        if not name.startswith("ray::Worker") and name not in tools
    )


def resume(bench: Bench) -> Row:
    """Resuming a run with very many finished units, from the command to the report."""
    found = run_program("resume.py", bench.sizes.resumed)
    return Row(
        f"resume of a run with {bench.sizes.resumed:,} finished units",
        f"{found['resume_s']:.1f} s, {found['peak_rss_mb']:.0f} MB",
        "4 s, 300 MB",
        found["resume_s"] <= 4.0 and found["peak_rss_mb"] < 300.0,
        f"{found['cpu_s']:.1f} s CPU; {found['dataset_mb']} MB of dataset read",
        data=found,
    )


def driver_memory(bench: Bench) -> Row:
    """Memory of the driver over many units."""
    found = run_program("driver_memory.py", bench.sizes.driven, 2 * bench.sizes.driven // 5)
    return Row(
        f"driver memory over {bench.sizes.driven:,} units",
        f"{found['mb_per_1000_units']:.2f} MB per 1,000",
        "1 MB per 1,000",
        found["mb_per_1000_units"] < 1.0,
        f"{found['driver_cpu_ms_per_unit']:.2f} ms CPU per unit",
        data=found,
    )


# Environments


def reward_lag(bench: Bench) -> Row:
    """The loop's lag with 500 rollouts whose rewards compute."""
    agents = min(500, max(10, bench.sizes.small * 5 // 2))
    found: dict[str, Any] = {}
    with bench.server("--latency", "0.2") as url:
        for where, count in (("pool", agents), ("here", min(agents, LAG_FEW))):
            out = Path(tempfile.mkdtemp(dir=bench.folder)) / "run"
            found[where] = run_program("rl_lag.py", url, count, REWARD_S, where, out)
            if found[where]["done"] != count:
                raise RuntimeError(f"{found[where]['done']} of {count} units are done")
    pool, here = found["pool"], found["here"]
    bench.say(f"loop lag p99: {pool['p99_ms']:.0f} ms, rewards on the loop {here['p99_ms']:.0f}")
    return Row(
        f"event loop lag (p99), {agents} agents, rewards of {REWARD_S} s of CPU in ctx.cpu",
        f"{pool['p99_ms']:.0f} ms (median {pool['median_ms']:.1f}, most {pool['most_ms']:.0f})",
        "250 ms",
        pool["p99_ms"] < 250,
        f"{min(agents, LAG_FEW)} agents with the same rewards on the loop: {here['p99_ms']:.0f} ms",
        data=found,
    )


def session_search(bench: Bench) -> Row:
    """Searches in a store of sessions, the slowest of several queries."""
    found = run_program("session_search.py", bench.sizes.searched)
    slowest = max(found["queries_ms"], key=found["queries_ms"].get)
    return Row(
        f"search in {bench.sizes.searched:,} messages of sessions, the slowest of "
        f"{len(found['queries_ms'])} queries",
        f"{found['worst_ms']:.1f} ms ({slowest})",
        "100 ms",
        found["worst_ms"] < 100,
        f"a turn is stored in {found['turn_ms']:.1f} ms, {found['bytes_per_message']:.0f} bytes "
        "per message with both indexes",
        data=found,
    )


ROWS: dict[str, Callable[[Bench], Row]] = {
    "turn-none": turn_none,
    "turn-bubblewrap": turn_bubblewrap,
    "turn-256": turn_agents,
    "layers": layers,
    "wall": wall,
    "calls": calls,
    "memory": memory,
    "at-once": run_concurrently,
    "sandbox": sandbox_verbs,
    "containers": containers,
    "remote": remote,
    "start": start_up,
    "first": first_request,
    "driver": per_trajectory,
    "resume": resume,
    "driver-memory": driver_memory,
    "reward-lag": reward_lag,
    "session-search": session_search,
    "commands": commands,
}
