"""Groups older than the trainer's weights: the table of the policies, and what a trainer gets."""

import asyncio
from typing import Any

import pytest
from runs import Lab
from test_weight_updates import TALK, make_engine, open_stream, policy_at, until

from hermes_rl.errors import UserError
from hermes_rl.rl import STALENESS, Staleness, compare_delivered
from hermes_rl.store import load_run

EVENTS = ("start", "update", "deliver")


@pytest.mark.parametrize("policy", STALENESS)
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_each_policy_does_what_the_table_says(policy: Any, event: Any, max_lag: int) -> None:
    staleness = Staleness(policy, max_lag)
    fresh = STALENESS["none"]
    first = max(1, max_lag) if event == "start" else max_lag + 1
    for lag in range(max_lag + 3):
        wanted = STALENESS[policy] if lag >= first else fresh
        assert staleness.decide(event, 10, 10 - lag) == wanted[event]
    assert staleness.decide(event, 10, None) == fresh[event]
    assert staleness.decide(event, None, 10) == fresh[event]


@pytest.mark.parametrize("wrong", [("stop", 1), ("pace", -1)])
def test_wrong_limits_are_refused(wrong: tuple[Any, int]) -> None:
    with pytest.raises(UserError, match="staleness"):
        Staleness(*wrong)


@pytest.mark.parametrize("name", ["none", "pace", "withhold", "cancel", "mask"])
async def test_groups_of_old_weights_meet_their_policy(lab: Lab, name: Any) -> None:
    lab.write(TALK)
    async with make_engine(lab, token_s=0.03) as engine:
        policy = policy_at(engine, lab, "vllm")
        await policy.set_version(1)
        more = {"concurrency": 8, "limit": 4, "staleness": Staleness(name, 0)}
        async with open_stream(lab, policy, **more) as stream:
            await until(lambda: engine.truth and engine.truth[-1].call_id is not None)
            engine.running.set_version("2")
            await policy.set_version(2)
            groups = [group async for group in stream]
            counts = stream.counts()
    run = load_run(lab.out)
    old = [group for group in groups if group.versions and group.versions[0] == 1]
    if name in ("withhold", "cancel"):
        assert not old
        assert counts.get("rejected", 0) + counts.get("rejected stale", 0) >= 1
        reasons = run.deliveries["reason"].dropna()
        assert reasons.str.startswith("stale: version 1 at version 2").all()
        compared = compare_delivered(run)
        assert compared["rejected"]["rollouts"] + compared["kept"]["rollouts"] == len(
            run.trajectories
        )
        if name == "withhold":
            assert compared["rejected"]["turns"]["mean"] > 0
    else:
        assert len(groups) == 4
        assert old
    if name == "cancel":
        ended = [row for row in lab.rows("failures") if row["cause"] == "interrupted"]
        assert ended
        assert all(row["calls"] for row in ended)
        rejected = set(run.deliveries.loc[run.deliveries["event"] == "rejected", "group_id"])
        assert {row["group_id"] for row in ended} <= rejected
    tokens = [
        (version, trained)
        for group in groups
        for segment in (s for m in group.members for s in m.segments)
        for version, trained in zip(segment.version_ids, segment.loss_mask, strict=True)
    ]
    assert ((1, True) in tokens) == (name in ("none", "pace"))
    assert (2, True) in tokens


@pytest.mark.parametrize("name", ["none", "pace"])
async def test_pace_starts_no_group_while_one_of_old_weights_is_in_progress(
    lab: Lab, name: Any
) -> None:
    """The engine is frozen: the old group cannot end before the trainer asks for another one."""
    lab.write(TALK)
    async with make_engine(lab, token_s=0.01) as engine:
        policy = policy_at(engine, lab, "vllm")
        await policy.set_version(1)
        more = {"limit": 2, "ahead": 0, "staleness": Staleness(name, 0)}
        async with open_stream(lab, policy, **more) as stream:
            engine.running.pause("keep")
            taking = [asyncio.ensure_future(stream.run.next())]
            await until(lambda: len(engine.running.tokens) == 4)
            engine.running.set_version("2")
            await policy.set_version(2)
            taking.append(asyncio.ensure_future(stream.run.next()))
            if name == "none":
                await until(lambda: len(engine.running.tokens) == 8)
            else:
                await asyncio.sleep(1)
                assert len(engine.running.tokens) == 4
            engine.running.resume()
            groups = await asyncio.gather(*taking)
    assert all(groups)
