"""What all rows of the bench share: sizes, the fake model server, our runs and the bare loops."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import meter
from meter import Cost

HERE = Path(__file__).parent
TURNS = 6
"""Model calls of a trajectory: five with a command, one with the final text."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    small: int = 200
    large: int = 1600
    repeats: int = 3
    held: tuple[int, int] = (2000, 10_000)
    """Agents at once: with sandboxes, without."""
    resumed: int = 1_000_000
    driven: int = 50_000
    verbs: int = 1000
    stored: int = 3000
    searched: int = 100_000


FULL = Sizes()
QUICK = Sizes(40, 200, 1, (150, 2000), 50_000, 10_000, 200, 200, 20_000)
TINY = Sizes(4, 12, 1, (8, 50), 500, 500, 10, 5, 500)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    measured: str
    bar: str
    met: bool
    scale: str = ""
    notes: tuple[str, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """Sizes and a folder of its own."""

    sizes: Sizes
    folder: Path
    say: Callable[[str], None]

    def dataset(self, rows: int, prompt: str = "Task {}: run the steps.") -> Path:
        """A dataset of so many distinct tasks."""
        path = self.folder / f"{rows}-{len(prompt)}.jsonl"
        if not path.exists():
            lines = (json.dumps({"prompt": prompt.format(n)}) for n in range(rows))
            path.write_text("\n".join(lines) + "\n")
        return path

    @contextmanager
    def server(self, *arguments: str) -> Iterator[str]:
        """The fake model server in a process of its own; yields its base URL."""
        process = subprocess.Popen(
            meter.python("-m", "hermes_rl.testing.fake_server", "--until-eof", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=meter.ROOT,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["base_url"]
        finally:
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def command(
        self,
        url: str,
        rows: int,
        agents: int,
        sandbox: str,
        *more: str,
        dataset: Path | None = None,
    ) -> tuple[list[str], Path]:
        """The command line of one of our runs, and its run directory."""
        out = Path(tempfile.mkdtemp(dir=self.folder)) / "run"
        where = ["--model", "echo", "--base-url", url] if url else ["--model", "noop"]
        allowed = ["--allow-unsandboxed"] if sandbox == "none" else []
        workers = [] if "--workers" in more else ["--workers", "0"]
        line = meter.python(
            *("-m", "batch_runner", dataset or self.dataset(rows), "--out", out),
            *("--toolsets", "terminal", "--concurrency", str(agents), "--sandbox", sandbox),
            *("--json", *where, *allowed, *workers, *more),
        )
        return line, out

    def run(
        self,
        url: str,
        rows: int,
        agents: int,
        sandbox: str,
        *more: str,
        sample_s: float | None = None,
        dataset: Path | None = None,
    ) -> Cost:
        """One run of ours to its end. Raises: RuntimeError unless all units are done."""
        line, out = self.command(url, rows, agents, sandbox, *more, dataset=dataset)
        try:
            cost = meter.measure(line, name="run", sample_s=sample_s)
        finally:
            shutil.rmtree(out.parent, ignore_errors=True)
        report = json.loads(cost.out.strip().splitlines()[-1])
        if report.get("done") != rows:
            raise RuntimeError(f"{report.get('done')} of {rows} units are done: {cost.out[-500:]}")
        return cost

    def bare(self, url: str, rows: int, agents: int, shell: str) -> Cost:
        """One run of the bare loop."""
        line = meter.python(HERE / "bare.py", url, str(rows), str(agents), shell)
        return meter.measure(line, name="bare")


def per_turn_ms(small: Cost, large: Cost, rows: tuple[int, int]) -> float:
    """Marginal CPU of a turn, in milliseconds."""
    return (large.cpu_s - small.cpu_s) / ((rows[1] - rows[0]) * TURNS) * 1e3


def median(values: Sequence[float]) -> float:
    """Of at least one value."""
    return statistics.median(values)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """A median with the range that it comes from."""
    middle = f"{median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})"
