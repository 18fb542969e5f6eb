"""What it costs to start: sandboxes, runs, commands."""

from __future__ import annotations

import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import meter
import pyarrow.parquet as pq
from setting import HERE, Bench, Row, median, spread

BALLAST_MB = 400
BARS_MS = {"start": 3.0, "builtin": 0.4, "external": 1.0}


def sandbox_verbs(bench: Bench) -> Row:
    """Start and stop, one builtin, one external command, in a worker of 400 MB."""
    found: dict[str, list[float]] = {}
    for verb in BARS_MS:
        few = max(2, bench.sizes.verbs // (100 if verb == "start" else 10))
        many = few + bench.sizes.verbs // (5 if verb == "start" else 1)
        for _ in range(bench.sizes.repeats):
            costs = [_verb("bubblewrap", verb, n) for n in (few, many)]
            found.setdefault(verb, []).append((costs[1] - costs[0]) / (many - few) * 1e3)
        bench.say(f"sandbox {verb}: {found[verb][-1]:.2f} ms")
    middle = {verb: median(values) for verb, values in found.items()}
    return Row(
        "sandbox start and stop at 400 MB; builtin; external command",
        "; ".join(f"{spread(found[verb])} ms" for verb in BARS_MS),
        "3 ms; 0.4 ms; 1 ms of CPU",
        all(middle[verb] <= bar for verb, bar in BARS_MS.items()),
        "docker run 250+ ms wall; SWE-ReX 120 ms a command",
        data=found,
    )


def _verb(backend: str, verb: str, count: int) -> float:
    line = meter.python(HERE / "sandbox_verbs.py", backend, verb, str(count), str(BALLAST_MB))
    return meter.measure(line, name="verb").cpu_s


def start_up(bench: Bench) -> Row:
    """A run of one trajectory, without and with Ray, and Ray alone."""
    alone: list[float] = []
    with_ray: list[float] = []
    bare: list[float] = []
    with bench.server() as url:
        for _ in range(bench.sizes.repeats):
            alone.append(bench.ours(url, 1, 1, "none").cpu_s)
            bare.append(meter.measure(meter.python(HERE / "bare_ray.py"), name="ray").cpu_s)
            with_ray.append(bench.ours(url, 2, 2, "none", "--workers", "2").cpu_s)
            bench.say(f"start: {alone[-1]:.2f} s, Ray {with_ray[-1]:.1f} s, bare {bare[-1]:.1f} s")
    over = median([a - b for a, b in zip(with_ray, bare, strict=True)])
    return Row(
        "start-up CPU without Ray; with Ray",
        f"{spread(alone)} s; {spread(with_ray, 1)} s = bare + {over:.1f} s",
        "1 s; bare ray.init and two actors + 2 s",
        median(alone) <= 1.0 and over <= 2.0,
        f"bare {spread(bare, 1)} s; inspect_ai 6; hermes-agent 41",
        _notes(),
        data={"without_s": alone, "with_ray_s": with_ray, "bare_ray_s": bare},
    )


def first_request(bench: Bench) -> Row:
    """From the command line to the first request of a run of 20 tasks by default settings."""
    waits: list[float] = []
    with bench.server() as url:
        for _ in range(bench.sizes.repeats):
            out = Path(tempfile.mkdtemp(dir=bench.folder)) / "run"
            words = [bench.dataset(20), "--out", out, "--model", "echo", "--base-url", url]
            began = time.time()
            meter.measure(meter.python("-m", "batch_runner", *words), name="ours")
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


def _notes() -> tuple[str, ...]:
    if find_spec("rfc3987_syntax") is None:
        return ()
    slow = "rfc3987-syntax is installed, not by our lock: each process of Ray loads it, for 1 s"
    return (slow,)


def commands(bench: Bench) -> Row:
    """`hermes-rl --help` and `import hermes_rl`."""
    door = Path(meter.python()[0]).with_name("hermes-rl")
    empty = meter.python("-c", "pass")
    lines = {
        "help": [str(door), "--help"],
        "import": meter.python("-c", "import hermes_rl"),
        "python": empty,
    }
    times = bench.sizes.repeats * 3
    found = {
        name: [meter.measure(line, name="door").cpu_s for _ in range(times)]
        for name, line in lines.items()
    }
    door_s, loaded_s = median(found["help"]), median(found["import"])
    return Row(
        "`hermes-rl --help`; `import hermes_rl`, Python's own start included",
        f"{spread(found['help'])} s; {spread(found['import'], 3)} s",
        "0.3 s; 0.1 s CPU",
        door_s < 0.3 and loaded_s < 0.1,
        f"python alone {spread(found['python'], 3)} s",
        data=found,
    )
