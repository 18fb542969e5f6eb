"""The one retry layer: what is tried again, how long, and that the books know every request."""

import asyncio

import pytest

from hermes_rl import errors as e
from hermes_rl.events import CallEnded, CallStarted, Waited
from hermes_rl.messages import AssistantMessage
from hermes_rl.models import Completion, Endpoint, connect
from hermes_rl.models.calls import ModelCaller, RetryPolicy, Route
from hermes_rl.models.rate import Limiter, Traffic
from hermes_rl.testing import FakeConfig, FakeServer, FaultPlan
from hermes_rl.usage import Usage

ANSWER = Completion(
    message=AssistantMessage(content="yes"),
    finish_reason="stop",
    usage=Usage(input_tokens=3, output_tokens=1),
)


class Scripted:
    """A client that raises or returns what it is told, call by call; the last one for ever."""

    api_mode = endpoint = "scripted"

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.call_ids = []

    async def complete(self, request):
        self.call_ids.append(request.call_id)
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def bound(self, request):
        return 11

    async def aclose(self):
        pass


def setup(kit, *outcomes, **policy):
    client, events, time = Scripted(*outcomes), kit.Events(), kit.FakeTime()
    limiter = Limiter(4, clock=lambda: time.now)
    route = Route.single("", client, limiter)
    calling = ModelCaller([route], events, RetryPolicy(**policy), clock=time.clock())
    return client, events, time, calling


async def test_each_request_is_a_call_of_its_own(kit):
    client, events, time, calling = setup(
        kit,
        e.RateLimited("429", status=429, request_id="r1", retry_after_s=5),
        e.ProtocolError("cut", served=True),
        ANSWER,
    )
    answer = await calling.call(kit.request(), turn=3, purpose="summary", agent="sub")
    assert answer is ANSWER
    assert client.call_ids == ["call-1", "call-2", "call-3"]
    assert [type(x) for x in events.all] == [
        CallStarted, CallEnded, Waited, CallStarted, CallEnded, Waited, CallStarted, CallEnded,
    ]  # fmt: skip
    assert [(x.outcome, x.retries, x.usage) for x in events.ends] == [
        ("refused", 0, None),
        ("cut", 1, None),
        ("ok", 2, ANSWER.usage),
    ]
    assert events.ends[0].request_id == "r1"
    assert events.ends[0].error == "RateLimited: 429"
    assert events.ends[2].cost_usd is None
    first = events.starts[0]
    assert (first.turn, first.purpose, first.agent, first.model) == (3, "summary", "sub", "echo")
    assert (first.max_input_tokens, first.max_output_tokens) == (11, None)
    # The hint, and jitter on top of it; then jitter alone. Waiting is not the model's time.
    assert time.slept == [5.5, 1.0]
    assert events.waited == [5.5, 1.0]
    assert all(x.latency_s == 0 for x in events.ends)


@pytest.mark.parametrize(
    "error",
    [
        e.AuthError, e.BillingError, e.ModelNotFound, e.BadRequest, e.ContentFiltered,
        e.ContextOverflow, e.PayloadTooLarge,
    ],
)  # fmt: skip
async def test_what_is_final_is_not_tried_again(kit, error):
    client, events, time, calling = setup(kit, error("no"))
    with pytest.raises(error):
        await calling.call(kit.request(), turn=1)
    assert len(client.call_ids) == 1
    assert time.slept == []
    assert events.ends[0].outcome == "refused"


async def test_ten_minutes_of_429_are_waited_out(kit):
    """An outage is bounded by time, not by a count, and pauses never exceed the cap."""
    client, events, time, calling = setup(kit, e.RateLimited("429"))
    began = time.now
    task = asyncio.create_task(calling.call(kit.request(), turn=1))
    await kit.until(lambda: time.now - began >= 600, step=0)
    client.outcomes = [ANSWER]
    assert await task is ANSWER
    assert max(time.slept) == 30
    assert sum(events.waited) == pytest.approx(time.now - began)


async def test_an_outage_ends_after_its_time(kit):
    client, _, time, calling = setup(kit, e.Overloaded("529"), outage_s=100)
    began = time.now
    with pytest.raises(e.Outage, match=r"no answer for .. s, the last error: 529") as caught:
        await calling.call(kit.request(), turn=1)
    assert (caught.value.cause, caught.value.reason) == ("outage", "overloaded")
    assert isinstance(caught.value.__cause__, e.Overloaded)
    assert 60 < time.now - began <= 100
    assert len(client.call_ids) > 5


async def test_a_hint_is_heeded_for_ten_minutes_at_most(kit):
    _, _, time, calling = setup(kit, e.RateLimited("429", retry_after_s=3601), ANSWER)
    assert await calling.call(kit.request(), turn=1) is ANSWER
    assert time.slept == [600.5]


@pytest.mark.parametrize(
    "error",
    [
        e.ProtocolError("cut", served=True),
        e.ModelTimeout("idle", served=True),
        e.ServerError("an error in the stream", served=True),
        e.ModelAborted("abort", served=True),
    ],
)
async def test_what_began_to_be_answered_is_tried_a_few_times_only(kit, error):
    client, events, _, calling = setup(kit, error, max_attempts=4)
    with pytest.raises(type(error)):
        await calling.call(kit.request(), turn=1)
    assert len(client.call_ids) == 4
    assert {x.outcome for x in events.ends} == {"cut"}


@pytest.mark.parametrize(
    "error",
    [
        e.ServerError("500", status=500),
        e.ServerError("502", status=502, served=True),
        e.ConnectionLost("reset", served=True),
    ],
)
async def test_a_server_in_trouble_is_waited_for_while_it_answers_nobody(kit, error):
    client, _, time, calling = setup(kit, error, max_attempts=2)
    began = time.now
    task = asyncio.create_task(calling.call(kit.request(), turn=1))
    await kit.until(lambda: time.now - began >= 600, step=0)
    client.outcomes = [ANSWER]
    assert await task is ANSWER


async def test_a_request_that_fails_where_others_are_answered_is_given_up(kit):
    """What is at fault then is the request: the unit fails, and the run goes on."""
    events, time = kit.Events(), kit.FakeTime()
    bad, good = e.ServerError("500: CUDA error", status=500), Scripted(ANSWER)
    ill = Scripted(bad)

    class Both(Scripted):
        async def complete(self, request):
            return await (ill if request.model == "ill" else good).complete(request)

    route = Route.single("", Both(), Limiter(8))

    def caller():
        return ModelCaller([route], events, RetryPolicy(max_attempts=4), clock=time.clock())

    task = asyncio.create_task(caller().call(kit.request(model="ill"), turn=1))
    while not task.done():
        await caller().call(kit.request(model="well"), turn=1)
        await asyncio.sleep(0)
    with pytest.raises(e.ServerError):
        await task
    assert len(ill.call_ids) == 5, "the first failure speaks of nobody"


async def test_retries_that_may_be_paid_twice_are_a_share_of_the_traffic(kit):
    """40 rollouts meet an endpoint that loses every answer: a few retries at once, then a trickle
    until it answers again, and no rollout is lost."""
    client, events, time, _ = setup(kit, e.ConnectionLost("reset", served=True))
    route = Route.single("", client, Limiter(64))
    callers = [ModelCaller([route], events, clock=time.clock()) for _ in range(40)]
    began = time.now
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(c.call(kit.request(), turn=1)) for c in callers]
        await kit.until(lambda: time.now - began >= 300, step=0)
        retries = len(client.call_ids) - 40
        # START + 40 calls / 5 + one in FLOOR_S seconds
        assert 10 <= retries <= 10 + 8 + 400 / Traffic.FLOOR_S
        client.outcomes = [ANSWER]
    assert all(call.result() is ANSWER for call in calls)


async def test_an_error_of_a_client_that_is_not_ours(kit):
    _, events, _, calling = setup(kit, ConnectionRefusedError(111, "refused"), ANSWER)
    assert await calling.call(kit.request(), turn=1) is ANSWER
    assert [x.outcome for x in events.ends] == ["refused", "ok"]
    assert events.ends[0].error.startswith("ConnectionLost: ConnectionRefusedError")


async def test_an_unreachable_server_is_waited_for(kit):
    client, _, _, calling = setup(kit, *[e.ConnectionLost("refused")] * 20, ANSWER, max_attempts=2)
    assert await calling.call(kit.request(), turn=1) is ANSWER
    assert len(client.call_ids) == 21


async def test_a_filtered_answer_is_paid_and_final(kit):
    filtered = Completion(
        message=AssistantMessage(), finish_reason="content_filter", usage=ANSWER.usage
    )
    client, events, _, calling = setup(kit, filtered)
    with pytest.raises(e.ContentFiltered):
        await calling.call(kit.request(), turn=1)
    assert len(client.call_ids) == 1
    assert (events.ends[0].outcome, events.ends[0].usage) == ("ok", ANSWER.usage)


async def test_an_aborted_answer_is_paid_and_asked_for_again(kit):
    aborted = Completion(message=AssistantMessage(), finish_reason="abort", usage=ANSWER.usage)
    _, events, _, calling = setup(kit, aborted, ANSWER)
    assert await calling.call(kit.request(), turn=1) is ANSWER
    assert [(x.outcome, x.usage) for x in events.ends] == [
        ("cut", ANSWER.usage),
        ("ok", ANSWER.usage),
    ]


async def test_a_bug_is_recorded_and_passes_through(kit):
    _, events, _, calling = setup(kit, ZeroDivisionError("secret text"))
    with pytest.raises(ZeroDivisionError):
        await calling.call(kit.request(), turn=1)
    assert (events.ends[0].outcome, events.ends[0].error) == ("unknown", "ZeroDivisionError")


async def test_prices_come_from_the_hook(kit):
    client, events = Scripted(ANSWER), kit.Events()
    calling = ModelCaller(
        [Route.single("", client, Limiter(1))],
        events,
        price=lambda model, usage: {"echo": 0.5}[model] * usage.output_tokens,
    )
    await calling.call(kit.request(), turn=1)
    assert events.ends[0].cost_usd == 0.5


async def test_cancelled_in_a_pause(kit):
    """At once, the slot free, the waiting recorded."""
    client, events = Scripted(e.RateLimited("429", retry_after_s=500)), kit.Events()
    limiter = Limiter(1)
    calling = ModelCaller([Route.single("", client, limiter)], events)
    task = asyncio.create_task(calling.call(kit.request(), turn=1))
    await kit.until(lambda: events.ends)
    task.cancel()
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert limiter.in_flight == 0
    assert len(events.waited) == 1
    assert len(events.starts) == 1


async def test_waiting_for_a_slot_is_not_the_models_time(kit):
    limiter, events = Limiter(1), kit.Events()
    async with FakeServer(FakeConfig(latency_s=0.15, script="noop")) as server:
        client = connect(Endpoint(server.base_url))
        calling = ModelCaller([Route.single("", client, limiter)], events)
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(calling.call(kit.request(model="noop"), turn=1))
        assert server.peak_in_flight == 1
        await client.aclose()
    assert sum(events.waited) >= 0.4
    assert sum(x.latency_s for x in events.ends) < sum(events.waited) + 0.45


@pytest.mark.parametrize("transport", ["http", "sdk"])
@pytest.mark.parametrize("stream", [False, True], ids=["body", "stream"])
async def test_the_books_are_the_servers(kit, transport, stream):
    """20 % mixed faults: call by call our record says what the server's log says."""
    faults = FaultPlan(seed=3, mixed=0.2, retry_after_s=0.01, slow_s=0.01)
    async with FakeServer(FakeConfig(faults=faults, script="echo-3")) as server:
        client, events = connect(Endpoint(server.base_url, transport=transport)), kit.Events()
        calling = kit.caller(client, events)
        async with asyncio.TaskGroup() as group:
            runs = [
                group.create_task(kit.rollout(calling, f"task {i}", "m", stream=stream))
                for i in range(60)
            ]
        await client.aclose()
    assert all(run.result()[-1].content == "All 3 steps are done." for run in runs)
    served = {entry.call_id: entry for entry in server.entries}
    ours = {end.call_id: end for end in events.ends}
    assert set(ours) == set(served) == {start.call_id for start in events.starts}
    expected = {"ok": "served", "refused": "refused", "cut": "cut"}
    for call_id, end in ours.items():
        entry = served[call_id]
        assert expected[end.outcome] == entry.outcome, entry
        assert (end.usage is not None) == entry.reported
        if end.usage is not None:
            assert end.usage.input_tokens == entry.prompt_tokens
            assert end.usage.output_tokens == entry.completion_tokens
            assert end.usage.cache_read_tokens == entry.cached_tokens
    outcomes = [end.outcome for end in ours.values()]
    assert outcomes.count("ok") == 240
    assert outcomes.count("refused") > 0
    assert outcomes.count("cut") > 0
    assert any(x.outcome == "ok" and x.usage is None for x in ours.values())
