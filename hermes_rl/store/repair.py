"""`hermes-rl check RUN --repair`: what recovery refuses to decide alone.

Damaged journal files: their good lines are recovered, the file is kept in `quarantine/saved`. Units
that are finished twice: the later row goes to `failures` with cause `duplicate`.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path

from hermes_rl.store.disk import one_line_errors
from hermes_rl.store.driver import begin_epoch
from hermes_rl.store.fence import GRACE_S
from hermes_rl.store.ledger import Ledger
from hermes_rl.store.recovery import Recovery, Report, finals, quarantined
from hermes_rl.store.rundir import RunDir


@dataclass
class RepairReport:
    """What a repair did."""

    recovery: Report
    saved: list[str] = field(default_factory=list)
    """Damaged files whose good lines were recovered: where they are kept."""
    duplicates: list[str] = field(default_factory=list)
    """Units that were finished twice."""


def repair_run(path: str | Path, *, grace_s: float = GRACE_S) -> RepairReport:
    """Repair a run directory; a new driver can open it afterwards. Blocking. May be repeated.

    Raises: StoreError when the run is in use or newer; DiskFull.
    """
    run_dir = RunDir(path)
    lock = run_dir.lock()
    try:
        with one_line_errors(run_dir.path):
            return _repair(run_dir, grace_s)
    finally:
        lock.release()


def _repair(run_dir: RunDir, grace_s: float) -> RepairReport:
    epoch = begin_epoch(run_dir, None, {"repair": True})
    saved = [_give_back(run_dir, damaged) for damaged in quarantined(run_dir)]
    recovery = Recovery(run_dir, epoch, itertools.count(), sound=False)
    report = recovery.at_start(Ledger(), grace_s=grace_s)
    for unit_id in report.twice:
        _settle(run_dir, unit_id)
    return RepairReport(report, saved, report.twice)


def _give_back(run_dir: RunDir, damaged: Path) -> str:
    """Keep a second name of a quarantined file and put it back where recovery reads it."""
    kept = run_dir.path / "quarantine" / "saved" / f"{damaged.parent.name}.{damaged.name}"
    kept.parent.mkdir(exist_ok=True)
    if not kept.exists():
        os.link(damaged, kept)
        run_dir.storage.sync_folder(kept.parent)
    folder = run_dir.writer_path(damaged.parent.name)
    folder.mkdir(exist_ok=True)
    os.rename(damaged, folder / damaged.name)
    return str(kept)


def _settle(run_dir: RunDir, unit_id: str) -> None:
    """Keep the earliest of a unit's final rows."""
    from hermes_rl.store.duplicates import move_to_failures

    for stem, key in finals(run_dir, unit_id)[1:]:
        move_to_failures(run_dir, stem, key)
