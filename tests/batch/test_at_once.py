"""Many things at once, and no more of them than that."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from batch_runner import at_once


async def numbers(count: int) -> AsyncGenerator[int, None]:
    for number in range(count):
        yield number


async def test_as_many_as_said_are_under_way() -> None:
    under_way, most, ended = 0, 0, []

    async def work(item: int) -> bool:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        ended.append(item)
        return True

    await at_once(numbers(20), work, 4)
    assert (sorted(ended), most) == (list(range(20)), 4)


async def test_what_is_under_way_goes_to_its_end_when_nothing_more_is_begun() -> None:
    began, ended, released = [], [], asyncio.Event()

    async def work(item: int) -> bool:
        began.append(item)
        if item == 1:
            released.set()
            return False
        await released.wait()
        ended.append(item)
        return True

    await at_once(numbers(20), work, 3)
    assert 1 in began
    assert set(began) - {1} == set(ended)
    assert len(began) < 6


async def test_the_first_error_comes_out_as_it_is() -> None:
    async def work(item: int) -> bool:
        if item == 2:
            raise KeyError(item)
        await asyncio.Event().wait()
        return True

    with pytest.raises(KeyError):
        await at_once(numbers(20), work, 5)
