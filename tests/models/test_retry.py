"""The one retry layer: what is tried again, how long, and that every request is recorded."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from hermes_rl import errors as e
from hermes_rl.events import CallEnded, CallStarted, Waited
from hermes_rl.messages import AssistantMessage
from hermes_rl.models import Completion, KeyNotRenewed, KeyRenewed
from hermes_rl.models.calls import Account, KeyPool, ModelCaller, RetryPolicy, Route
from hermes_rl.models.rate import Cooldowns, Limiter, Traffic


@pytest.fixture
def setup(kit):
    def made(*scripts, takes_s=0.0, **policy):
        """A caller with one account per script, on simulated time."""
        time, events = kit.FakeTime(), kit.Events()

        def before():
            time.now += takes_s

        # One account's limiter would pace it; several give way to each other before that.
        limit = {"clock": lambda: time.now} if len(scripts) == 1 else {}
        clients = [kit.Scripted(*script, before=before) for script in scripts]
        accounts = [
            Account("AB"[n], client, Limiter(64, **limit)) for n, client in enumerate(clients)
        ]
        route = Route("", KeyPool(accounts, Cooldowns(lambda: time.now), scope="h m"))

        def caller():
            return ModelCaller([route], events, RetryPolicy(**policy), clock=time.clock())

        async def call(**fields):
            async with asyncio.timeout(60):
                return await caller().call(kit.request(**fields), turn=1)

        async def waits_out(seconds):
            """Whether a call is answered once the server answers again after so long."""
            began, task = time.now, asyncio.create_task(call())
            await kit.until(lambda: time.now - began >= seconds, step=0)
            clients[0].outcomes = [kit.ANSWER]
            return await task is kit.ANSWER

        return SimpleNamespace(
            clients=clients, client=clients[0], time=time, events=events, call=call,
            caller=caller, waits_out=waits_out, sent=lambda: [len(c.call_ids) for c in clients],
        )  # fmt: skip

    return made


async def test_each_request_is_recorded_as_a_call(kit, setup):
    s = setup(
        (
            e.RateLimited("429", status=429, request_id="r1", retry_after_s=5),
            e.ProtocolError("cut", served=True),
            kit.ANSWER,
        )
    )
    answer = await s.caller().call(kit.request(), turn=3, purpose="summary", agent="sub")
    assert answer is kit.ANSWER
    assert s.client.call_ids == ["call-1", "call-2", "call-3"]
    started, ended = CallStarted, CallEnded
    kinds = [started, ended, Waited, started, ended, Waited, started, ended]
    assert [type(event) for event in s.events.all] == kinds
    assert [(x.outcome, x.retries, x.usage) for x in s.events.ends] == [
        ("refused", 0, None),
        ("cut", 1, None),
        ("ok", 2, kit.ANSWER.usage),
    ]
    first, last = s.events.ends[0], s.events.ends[2]
    assert (first.request_id, first.error, last.cost_usd) == ("r1", "RateLimited: 429", None)
    first = s.events.starts[0]
    assert (first.turn, first.purpose, first.agent, first.model) == (3, "summary", "sub", "echo")
    assert (first.max_input_tokens, first.max_output_tokens) == (11, None)
    # The hint, and jitter on top of it; then jitter alone. Waiting is not the model's time.
    assert s.time.slept == s.events.waited == [5.5, 1.0]
    assert all(x.latency_s == 0 for x in s.events.ends)


FINAL = (
    e.AuthError, e.BillingError, e.ModelNotFound, e.BadRequest, e.ContentFiltered,
    e.ContextOverflow, e.PayloadTooLarge,
)  # fmt: skip
BEGUN = (
    e.ProtocolError("cut", served=True),
    e.ModelTimeout("idle", served=True),
    e.ServerError("an error in the stream", served=True),
    e.ModelAborted("abort", served=True),
)


@pytest.mark.parametrize(
    ("error", "requests", "outcome"),
    [*((kind("no"), 1, "refused") for kind in FINAL), *((error, 4, "cut") for error in BEGUN)],
)
async def test_final_errors_are_not_retried_and_broken_answers_only_a_few_times(
    setup, error, requests, outcome
):
    s = setup((error,), max_attempts=4)
    with pytest.raises(type(error)):
        await s.call()
    assert s.sent() == [requests] == [len(s.time.slept) + 1]
    assert {x.outcome for x in s.events.ends} == {outcome}


async def test_ten_minutes_of_rate_limits_are_waited_for(setup):
    """An outage is bounded by time, not by a count, and pauses never exceed the cap."""
    s = setup((e.RateLimited("429"),))
    began = s.time.now
    assert await s.waits_out(600)
    assert max(s.time.slept) == 30
    assert sum(s.events.waited) == pytest.approx(s.time.now - began)


@pytest.mark.parametrize(
    "error",
    [
        e.ServerError("500", status=500),
        e.ServerError("502", status=502, served=True),
        e.Overloaded("529", status=529),
        e.ConnectionLost("reset", served=True),
        e.ConnectionLost("refused"),
    ],
)
async def test_failing_server_without_answers_is_waited_for(setup, error):
    assert await setup((error,), max_attempts=2).waits_out(600)


async def test_outage_is_raised_after_the_time_limit(setup):
    s = setup((e.Overloaded("529"),), outage_s=100)
    began = s.time.now
    with pytest.raises(e.Outage, match=r"no answer for .. s, the last error: 529") as caught:
        await s.call()
    assert (caught.value.cause, caught.value.reason) == ("outage", "overloaded")
    assert isinstance(caught.value.__cause__, e.Overloaded)
    assert 60 < s.time.now - began <= 100
    assert s.sent()[0] > 5


async def test_retry_after_is_obeyed_up_to_ten_minutes(kit, setup):
    s = setup((e.RateLimited("429", retry_after_s=3601), kit.ANSWER))
    assert await s.call() is kit.ANSWER
    assert s.time.slept == [600.5]


async def test_request_that_fails_while_others_succeed_is_given_up(kit, setup):
    """The request is at fault: the unit fails, and the run continues."""
    s = setup((e.ServerError("500: CUDA error", status=500),), max_attempts=4)
    task = asyncio.create_task(s.call())
    while not task.done():
        s.clients[0].outcomes, bad = [kit.ANSWER], s.clients[0].outcomes
        await s.call()
        s.clients[0].outcomes = bad
        await asyncio.sleep(0)
    with pytest.raises(e.ServerError):
        await task


async def test_retries_that_may_be_billed_twice_are_throttled(kit, setup):
    """40 rollouts meet an endpoint that loses every answer: a few retries at once, then a trickle
    until it answers again, and no rollout is lost."""
    s = setup((e.ConnectionLost("reset", served=True),))
    began = s.time.now
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(s.call()) for _ in range(40)]
        await kit.until(lambda: s.time.now - began >= 300, step=0)
        retries = s.sent()[0] - 40
        # INITIAL + 40 calls / 5 + one in EARN_S seconds
        assert 10 <= retries <= 10 + 8 + 400 / Traffic.EARN_S
        s.client.outcomes = [kit.ANSWER]
    assert all(call.result() is kit.ANSWER for call in calls)


def ended(reason, usage):
    return Completion(message=AssistantMessage(), finish_reason=reason, usage=usage)


@pytest.mark.parametrize(
    ("reason", "raised", "outcomes"),
    [("content_filter", e.ContentFiltered, ["ok"]), ("abort", None, ["cut", "ok"])],
)
async def test_withheld_answer_is_billed_and_retried_if_aborted(
    kit, setup, reason, raised, outcomes
):
    s = setup((ended(reason, kit.ANSWER.usage), kit.ANSWER))
    if raised:
        with pytest.raises(raised):
            await s.call()
    else:
        assert await s.call() is kit.ANSWER
    assert [(x.outcome, x.usage) for x in s.events.ends] == [
        (outcome, kit.ANSWER.usage) for outcome in outcomes
    ]


async def test_foreign_exceptions_are_classified_and_bugs_propagate(kit, setup):
    s = setup((ConnectionRefusedError(111, "refused"), kit.ANSWER))
    assert await s.call() is kit.ANSWER
    assert [x.outcome for x in s.events.ends] == ["refused", "ok"]
    assert s.events.ends[0].error.startswith("ConnectionLost: ConnectionRefusedError")
    s = setup((ZeroDivisionError("secret text"),))
    with pytest.raises(ZeroDivisionError):
        await s.call()
    assert (s.events.ends[0].outcome, s.events.ends[0].error) == ("unknown", "ZeroDivisionError")


async def test_cancelled_pause_ends_at_once_and_is_recorded(kit):
    client, events = kit.Scripted(e.RateLimited("429", retry_after_s=500)), kit.Events()
    limiter = Limiter(1)
    calling = ModelCaller([Route.single("", client, limiter)], events)
    task = asyncio.create_task(calling.call(kit.request(), turn=1))
    await kit.until(lambda: events.ends)
    task.cancel()
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (limiter.in_flight, len(events.waited), len(events.starts)) == (0, 1, 1)


async def test_waiting_for_a_slot_is_not_model_time(kit, stage):
    async with stage() as s:
        server = await s.server(latency_s=0.15)
        calling = s.caller(Route.single("noop", s.client(server), Limiter(1)))
        began = time.monotonic()
        await asyncio.gather(*(calling.call(kit.request(), turn=1) for _ in range(3)))
        assert server.peak_in_flight == 1
        assert sum(s.events.waited) >= 0.4
        assert sum(x.latency_s for x in s.events.ends) <= time.monotonic() - began


# Several keys


def busy(seconds):
    return e.RateLimited("429", status=429, retry_after_s=seconds)


NO = e.AuthError("401", status=401)
POOR = e.BillingError("402", status=402, retry_after_s=1.0)
ENDED = KeyNotRenewed("401: expired", status=401)


@pytest.mark.parametrize("seconds", [0.0, 1.0])
async def test_short_cooldowns_do_not_alternate_keys_forever(setup, seconds):
    s = setup((busy(seconds),), (busy(seconds),), takes_s=2.0, outage_s=120.0)
    with pytest.raises(e.Outage):
        await s.call()
    assert sum(s.time.slept) > 60, "between two rounds there is a pause"
    assert sum(s.sent()) < 40


@pytest.mark.parametrize("error", [NO, POOR])
async def test_two_refused_keys_end_the_call(setup, error):
    s = setup((error,), (error,), takes_s=2.0)
    with pytest.raises(type(error)):
        await s.call()
    assert sum(s.sent()) <= 3


async def test_rate_limited_key_is_waited_for_if_the_other_is_refused(kit, setup):
    s = setup((busy(30.0), busy(30.0), kit.ANSWER), (NO,), takes_s=2.0)
    assert await s.call() is kit.ANSWER
    assert s.sent() == [3, 1]
    assert sum(s.time.slept) >= 30


async def test_expired_key_is_renewed_or_replaced_or_waited_for(kit, setup):
    s = setup((KeyRenewed("401: expired", status=401), kit.ANSWER))
    assert await s.call() is kit.ANSWER
    assert (s.sent(), s.time.slept) == ([2], [])
    s = setup((*[ENDED] * 40, kit.ANSWER))
    assert await s.call() is kit.ANSWER
    assert sum(s.time.slept) > 300
    s = setup((ENDED,), (kit.ANSWER,))
    assert await s.call() is kit.ANSWER
    assert (s.sent(), s.time.slept) == ([1, 1], [])
    with pytest.raises(e.Outage, match="the last error: 401: expired"):
        await setup((ENDED,), outage_s=100.0).call()
