"""Few files lie between a request and its result: traced rollouts count the project's files.

A file counts when one of its functions runs. The server of the model is a process of its own, so
its files do not count, nor does the watcher of all sandboxes. What else falls into a step by
chance, as a late message of a shell, is left out too: the files that every one of several attempts
used count.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from source_tree import ROOT

from batch_runner import run_batch
from hermes_rl import RunConfig
from hermes_rl.config import parse_config
from hermes_rl.events import Ended, Event, EventLog, MessageAdded
from hermes_rl.messages import AssistantMessage, ToolMessage
from hermes_rl.ports import WorkItem
from hermes_rl.rollout import run_attempt
from hermes_rl.tasks import parse_row
from hermes_rl.wiring import open_run_context

# step -> files at most
CEILINGS = {
    "one chat call": 20,
    "one tool call": 10,
    "grading and ending": 13,  # with the launcher, and with what the next sandbox takes over
    "a run of one row": 88,  # with the look for parts that were merged, and the socket of `ctl`
}
STEPS = [
    {"run": "echo 1"},
    {"run": "echo 2"},
    "done",
]
ATTEMPTS = 6
ROW = {"prompt": "Do it.\nSCRIPT: " + json.dumps(STEPS), "verify": "true"}


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    """The address of a fake model server; prompts carry their scripts."""
    command = [sys.executable, "-m", "hermes_rl.testing.fake_server", "--until-eof"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout
        yield json.loads(server.stdout.readline())["base_url"]


def configuration(base_url: str, **run: Any) -> dict[str, Any]:
    return {
        "model": {"name": "fake"},
        "endpoint": {"base_url": base_url},
        "sandbox": {"backend": "bubblewrap"},
        "run": {"allow_unsandboxed": True, **run},
    }


@cache
def project_file(code: CodeType) -> str | None:
    """The file of a function of the product; None for modules being loaded and for other code."""
    path = Path(code.co_filename)
    if code.co_name == "<module>" or not path.is_relative_to(ROOT):
        return None
    name = path.relative_to(ROOT).as_posix()
    return name if name.startswith(("hermes_rl/", "batch_runner/")) else None


def by_the_watcher(frame: FrameType | None) -> bool:
    """Whether a function runs for the task that looks at all sandboxes, four times a second."""
    while frame is not None:
        if frame.f_code.co_name == "_watch":
            return True
        frame = frame.f_back
    return False


@contextmanager
def traced(note: Callable[[str], None], *, threads: bool) -> Iterator[None]:
    """Report the file of each project function that starts."""

    def profile(frame: FrameType, what: str, _: Any) -> None:
        if what == "call" and (file := project_file(frame.f_code)) and not by_the_watcher(frame):
            note(file)

    if threads:
        threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class Steps:
    """A recorder that divides the files of an attempt by the events of the attempt."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.spans: list[tuple[type, set[str]]] = []

    def note(self, file: str) -> None:
        self.files.add(file)

    def record(self, event: Event) -> None:
        """Close the span that ends with this event."""
        if isinstance(event, MessageAdded | Ended):
            what = event.message if isinstance(event, MessageAdded) else event
            self.spans.append((type(what), self.files))
            self.files = set()

    def last(self, ending: type) -> set[str]:
        """The files of the last span that ended with a message, or an event, of this type."""
        return next(files for kind, files in reversed(self.spans) if kind is ending)


async def attempts(base_url: str) -> list[Steps]:
    config = parse_config({**configuration(base_url), "dataset": {"path": "rows"}})
    parsed = parse_row(ROW, 0, "row 0")
    item = WorkItem(
        unit_id="0" * 32,
        group_id="0" * 32,
        epoch=1,
        attempt=0,
        repeat=0,
        row_index=0,
        task_id="task",
        task=parsed.task,
        task_hash=parsed.task_hash,
        seed=0,
        bad_row=None,
    )
    traces = []
    async with open_run_context(config, run_id="traced", concurrency=1) as context:
        await run_attempt(context, item, EventLog(Steps().record))  # what only the first one does
        for _ in range(ATTEMPTS):
            steps = Steps()
            with traced(steps.note, threads=False):
                row = await run_attempt(context, item, EventLog(steps.record))
            assert (row.end_reason, row.reward, row.turns) == ("answered", 1.0, 3)
            traces.append(steps)
    return traces


def check(step: str, files: set[str]) -> None:
    listed = "\n".join(sorted(files))
    assert len(files) <= CEILINGS[step], f"{step}: {len(files)} files:\n{listed}"


def test_steps_of_an_attempt_use_few_files(base_url: str) -> None:
    traces = asyncio.run(attempts(base_url))

    def used(ending: type) -> set[str]:
        return set.intersection(*(steps.last(ending) for steps in traces))

    check("one chat call", used(AssistantMessage))
    check("one tool call", used(ToolMessage))
    check("grading and ending", used(Ended))


def test_a_run_of_one_row_uses_few_files(base_url: str, tmp_path: Path) -> None:
    files: set[str] = set()
    data = configuration(base_url, out=str(tmp_path / "run"), workers=0)
    with traced(files.add, threads=True):
        report = run_batch(RunConfig.model_validate({**data, "dataset": {"path": [ROW]}}))
    assert (report.done, report.solved) == (1, 1)
    check("a run of one row", files)
