"""The queue in front of a rate: order, cancellation, and grants."""

import asyncio

from hypothesis import example, given, settings
from hypothesis import strategies as st

from hermes_rl.models.rate import LaneGrant, Limiter


async def hold(limiter, release):
    async with limiter.slot() as slot:
        await release.wait()
        return slot.waited_s


async def test_slots_are_first_come_first_served():
    limiter, order = Limiter(2), []

    async def work(name):
        async with limiter.slot():
            order.append(name)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for name in range(20):
            group.create_task(work(name))
    assert order == list(range(20))
    assert limiter.in_flight == 0


async def test_increased_limit_wakes_waiting_requests():
    limiter, release = Limiter(4, start=1), asyncio.Event()
    async with limiter.slot() as slot:
        assert slot.waited_s == 0
        tasks = [asyncio.create_task(hold(limiter, release)) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert limiter.in_flight == 1
        for _ in range(3):
            slot.report(None)
        await asyncio.sleep(0.01)
        assert limiter.in_flight == 4
    release.set()
    assert min(await asyncio.gather(*tasks)) > 0


async def test_cancelled_call_reduces_demand():
    """A worker would else be given slots for it, which others lack, until its turn comes."""
    limiter = Limiter(None, name="h|K|m")
    tasks = [asyncio.create_task(hold(limiter, asyncio.Event())) for _ in range(50)]
    await asyncio.sleep(0)
    assert limiter.report().demand == 50
    limiter.take_grant(LaneGrant(lane="h|K|m", slots=0))
    for task in tasks[1:]:
        task.cancel()
    await asyncio.wait(tasks[1:])
    assert limiter.report().demand == 1
    tasks[0].cancel()
    await asyncio.wait(tasks)
    assert limiter.report().demand == 0


STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "cancel", "end", "turn"]), st.integers(0, 30)), max_size=80
)


@settings(deadline=None, max_examples=60)
@given(STEPS, st.integers(1, 3))
@example([("ask", 0)] * 3 + [("turn", 0), ("end", 0), ("turn", 0), ("cancel", 1)], 1)
def test_no_slot_leaks_on_cancellation(steps, most):
    """In the example the cancellation comes in the same moment as the slot."""

    async def play():
        limiter = Limiter(most)
        tasks, events = [], []
        for what, number in steps:
            if what == "ask":
                events.append(asyncio.Event())
                tasks.append(asyncio.create_task(hold(limiter, events[-1])))
            elif tasks and what == "cancel":
                tasks[number % len(tasks)].cancel()
            elif tasks and what == "end":
                events[number % len(tasks)].set()
            elif what == "turn":
                await asyncio.sleep(0)
            assert limiter.in_flight <= most
        for event in events:
            event.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks, return_exceptions=True)
            assert limiter.in_flight == 0
            done = asyncio.Event()
            done.set()
            await asyncio.gather(*(hold(limiter, done) for _ in range(3)))

    asyncio.run(play())
