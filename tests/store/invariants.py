"""Invariants of a run directory at every moment, and checks of a finished run."""

from __future__ import annotations

import threading
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import scripted_rows
from scripted_driver import Plan

from hermes_rl.store import (
    FOREIGN,
    TABLES,
    Ledger,
    RunDir,
    file_faults,
    load_run,
    open_checkpoint,
    read_commits,
    read_payloads,
    schema_of,
)

Key = tuple[str, int, int]


def glob_units(path: Path) -> Counter[str]:
    """The units that a plain glob of `trajectories` reads."""
    parts = sorted(path.glob("trajectories/*.parquet"))
    return Counter(unit for part in parts for unit in _units(part, _version(part)))


def _version(part: Path) -> tuple[int, int, int]:
    """A file that has the same is the same: it need not be read again."""
    found = part.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


@lru_cache(10_000)
def _units(part: Path, version: object) -> list[str]:
    units: list[str] = read_part(part, ["unit_id"])[0].to_pylist()
    return units


@lru_cache(10_000)
def _check_part(part: Path, version: object) -> None:
    """It can be read as a whole, and is of its table."""
    content = read_part(part)
    assert content.schema.equals(schema_of(part.parent.name), check_metadata=True)
    assert content.num_rows > 0


def read_part(path: Path, columns: list[str] | None = None) -> pa.Table:
    """A Parquet file. In this thread and without a dataset, which costs a multiple."""
    with pq.ParquetFile(path) as file:
        return file.read(columns, use_threads=False)


class GlobReader(threading.Thread):
    """Reads `trajectories` by a glob all the time during its context: no row is ever there twice,
    or missing after it was there."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self._path = path
        self._ended = threading.Event()
        self.reads = 0
        self.wrong: list[object] = []

    def run(self) -> None:
        seen: set[str] = set()
        ended = False
        while not ended:
            ended = self._ended.wait(0.005)  # then it reads once more: a busy thread starts late
            try:
                found = glob_units(self._path)
            except FileNotFoundError:
                continue  # listed before a switch: an error that names the file, never other rows
            self.reads += 1
            twice = {unit for unit, n in found.items() if n > 1}
            if twice or not seen <= found.keys():
                self.wrong.append((twice, seen - found.keys()))
            seen = {*found}

    def __enter__(self) -> GlobReader:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()
        assert self.wrong == []


def check_invariants(path: Path) -> None:
    """The invariants of the commit protocol, and: every Parquet file is whole."""
    run_dir = RunDir(path)
    if not (path / "commits").is_dir():
        return
    ids: Counter[str] = Counter()
    for table in TABLES:
        for part in path.glob(f"{table}/*"):
            _check_part(part, _version(part))
            if table == "trajectories":
                ids.update(_units(part, _version(part)))
    assert set(ids.values()) <= {1}, "a glob reader sees a unit twice"

    committed = committed_keys(run_dir)
    waiting = waiting_keys(run_dir)
    recorded = Counter(k for keys in (*committed.values(), *waiting.values()) for k in keys)
    twice = {k for k, n in recorded.items() if n > 1}
    # Between steps 8 and 9 a batch is in both places, with one stem.
    both = {k for stem in committed.keys() & waiting.keys() for k in committed[stem]}
    assert twice <= both, "I1: an attempt has two records"
    _, receipts = read_log(path)
    missing = set(receipts) - set(recorded)
    assert not missing, "I2: a receipt without a durable record"
    check_checkpoint(run_dir)
    faults = [place for place, fault in file_faults(run_dir) if fault != FOREIGN]
    assert not [p for p in faults if p.suffix == ".parquet"], "I3: a commit without its parts"


def check_checkpoint(run_dir: RunDir) -> int:
    """A checkpoint agrees with its commits. Returns how many units it has."""
    base = open_checkpoint(run_dir)
    if base is None:
        return 0
    whole, short = Ledger(), Ledger(base=base)
    whole.load(read_commits(run_dir, lambda stem: not base.covers(stem)))
    assert dict(short.units()) == dict(whole.units())
    assert [short.done, short.given_up, len(short)] == [whole.done, whole.given_up, len(whole)]
    assert short.summary.counts == whole.summary.counts
    return len(base)


def committed_keys(run_dir: RunDir) -> dict[str, list[Key]]:
    return {
        commit.stem: [(o.key.unit_id, o.key.epoch, o.key.attempt) for o in commit.keys.outcomes()]
        for commit in read_commits(run_dir)
    }


def waiting_keys(run_dir: RunDir) -> dict[str, list[Key]]:
    found = {}
    for stem, done in run_dir.journals("done"):
        keys = [msgspec.json.decode(line)["key"] for line in read_payloads(done)]
        found[stem] = [(k["unit_id"], k["epoch"], k["attempt"]) for k in keys]
    return found


def read_log(path: Path) -> tuple[list[Key], list[Key]]:
    """(started attempts, receipts) of the log, each in order."""
    log = path.with_name(path.name + ".log")
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    found: dict[str, list[Key]] = {"started": [], "receipt": []}
    for what, number, epoch, attempt in lines:
        found[what].append((scripted_rows.unit_id(int(number)), int(epoch), int(attempt)))
    return found["started"], found["receipt"]


def check_no_unit_ran_again(path: Path, plan: Plan) -> None:
    """No unit starts again after its final receipt, and no attempt starts twice."""
    log = path.with_name(path.name + ".log").read_text().splitlines()
    over: set[str] = set()
    seen: set[tuple[str, str]] = set()
    for what, number, _, attempt in (line.split() for line in log):
        if what == "started":
            assert number not in over, f"unit {number} was finished and started again"
            assert (number, attempt) not in seen
            seen.add((number, attempt))
        elif plan.cause(int(number), int(attempt)) is None:
            over.add(number)


def check_finished_run(path: Path, plan: Plan) -> None:
    """Every unit in exactly one final state, equal to that of an undisturbed run."""
    check_invariants(path)
    check_no_unit_ran_again(path, plan)
    run = load_run(path)
    assert list((path / "journal").iterdir()) == []
    assert list((path / "tmp").iterdir()) == []
    assert not (path / "quarantine").exists()

    rows = run.trajectories
    assert dict(Counter(rows["unit_id"])) == {
        scripted_rows.unit_id(n): 1 for n in range(plan.units) if n not in (3, 6)
    }
    for _, row in rows.iterrows():
        assert final_content(row) == _expected_content(int(row["seed"]))
    states = {n: run.ledger.disposition(scripted_rows.unit_id(n)) for n in range(plan.units)}
    assert states == {n: "given_up" if n in (3, 6) else "done" for n in range(plan.units)}

    failed = run.failures
    counted = Counter(failed[~failed["cause"].isin(["driver_lost", "worker_lost"])]["seed"])
    lost = failed[failed["cause"].isin(["driver_lost", "worker_lost"])]
    first_lost = set(lost[lost["attempt"] == 0]["seed"])
    expected = {n: 1 for n in range(plan.units) if n % 5 == 4 and n not in first_lost}
    assert dict(counted) == expected | {3: 3, 6: 1}
    assert lost["reward"].isna().all()
    assert (lost["status"] == "failed").all()
    keys = [(r["unit_id"], r["attempt"]) for r in (*records(rows), *records(failed))]
    assert len(keys) == len(set(keys)), "one row per attempt"
    started, _ = read_log(path)
    assert {(u, a) for u, _, a in started} <= set(keys), "every started attempt has a row"


def records(frame: Any) -> list[dict[str, Any]]:
    return list(frame.to_dict("records"))


@lru_cache
def _expected_content(number: int) -> dict[str, Any]:
    return final_content(expected_row(number))


def expected_row(number: int) -> dict[str, Any]:
    row = msgspec.to_builtins(scripted_rows.make_row(number))
    row["messages"] = [msgspec.json.decode(m) for m in row["messages"]]
    row["tools"] = msgspec.json.decode(row["tools"])
    return dict(row)


def final_content(row: Any) -> dict[str, Any]:
    """A final row without times and ids of attempts."""
    names = ("task_id", "repeat", "status", "reward", "end_reason", "truncated", "turns")
    names += ("task_prompt", "final_response", "messages", "tools", "metrics", "unit_id")
    return {name: row[name] for name in names}
