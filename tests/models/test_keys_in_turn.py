"""Calls over several keys that are refused: nobody is asked for ever, and a key that only rests is
waited for."""

import asyncio

import pytest

from hermes_rl import errors as e
from hermes_rl.messages import AssistantMessage
from hermes_rl.models import Completion, KeyRenewed, NoNewKey
from hermes_rl.models.calls import Account, KeyPool, ModelCaller, RetryPolicy, Route
from hermes_rl.models.rate import Cooldowns, Limiter
from hermes_rl.usage import Usage

ANSWER = Completion(
    message=AssistantMessage(content="yes"),
    finish_reason="stop",
    usage=Usage(input_tokens=3, output_tokens=1),
)


class Slow:
    """A client whose requests take 2 seconds; it does what it is told, the last for ever."""

    api_mode = endpoint = "slow"

    def __init__(self, time, *outcomes):
        self.time, self.outcomes, self.asked = time, list(outcomes), 0

    async def complete(self, request):
        self.asked += 1
        self.time.now += 2.0
        await asyncio.sleep(0)
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, e.ModelError):
            raise outcome
        return outcome

    def bound(self, request):
        return 11

    async def aclose(self):
        pass


def setup(kit, *scripts, **policy):
    time = kit.FakeTime()
    clients = [Slow(time, *script) for script in scripts]
    accounts = [
        Account(name, client, Limiter(4))
        for name, client in zip("AB"[: len(clients)], clients, strict=True)
    ]
    pool = KeyPool(accounts, Cooldowns(lambda: time.now), scope="h m")
    calling = ModelCaller(
        [Route(model="m", accounts=pool)], kit.Events(), RetryPolicy(**policy), clock=time.clock()
    )
    return clients, time, calling


def busy(seconds):
    return e.RateLimited("429", status=429, retry_after_s=seconds)


@pytest.mark.parametrize("asked_to_wait", [0.0, 1.0])
async def test_keys_that_rest_shorter_than_a_request_takes_do_not_take_turns_for_ever(
    kit, asked_to_wait
):
    clients, time, calling = setup(
        kit, (busy(asked_to_wait),), (busy(asked_to_wait),), outage_s=120.0
    )
    async with asyncio.timeout(20):
        with pytest.raises(e.Outage):
            await calling.call(kit.request(), turn=1)
    assert sum(time.slept) > 60, "between two rounds there is a pause"
    assert sum(client.asked for client in clients) < 40


async def test_a_refused_key_beside_one_that_rests_for_its_rate_does_not_stop_the_run(kit):
    clients, time, calling = setup(
        kit, (busy(30.0), busy(30.0), ANSWER), (e.AuthError("401", status=401),)
    )
    assert await calling.call(kit.request(), turn=1) is ANSWER
    assert [client.asked for client in clients] == [3, 1]
    assert sum(time.slept) >= 30


async def test_two_refused_keys_stop_it(kit):
    no = e.AuthError("401", status=401)
    clients, _, calling = setup(kit, (no,), (no,))
    with pytest.raises(e.AuthError):
        await calling.call(kit.request(), turn=1)
    assert [client.asked for client in clients] == [1, 1]


async def test_two_accounts_without_credit_stop_it_however_soon_they_may_have_some(kit):
    poor = e.BillingError("402", status=402, retry_after_s=1.0)
    clients, _, calling = setup(kit, (poor,), (poor,))
    async with asyncio.timeout(20):
        with pytest.raises(e.BillingError):
            await calling.call(kit.request(), turn=1)
    assert sum(client.asked for client in clients) <= 3


def ended(kind=NoNewKey):
    return kind("401: expired", status=401)


async def test_a_new_key_is_tried_at_once(kit):
    (client,), time, calling = setup(kit, (ended(KeyRenewed), ANSWER))
    assert await calling.call(kit.request(), turn=1) is ANSWER
    assert (client.asked, time.slept) == (2, [])


async def test_an_ended_key_whose_command_has_no_other_is_waited_for(kit):
    _, time, calling = setup(kit, (*[ended()] * 40, ANSWER))
    async with asyncio.timeout(20):
        assert await calling.call(kit.request(), turn=1) is ANSWER
    assert sum(time.slept) > 300


async def test_another_key_is_asked_meanwhile(kit):
    clients, time, calling = setup(kit, (ended(),), (ANSWER,))
    assert await calling.call(kit.request(), turn=1) is ANSWER
    assert ([client.asked for client in clients], time.slept) == ([1, 1], [])


async def test_patience_with_a_command_has_an_end(kit):
    _, _, calling = setup(kit, (ended(),), outage_s=100.0)
    async with asyncio.timeout(20):
        with pytest.raises(e.Outage, match="the last error: 401: expired"):
            await calling.call(kit.request(), turn=1)
