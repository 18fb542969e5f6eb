"""The dispatcher with workers that are told what to do, through the protocols that it meets."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from batch_runner.dispatcher import Dispatcher, Fleet
from batch_runner.wire import Reply
from hermes_rl.ports import Receipt, WorkItem
from hermes_rl.usage import UsageTotal


def item() -> WorkItem:
    return WorkItem(
        unit_id="0" * 32, group_id="g", epoch=1, attempt=0, repeat=0, row_index=0, task_id="t",
        task=None, task_hash="h", seed=0,
    )  # fmt: skip


def receipt(of: WorkItem) -> Receipt:
    return Receipt(
        unit_id=of.unit_id, epoch=1, attempt=0, writer="1-1", task_id="t", repeat=0, status="ok",
        end_reason="answered", cause=None, reward=1.0, turns=1, usage=UsageTotal(), cost_usd=None,
        unpriced_calls=0, seconds=0.0,
    )  # fmt: skip


@dataclass
class Worker:
    """Finishes what it is given at once; its `close` publishes for ever."""

    writer: str
    publishing: asyncio.Event = field(default_factory=asyncio.Event)
    killed: bool = False
    given: asyncio.Queue[WorkItem] = field(default_factory=asyncio.Queue)

    async def send(self, item: WorkItem) -> None:
        self.given.put_nowait(item)

    async def poll(self) -> Reply:
        return Reply(receipts=(receipt(await self.given.get()),))

    async def close(self) -> Reply:
        self.publishing.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def kill(self) -> None:
        self.killed = True


@dataclass
class Rig:
    """Factory, journal, listener and source in one."""

    workers: list[Worker] = field(default_factory=lambda: [Worker("1-1"), Worker("1-2")])
    recovered: list[tuple[str, str]] = field(default_factory=list)
    received: list[Receipt] = field(default_factory=list)
    left: list[WorkItem] = field(default_factory=lambda: [item()])

    async def start(self, worker: int, capacity: int) -> Worker:
        return self.workers[worker - 1]

    def dispatch(self, item: WorkItem, writer: str) -> None:
        pass

    async def recover(self, writer: str, cause: str) -> list[Receipt]:
        self.recovered.append((writer, cause))
        return []

    def heard(self, requests: int, throttled: int) -> None: ...

    def lost(self, *told: Any) -> None:
        raise AssertionError(told)

    def fault(self, *told: Any) -> None:
        raise AssertionError(told)

    async def next(self) -> WorkItem | None:
        return self.left.pop() if self.left else None

    async def receive(self, receipt: Receipt) -> None:
        self.received.append(receipt)


async def test_a_worker_that_is_cut_while_it_publishes_is_killed_and_recovered() -> None:
    """A second Ctrl-C at the very end: what the worker finished is published all the same."""
    rig: Any = Rig()
    run = asyncio.create_task(Dispatcher(rig, rig, Fleet(2, 2), rig).run(rig))
    await asyncio.gather(*(worker.publishing.wait() for worker in rig.workers))
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert len(rig.received) == 1
    assert all(worker.killed for worker in rig.workers)
    assert sorted(rig.recovered) == [("1-1", "interrupted"), ("1-2", "interrupted")]
