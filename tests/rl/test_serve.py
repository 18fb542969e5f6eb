"""`hermes-rl env serve`: groups arrive at a trajectory API once, with their advantages."""

import asyncio
import json
import math
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from api_kit import Api
from atropos_requests import call, trainer
from forks import ForkedProcess
from hypothesis import given
from hypothesis import strategies as st
from runs import Lab, start

from hermes_rl.errors import UserError
from hermes_rl.rl import ServeOptions, grpo, rescale
from hermes_rl.store import load_run
from hermes_rl.testing import ExactConfig, ExactEngine, chat_of, write_tiny_tokenizer

SIZE = 4
TALK = """
class Config(EnvConfig):
    sandboxed: bool = False
    toolsets: tuple[str, ...] | None = ()
    group_size: int = 4

endless = True

def tasks(self, split, seed):
    n = 0
    while True:
        first = [[{"reasoning": f"r{n}", "text": "a"}, "b", {"reasoning": "q", "text": "c"}, "d"]]
        yield make_task(f"Number {n}.\\nSCRIPT: {json.dumps([*first, f'end {n}'])}\\n", id=f"n{n}")
        n += 1

async def reply(self, task, trajectory, ctx):
    return "Continue." if len(trajectory.answers) < 2 else None

async def compute_reward(self, task, trajectory, ctx):
    return ctx.member / 8
"""


@asynccontextmanager
async def engine_at(lab: Lab, family: str) -> AsyncIterator[ExactEngine]:
    tokenizer = write_tiny_tokenizer(lab.path / "tokenizer", family)
    config = ExactConfig(tokenizer=tokenizer, version="7")
    async with ExactEngine(config, chat=chat_of(tokenizer)) as engine:
        yield engine


async def serve(lab: Lab, engine: ExactEngine, api: Api, *more: str) -> ForkedProcess:
    lab.write(TALK, head="import json")
    return await start(
        "serve", lab.path / "made_up.py", "--api", api.url, "--model", "toy", "--base-url",
        engine.base_url, "--set", "endpoint.tokens=vllm", "--set",
        f"endpoint.tokenizer={engine.config.tokenizer}", "--out", lab.out, "--sandbox", "none",
        "--allow-unsandboxed", "--concurrency", "8", *more,
    )  # fmt: skip


async def finish(process: ForkedProcess) -> tuple[dict[str, Any], str]:
    """The report of a process, and its errors."""
    out, errors = await asyncio.wait_for(process.communicate(), 120)
    events = [json.loads(line) for line in out.decode().splitlines()]
    return next((event for event in events if event["event"] == "report"), {}), errors.decode()


class Trainer:
    """Takes batches as a trainer does, and repeats a request that gets no answer."""

    def __init__(self, api: Api, batch_size: int = 8, **registered: Any) -> None:
        self.api, self.attempt = api, 0
        self.groups: list[dict[str, Any]] = []
        assert api.post("/register", trainer(batch_size=batch_size, **registered))[0] == 200
        api.get("/batch")

    async def take(self, wanted: int, count: Callable[[Any], int] = lambda group: 1) -> None:
        """Take batches until their groups count so much."""
        await self.take_until(lambda: sum(map(count, self.groups)) >= wanted)

    async def take_until(self, done: Callable[[], bool]) -> None:
        """Take batches until a condition holds."""
        async with asyncio.timeout(120):
            while not done():
                try:
                    key = {"Idempotency_Key": f"b{self.attempt}"}
                    reply = await asyncio.to_thread(self.api.get, "/batch", **key)
                except (OSError, AssertionError):
                    await asyncio.sleep(0.05)
                    continue
                self.attempt += 1
                self.groups += reply["batch"] or ()
                if not reply["batch"]:
                    await asyncio.sleep(0.05)


def normalised(scores: list[float]) -> list[float]:
    """The advantages of a stock trainer of Atropos."""
    mean = math.fsum(scores) / len(scores)
    std = math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / len(scores))
    return [(score - mean) / max(std, 1e-8) for score in scores]


def trained(group: dict[str, Any]) -> list[tuple[int, ...]]:
    """The trained ids of each sequence of a group that has some."""
    masks = [tuple(i for i in mask if i != -100) for mask in group["masks"]]
    return [ids for ids in masks if ids]


async def test_rescaled_forks_give_a_stock_trainer_our_advantages(lab: Lab, tmp_path: Path) -> None:
    async with engine_at(lab, "qwen3") as engine:
        with Api(tmp_path) as api:
            learner = Trainer(api, batch_size=SIZE, max_token_len=-1)
            process = await serve(lab, engine, api, "--forks", "rescale", "--limit", "6")
            taking = learner.take(6 * (SIZE + 2), lambda group: len(trained(group)))
            (report, errors), _ = await asyncio.gather(finish(process), taking)
            assert (report["sent"], report["not_sent"]) == (6, 0), errors
    run = load_run(lab.out)
    segments = [s for s in run.arrow("segments").to_pylist() if any(s["loss_mask"])]
    assert len(segments) == 6 * (SIZE + 2), "two of four rollouts fork"
    stored = Counter(
        tuple(i for i, t in zip(s["input_ids"], s["loss_mask"], strict=True) if t) for s in segments
    )
    assert Counter(ids for group in learner.groups for ids in trained(group)) == stored
    advantages = {
        member: advantage
        for row in run.arrow("groups").to_pylist()
        for member, advantage in zip(row["trajectory_ids"], row["grpo"], strict=True)
    }
    expected = [advantages[s["trajectory_id"]] for s in segments]
    got = []
    for group in learner.groups:
        assert len(group["tokens"]) == SIZE
        assert group["generation_params"]["policy_version_min"] == 7
        for value, mask, sent in zip(
            normalised(group["scores"]), group["masks"], group["advantages"], strict=True
        ):
            if any(i != -100 for i in mask):
                assert value == pytest.approx(sent[0], abs=1e-6)
                got.append(value)
    assert sorted(got) == pytest.approx(sorted(expected), abs=1e-6)


async def test_a_template_that_forks_is_refused_before_any_rollout(
    lab: Lab, tmp_path: Path
) -> None:
    async with engine_at(lab, "qwen3") as engine:
        with Api(tmp_path) as api:
            Trainer(api)
            process = await serve(lab, engine, api, "--limit", "4")
            _, errors = await finish(process)
    assert process.returncode == 2
    assert errors.count("\n") == 1
    assert "the chat template makes conversations fork" in errors
    assert "--forks choose" in errors
    assert not any((lab.out / "trajectories").glob("*.parquet"))


async def test_a_chosen_branch_keeps_the_size_and_counts_its_loss(lab: Lab, tmp_path: Path) -> None:
    async with engine_at(lab, "qwen3") as engine:
        with Api(tmp_path) as api:
            learner = Trainer(api)
            process = await serve(lab, engine, api, "--forks", "choose", "--limit", "4")
            (report, errors), _ = await asyncio.gather(finish(process), learner.take(4))
    assert report["sent"] == 4, errors
    for group in learner.groups:
        assert group["scores"] == [0, 1 / 8, 2 / 8, 3 / 8]
    sent = sum(len(ids) for group in learner.groups for ids in trained(group))
    every = [s["loss_mask"] for s in load_run(lab.out).arrow("segments").to_pylist()]
    assert report["tokens"] == sum(map(sum, every))
    assert report["tokens"] - report["not_sent"] == sent
    assert report["not_sent"] > 0


async def test_over_long_sequences_and_equal_rewards_are_not_sent(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unequal_from_1 = TALK.replace("ctx.member / 8", "ctx.member / 8 * (task.id != 'n0')")
    monkeypatch.setitem(globals(), "TALK", unequal_from_1)
    async with engine_at(lab, "chatml") as engine:
        with Api(tmp_path) as api:
            Trainer(api, max_token_len=10)
            report, errors = await finish(await serve(lab, engine, api, "--limit", "2"))
    assert [report[n] for n in ("groups", "sent", "rejected")] == [2, 0, 2], errors
    assert report["rejected equal_scores"] == 1
    fates = load_run(lab.out).frame("deliveries")
    assert {event for event in fates["event"]} == {"rejected"}
    equal, long = sorted(fates["reason"])
    assert equal.startswith("equal_scores")
    assert "fewer than 10 tokens" in long


@pytest.mark.slow
async def test_kills_of_either_side_lose_and_double_no_group(lab: Lab, tmp_path: Path) -> None:
    async with engine_at(lab, "chatml") as engine:
        with Api(tmp_path) as api:
            learner = Trainer(api)
            total = 10
            more = ("--limit", str(total), "--max-batches-ahead", "2")
            process = await serve(lab, engine, api, *more)
            await learner.take(4)
            process.kill()
            await process.wait()
            api.kill()
            process = await serve(lab, engine, api, *more)
            await asyncio.to_thread(api.start)
            await learner.take(total)
            _, errors = await finish(process)
            assert process.returncode == 0, errors
            assert api.get("/batch") == {"batch": None}
    tasks = [ids for group in learner.groups for ids in trained(group)[:1]]
    assert len(tasks) == len(set(tasks)) == total


@asynccontextmanager
async def losing_replies(api: Api) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """The URL of a proxy that passes groups on and no reply to them, and whether one was lost."""
    lost = asyncio.Event()

    async def pump(source: asyncio.StreamReader, to: asyncio.StreamWriter, up: bool) -> None:
        groups = False
        while data := await source.read(1 << 16):
            groups = groups or b"/scored_data" in data
            if not up and sending:
                lost.set()
                continue
            if up and groups:
                sending.append(True)
            to.write(data)
        to.close()

    sending: list[bool] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, away = await asyncio.open_connection(api.host, api.port)
        await asyncio.gather(pump(reader, away, True), pump(there, writer, False))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", lost
    finally:
        server.close()


async def test_a_group_whose_reply_was_lost_arrives_once_with_other_options_too(
    lab: Lab, tmp_path: Path
) -> None:
    """With another weight it is another environment: the same key has another body."""
    async with engine_at(lab, "chatml") as engine:
        with Api(tmp_path) as api:
            learner = Trainer(api)
            async with losing_replies(api) as (url, lost):
                process = await serve(lab, engine, api, "--limit", "2", "--api", url)
                await asyncio.wait_for(lost.wait(), 60)
                process.kill()
                await process.communicate()
            process = await serve(lab, engine, api, "--limit", "2", "--weight", "2")
            await learner.take(2)
            _, errors = await finish(process)
            assert process.returncode == 0, errors
            assert api.get("/batch") == {"batch": None}
    assert len({ids for group in learner.groups for ids in trained(group)[:1]}) == 2


async def test_the_queue_bounds_how_far_an_environment_runs_ahead(lab: Lab, tmp_path: Path) -> None:
    async with engine_at(lab, "chatml") as engine:
        with Api(tmp_path) as api:
            learner = Trainer(api, num_steps=5)
            process = await serve(lab, engine, api, "--max-batches-ahead", "1")
            for _ in range(1000):
                await asyncio.sleep(0.05)
                if api.get("/status")["queue_size"] >= 2:
                    break
            await asyncio.sleep(2)  # two more looks at the status
            assert api.get("/status")["queue_size"] == 2
            await learner.take(10)  # five batches: the last step
            report, errors = await finish(process)
            assert report["sent"] >= 10, errors
            assert process.returncode == 0


async def test_groups_older_than_the_version_that_the_trainer_posts_are_withheld(
    lab: Lab, tmp_path: Path
) -> None:
    async with engine_at(lab, "chatml") as engine:
        with Api(tmp_path) as api:
            learner = Trainer(api)
            assert api.get("/policy_version") == {"version": None}
            process = await serve(lab, engine, api, "--staleness", "withhold", "--max-lag", "1")
            await learner.take(2)
            assert api.post("/policy_version", {"version": -1})[0] == 422
            assert api.post("/policy_version", {"version": 9})[0] == 200
            api.kill()
            api.start()
            assert api.get("/policy_version") == {"version": 9}

            def withheld() -> bool:
                reasons = [*load_run(lab.out).deliveries["reason"]]
                return "stale: version 7 at version 9, max_lag 1" in reasons

            # Older groups fill the queue of the API: unless they are taken, no new one starts.
            await learner.take_until(withheld)
            engine.running.set_version("9")

            def fresh(group: Any) -> int:
                return int(group["generation_params"]["policy_version_min"] == 9)

            await learner.take(2, fresh)
            process.send_signal(signal.SIGINT)
            await finish(process)
            metrics = api.send(call("GET", "/metrics"))[1].decode()
            assert "environments_connected 0" in metrics, "Ctrl-C leaves the API"


async def test_least_shares_are_in_every_batch_and_stopped_programs_lose_nothing(
    lab: Lab, tmp_path: Path
) -> None:
    """Two environments, each with half of the batch; SIGSTOP stops the API, then one of them."""
    async with engine_at(lab, "chatml") as engine:
        with Api(tmp_path) as api:
            learner = Trainer(api)
            half = ["--min-batch-allocation", "0.5", "--max-batches-ahead", "1", "--limit", "6"]
            served = [
                await serve(lab, engine, api, *half, "--out", str(lab.path / name)) for name in "ab"
            ]
            async with asyncio.timeout(120):
                while b"connected 2" not in api.send(call("GET", "/metrics"))[1]:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            await learner.take(4)
            for process in (api.process, served[0]):
                process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(1.5)
                process.send_signal(signal.SIGCONT)
                await learner.take(len(learner.groups) + 2)
            await learner.take(12)
            for process in served:
                report, errors = await finish(process)
                assert (process.returncode, report["sent"]) == (0, 6), errors
    pairs = list(zip(learner.groups[::2], learner.groups[1::2], strict=True))
    both = pairs[:4]  # neither has sent its last group and left
    assert all({a["env_id"], b["env_id"]} == {0, 1} for a, b in both)
    assert Counter(group["env_id"] for group in learner.groups) == {0: 6, 1: 6}
    texts = {(group["env_id"], str(group["tokens"])) for group in learner.groups}
    assert len(texts) == 12


@given(
    rewards=st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=12),
    branches=st.lists(st.integers(1, 4), min_size=12, max_size=12),
    absent=st.integers(0, 3),
)
def test_normalised_scores_of_rescaled_groups_are_the_advantages(
    rewards: list[float], branches: list[int], absent: int
) -> None:
    size = len(rewards)
    known = [None if index < min(absent, size - 2) else r for index, r in enumerate(rewards)]
    members = [a for a in grpo(known) if a is not None]
    values = [a for a, count in zip(members, branches, strict=False) for _ in range(count)]
    groups = rescale(values, size)
    assert sorted(index for taken, _ in groups for index in taken) == list(range(len(values)))
    for taken, fillers in groups:
        scores = [*(values[index] for index in taken), *fillers]
        assert len(scores) == size
        for index, value in zip(taken, normalised(scores), strict=False):
            assert value == pytest.approx(values[index], abs=1e-6)


@pytest.mark.parametrize(
    ("last", "error"),
    [
        ((401, b"no"), "401. It refuses the token (--api-token-env)"),
        ((200, b"{}"), "This server is not a trajectory API (hermes-rl api). Check the address"),
        ((404, b"no"), "404. This server is not a trajectory API"),
    ],
)
async def test_an_api_that_answers_nonsense_is_tried_again_and_a_wrong_one_is_named(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, last: tuple[int, bytes], error: str
) -> None:
    replies = iter(
        [
            (200, b"<html>Welcome</html>", "0"),
            (200, b"[]", "0"),
            (503, b"busy", "\u00b2"),
            (*last, "0"),
        ]
    )

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body, after = next(replies)
            self.send_response(status)
            self.send_header("Retry-After", after)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    monkeypatch.setenv("TOKEN", "old")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        api: Any = SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}")
        async with engine_at(lab, "chatml") as engine:
            process = await serve(lab, engine, api, "--api-token-env", "TOKEN", "--limit", "1")
            _, errors = await finish(process)
        server.shutdown()
    assert process.returncode == 2
    assert error in errors
    assert next(replies, None) is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"weight": math.nan}, "--weight nan is not a number above 0"),
        ({"weight": -1.0}, "--weight -1 is not a number above 0"),
        ({"min_batch_allocation": math.nan}, "--min-batch-allocation nan is not a number from 0"),
    ],
)
def test_shares_that_are_none_are_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=error):
        ServeOptions("http://127.0.0.1:8000", **options)
