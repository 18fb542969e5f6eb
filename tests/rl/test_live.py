"""`rollouts()`: complete groups as they end, acknowledged once, also after kills."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
from runs import Lab, start_server

from hermes_rl.cli import main
from hermes_rl.errors import UserError
from hermes_rl.rl import (
    Curriculum,
    LiveGroup,
    Policy,
    RolloutsStopped,
    RolloutStream,
    RowFeed,
    Selection,
    rollouts,
)
from hermes_rl.store import OpenOptions, load_run
from hermes_rl.testing import (
    ExactConfig,
    ExactEngine,
    FakeConfig,
    FakeServer,
    FaultPlan,
    chat_of,
    write_tiny_tokenizer,
)

SIZE = 4
TALK = f"""
class Config(EnvConfig):
    sandboxed: bool = False
    toolsets: tuple[str, ...] | None = ()

endless = True

def tasks(self, split, seed):
    n = 0
    while True:
        yield make_task(f"Number {{n}}.", id=f"n{{n}}", n=n, level=str(n % 3))
        n += 1

async def compute_reward(self, task, trajectory, ctx):
    return float(ctx.member < task.metadata["n"] % {SIZE + 1})
"""


def open_stream(lab: Lab, server: FakeServer | None, **more: Any) -> RolloutStream:
    url = server.base_url if server is not None else None
    policy = more.pop("policy", None) or Policy(model="policy", base_url=url, tokens="off")
    run = {"allow_unsandboxed": True, "budget_tokens": more.pop("budget_tokens", None)}
    run |= {name: more.pop(name) for name in ("publish_every_s",) if name in more}
    config = {"sandbox": {"backend": "none"}, "run": run}
    more = {"group_size": SIZE, "concurrency": 16, **more}
    return rollouts(str(lab.path / "made_up.py"), policy, out=lab.out, config=config, **more)


async def take(stream: RolloutStream, count: int, ack: int | None = None) -> list[LiveGroup]:
    taken = []
    for step in range(count):
        async with asyncio.timeout(120):
            group = await anext(stream)
        taken.append(group)
        if ack is not None:
            await group.ack(step=ack + step)
    return taken


async def check(lab: Lab) -> None:
    """`hermes-rl check` finds nothing."""
    assert await asyncio.to_thread(main, ["check", str(lab.out)]) == 0


async def test_small_files_are_merged_during_a_run_and_groups_are_read_from_them(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = OpenOptions.__init__.__defaults__  # many_files is the last
    monkeypatch.setattr(OpenOptions.__init__, "__defaults__", (*(defaults or ())[:-1], 1))
    lab.write(TALK)
    async with start_server(policy=lambda request: "Well.") as server:
        async with open_stream(lab, server, publish_every_s=0.05) as stream:
            for number, group in enumerate(await take(stream, 30)):
                if number not in (20, 21):
                    await group.ack(step=number)
        assert len(list(lab.out.glob("trajectories/*.parquet"))) == 1
        merges = len(list(lab.out.glob("compacted/*.json")))
        async with open_stream(lab, server, publish_every_s=0.05, ahead=20) as stream:
            again = await take(stream, 1)
            while len(list(lab.out.glob("compacted/*.json"))) == merges:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            again += await take(stream, 1)
            for group in again:
                assert group.again
                assert all(m.trajectory and m.trajectory["messages"] for m in group.members)
                await group.ack(step=40)
    await check(lab)


async def test_groups_are_complete_and_acknowledged_once(lab: Lab) -> None:
    lab.write(TALK)
    async with start_server(policy=lambda request: "Well.") as server:
        async with open_stream(lab, server) as stream:
            first = await take(stream, 6, ack=1)
            held = await take(stream, 3)
        for group in first:
            n = int(group.task_id[1:])
            rewards = [member.reward for member in group.members]
            assert rewards == [float(m < n % (SIZE + 1)) for m in range(SIZE)]
            assert [m.trajectory["reward"] for m in group.members if m.trajectory] == rewards
            advantages = [member.advantage for member in group.members]
            assert sum(a for a in advantages if a is not None) == pytest.approx(0, abs=1e-9)
            assert all(m.trajectory and m.trajectory["messages"] for m in group.members)
        async with open_stream(lab, server) as stream:
            timed_out = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            timed_out.cancel()
            await asyncio.wait([timed_out])
            again = await take(stream, len(held), ack=7)
            assert [g.group_id for g in again] == [g.group_id for g in held]
            assert all(group.again for group in again)
            before, now = (g[0].members[0].trajectory or {} for g in (held, again))
            names = ("messages", "metrics", "usage", "reward", "metadata", "started_at", "calls")
            for name in names:
                assert before[name] == now[name]
            more = await take(stream, 3, ack=10)
        # The trainer goes back to step 8: what it acknowledged later comes again.
        later = [g.group_id for g in (*again, *more)][2:]
        async with open_stream(lab, server, resume_step=8) as stream:
            restored = await take(stream, len(later))
            assert [g.group_id for g in restored] == later
            await asyncio.gather(*(group.ack(step=9) for group in restored))
            await restored[0].ack(step=9)
    events = load_run(lab.out).frame("deliveries")
    acknowledged = Counter(events[events["event"] == "acknowledged"]["group_id"])
    assert acknowledged == Counter({**{g.group_id: 1 for g in (*first, *again, *more)}}) + Counter(
        later
    )
    units = Counter(row["unit_id"] for row in lab.rows())
    assert set(units.values()) == {1}
    await check(lab)


async def test_with_ahead_0_a_group_starts_only_when_the_trainer_waits_for_it(lab: Lab) -> None:
    lab.write(TALK)
    async with start_server(policy=lambda request: "Well.") as server:
        stream = open_stream(lab, server, ahead=0)
        async with stream, asyncio.timeout(60):
            await take(stream, 1, ack=1)
            await asyncio.gather(*(anext(stream) for _ in range(3)))
    assert len(lab.rows()) == 4 * SIZE  # a rollout that was cut would be in `failures`
    assert not load_run(lab.out).failures.shape[0]


async def test_a_trainer_that_acknowledges_nothing_stops_the_rollouts_in_one_line(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    lab.write(TALK)
    async with start_server(policy=lambda request: "Well.") as server:
        stream = open_stream(lab, server, max_unacknowledged=3, concurrency=SIZE)
        async with stream, asyncio.timeout(60):
            taken = [await anext(stream) for _ in range(3)]
            waiting = asyncio.ensure_future(anext(stream))
            lines: list[str] = []
            while not lines:
                lines = [text for text in caplog.messages if "acknowledged" in text]
                await asyncio.sleep(0.01)
            assert not waiting.done()
            assert lines == [
                "no further group starts: 3 groups are neither acknowledged nor rejected. Call"
                " group.ack or group.reject, or set max_unacknowledged"
            ]
            assert len(stream.counts()) == 1
            await taken[0].ack(step=1)
            assert (await waiting).task_id not in {group.task_id for group in taken}
    with pytest.raises(UserError, match="max_unacknowledged must be at least 1"):
        open_stream(lab, None, max_unacknowledged=0)


async def test_refused_groups_are_stored_with_the_reason(lab: Lab) -> None:
    lab.write(TALK)
    selection = Selection(drop_equal=True, solve_rate=(0.5, 1.0), early_stop=2)
    async with start_server(policy=lambda request: "Well.") as server:
        stream = open_stream(lab, server, selection=selection, limit=20)
        async with stream:
            taken = [group async for group in stream]
            counts = stream.counts()
    # Of n % 5 solved members: the first two are equal for 0, 2, 3 and 4.
    assert {int(g.task_id[1:]) % 5 for g in taken} == set()
    assert counts["rejected equal_scores"] == 16
    assert counts["rejected too_hard"] == 4
    stored = load_run(lab.out).deliveries.set_index("task_id")
    assert stored.loc["n2", "reason"] == "equal_scores: the first 2 of 4 rewards are 1"
    assert stored.loc["n1", "reason"].startswith("too_hard: solve rate 0.25")
    rolled = Counter(row["task_id"] for row in lab.rows())
    assert rolled["n2"] == 2
    assert rolled["n1"] == SIZE


async def test_a_trainer_that_is_slow_holds_rollouts_back_and_pause_stops_them(lab: Lab) -> None:
    lab.write(TALK)
    async with start_server(policy=lambda request: "Well.") as server:
        policy = Policy(model="policy", base_url=server.base_url, tokens="off")
        async with open_stream(lab, server, ahead=2, policy=policy) as stream:
            await take(stream, 1)
            await asyncio.sleep(0.5)
            waiting = len(server.entries)
            assert waiting <= (1 + 2) * SIZE + 16
            await policy.pause()
            await take(stream, 2)
            async with asyncio.timeout(60):  # until what was sent before has arrived
                paused = -1
                while paused != (paused := len(server.entries)):  # noqa: ASYNC110
                    await asyncio.sleep(0.3)
            await policy.resume()
            await take(stream, 6)


ENDS = """
async def compute_reward(self, task, trajectory, ctx):
    if ctx.member:
        sys.exit(3)
    waited = asyncio.ensure_future(asyncio.sleep(9))
    waited.cancel()
    await waited
"""
UNSCORED = """
async def score_group(self, task, members, ctx):
    {}["a"]
"""


@pytest.mark.parametrize(
    ("body", "errors"),
    [
        (ENDS, ("compute_reward() raised SystemExit: 3", "compute_reward() raised CancelledError")),
        (UNSCORED, ("score_group() raised KeyError: 'a'",)),
    ],
)
async def test_an_environment_that_gives_no_rewards_ends_the_stream_with_its_error(
    lab: Lab, caplog: pytest.LogCaptureFixture, body: str, errors: tuple[str, ...]
) -> None:
    lab.write(TALK + body, "import asyncio, sys")
    with pytest.raises(RolloutsStopped, match="16 groups in a row got no reward") as raised:
        async with open_stream(lab, None, policy=Policy(model="noop"), group_size=2) as stream:
            await anext(stream)
    text = str(raised.value)
    assert any(f"environment made_up: {error} (" in text for error in errors)
    assert "\n" not in text
    for error in errors:
        (record,) = [one for one in caplog.records if error in one.getMessage()]
        assert "of task n" in record.getMessage()
        assert record.exc_info is None


async def test_an_engine_that_answers_errors_is_named_while_it_is_waited_for(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    lab.write(TALK)
    broken = FakeConfig(
        plays={"policy": lambda request: "Well."}, faults=FaultPlan(rates={"server_error": 1.0})
    )
    async with FakeServer(broken) as server, open_stream(lab, server) as stream:
        waiting = asyncio.create_task(anext(stream))
        async with asyncio.timeout(120):
            while "answers 500" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        waiting.cancel()
    assert "calls waiting; gives up in " in caplog.text


async def test_a_spent_budget_ends_the_stream_with_the_reason(lab: Lab) -> None:
    lab.write(TALK)
    async with start_server(policy=lambda request: "Well.") as server:
        async with open_stream(lab, server, budget_tokens=20_000) as stream:
            with pytest.raises(RolloutsStopped, match="budget"):
                await take(stream, 10_000, ack=1)
        async with open_stream(lab, server, budget_tokens=10**9) as stream:
            await take(stream, 2)


async def test_an_engine_whose_answers_cannot_be_trained_is_named(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no such route, since `/v1` is missing; or it returns logprobs of another model."""
    lab.write(TALK)
    tokenizer = write_tiny_tokenizer(lab.path / "tokenizer")

    def warnings() -> list[str]:
        found = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        caplog.clear()
        return [text for text in found if "token ids" in text or "trainable" in text]

    async with ExactEngine(ExactConfig(tokenizer=tokenizer)) as engine:
        policy = Policy(model="toy", base_url=engine.root_url)
        async with open_stream(lab, None, policy=policy) as stream:
            with pytest.raises(RolloutsStopped, match="; base_url does not end with /v1, which"):
                await anext(stream)
        (text,) = warnings()
        assert text.startswith("no token ids: 127.0.0.1")
        config = {"sandbox": {"backend": "none"}, "run": {"allow_unsandboxed": True}}
        config["model"] = {"temperature": 0.5}
        policy = Policy(model="toy", base_url=engine.base_url, tokens="vllm", tokenizer=tokenizer)
        env = str(lab.path / "made_up.py")
        async with rollouts(env, policy, out=lab.path / "warm", limit=1, config=config):
            (text,) = warnings()
        assert text.startswith("nothing will be trainable: logprobs are of the model before temp")


def test_a_synchronous_trainer_uses_the_same_stream(lab: Lab) -> None:
    lab.write(TALK)
    config = {"sandbox": {"backend": "none"}, "run": {"allow_unsandboxed": True}}
    env = str(lab.path / "made_up.py")
    with rollouts(
        env, Policy(model="noop"), out=lab.out, group_size=2, limit=3, config=config
    ).sync() as stream:
        for group in stream:
            group.ack(step=1)
    deliveries = load_run(lab.out).deliveries
    assert deliveries["event"].tolist() == ["acknowledged"] * 3


TRAINER = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[1])
from runs import Lab
from test_live import open_stream
from pathlib import Path
from types import SimpleNamespace

async def main():
    lab, server = Lab(Path(sys.argv[2])), SimpleNamespace(base_url=sys.argv[3])
    async with open_stream(lab, server, limit=int(sys.argv[4])) as stream:
        async for group in stream:
            print("got", group.group_id, flush=True)
            await group.ack(step=1)
            print("ack", group.group_id, flush=True)
    print("end", flush=True)

asyncio.run(main())
"""


async def train_until(
    lab: Lab, server: FakeServer, acks: int, limit: int
) -> tuple[list[str], bool]:
    """Run a trainer, and kill it after some acknowledgements. Returns those, and its end."""
    here = str(Path(__file__).parent)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TRAINER, here, str(lab.path), server.base_url, str(limit),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout
    seen: list[str] = []
    async for line in process.stdout:
        kind, _, name = line.decode().strip().partition(" ")
        if kind == "ack":
            seen.append(name)
            if len(seen) == acks:
                process.send_signal(signal.SIGKILL)
        if kind == "end":
            await process.wait()
            return seen, True
    await process.wait()
    return seen, False


async def kill_trainers(lab: Lab, server: FakeServer, kills: int, limit: int) -> list[str]:
    seen: list[str] = []
    for number in range(kills):
        more, _ = await train_until(lab, server, 1 + number % 3, limit)
        seen += more
    more, ended = await train_until(lab, server, 10**6, limit)
    assert ended
    return seen + more


async def test_each_group_is_acknowledged_exactly_once_over_kills(lab: Lab) -> None:
    lab.write(TALK)
    async with start_server(policy=lambda request: "Well.") as server:
        seen = await kill_trainers(lab, server, kills=2, limit=12)
    assert len(seen) == len(set(seen)), "an acknowledged group does not come again"
    events = load_run(lab.out).frame("deliveries")
    acknowledged = Counter(events[events["event"] == "acknowledged"]["group_id"])
    assert set(acknowledged.values()) == {1}
    assert set(seen) <= set(acknowledged)
    assert len(acknowledged) == 12
    assert set(Counter(row["unit_id"] for row in lab.rows()).values()) == {1}
    await check(lab)


async def test_segments_have_the_engines_tokens_also_when_delivered_again(lab: Lab) -> None:
    lab.write(TALK)
    tokenizer = write_tiny_tokenizer(lab.path / "tokenizer")
    engine = ExactEngine(ExactConfig(tokenizer=tokenizer, version="7"), chat=chat_of(tokenizer))
    async with engine:
        policy = Policy(
            model="toy", base_url=engine.base_url, tokens="vllm", tokenizer=tokenizer, version=7
        )
        held: list[LiveGroup] = []
        for again in (False, True):
            async with open_stream(lab, server=None, policy=policy, limit=3) as stream:
                groups = [group async for group in stream]
            assert [group.again for group in groups] == [again] * 3
            held += groups
    first, second = held[:3], held[3:]
    for before, now in zip(first, second, strict=True):
        assert before.group_id == now.group_id
        assert before.versions == now.versions == (7, 7)
        for one, other in zip(before.members, now.members, strict=True):
            assert one.segments
            assert one.segments == other.segments
            assert all(s.trajectory_id == one.trajectory_id for s in one.segments)
            assert any(s.trainable and any(s.loss_mask) for s in one.segments)


SCORED = """
async def score_group(self, task, members, ctx):
    if task.metadata["n"] == 1:
        raise ValueError("broken")
    return [m.member / 10 for m in members]
"""


async def test_an_environment_scores_whole_groups_before_they_are_delivered(lab: Lab) -> None:
    lab.write(TALK + SCORED)
    async with (
        start_server(policy=lambda request: "Well.") as server,
        open_stream(lab, server, limit=3) as stream,
    ):
        taken = {group.task_id: group async for group in stream}
        counts = stream.counts()
    assert set(taken) == {"n0", "n2"}
    assert [m.reward for m in taken["n2"].members] == [0.0, 0.1, 0.2, 0.3]
    assert counts["unscored"] == 1
    groups = load_run(lab.out).groups.set_index("task_id")
    assert "broken" in groups.loc["n1", "error"]
    await check(lab)


async def test_a_group_whose_rows_were_lost_is_rolled_out_again(lab: Lab) -> None:
    lab.write(TALK)
    async with start_server(policy=lambda request: "Well.") as server:
        async with open_stream(lab, server, limit=3) as stream:
            held = await take(stream, 3)
        for part in (lab.out / "trajectories").glob("*.parquet"):
            part.unlink()
        async with open_stream(lab, server, limit=3) as stream:
            groups = await take(stream, 3, ack=1)
    assert {group.group_id for group in groups} == {group.group_id for group in held}
    assert all(m.valid and m.trajectory for group in groups for m in group.members)


UNJUDGED = """
async def compute_reward(self, task, trajectory, ctx):
    if ctx.member in (1, 4) and task.metadata["n"] == 0:
        raise CannotJudge("this one")
    return float(ctx.member % 2)
"""


async def test_members_that_failed_are_replaced_also_after_a_restart(lab: Lab) -> None:
    lab.write(TALK + UNJUDGED)
    selection = Selection(refill=2)
    async with start_server(policy=lambda request: "Well.") as server:
        for again in (False, True):
            stream = open_stream(lab, server, selection=selection, limit=2)
            async with stream:
                groups = {group.task_id: group async for group in stream}
            assert {group.again for group in groups.values()} == {again}
            first = groups["n0"].members
            assert [m.index for m in first] == [0, 1, 2, 3, 4, 5]
            assert [m.why_invalid for m in first] == [
                None,
                "verifier",
                None,
                None,
                "verifier",
                None,
            ]
            assert [m.reward for m in first if m.valid] == [0.0, 0.0, 1.0, 1.0]
            assert [m.index for m in groups["n1"].members] == [0, 1, 2, 3]


async def test_a_group_arrives_when_its_last_member_has_ended(lab: Lab) -> None:
    go = lab.path / "go"
    lab.write(
        TALK.replace(
            "ctx):\n",
            f"ctx):\n    while task.metadata['n'] and not pathlib.Path({str(go)!r}).exists():\n"
            "        await asyncio.sleep(0.02)\n",
        ),
        "import asyncio, pathlib",
    )
    async with open_stream(lab, None, policy=Policy(model="noop")) as stream:
        assert [group.task_id for group in await take(stream, 1)] == [
            "n0"
        ]  # others are in progress
        go.touch()
        await take(stream, 1)


LEVELS = """
async def compute_reward(self, task, trajectory, ctx):
    level = task.metadata["level"]
    return {"0": 1.0, "1": float(ctx.member % 2), "2": 0.0}[level]
"""


async def test_a_curriculum_prefers_levels_that_are_solved_half_of_the_time(lab: Lab) -> None:
    lab.write(TALK + LEVELS)
    selection = Selection(curriculum=Curriculum(key="level", target=0.5, window=6))
    async with (
        start_server(policy=lambda request: "Well.") as server,
        open_stream(
            lab, server, selection=selection, limit=60, concurrency=SIZE, ahead=1
        ) as stream,
    ):
        taken = [group async for group in stream]
    levels = [int(group.task_id[1:]) % 3 for group in taken[6:18]]
    assert levels.count(1) >= 8
    stored = load_run(lab.out).deliveries
    skipped = stored[stored["event"] == "skipped"]
    assert len(skipped) > 0
    assert skipped["reason"].str.startswith("curriculum: ").all()
    assert not set(skipped["task_id"]) & {group.task_id for group in taken}
    assert len(skipped) + len(taken) == 60


@pytest.mark.slow
async def test_groups_come_from_ray_workers_of_which_one_is_killed(
    lab: Lab, cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.write(TALK)
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    async with (
        start_server(policy=lambda request: "Well.") as server,
        open_stream(lab, server, limit=12, workers=2) as stream,
    ):
        taken = await take(stream, 3, ack=1)
        alive = sorted((lab.out / "journal").glob("*/alive"))
        pids = [json.loads(path.read_bytes())["pid"] for path in alive]
        os.kill(next(pid for pid in pids if pid != os.getpid()), signal.SIGKILL)
        async for group in stream:
            taken.append(group)
            await group.ack(step=2)
    assert len({group.group_id for group in taken}) == len(taken) == 12
    for group in taken:
        assert all(member.valid and member.trajectory for member in group.members)
    assert set(Counter(row["unit_id"] for row in lab.rows()).values()) == {1}
    await check(lab)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group_size": 0}, "'dataset.repeats' must be 1 or more"),
        ({"group_size": "four"}, "'dataset.repeats' must be a whole number, not 'four'"),
        ({"group_size": 1}, "group_size 1 is less than selection.min_valid 2"),
        ({"concurrency": None, "ahead": 1.5}, "'ahead' must be a whole number, not 1.5"),
        ({"advantage": "x"}, "'advantage' must be 'grpo', 'rloo' or 'dr_grpo', not 'x'"),
        ({"ahead": -1}, "ahead must be at least 0"),
        ({"max_unacknowledged": None}, "'max_unacknowledged' must be a whole number"),
        ({"resume_step": -5}, "resume_step must be a whole number from 0 on, not -5"),
        ({"resume_step": "a"}, "resume_step must be a whole number from 0 on, not 'a'"),
        ({"selection": "drop_equal"}, "'selection' must be .* an instance of Selection"),
        ({"selection": {"gate": "x"}}, "'selection.gate' must be callable, not 'x'"),
        ({"selection": {"solve_rate": ["a", 1]}}, "'selection.solve_rate.0' must be a number"),
        ({"selection": {"refill": -1}}, "selection: refill must be a number of members from 0"),
        ({"selection": {"min_valid": -2}}, "selection: min_valid must be a number of members"),
        ({"staleness": "pace"}, "'staleness' must be .* an instance of Staleness"),
        ({"config": {"runn": 1}}, "unknown key 'runn'"),
        ({"config": [1]}, "is not a mapping of sections"),
        ({"env": 3}, "env: 3 is not a name, file.py:Class, a class or an environment"),
        ({"policy": "m"}, "policy: 'm' is not a hermes_rl.rl.Policy"),
        ({"out": None}, "out: None is not a folder"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments: Any, message: str) -> None:
    valid = {"env": "any", "policy": Policy(model="noop"), "out": "never"}
    with pytest.raises(UserError, match=message) as raised:
        rollouts(**{**valid, **arguments})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Curriculum(window=0), "curriculum: window must be at least 1 task, not 0"),
        (lambda: Curriculum(target=50), "curriculum: target is a solve rate from 0 to 1, not 50"),
        (lambda: RowFeed(None, None, size=0), "RowFeed: size must be at least 1, not 0"),
        (lambda: RowFeed(None, None, max_staleness=-1), "max_staleness must be at least 0, not -1"),
    ],
)
def test_wrong_options_are_refused_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


async def test_mistakes_of_a_trainer_are_one_line_and_lose_no_group(lab: Lab) -> None:
    lab.write(TALK)
    policy = Policy(model="noop")

    def refused(message: str) -> Any:
        return pytest.raises(UserError, match=message)

    with refused("rollouts.* is not open"):
        next(iter(open_stream(lab, None, policy=policy).sync()))
    async with open_stream(lab, None, policy=policy) as stream:
        group, late = await take(stream, 2)
        wrong: Any = "3"
        for step in (wrong, 1.5, -1):
            with refused("step must be a whole number from 0 on, not"):
                await group.ack(step)
        for version in (wrong, None, -1):
            with refused(f"version must be a whole number from 0 on, not {version!r}"):
                await policy.set_version(version)
        await policy.set_version(numpy.int64(3))
        with refused("set_version.2. after version 3: .* resume_step, or call these weights 4"):
            await policy.set_version(2)
        assert policy.version == 3
        await policy.set_version(2, in_pause=False)  # another program's trainer went back
        for reason in (None, " "):
            with refused("reason must say why the group is not used, not"):
                await group.reject(reason)
        await group.ack(numpy.int64(5))
    await policy.set_version(1)  # a rollback: the stream is opened again
    with refused("the stream is closed; the next start delivers this group again"):
        await late.ack(6)
    for gate, error in ((lambda _: {}["a"], "raised KeyError: 'a'"), (bool, "returned True; ret")):
        stream = open_stream(lab, None, policy=policy, selection=Selection(gate=gate))
        with refused(f"selection.gate {error}"):
            async with stream:
                await take(stream, 50)
    async with open_stream(lab, None, policy=policy) as stream:
        assert (await anext(stream)).group_id == late.group_id
    feed = RowFeed(open_stream(lab, None, policy=policy), policy)
    with refused("the feed is not open"):
        feed.take(1)
    with refused("a trainer needs exact tokens: this model gives no token ids"):
        await asyncio.to_thread(feed.start)
    assert {(row.event, row.step) for row in load_run(lab.out).deliveries.itertuples()} == {
        ("acknowledged", 5)
    }


PROGRAM = """
class Config(EnvConfig):
    sandboxed: bool = False
    toolsets: tuple[str, ...] | None = ()

class Numbers(Environment[Config]):
    name, Config = "numbers", Config

    def tasks(self, split, seed):
        return [make_task("One.", id="one")]

    async def compute_reward(self, task, trajectory, ctx):
        return float(ctx.member)

if __name__ == "__main__":
    config = {"sandbox": {"backend": "none"}, "run": {"allow_unsandboxed": True}}
    policy = Policy(model="noop")
    with rollouts(Numbers, policy, out=sys.argv[1], group_size=2, config=config).sync() as stream:
        for group in stream:
            print([member.reward for member in group.members])
"""


def test_a_program_may_define_its_environment_itself(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(f"import sys\nfrom hermes_rl.rl import *\nprint('loaded')\n{PROGRAM}")
    command = [sys.executable, program, tmp_path / "run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["loaded", "[0.0, 1.0]"]
