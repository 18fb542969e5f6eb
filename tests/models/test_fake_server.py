"""The fake model server: answers, faults, its program and its log."""

import asyncio
import json
import os
import signal
import sys
import time

import pytest

from hermes_rl.errors import RateLimited
from hermes_rl.models import Endpoint, connect
from hermes_rl.testing import (
    KINDS,
    MIXED,
    FakeConfig,
    FakeServer,
    FaultPlan,
    plan_from_json,
    read_log,
)

STEPS = [
    {"text": "Let me see.", "reasoning": "hm", "calls": [
        {"name": "terminal", "arguments": {"command": "ls"}},
        {"name": "read_file", "arguments": {"path": "a"}},
    ]},
    "There are two files.",
]  # fmt: skip
PROMPT = "Count.\nSCRIPT: " + json.dumps(STEPS)
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": PROMPT}]


def official(server, **options):
    import openai  # late: half a second, which few processes need

    return openai.AsyncOpenAI(
        base_url=server.base_url, api_key="k", **{"max_retries": 0, **options}
    )


async def test_retries_of_official_clients_draw_new_faults():
    plan = FaultPlan(seed=1, rates={"rate_limit_after": 0.5}, retry_after_s=0.01)
    async with (
        FakeServer(FakeConfig(faults=plan)) as server,
        official(server, max_retries=20) as client,
    ):
        for i in range(6):
            messages = [{"role": "user", "content": f"{i}"}]
            await client.chat.completions.create(model="noop", messages=messages)
    outcomes = [entry.outcome for entry in server.entries]
    assert outcomes.count("served") == 6
    assert "refused" in outcomes


async def test_answers_are_a_function_of_the_request():
    async def bodies(stream):
        async with FakeServer() as server, official(server) as client:
            call = client.chat.completions.with_raw_response.create
            return [
                (await call(model="m", messages=MESSAGES, stream=stream)).http_response
                for _ in range(2)
            ]

    first, again = await bodies(False)
    (other, _) = await bodies(False)
    assert first.content == again.content == other.content


async def test_bad_requests_get_a_one_line_error():
    import openai

    async with FakeServer() as server, official(server) as client:
        for messages in ([{"role": "user", "content": "SCRIPT: [oops]"}], "no list"):
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="m", messages=messages)
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="m", input="x")


def test_faults_are_a_seeded_function_of_the_request():
    plan = FaultPlan(seed=1, mixed=0.2)
    drawn = [plan.draw(f"call-{i}".encode()) for i in range(4000)]
    assert drawn == [plan.draw(f"call-{i}".encode()) for i in range(4000)]
    assert drawn != [FaultPlan(seed=2, mixed=0.2).draw(f"call-{i}".encode()) for i in range(4000)]
    assert 700 < sum(d is not None for d in drawn) < 900
    assert {d for d in drawn if d} == set(MIXED)
    assert all(FaultPlan(rates={kind: 1.0}).draw(b"x") == kind for kind in KINDS)


@pytest.mark.parametrize(
    "text", ['{"rates": {"no_such": 0.1}}', '{"mixed": 0.9, "rates": {"cut": 0.2}}', "{"]
)
def test_invalid_fault_plans_are_refused(text):
    with pytest.raises(ValueError):
        plan_from_json(text)


async def start(*arguments):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hermes_rl.testing.fake_server", "--until-eof", *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    return process, json.loads(await process.stdout.readline())


async def stop(process):
    process.stdin.close()
    async with asyncio.timeout(60):
        assert await process.wait() == 0


async def test_fake_server_runs_as_a_program(kit, tmp_path):
    log = tmp_path / "served.jsonl"
    process, hello = await start("--log", str(log), "--script", "echo-2", "--key", "k-12345")
    client, events = connect(Endpoint(hello["base_url"], api_key="k-12345")), kit.Events()
    conversation = await kit.rollout(kit.caller(client, events), model="m")
    await client.aclose()
    await stop(process)
    assert conversation[-1].content == "All 2 steps are done."
    entries = read_log(log)
    assert [entry.call_id for entry in entries] == [start.call_id for start in events.starts]
    assert [entry.n for entry in entries] == [1, 2, 3]


async def test_program_accepts_limits_clock_and_prices_as_json(kit):
    process, hello = await start(
        "--rate", '{"requests": 1, "schedule": [[30, 2]]}',
        "--conditions", '{"clock_scale": 2, "prices": {"*": {"input": "1", "output": 2.5}}}',
    )  # fmt: skip
    client = connect(Endpoint(hello["base_url"]))
    first = await client.complete(kit.request(model="noop"))
    with pytest.raises(RateLimited) as caught:
        await client.complete(kit.request(model="noop"))
    await client.aclose()
    await stop(process)
    assert first.rate_limit["x-ratelimit-limit-requests"] == "1"
    assert 0 < caught.value.retry_after_s <= 60


async def test_fake_server_can_be_stopped_during_requests(kit, tmp_path):
    """For kill tests: the k-th request is announced, and never answered."""
    log = tmp_path / "served.jsonl"
    process, hello = await start("--log", str(log), "--hold-at", "3")
    client, events = connect(Endpoint(hello["base_url"])), kit.Events()
    task = asyncio.create_task(kit.rollout(kit.caller(client, events)))
    async with asyncio.timeout(60):
        assert json.loads(await process.stdout.readline()) == {"request": 3}
    task.cancel()
    await asyncio.wait([task])
    await client.aclose()
    os.kill(process.pid, signal.SIGTERM)
    async with asyncio.timeout(60):
        assert await process.wait() == 0
    assert [entry.outcome for entry in read_log(log)] == ["served", "served", "dropped"]
    assert [end.outcome for end in events.ends] == ["ok", "ok", "cancelled"]


async def test_latency_is_applied(kit):
    prompt = 'SCRIPT: [{"text": "late", "latency_s": 0.2}]'
    async with FakeServer(FakeConfig(latency_s=0.1)) as server:
        client = connect(Endpoint(server.base_url))
        began = time.monotonic()
        answer = await client.complete(kit.request(prompt))
        await client.aclose()
    assert answer.message.content == "late"
    assert time.monotonic() - began > 0.29
    assert answer.first_byte_s >= 0.29
