"""`RowFeed`: rows of groups in a queue, and groups acknowledged when their rows were taken."""

import asyncio
from pathlib import Path

import pytest
from runs import Lab

from hermes_rl.rl import Policy, Row, RowFeed, rollouts
from hermes_rl.store import load_run
from hermes_rl.testing import ExactConfig, ExactEngine, write_tiny_tokenizer

SIZE = 2
TALK = """
class Config(EnvConfig):
    sandboxed: bool = False
    toolsets: tuple[str, ...] | None = ()

endless = True

def tasks(self, split, seed):
    n = 0
    while True:
        yield make_task(f"Number {n}.\\nSCRIPT: [\\"Well {n}.\\"]\\n", id=f"n{n}")
        n += 1

async def compute_reward(self, task, trajectory, ctx):
    return float(ctx.member)
"""


def make_feed(lab: Lab, policy: Policy, **more: int | None) -> RowFeed:
    config = {"sandbox": {"backend": "none"}, "run": {"allow_unsandboxed": True}}
    stream = rollouts(
        str(lab.path / "made_up.py"),
        policy,
        out=lab.out,
        group_size=SIZE,
        concurrency=4,
        resume_step=more.pop("resume_step", None),
        config=config,
    )
    return RowFeed(stream, policy, **more)


def make_policy(engine: ExactEngine, tokenizer: Path, version: int | None = None) -> Policy:
    return Policy(
        model="toy", base_url=engine.base_url, tokens="vllm", tokenizer=tokenizer, version=version
    )


def events(lab: Lab) -> list[tuple[str, float | None]]:
    frame = load_run(lab.out).deliveries
    return [(row.event, row.step) for row in frame.sort_values("created_at").itertuples()]


async def test_groups_are_acknowledged_when_all_of_their_rows_were_taken(
    lab: Lab, tmp_path: Path
) -> None:
    lab.write(TALK)
    tokenizer = write_tiny_tokenizer(tmp_path / "tokenizer")
    taken: list[Row] = []

    def train(engine: ExactEngine) -> list[Row]:
        policy = make_policy(engine, tokenizer)
        with make_feed(lab, policy) as feed:
            taken.extend(feed.take(3))
            assert feed.acknowledge(1) == 1
            assert feed.acknowledge(1) == 0
            taken.extend(feed.take(2))
            assert feed.acknowledge(2) == 1
        assert events(lab) == [("acknowledged", 1), ("acknowledged", 2)]
        with make_feed(lab, policy, resume_step=1) as feed:
            return feed.take(3)

    async with ExactEngine(ExactConfig(tokenizer=tokenizer)) as engine:
        rows = await asyncio.to_thread(train, engine)
        served = {entry.prompt_ids: entry for entry in engine.truth if entry.outcome == "served"}
    # Two groups are in progress at once, so any of them may be the first.
    first, second, third = dict.fromkeys(row.group.task_id for row in taken)
    assert [row.group.task_id for row in taken] == [first, first, second, second, third]
    # Step 2 was after the checkpoint, and the group of the fifth row was not acknowledged at all.
    assert [row.group.task_id for row in rows] == [second, second, third]
    for row in rows:
        truth = served[tuple(row.prompt_ids)]
        assert row.completion_ids == list(truth.sampled_ids)
        assert row.completion_mask == [1] * len(truth.sampled_ids)
        assert row.logprobs[row.segment.prompt_len :] == pytest.approx(truth.raw_logprobs)
        assert row.member.reward == float(row.member.index)


async def test_what_a_trainer_drops_as_stale_is_rejected(lab: Lab, tmp_path: Path) -> None:
    lab.write(TALK)
    tokenizer = write_tiny_tokenizer(tmp_path / "tokenizer")

    def train(engine: ExactEngine) -> None:
        policy = make_policy(engine, tokenizer, version=5)  # the engine names no version
        with make_feed(lab, policy, max_staleness=1) as feed:
            assert {row.version for row in feed.take(SIZE)} == {5}
            asyncio.run(policy.set_version(7))
            assert feed.acknowledge(1) == 1
            while feed.take(1)[0].version != 7:
                pass
            feed.acknowledge(2)

    async with ExactEngine(ExactConfig(tokenizer=tokenizer)) as engine:
        async with asyncio.timeout(120):
            await asyncio.to_thread(train, engine)
    found = [event for event, _ in events(lab)]
    assert found[0] == "acknowledged"
    assert "rejected" in found
    assert found[1:].count("acknowledged") <= 1  # one may have begun before and after the update
    reasons = load_run(lab.out).deliveries.reason.dropna()
    assert set(reasons) == {"stale: more than 1 versions old"}


async def test_the_last_rows_of_the_tasks_are_taken_and_the_end_is_an_empty_list(
    lab: Lab, tmp_path: Path
) -> None:
    lab.write(TALK.replace("endless = True", "").replace("while True", "while n < 2"))
    tokenizer = write_tiny_tokenizer(tmp_path / "tokenizer")

    def train(engine: ExactEngine) -> None:
        with make_feed(lab, make_policy(engine, tokenizer)) as feed:
            assert [len(feed.take(3)) for _ in range(3)] == [3, 1, 0]
            assert feed.acknowledge(1) == 2
            with pytest.raises(RuntimeError, match="the environment has no more tasks"):
                feed.check()

    async with ExactEngine(ExactConfig(tokenizer=tokenizer)) as engine:
        await asyncio.to_thread(train, engine)
