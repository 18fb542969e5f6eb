"""Playing a dataset before a token is spent: its oracles, doing nothing, and the cheats."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batch_runner import run_batch
from batch_runner.progress import default_progress
from hermes_rl.config import parse_config
from hermes_rl.errors import ExitCode, UserError
from hermes_rl.sources import mapped_rows
from hermes_rl.store.reader import load_run
from hermes_rl.testing.cheats import BUNDLES, CHEATS, bundle


@dataclass(frozen=True)
class Play:
    """One way of playing every task, and the reward that each must then have."""

    name: str
    model: str
    wanted: float
    scripts: Mapping[str, str] = field(default_factory=dict)
    """Played in place of the task's oracle, each of them on every task."""


def plays() -> list[Play]:
    """Oracle 1, no-op 0, cheats 0."""
    bundles = {name: bundle(name) for name in BUNDLES}
    cheats = Play(f"{len(CHEATS)} cheats", "oracle", 0.0, bundles)
    return [Play("oracle", "oracle", 1.0), Play("no-op", "noop", 0.0), cheats]


@dataclass(frozen=True)
class Played:
    """What one way of playing gave."""

    play: Play
    tasks: int
    wrong: list[str]
    """`task: what it should be and what it was`."""


def play_all(dataset: str, columns: dict[str, str], limit: int | None) -> Iterator[Played]:
    """Play every verified task in every way, through the real pipeline. Progress goes to stderr.

    Raises: SandboxStartError, UserError.
    """
    rows = [
        r for r in mapped_rows(dataset, columns=columns, limit=limit) if r.get("verify") is not None
    ]
    with tempfile.TemporaryDirectory(prefix="hermes-rl-check-") as scratch:
        for number, play in enumerate(plays()):
            out = Path(scratch) / str(number)
            chosen = [r for r in rows if play.name != "oracle" or r.get("oracle")]
            yield _play(chosen, play, out)


def _play(rows: list[dict[str, Any]], play: Play, out: Path) -> Played:
    if not rows:
        return Played(play, 0, [])
    wrong = _wrong(_with_scripts(rows, play.scripts), play, out)
    if play.scripts and wrong:
        # Now each cheat of its own, on the tasks that one of the bundles got the better of.
        suspects = [r for r in rows if any(w.startswith(f"{r.get('id')} (") for w in wrong)]
        alone = _with_scripts(suspects, CHEATS) if suspects else []
        wrong = (_wrong(alone, play, out / "alone") if alone else []) or wrong
    if play.name == "oracle" and wrong:
        wrong = _explain(rows, wrong, out)
    return Played(play, len(rows), wrong)


def _with_scripts(rows: list[dict[str, Any]], scripts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every row with every script as its oracle, which its id then names; without scripts the
    rows."""
    if not scripts:
        return rows
    return [
        {**row, "id": f"{row.get('id', number)} ({name})", "oracle": script}
        for number, row in enumerate(rows)
        for name, script in scripts.items()
    ]


def _wrong(rows: list[dict[str, Any]], play: Play, out: Path) -> list[str]:
    rewards = _run(rows, play, out)
    return [
        f"{task}: {why or f'reward {reward}, wanted {play.wanted}'}"
        for task, (reward, why) in rewards.items()
        if reward != play.wanted
    ]


def _run(
    rows: list[dict[str, Any]], play: Play, out: Path
) -> dict[str, tuple[float | None, str | None]]:
    """Task -> (reward, error), over one run of the batch runner.

    Raises: KeyboardInterrupt, UserError: the run stopped early, so tasks that nobody played would
    pass for right.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "tasks.jsonl"
    with path.open("w") as file:
        for row in rows:
            own = {k: v for k, v in row.items() if k not in ("repeats", "toolsets", "distribution")}
            file.write(json.dumps(own) + "\n")
    config = parse_config(
        {
            "dataset": {"path": str(path)},
            "model": {"name": play.model},
            "agent": {"toolsets": ["terminal"]},
            "run": {"out": str(out / "run"), "workers": 0, "concurrency": 8, "max_attempts": 1},
        }
    )
    progress = default_progress()
    progress.note(f"{play.name}: {len(rows):,} rollouts")
    report = run_batch(config, progress=progress)
    if report.exit_code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if report.stopped is not None:
        raise UserError(f"{play.name}: stopped before all tasks were played: {report.stopped}")
    run = load_run(out / "run")
    rewards: dict[str, tuple[float | None, str | None]] = {}
    for table in ("failures", "trajectories"):
        for row in run.arrow(table).to_pylist():
            rewards[row["task_id"]] = (row["reward"], row["error"])
    return rewards


def _explain(rows: list[dict[str, Any]], wrong: list[str], out: Path) -> list[str]:
    """Say of which failing oracles the verifier holds in the agent's own sandbox."""
    failing = {line.partition(":")[0] for line in wrong}
    suspects = [r for r in rows if str(r.get("id")) in failing and _plain_script(r)]
    if not suspects:
        return wrong
    replayed = [
        {**r, "oracle": _in_session(r), "verify": 'test -e "$WORKSPACE/.passed"'} for r in suspects
    ]
    rewards = _run(
        replayed, Play("oracle, verified in the agent's sandbox", "oracle", 1.0), out / "again"
    )
    hint = " (it passes in the agent's sandbox: /tmp and services do not reach the grading box)"
    return [
        line + hint if rewards.get(line.partition(":")[0], (0.0, None))[0] == 1.0 else line
        for line in wrong
    ]


def _plain_script(row: dict[str, Any]) -> bool:
    return isinstance(row["verify"], str)


def _in_session(row: dict[str, Any]) -> str:
    """The oracle, then the verifier where the oracle ran; home is the workspace there."""
    quoted = "'" + row["verify"].replace("'", "'\\''") + "'"
    verified = f"(cd / && bash -c {quoted})"
    return f'export WORKSPACE=~\n{row["oracle"]}\n{verified} && touch "$WORKSPACE/.passed"'
