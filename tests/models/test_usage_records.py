"""Under faults, our record of each call is the server's own, to the token and the cent."""

import asyncio
from decimal import Decimal

import pytest

from hermes_rl.models import DIALECTS, Endpoint, connect
from hermes_rl.models.providers import Rates
from hermes_rl.testing import Conditions, FakeConfig, FakeServer, FaultPlan, Price

READ = {"input": Decimal(3), "output": Decimal(15), "cache_read": Decimal("0.3")}
SHORT, LONG = Decimal("3.75"), Decimal(6)
PRICES = {  # only Anthropic's wire tells what is written to a cache
    "chat_completions": (Rates(**READ), Price(**READ)),
    "codex_responses": (Rates(**READ), Price(**READ)),
    "anthropic_messages": (
        Rates(**READ, cache_write_5m=SHORT, cache_write_1h=LONG),
        Price(**READ, cache_write=SHORT, cache_write_1h=LONG),
    ),
}
OUTCOMES = {"ok": "served", "refused": "refused", "cut": "cut"}


CACHED = [*((mode, "5m") for mode in DIALECTS), ("anthropic_messages", "1h")]
"""Only Anthropic's wire tells for how long something was written to a cache."""


@pytest.mark.parametrize("transport", ["http", "sdk"])
@pytest.mark.parametrize("stream", [False, True], ids=["body", "stream"])
@pytest.mark.parametrize(("mode", "cache"), CACHED)
async def test_usage_records_equal_the_servers_log(kit, mode, cache, stream, transport):
    rates, price = PRICES[mode]
    faults = FaultPlan(seed=5, mixed=0.3, retry_after_s=0.01, slow_s=0.01)
    config = FakeConfig(faults=faults, script="echo-3", conditions=Conditions(prices={"*": price}))
    async with FakeServer(config) as server:
        client = connect(Endpoint(server.base_url, api_mode=mode, transport=transport))
        events = kit.Events()
        calling = kit.caller(client, events)
        async with asyncio.TaskGroup() as group:
            for i in range(12):
                run = kit.rollout(calling, f"task {i}", "m", stream=stream, cache=cache)
                group.create_task(run)
        await client.aclose()
    served = {entry.call_id: entry for entry in server.entries}
    local = {end.call_id: end for end in events.ends}
    assert set(local) == set(served) == {start.call_id for start in events.starts}
    for call_id, end in local.items():
        entry = served[call_id]
        assert OUTCOMES[end.outcome] == entry.outcome, entry
        assert (end.usage is not None) == entry.reported
        if end.usage is None:
            continue
        assert end.usage.input_tokens == entry.prompt_tokens
        assert end.usage.output_tokens == entry.completion_tokens
        assert end.usage.cache_read_tokens == entry.cached_tokens
        assert (end.usage.cache_write_tokens or 0) == entry.cache_write_tokens
        assert rates.cost(end.usage) == entry.dollars
    reported = [end.outcome for end in local.values()]
    assert reported.count("ok") == 48
    assert {"refused", "cut"} & set(reported), "faults met at least one of some 60 requests"
