"""Ray workers that do not see the run directory: their rows travel through the driver."""

import base64
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import kit
import pytest

from hermes_rl.store import read_payloads
from hermes_rl.testing import FakeServer

pytestmark = pytest.mark.slow

LARGE = 5 * 2**20
"""Bytes of an answer that is larger than one reply of a worker."""


@pytest.fixture
def hidden(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder in which workers see an empty file system instead of runs, or, as indirect parameter
    `copy`, a copy from the moment of the first one's start."""
    folder, copy = tmp_path / "hidden", tmp_path / "copy"
    folder.mkdir()
    copy.mkdir()
    if getattr(request, "param", None) == "copy":
        first = f'flock {copy}.lock sh -c "test -e {copy}/run || cp -r {folder}/. {copy}"'
        kit.make_blind_python(folder, f"{first} && mount --bind {copy} {folder}")
    else:
        kit.make_blind_python(folder)
    return folder


def arguments(
    hidden: Path, rows: list[dict[str, Any]], server: FakeServer, *more: str
) -> list[str]:
    """A run whose workers do not see it."""
    section = f"run.runtime_env={{py_executable: {hidden.parent}/python}}"
    made = kit.run_arguments(hidden.parent, rows, server, "--workers", "2", "--set", section, *more)
    return [*made, "--out", str(hidden / "run")]


def notes(run: kit.RunProcess) -> list[str]:
    return [event["text"] for event in run.events if event["event"] == "note"]


@pytest.mark.parametrize("hidden", ["copy"], indirect=True)
async def test_rows_are_those_of_a_shared_run_directory(
    tmp_path: Path, hidden: Path, server: FakeServer, cluster: dict[str, str]
) -> None:
    """Workers see another folder of the same name. One answer is longer than a reply."""
    text = base64.b64encode(random.Random(0).randbytes(LARGE)).decode()  # does not compress
    large = {"id": "large", "prompt": f'x\nSCRIPT: ["{text}"]'}
    rows = [*kit.make_rows(20), large]
    run = await kit.finish_run(*arguments(hidden, rows, server), env=cluster)
    out = hidden / "run"
    assert run.report()["done"] == kit.count_units(20) + 1
    (note,) = (text for text in notes(run) if "does not see" in text)
    assert note.endswith(f"does not see {out}: its rows travel through the driver")
    assert not (out / "journal").exists() or not [*(out / "journal").iterdir()]
    assert (tmp_path / "copy" / "run" / "epochs" / "1.json").exists()
    assert not [*(tmp_path / "copy" / "run" / "journal").iterdir()]
    kit.check_usage(out, server.entries)
    writers = {part.name.rpartition("-")[0] for part in (out / "trajectories").iterdir()}
    assert writers == {"part-1-1", "part-1-2"}
    await kit.finish_run(*kit.run_arguments(tmp_path, rows, server, "--workers", "0"))
    assert kit.comparable_rows(out) == kit.comparable_rows(tmp_path / "run")


async def test_a_driver_and_a_worker_are_killed(
    hidden: Path, server: FakeServer, cluster: dict[str, str]
) -> None:
    """The rows of lost attempts have the events that arrived. The command of one task runs until
    the driver is killed, and kills its worker after the resume."""
    resumed, known, killed = (hidden.parent / name for name in ("resumed", "known", "killed"))
    command = (
        f"[ -e {killed} ] || if [ -e {resumed} ]; then until [ -e {known} ]; do sleep 0.1; done; "
        f"touch {killed}; kill -9 $PPID; else sleep 600; fi"
    )
    steps = json.dumps([{"run": command}, "done"])
    rows = [{"id": "long", "prompt": f"x\nSCRIPT: {steps}"}]
    rows += [kit.make_task(n, latency_s=0.2) for n in range(24)]
    run = arguments(hidden, rows, server, "--concurrency", "4")
    first = await kit.start_run(*run, env=cluster)
    await first.wait_for_events("attempt", 12)
    kit.kill(first.pid)
    await first.wait()
    resumed.touch()
    second, out = await kit.start_run(*run, env=cluster), hidden / "run"

    def has_arrived() -> bool:
        """The call of the command is in the driver's journal."""
        lines = (line for file in out.glob("journal/2-*/live-*") for line in read_payloads(file))
        return any(b"tool_calls" in line and str(known).encode() in line for line in lines)

    await kit.wait_for(second, has_arrived)
    known.touch()
    assert await second.wait() == 0, second.errors
    assert {row["task_id"] for row in kit.final_rows(out).values()} == {r["id"] for r in rows}
    kit.check_no_unit_ran_again(out, first.receipts() | second.receipts())
    failures = kit.read_table(out, "failures")
    long = {row["cause"]: row for row in failures if row["task_id"] == "long"}
    assert {row["cause"] for row in failures} == long.keys() == {"driver_lost", "worker_lost"}
    for row in long.values():
        assert [call["outcome"] for call in row["calls"]] == ["ok"]
        assert command[:20] in row["messages"][-1], "the answer to the call arrived"
    every = [*kit.read_table(out, "trajectories"), *failures]
    calls = Counter(call["call_id"] for row in every for call in row["calls"])
    assert max(calls.values()) == 1, "a call is recorded twice"


async def test_files_that_have_no_place_are_refused(
    hidden: Path, server: FakeServer, cluster: dict[str, str]
) -> None:
    more = ("--workers", "1", "--set", "run.keep_workspaces=true")
    ended = await kit.finish_run(
        *arguments(hidden, [kit.make_task(1)], server, *more), env=cluster, code=2
    )
    assert f"run.keep_workspaces writes files to {hidden / 'run'}, which this node" in ended.errors
    assert "Traceback" not in ended.errors
    assert not server.entries
