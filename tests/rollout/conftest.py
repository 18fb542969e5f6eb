"""Attempts through the public entry point: fake server, real sandboxes, nothing patched."""

import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.config import parse_config
from hermes_rl.events import Event, EventLog
from hermes_rl.identity import group_id, unit_id, unit_seed
from hermes_rl.ports import WorkItem
from hermes_rl.record import Trajectory
from hermes_rl.rollout import run_attempt
from hermes_rl.tasks import parse_row
from hermes_rl.testing import FakeConfig, FakeServer
from hermes_rl.wiring import RunContext, open_run_context

sys.path.insert(0, str(Path(__file__).parents[1] / "batch"))  # for forks


def script(*steps: Any) -> str:
    """A prompt that tells the fake server what to answer."""
    return "Do it.\nSCRIPT: " + json.dumps(list(steps))


@dataclass
class Journal:
    """A recorder in memory."""

    events: list[Event] = field(default_factory=list)

    def record(self, event: Event) -> None:
        self.events.append(event)


@dataclass
class Stage:
    """A context and the server behind it."""

    context: RunContext
    server: FakeServer

    def item(self, row: dict[str, Any], index: int = 0) -> WorkItem:
        parsed = parse_row(row, index, f"row {index}")
        unit = unit_id(self.context.config_hash, parsed.task_hash, index, 0)
        return WorkItem(
            unit_id=unit,
            group_id=group_id(self.context.config_hash, parsed.task_hash, index),
            epoch=1,
            attempt=0,
            repeat=0,
            row_index=index,
            task_id=parsed.raw_id,
            task=parsed.task,
            task_hash=parsed.task_hash,
            seed=unit_seed(0, unit),
            bad_row=parsed.error and f"{parsed.place}: {parsed.error}",
        )

    async def attempt(
        self, row: dict[str, Any], index: int = 0, journal: Journal | None = None
    ) -> Trajectory:
        item = self.item(row, index)
        return await run_attempt(self.context, item, EventLog((journal or Journal()).record))


Open = Callable[..., Any]


@pytest.fixture
async def stage() -> AsyncIterator[Open]:
    """Opens a stage: `await stage(backend=..., faults=..., **sections)`."""
    async with AsyncExitStack() as stack:

        async def open_stage(
            *,
            backend: str = "bubblewrap",
            server: FakeConfig | None = None,
            fake: type[FakeServer] = FakeServer,
            **sections: Any,
        ) -> Stage:
            served = await stack.enter_async_context(fake(server or FakeConfig()))
            data: dict[str, Any] = {
                "dataset": {"path": "rows"},
                "model": {"name": "fake"},
                "endpoint": {"base_url": served.base_url},
                "sandbox": {"backend": backend},
                "run": {"allow_unsandboxed": True},
            }
            for name, more in sections.items():
                data[name] = {**data.get(name, {}), **more}
            context = await stack.enter_async_context(
                open_run_context(
                    parse_config(data),
                    run_id="test",
                    concurrency=64,
                )
            )
            return Stage(context, served)

        yield open_stage
