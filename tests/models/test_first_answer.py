"""Endpoints that never answer, and endpoints that refuse every request."""

import asyncio
import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest
from simulated_time import with_sockets

from hermes_rl import errors as e
from hermes_rl.events import CallEnded
from hermes_rl.messages import UserMessage
from hermes_rl.models import Endpoint
from hermes_rl.models.calls import RetryPolicy, Route
from hermes_rl.models.rate import Limiter, Traffic
from hermes_rl.testing import Conditions, FaultPlan

FIRST = RetryPolicy(base_s=0.05, cap_s=0.2, outage_s=60.0, first_answer_s=1.0, silence_s=1.0)
"""Where there never was a sign of life a call ends after a second, else after a minute."""


def dead(kind):
    """From the start, for ever."""
    return Conditions(outages=((0, 1e9),), outage=kind)


@pytest.mark.parametrize("fault", ["server_error", "garbage", "reset", "held"])
@with_sockets
async def test_endpoint_that_never_answers_is_given_up_early(kit, stage, fault):
    """Errors, web pages, lost connections and silence alike, for all calls at once."""
    config = {"hold_at": 1} if fault == "held" else {"faults": FaultPlan(rates={fault: 1.0})}
    async with stage() as s:
        calling = s.in_loop_time(s.route(await s.server(**config), "noop"), policy=FIRST)
        time = asyncio.get_running_loop().time
        ended = await asyncio.gather(
            *(calling.call(kit.request(), turn=1) for _ in range(3)), return_exceptions=True
        )
        assert 1.0 <= time() < 1.5
        assert {type(one) for one in ended} == {e.Outage}
        assert all(str(one).startswith("nothing was answered within 1 s, the") for one in ended)
        assert all(str(one).count("127.0.0.1") <= 1 for one in ended)


@with_sockets
async def test_silence_after_an_error_names_the_endpoint_once(kit, stage):
    async with stage() as s:
        server = await s.server(hold_at=2, faults=FaultPlan(rates={"reset": 1.0}))
        with pytest.raises(e.Outage, match="broke off") as raised:
            await s.in_loop_time(s.route(server, "noop"), policy=FIRST).call(kit.request(), turn=1)
        assert str(raised.value).count("127.0.0.1") == 1


async def test_closed_port_is_given_up_early(kit, stage):
    async with stage() as s:
        route = s.route(SimpleNamespace(base_url="http://127.0.0.1:1/v1"), "noop")
        calling = s.caller(route, policy=replace(FIRST, silence_s=None))
        with pytest.raises(e.Outage, match="cannot reach"):
            await calling.call(kit.request(), turn=1)


@pytest.mark.parametrize("kind", ["unavailable", "overloaded", "rate_limit"])
async def test_loading_or_busy_server_is_waited_for(kit, stage, kind):
    """A model that is being loaded answers 503 for minutes, which is an answer."""
    async with stage() as s:
        server = await s.server(conditions=dead(kind))
        calling = s.caller(s.route(server, "noop"), policy=replace(FIRST, first_answer_s=0.2))
        task = asyncio.create_task(calling.call(kit.request(), turn=1))
        await kit.until(lambda: server.requests >= 5)
        await asyncio.sleep(0.5)
        assert not task.done()
        server.config = replace(server.config, conditions=Conditions())
        assert await task


async def test_endpoint_that_answered_once_gets_the_outage_limit(kit, stage):
    async with stage() as s:
        server = await s.server()
        calling = s.caller(s.route(server, "noop"), policy=replace(FIRST, first_answer_s=0.2))
        await calling.call(kit.request(), turn=1)
        server.config = replace(server.config, conditions=dead("server_error"))
        task = asyncio.create_task(calling.call(kit.request(), turn=2))
        await kit.until(lambda: server.requests >= 6)
        await asyncio.sleep(0.5)
        assert not task.done()
        server.config = replace(server.config, conditions=Conditions())
        assert await task


@with_sockets
async def test_busy_local_server_is_waited_for(kit, stage):
    """It answers no call for longer than silence may last, but it lists its models."""
    async with stage() as s:
        route = s.route(await s.server(latency_s=4.0), "noop")
        calling = s.in_loop_time(route, policy=replace(FIRST, silence_s=2.0))
        assert await asyncio.gather(*(calling.call(kit.request(), turn=1) for _ in range(3)))
        assert s.outcomes == ["ok"] * 3


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("localhost", True),
        ("192.168.1.7", True),
        ("8.8.8.8", False),
        ("api.example.com", False),
    ],
)
def test_only_loopback_and_private_addresses_are_local(host, local):
    assert Endpoint(f"http://{host}/v1").local is local


class Remote:
    """A client whose server is not local: it has no free sign of life."""

    def __init__(self, client):
        self.complete, self.bound, self.aclose = client.complete, client.bound, client.aclose
        self.api_mode, self.endpoint = client.api_mode, client.endpoint


@with_sockets
async def test_slow_model_that_answers_a_probe_is_waited_for(kit, stage):
    """After half the time without a byte the model gets a short probe, once, beside the queue."""
    slow = [UserMessage(content='SCRIPT: [{"text": "done", "latency_s": 1.5}]')]
    async with stage() as s:
        client = Remote(s.client(await s.server()))
        route = Route.single("noop", client, Limiter(64))
        calling = s.in_loop_time(route, policy=FIRST)
        answers = await asyncio.gather(*(calling.call(kit.request(slow), turn=1) for _ in range(3)))
        assert [a.message.content for a in answers] == ["done"] * 3
        assert sorted(start.purpose for start in s.events.starts) == ["agent"] * 3 + ["probe"]


@with_sockets
async def test_first_streamed_text_marks_the_endpoint_alive(kit, stage):
    """It stalls in the middle for longer than silence may last, and is not taken for silence."""
    plan = FaultPlan(rates={"stall_mid": 1.0}, stall_s=2.0)
    async with stage() as s:
        route = s.route(await s.server(script="echo", faults=plan), "noop")
        calling = s.in_loop_time(route, policy=replace(FIRST, outage_s=0.1, max_attempts=1))
        with pytest.raises(e.ModelError) as raised:
            await calling.call(kit.request(stream=True), turn=1)
        assert "nothing was answered within" not in str(raised.value)


@pytest.mark.parametrize("full", [False, True])
async def test_cancelled_call_of_a_silent_model_is_recorded(
    kit, stage, monkeypatch, full, loop_reports
):
    """A full disk, which prevents that, is not reported by the event loop, with a traceback."""

    def record(event):
        if isinstance(event, CallEnded):
            raise e.DiskFull("the disk is full")

    async with stage() as s:
        if full:
            monkeypatch.setattr(s.events, "record", record)
        server = await s.server(hold_at=1)
        calling = s.caller(s.route(server, "noop"), policy=replace(FIRST, silence_s=60.0))
        task = asyncio.create_task(calling.call(kit.request(), turn=1))
        await kit.until(lambda: server.requests == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 240)
        del task
        gc.collect()
        assert loop_reports == []
        assert s.outcomes == ([] if full else ["cancelled"])


@with_sockets
async def test_fallback_is_used_if_the_first_model_never_answers(kit, stage):
    async with stage() as s:
        silent, sound = await s.server(hold_at=1), await s.server()
        calling = s.in_loop_time(s.route(silent, "noop"), s.route(sound, "noop"), policy=FIRST)
        assert await calling.call(kit.request(), turn=1)


async def test_identical_refusals_stop_requests(kit, stage):
    """Ten calls; then nothing is sent. An answer between them begins the count again."""
    async with stage() as s:
        server = await s.server()
        route = s.route(server, "noop")
        calling = s.caller(route, policy=replace(FIRST, refusals=10))
        refuse = replace(server.config, faults=FaultPlan(rates={"bad_request": 1.0}))
        for first in (9, 10):
            server.config = refuse
            for _ in range(first):
                with pytest.raises(e.BadRequest, match="Invalid value"):
                    await calling.call(kit.request(), turn=1)
            if first == 9:
                server.config = replace(refuse, faults=FaultPlan())
                await calling.call(kit.request(), turn=1)
        sent = server.requests
        with pytest.raises(e.Outage, match=r"10 calls were refused in the same words.*: 400"):
            await calling.call(kit.request(), turn=1)
        assert server.requests == sent == 20


def test_refusals_are_identical_apart_from_numbers_and_ids():
    """Counts and request IDs make no difference."""
    traffic = Traffic()
    for text in ("no tools", "no images", "too long", "bad role"):
        traffic.note_refusal(e.BadRequest(f"400: {text}"))
    assert traffic.repeated_refusal(2) is None
    for n in range(3):
        traffic.note_refusal(e.BadRequest(f"400: {n} tokens are too many (req-{n}f)"))
    assert traffic.repeated_refusal(3) == "400: 2 tokens are too many (req-2f)"
