"""Answers that an engine cuts off, pauses, and weights that change: nothing is lost or redrawn."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import Lab

from hermes_rl.rl import LiveGroup, LiveMember, Policy, RolloutStream, Staleness, rollouts
from hermes_rl.store import load_run
from hermes_rl.testing import ExactConfig, ExactEngine, Truth, chat_of, write_tiny_tokenizer

TALK = """
class Config(EnvConfig):
    sandboxed: bool = False
    toolsets: tuple[str, ...] | None = ()

def tasks(self, split, seed):
    for n in range(1000):
        yield make_task(f"Number {n}.", id=f"n{n}")

async def reply(self, task, trajectory, ctx):
    return None if trajectory.turns >= 2 else UserMessage(content="Continue.")

async def compute_reward(self, task, trajectory, ctx):
    return float(ctx.member % 2)
"""
MODES = ("vllm", "vllm_generate", "sglang")


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(60):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def cut_all(engine: ExactEngine) -> None:
    """Cut all answers off in a pause, once what was sent before it has arrived; wait a moment."""
    async with asyncio.timeout(60):
        before = -1
        while before != (before := engine.requests):  # noqa: ASYNC110
            await asyncio.sleep(0.3)
    engine.running.abort_all()
    await asyncio.sleep(0.6)


def started_in(pauses: list[tuple[float, float]], rows: list[dict[str, Any]]) -> list[str]:
    """The calls of rows that started in pauses."""
    calls = [(call["call_id"], call["started_at"]) for row in rows for call in row["calls"]]
    return [name for name, at in calls if any(a < at.timestamp() < b for a, b in pauses)]


def make_engine(lab: Lab, **more: Any) -> ExactEngine:
    tokenizer = write_tiny_tokenizer(lab.path / "tokenizer")
    return ExactEngine(
        ExactConfig(tokenizer=tokenizer, version="1", **more), chat=chat_of(tokenizer)
    )


def open_stream(lab: Lab, policy: Policy, max_tokens: int = 48, **more: Any) -> RolloutStream:
    config = {
        "sandbox": {"backend": "none"},
        "run": {"allow_unsandboxed": True},
        "model": {"max_tokens": max_tokens},
    }
    more = {"group_size": 4, "concurrency": 16, "limit": 3, **more}
    return rollouts(str(lab.path / "made_up.py"), policy, out=lab.out, config=config, **more)


def policy_at(engine: ExactEngine, lab: Lab, tokens: str) -> Policy:
    tokens, folder = tokens.partition("_")[0], lab.path / "tokenizer"
    return Policy(model="toy", base_url=engine.base_url, tokens=tokens, tokenizer=folder)


def served(tokens: str) -> dict[str, Any]:
    """What the engine serves, if not everything."""
    return {"routes": frozenset({"/inference/v1/generate"})} if "_" in tokens else {}


@asynccontextmanager
async def updates(
    engine: ExactEngine, every_s: float, mode: Any, policy: Policy | None = None
) -> AsyncIterator[None]:
    """Update the weights again and again: cut all answers off, or freeze them.

    Args:
        policy: is paused meanwhile, and gets the version.
    """

    async def update() -> None:
        for version in range(2, 10_000):
            await asyncio.sleep(every_s)
            if policy is not None:
                await policy.pause()
            engine.running.pause(mode)
            engine.running.set_version(str(version))
            await asyncio.sleep(every_s / 10)
            if policy is not None:
                await policy.set_version(version)
            engine.running.resume()
            if policy is not None:
                await policy.resume()

    task = asyncio.create_task(update())
    try:
        yield
    finally:
        task.cancel()
        engine.running.resume()


def assert_all_tokens(
    groups: Iterable[LiveGroup], truth: Iterable[Truth], *, some_unknown: bool = False
) -> None:
    """Each token that the engine sampled is trained once, with its logprob and version."""
    by_call = {one.call_id: one for one in truth if one.sampled_ids}
    trained: list[str] = []
    for group in groups:
        for segment in (s for m in group.members for s in m.segments):
            starts = [*segment.call_starts, len(segment.input_ids)]
            for call_id, (start, following) in zip(segment.call_ids, pairwise(starts), strict=True):
                known = by_call[call_id]
                count = len(known.sampled_ids)
                if known.fault == "reset":  # all that arrived; the next call continues it
                    count = min(count, following - start)
                end, sampled = start + count, known.sampled_ids[:count]
                assert tuple(segment.input_ids[:end]) == (*known.prompt_ids, *sampled)
                assert segment.logprobs[start:end] == pytest.approx(known.raw_logprobs[:count])
                ends = [0, *(end for _, end in known.versions)]
                versions = [
                    int(version or -1)
                    for (version, end), begin in zip(known.versions, ends, strict=False)
                    for _ in range(end - begin)
                ][:count]
                found = segment.version_ids[start:end]
                if some_unknown:
                    versions = [-1 if f == -1 else v for f, v in zip(found, versions, strict=True)]
                assert found == versions
                if segment.loss_mask[start]:
                    assert all(segment.loss_mask[start:end])
                    trained.append(call_id)
    assert sorted(trained) == sorted(name for name in by_call if name)


@pytest.mark.parametrize("mode", ["abort", "keep"])
@pytest.mark.parametrize("tokens", MODES)
async def test_answers_continue_over_weight_updates_with_every_token(
    lab: Lab, tokens: str, mode: str
) -> None:
    lab.write(TALK)
    async with make_engine(lab, token_s=0.02, refuse_paused=True, **served(tokens)) as engine:
        async with (
            updates(engine, 0.3, mode),
            open_stream(lab, policy_at(engine, lab, tokens)) as stream,
        ):
            groups = [group async for group in stream]
        truth = [one for one in engine.truth if one.call_id and one.prompt_ids]
    assert len(groups) == 3
    rows = [m.trajectory for g in groups for m in g.members if m.trajectory]
    assert len(rows) == 12
    ids = {call["call_id"] for row in rows for call in row["calls"]}
    assert_all_tokens(groups, [one for one in truth if one.call_id in ids])
    assert not any("redrawn_answers" in row["metrics"] for row in rows)
    assert load_run(lab.out).failures.empty
    several = [
        s for g in groups for m in g.members for s in m.segments if len({*s.version_ids}) > 2
    ]
    assert several, "answers of several versions"
    assert all(s.policy_version_min != s.policy_version_max for s in several)
    assert any(one.finish == "abort" for one in truth) == (mode == "abort")


@pytest.mark.parametrize(
    ("tokens", "form"),
    [
        *((tokens, "cumulative") for tokens in ("vllm", "vllm_generate", "llamacpp")),
        *(("sglang", form) for form in ("cumulative", "incremental", "mixed")),
    ],
)
async def test_answers_whose_connections_are_closed_continue_after_the_first_ones(
    lab: Lab, tokens: str, form: Any
) -> None:
    """Answers are streamed from the first one on that is lost as a whole, and counted. The streams
    end after any byte, also as if they were complete, and the weights change meanwhile. SGLang's
    are ended after 128 tokens."""
    lab.write(TALK)
    answers = {"end_logit": -9.0, "token_s": 0.002, "stream_form": form, "whole_characters": True}
    closed = {"close_every": 60.0, "close_anywhere": True}
    async with make_engine(lab, **answers, **closed, **served(tokens)) as engine:
        policy = policy_at(engine, lab, tokens)
        async with (
            updates(engine, 0.2, "keep", policy),
            open_stream(lab, policy, max_tokens=180, limit=2) as stream,
        ):
            groups = [group async for group in stream]
        truth = {one.call_id: one for one in engine.truth if one.call_id}
    rows = [m.trajectory for g in groups for m in g.members if m.trajectory]
    assert len(rows) == 8
    calls = [call for row in rows for call in row["calls"]]
    kept = {c["call_id"] for c in calls if c["finish_reason"] is not None}
    assert_all_tokens(groups, [truth[name] for name in kept], some_unknown=True)
    cut = [c for c in calls if c["finish_reason"] == "abort"]
    assert any(len(row["calls"]) > row["turns"] + 1 for row in rows), "several closes in an answer"
    billed = {c["output_tokens"] for c in cut}
    assert None in billed, "what the engine billed is unknown"
    assert billed <= {None, 128}
    redrawn = sum(row["metrics"].get("redrawn_answers", 0) for row in rows)
    lost = [t for t in truth.values() if t.fault == "reset" and t.call_id not in kept]
    assert 0 < redrawn <= len(lost)
    assert load_run(lab.out).failures.empty


async def test_streams_that_leave_out_ids_are_drawn_again_as_a_whole(lab: Lab) -> None:
    """llama.cpp's streams have no ids of tokens that end within a character."""
    lab.write(TALK)
    async with make_engine(lab, end_logit=-9.0, close_every=60.0) as engine:
        async with open_stream(lab, policy_at(engine, lab, "llamacpp"), limit=2) as stream:
            groups = [group async for group in stream]
        truth = {one.call_id: one for one in engine.truth if one.call_id}
    rows = [m.trajectory for g in groups for m in g.members if m.trajectory]
    calls = [call for row in rows for call in row["calls"]]
    kept = [c["call_id"] for c in calls if c["finish_reason"] is not None]
    assert_all_tokens(groups, [truth[name] for name in kept], some_unknown=True)
    left_out = [c["error"] for c in calls if c["error"] and "the stream left out" in c["error"]]
    assert left_out
    redrawn = sum(row["metrics"].get("redrawn_answers", 0) for row in rows)
    assert redrawn == len(calls) - len(kept) > len(left_out)


@pytest.mark.parametrize("tokens", ["vllm", "sglang", "chat"])
async def test_a_version_of_a_whole_answer_is_null_where_weights_may_have_changed_within(
    lab: Lab, tokens: str
) -> None:
    """The engine names the version at the end of an answer, whatever sampled its beginning."""
    lab.write(TALK.replace(">= 2", ">= 1"))  # a chat template may fork within an earlier answer
    async with make_engine(lab, token_s=0.03, version_by="answer") as engine:
        policy = policy_at(engine, lab, tokens)
        # At the last update, some rollouts have not begun.
        async with open_stream(lab, policy, limit=6, concurrency=8) as stream:
            async with updates(engine, 0.4, "keep"):
                groups = [await anext(stream) for _ in range(3)]
            groups += [group async for group in stream]
        truth = [one for one in engine.truth if one.call_id and one.prompt_ids]
    assert_all_tokens(groups, truth, some_unknown=True)
    ids = [v for g in groups for m in g.members for s in m.segments for v in s.version_ids]
    assert any(v > 0 for v in ids), "answers after the last update"
    assert any(len(one.versions) > 1 for one in truth), "answers over an update"


@pytest.mark.parametrize("tokens", MODES)
async def test_weights_that_never_change_are_known_from_the_first_answer(
    lab: Lab, tokens: str
) -> None:
    """The call that finds out how to get ids names their version."""
    lab.write(TALK)
    async with make_engine(lab, version_by="answer", **served(tokens)) as engine:
        policy = policy_at(engine, lab, tokens)
        async with open_stream(lab, policy, limit=2) as stream:
            groups = [group async for group in stream]
        truth = [one for one in engine.truth if one.call_id and one.prompt_ids]
    ids = {call["call_id"] for g in groups for m in g.members for call in calls_of(m)}
    assert_all_tokens(groups, [one for one in truth if one.call_id in ids])


def calls_of(member: LiveMember) -> list[dict[str, Any]]:
    return [] if member.trajectory is None else list(member.trajectory["calls"])


@pytest.mark.parametrize(("version_by", "mode"), [("answer", "keep"), ("none", "abort")])
async def test_weights_that_a_trainer_announces_in_a_pause_are_certain(
    lab: Lab, version_by: Any, mode: str
) -> None:
    lab.write(TALK)
    async with make_engine(lab, token_s=0.01, version_by=version_by) as engine:
        policy = policy_at(engine, lab, "vllm")
        loop = updates(engine, 0.3, mode, policy)
        async with loop, open_stream(lab, policy, limit=6) as stream:
            groups = [group async for group in stream]
        truth = [one for one in engine.truth if one.call_id and one.prompt_ids]
    assert_all_tokens(groups, truth, some_unknown=True)
    known = {v for g in groups for m in g.members for s in m.segments for v in s.version_ids}
    assert max(known) >= 2, "answers that began and ended between two updates"


async def test_a_pause_stops_the_calls_of_all_workers_and_cut_answers_wait_for_its_end(
    lab: Lab,
) -> None:
    lab.write(TALK)
    async with make_engine(lab, token_s=0.02) as engine:
        policy = policy_at(engine, lab, "vllm")
        async with open_stream(lab, policy) as stream:
            await until(lambda: engine.requests >= 12 and any(engine.running.tokens))
            engine.running.pause("keep")
            await policy.pause()
            paused = time.time()
            await cut_all(engine)
            pause = paused, time.time()
            await policy.set_version(2)
            engine.running.set_version("2")
            engine.running.resume()
            await policy.resume()
            groups = [group async for group in stream]
        truth = list(engine.truth)
    rows = [m.trajectory for g in groups for m in g.members if m.trajectory]
    assert len(rows) == 12
    ids = {call["call_id"] for row in rows for call in row["calls"]}
    assert_all_tokens(groups, [one for one in truth if one.call_id in ids])
    assert any(one.finish == "abort" and one.sampled_ids for one in truth)
    assert any(group.versions == (1, 2) for group in groups)
    assert started_in([pause], lab.rows()) == [], "no call, not even the rest of an answer"


TRAINER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from runs import Lab
from hermes_rl.rl import Policy
from test_weight_updates import open_stream

async def main():
    lab = Lab(Path(sys.argv[2]))
    tokenizer = lab.path / "tokenizer"
    policy = Policy(model="toy", base_url=sys.argv[3], tokens="vllm", tokenizer=tokenizer)
    async with open_stream(lab, policy, limit=8) as stream:
        async for group in stream:
            await group.ack(step=1)
            print("ack", flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_trainer_that_is_killed_during_weight_updates_loses_no_token(lab: Lab) -> None:
    """Each kill comes while the engine is paused, with all answers in progress cut off."""
    lab.write(TALK)
    command = [sys.executable, "-c", TRAINER, str(Path(__file__).parent), str(lab.path)]
    async with make_engine(lab, token_s=0.01) as engine:
        for kill in (True, True, False):
            process = await asyncio.create_subprocess_exec(
                *command, engine.base_url, stdout=asyncio.subprocess.PIPE
            )
            assert process.stdout
            assert await process.stdout.readline() == b"ack\n"
            if kill:
                engine.running.pause("abort")
                engine.running.set_version(str(int(engine.running.version or 0) + 1))
                process.kill()
            else:
                assert await process.stdout.read()
            assert await process.wait() == (-signal.SIGKILL if kill else 0)
            engine.running.resume()
        truth = list(engine.truth)
    run = load_run(lab.out)
    assert [*run.deliveries["event"]] == ["acknowledged"] * 8
    assert run.trajectories["unit_id"].is_unique
    assert len(run.trajectories) == 32
    ids = {call["call_id"] for row in lab.rows() for call in row["calls"]}
    final = set(run.trajectories["trajectory_id"])
    rows = [s for s in run.arrow("segments").to_pylist() if s["trajectory_id"] in final]
    segments = [SimpleNamespace(**row) for row in rows]
    kept: Any = [SimpleNamespace(members=[SimpleNamespace(segments=segments)])]
    assert_all_tokens(kept, [one for one in truth if one.call_id in ids])


@pytest.mark.slow
async def test_pauses_and_cut_answers_on_ray_workers(
    lab: Lab,
    cluster: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lab.write(TALK)
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    async with make_engine(lab, token_s=0.02, version_by="none") as engine:
        policy = policy_at(engine, lab, "vllm")
        async with open_stream(lab, policy, workers=2, limit=14) as stream:
            groups, pauses = [await anext(stream)], list[tuple[float, float]]()
            files = (lab.out / "journal").glob("*/alive")
            pids = [json.loads(path.read_bytes())["pid"] for path in files]
            stopped = next(pid for pid in pids if pid != os.getpid())
            os.kill(stopped, signal.SIGSTOP)
            pausing = asyncio.ensure_future(policy.pause())
            await until(lambda: "pause waits for workers that do not report" in caplog.text)
            assert not pausing.done()
            os.kill(stopped, signal.SIGCONT)
            await pausing
            await policy.resume()
            for version in (2, 3):
                await policy.pause()
                paused = time.time()
                await cut_all(engine)
                pauses.append((paused, time.time()))
                engine.running.set_version(str(version))
                await policy.set_version(version)
                await policy.resume()
                groups.append(await anext(stream))
            groups += [group async for group in stream]
        truth = [one for one in engine.truth if one.call_id]
    rows = [m.trajectory for g in groups for m in g.members if m.trajectory]
    assert len(rows) == 56
    ids = {call["call_id"] for row in rows for call in row["calls"]}
    assert_all_tokens(groups, [t for t in truth if t.call_id in ids], some_unknown=True)
    known = {v for g in groups for m in g.members for s in m.segments for v in s.version_ids}
    assert 3 in known, "the workers know what the trainer announces"
    assert started_in(pauses, lab.rows()) == [], "no call in any worker"
    assert not any("redrawn_answers" in row["metrics"] for row in rows)


@pytest.mark.slow
async def test_stale_rollouts_on_ray_workers_are_interrupted(
    lab: Lab, cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.write(TALK)
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    async with make_engine(lab, token_s=0.02) as engine:
        policy = policy_at(engine, lab, "vllm")
        await policy.set_version(1)
        more: dict[str, Any] = {"workers": 1, "limit": 4, "staleness": Staleness("cancel", 0)}
        async with open_stream(lab, policy, **more) as stream:
            engine.running.pause("keep")
            await until(lambda: len(engine.running.tokens) == 16)
            engine.running.set_version("2")
            await policy.set_version(2)
            assert [group async for group in stream] == [], "the frozen engine answered none"
    ended = lab.rows("failures")
    assert [row["cause"] for row in ended] == ["interrupted"] * 16
