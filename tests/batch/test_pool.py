"""Failing starts of Ray, and workers that end slowly or never."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_runner import RayWorker, Reply, WorkerLost, connect_ray, decode_reply
from hermes_rl.errors import DiskFull, StoreError, UserError
from hermes_rl.events import AttemptKey, Begun, Ended
from hermes_rl.record import Call
from hermes_rl.store import BatchSummary, CommitBatch, Finished, Prepared, receipt_of
from hermes_rl.trajectory import fold


class FailingRay(SimpleNamespace):
    """Replaces the package: the first starts fail, each after it started a process."""

    def __init__(self, failures: int) -> None:
        super().__init__(failures=failures, started=[], options=[], shut=0)

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        self.options.append(options)
        self.started.append(subprocess.Popen(["sleep", "600"]))
        if len(self.started) <= self.failures:
            raise RuntimeError("The node timed out during startup.\nSee the logs.")

    def shutdown(self) -> None:
        self.shut += 1


@pytest.fixture
def failing_ray(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FailingRay]:
    ray = FailingRay(request.param)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield ray
    for process in ray.started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("failing_ray", [1], indirect=True)
def test_a_failed_ray_start_is_retried_once(failing_ray: FailingRay) -> None:
    with connect_ray(3) as watchdog:
        assert watchdog is not None
        first, second = failing_ray.started
        assert first.wait(240) == -9, "the process of the failed start"
        assert second.poll() is None
        assert [options["num_cpus"] for options in failing_ray.options] == [3, 3]
    assert second.wait(240) == -9


@pytest.mark.parametrize("failing_ray", [9], indirect=True)
def test_two_failed_ray_starts_are_one_error_line(failing_ray: FailingRay) -> None:
    with pytest.raises(UserError) as caught, connect_ray(1):
        pass
    assert str(caught.value) == (
        "cannot start Ray: The node timed out during startup. Use --workers 0"
    )
    assert [process.wait(240) for process in failing_ray.started] == [-9, -9]


@pytest.mark.parametrize("failing_ray", [9], indirect=True)
def test_a_wrong_ray_address_is_tried_once(
    failing_ray: FailingRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UserError, match=r"cannot reach RAY_ADDRESS 127\.0\.0\.1:1: .* unset it"):
        connect_ray(1).__enter__()
    assert len(failing_ray.options) == 1


class Actor(SimpleNamespace):
    """Replaces an actor handle; `close` and `poll` take some time."""

    def __init__(self, close_s: float, poll_s: float) -> None:
        def after(seconds: float) -> Any:
            async def answer(*_: object) -> bytes:
                await asyncio.sleep(seconds)
                return msgspec.msgpack.encode(Reply(requests=7))

            return SimpleNamespace(remote=answer)

        super().__init__(close=after(close_s), poll=after(poll_s))


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The actors that were killed."""
    gone: list[object] = []
    ray = SimpleNamespace(kill=lambda actor, no_restart: gone.append(actor))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", SimpleNamespace(RayError=RuntimeError))
    return gone


async def commit(prepared: Prepared) -> None:
    raise AssertionError


def worker(actor: Any, lease_s: float, commit: CommitBatch = commit) -> RayWorker:
    return RayWorker(actor, "1-1", lease_s, commit)


async def test_a_worker_may_publish_longer_than_its_lease(killed: list[object]) -> None:
    actor = Actor(close_s=0.4, poll_s=0.0)  # a poll that waits for no timer is never late
    assert (await worker(actor, lease_s=0.3).close()).requests == 7
    assert killed == [actor]


async def test_a_worker_without_heartbeat_while_publishing_is_lost(killed: list[object]) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(WorkerLost, match=r"not heard for 0\.3 s"):
            await worker(Actor(close_s=600.0, poll_s=600.0), lease_s=0.3).close()


class StalledRelay:
    """Replaces the writer of a worker without a run directory, on a disk that answers late."""

    def __init__(self) -> None:
        self.beats = asyncio.Semaphore(0)

    async def take(self, lines: object) -> tuple[()]:
        for _ in range(12):
            await self.beats.acquire()
        return ()


async def test_a_worker_is_kept_alive_while_the_driver_writes_its_rows(
    killed: list[object],
) -> None:
    """For twice its lease."""
    relay, actor = StalledRelay(), Actor(close_s=0.0, poll_s=0.0)
    actor.beat = SimpleNamespace(remote=relay.beats.release)
    handle = worker(actor, lease_s=0.3)
    handle.relay = relay
    async with asyncio.timeout(240):
        assert (await handle.poll()).requests == 7


class ClosingActor(SimpleNamespace):
    """Replaces an actor handle: it closes after the answer to its batch, which is in each reply."""

    def __init__(self, prepared: Prepared) -> None:
        answers: list[tuple[str | None, ...]] = []
        answered = asyncio.Event()

        async def poll(wait_s: float) -> bytes:
            await asyncio.sleep(0.02)
            self.polls.release()
            return msgspec.msgpack.encode(Reply(prepared=prepared))

        async def close() -> bytes:
            await answered.wait()
            fault, cause = answers[0]
            return msgspec.msgpack.encode(Reply(fault=fault, cause=cause))

        def committed(*outcome: str | None) -> None:
            answers.append(outcome)
            answered.set()

        names = {"poll": poll, "close": close, "committed": committed}
        super().__init__(**{n: SimpleNamespace(remote=call) for n, call in names.items()})
        self.answers, self.polls = answers, asyncio.Semaphore(0)


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (None, (None, None)),
        (DiskFull("the disk is full"), ("the disk is full", "disk")),
        (StoreError("a part differs"), ("a part differs", "harness")),
        (OSError(5, "EIO"), ("OSError(5, 'EIO')", "harness")),
    ],
)
async def test_a_batch_of_a_closing_worker_is_committed_once_through_its_polls(
    killed: list[object], error: Exception | None, answer: tuple[str | None, str | None]
) -> None:
    batch = Prepared(commit=BatchSummary().commit("1-1-0"), files=[])
    committed: list[Prepared] = []

    async def commit(prepared: Prepared) -> None:
        committed.append(prepared)
        for _ in range(5):
            await actor.polls.acquire()
        if error is not None:
            raise error

    actor = ClosingActor(batch)
    reply = await worker(actor, 30.0, commit).close()
    assert committed == [batch]
    assert actor.answers == [answer]
    assert (reply.fault, reply.cause) == answer
    assert killed == [actor]


async def test_a_batch_whose_commit_failed_is_committed_when_it_is_tried_again(
    killed: list[object],
) -> None:
    first, second = (Prepared(commit=BatchSummary().commit("1-1-0"), files=[n]) for n in "ab")
    committed: list[Prepared] = []
    outcomes = asyncio.Queue[tuple[str | None, str | None]]()

    async def commit(prepared: Prepared) -> None:
        committed.append(prepared)
        if prepared is not second and len(committed) == 1:
            raise DiskFull("full")

    def remote(call: Any) -> Any:
        return SimpleNamespace(remote=call)

    replies = [first, first, second, second]

    async def poll(wait_s: float) -> bytes:
        return msgspec.msgpack.encode(Reply(prepared=replies.pop(0)))

    handle = worker(SimpleNamespace(poll=remote(poll)), 5.0, commit)
    handle.actor.committed = remote(lambda *outcome: outcomes.put_nowait(outcome))
    for _ in range(2):
        await handle.poll()
        await handle.poll()
        await outcomes.get()
    assert committed == [first, second]


CHILD = """
import os, subprocess, sys, time
import ray
from batch_runner.pool import connect_ray

def state_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]

@ray.remote
class Actor:
    def start(self):
        child = subprocess.Popen(["sleep", "60"], start_new_session=True)
        return os.getpid(), child.pid

with connect_ray(1):
    actor = Actor.options(num_cpus=0).remote()
    pid, child = ray.get(actor.start.remote())
    ray.kill(actor)
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.01)
    print(state_of(child) in "RSD")
    os.kill(child, 9)
"""


def test_ray_does_not_kill_the_children_of_an_actor_first(
    cluster: dict[str, str],
) -> None:
    """The actor would record the end of a sandbox or a verifier that Ray itself killed."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**os.environ, **cluster},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "True\n", done.stderr


KEY = AttemptKey(unit_id="f" * 32, epoch=2**31, attempt=2**31)


def finished(task_id: str, error: str) -> Finished:
    begun = Begun(
        key=KEY, started_at=1e9, run_id="r", group_id="g", member=2**31, repeat=2**31, row_index=0,
        task_id=task_id, task_hash="h", config_hash="c", seed=0, prompt="p", model="m",
        api_mode="chat_completions", endpoint="e",
    )  # fmt: skip
    end = Ended(finished_at=2e9, end_reason="error", cause="model_protocol", error=error)
    return Finished(key=KEY, row=fold([begun, end]), fatal_command="f" * 32)


@given(st.text(max_size=20), st.text(max_size=20))
def test_a_receipt_is_under_4_kb(task_id: str, error: str) -> None:
    made = finished(task_id * 200 + "\U0001f600" * 5000, error * 200 + "\U0001f600" * 5000)
    sent = msgspec.msgpack.encode(Reply(receipts=(receipt_of(made, f"{2**31}-{2**31}"),)))
    assert len(sent) < 4096
    (got,) = decode_reply(sent).receipts
    assert made.row.task_id.startswith(got.task_id)
    assert got.fatal_command == made.fatal_command


def test_a_receipt_has_the_known_cost_of_a_row_with_an_unpriced_call() -> None:
    made = finished("task", "")
    none = dict.fromkeys(Call.__struct_fields__)
    calls = [Call(**{**none, "cost_usd": cost}) for cost in (0.25, None)]
    row = msgspec.structs.replace(made.row, cost_usd=None, calls=calls)
    assert receipt_of(msgspec.structs.replace(made, row=row), "1-0").cost_usd == 0.25
