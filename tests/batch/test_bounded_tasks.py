"""`run_concurrently` works through items with a limit on concurrency."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from batch_runner import run_concurrently


async def numbers(count: int) -> AsyncGenerator[int, None]:
    for number in range(count):
        yield number


async def test_at_most_the_limit_runs_at_once() -> None:
    running, peak, ended = 0, 0, []

    async def work(item: int) -> bool:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0)
        running -= 1
        ended.append(item)
        return True

    await run_concurrently(numbers(20), work, 4)
    assert (sorted(ended), peak) == (list(range(20)), 4)


async def test_running_tasks_finish_after_one_returns_false() -> None:
    started, ended, released = [], [], asyncio.Event()

    async def work(item: int) -> bool:
        started.append(item)
        if item == 1:
            released.set()
            return False
        await released.wait()
        ended.append(item)
        return True

    await run_concurrently(numbers(20), work, 3)
    assert 1 in started
    assert set(started) - {1} == set(ended)
    assert len(started) < 6


async def test_the_first_error_is_raised_unwrapped() -> None:
    async def work(item: int) -> bool:
        if item == 2:
            raise KeyError(item)
        await asyncio.Event().wait()
        return True

    with pytest.raises(KeyError):
        await run_concurrently(numbers(20), work, 5)
