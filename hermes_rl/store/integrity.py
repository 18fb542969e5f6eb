"""Whether the files of a run directory are what was written: `hermes-rl check RUN`.

It reads every byte of what has a digest and every line of the journal, and changes nothing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hermes_rl.errors import StoreError
from hermes_rl.store.commit import part_fault, read_commit
from hermes_rl.store.lines import payloads
from hermes_rl.store.reader import load_run
from hermes_rl.store.recovery import foreign_parts, outcomes, quarantined
from hermes_rl.store.replay import journal_files
from hermes_rl.store.rundir import FOLDERS, RunDir, order_of
from hermes_rl.store.watch import driver_of

Fault = tuple[Path, str]

FOREIGN = "belongs to no commit"

_JOURNAL = ("done", "live", "asked", "dispatch")


def file_faults(run_dir: RunDir) -> Iterator[Fault]:
    """Every file that is not as it was written, and why."""
    for folder in FOLDERS:
        if not (run_dir.path / folder).is_dir():
            yield run_dir.path / folder, "is missing, or no folder"
    yield from _epoch_faults(run_dir)
    for stem in run_dir.commit_stems():
        yield from _commit_faults(run_dir, stem)
    for name in foreign_parts(run_dir):
        yield run_dir.path / name, FOREIGN
    yield from _journal_faults(run_dir)
    for path in quarantined(run_dir):
        yield path, "waits for --repair"
    yield from _document_faults(run_dir)


def _epoch_faults(run_dir: RunDir) -> Iterator[Fault]:
    known, run_ids = run_dir.epochs(), set()
    gone = run_dir.last_epoch() - len(known)
    if gone > 0:
        first = next(n for n in range(1, len(known) + 2) if n not in known)
        others = f", like {gone - 1} others" if gone > 1 else ""
        yield run_dir.path / "epochs" / f"{first}.json", f"is missing{others}"
    for number in known:
        place = run_dir.path / "epochs" / f"{number}.json"
        try:
            epoch = run_dir.epoch(number)
        except StoreError as error:
            yield place, _why(place, error)
            continue
        run_ids.add(epoch.run_id)
        if epoch.epoch != number or len(run_ids) > 1:
            yield place, f"is of another start: epoch {epoch.epoch} of run {epoch.run_id}"


def _commit_faults(run_dir: RunDir, stem: str) -> Iterator[Fault]:
    place = run_dir.path / "commits" / f"{stem}.json"
    try:
        commit = read_commit(run_dir, stem)
        list(outcomes(commit))
    except (StoreError, ValueError, IndexError) as error:
        yield place, _why(place, error)
        return
    if commit.stem != stem:
        yield place, f"is the commit of {commit.stem}"
        return
    for part in commit.parts:
        if fault := part_fault(run_dir, stem, part, content=True):
            yield run_dir.part_path(part.table, stem), fault


def _journal_faults(run_dir: RunDir) -> Iterator[Fault]:
    folder = run_dir.path / "journal"
    for name in run_dir.storage.names("journal"):
        if order_of(f"{name}-0")[0] and not (folder / name).is_dir():
            yield folder / name, "is no folder"
    writers = [run_dir.writer_path(writer) for writer in run_dir.writers()]
    for path in (path for w in writers for kind in _JOURNAL for path in journal_files(w, kind)):
        try:
            for payload in payloads(path):
                msgspec.json.decode(payload)
        except FileNotFoundError:
            continue  # its owner has just published it
        except (OSError, StoreError, msgspec.DecodeError) as error:
            yield path, _why(path, error)


def _document_faults(run_dir: RunDir) -> Iterator[Fault]:
    """manifest.json and stats.json: they follow from the rest, and any start writes them again."""
    found: dict[str, Any] = {}
    for name in ("manifest.json", "stats.json"):
        place = run_dir.path / name
        try:
            content = json.loads(place.read_bytes())
            if not isinstance(content, dict):
                raise ValueError("holds no object")
            found[name] = content
        except FileNotFoundError:
            if name == "manifest.json" and (run_dir.path / "run.yaml").exists():
                yield place, "is missing"
        except (OSError, ValueError, RecursionError) as error:
            yield place, _why(place, error)
    if "manifest.json" in found:
        yield from _manifest_faults(run_dir, found["manifest.json"], found.get("stats.json"))


def _manifest_faults(
    run_dir: RunDir, manifest: dict[str, Any], stats: dict[str, Any] | None
) -> Iterator[Fault]:
    try:
        first = run_dir.epoch(run_dir.epochs()[0])
        wanted = json.loads(json.dumps(load_run(run_dir.path, pending=False).stats))
    except (StoreError, IndexError, ValueError):
        return  # told of the epochs or commits themselves
    if (manifest.get("run_id"), manifest.get("identity")) != (first.run_id, first.identity):
        yield run_dir.path / "manifest.json", "is not of this run"
    # Only a start that came to its end leaves a plan, and then its statistics.
    plan, place = manifest.get("plan"), run_dir.path / "stats.json"
    if not plan or driver_of(run_dir) is not None or run_dir.writers():
        return
    if stats is None:
        if not os.path.lexists(place):
            yield place, "is missing"
        return
    if stats.get("plan") != plan:
        yield place, "has another plan than manifest.json"
    # Units that `--retry-failed` opened again were not given up for that start: `units` differs.
    differ = [
        n for n in wanted if n not in ("plan", "units") and not _same(stats.get(n), wanted[n])
    ]
    if stats.get("units", {}).get("done") != wanted["units"]["done"]:
        differ.append("units")
    if differ:
        yield place, f"is not what the commits add up to ({', '.join(differ)})"


def _same(one: Any, other: Any) -> bool:
    """Equal but for the last digits of sums, which depend on the order of the batches, and for
    figures that only one of two versions counts, while they count nothing."""
    if isinstance(one, dict) and isinstance(other, dict):
        both = one.keys() & other.keys()
        alone = [(one | other)[k] for k in one.keys() ^ other.keys()]
        return not any(alone) and all(_same(one[k], other[k]) for k in both)
    if isinstance(one, float) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6)
    return bool(one == other)


def _why(place: Path, error: Exception) -> str:
    """The first line of an error without the place, which stands before it."""
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    return str(error).partition("\n")[0].removeprefix(f"{place}").lstrip(": ")
