"""A budget limits the output of each call that it reserves for."""

import json
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from wire_kit import budget_of

from hermes_rl import errors as e
from hermes_rl.messages import UserMessage
from hermes_rl.models import Endpoint, Sampling, connect
from hermes_rl.models.calls import Route
from hermes_rl.models.errors import read_error_facts
from hermes_rl.models.providers import PriceTable, read_price
from hermes_rl.models.rate import NANO, OUTPUT_MAX, Budget, Limiter
from hermes_rl.testing import OUTPUT_CAP, PROMPT, WINDOW

DIALECTS = ("chat_completions", "codex_responses", "anthropic_messages")
PRICE = {"input": 1, "output": 2}


def sent(server):
    """The output bound that each request named, as the server logged it."""
    return [entry.max_tokens for entry in server.entries]


def priced(**more):
    return PriceTable(user_prices={"noop": read_price({**PRICE, **more})})


@pytest.mark.parametrize("mode", DIALECTS)
async def test_reserved_output_limit_is_sent_and_recorded(kit, stage, mode):
    custom = OUTPUT_MAX if mode == "anthropic_messages" else None  # this wire always names a bound
    async with stage() as s:
        server = await s.server()
        route = s.route(server, "noop", api_mode=mode)
        await s.caller(route).call(kit.request(), turn=1)
        assert (sent(server), s.events.starts[0].max_output_tokens) == ([custom], None)
        budget = budget_of(run_tokens=10**6)
        await s.caller(route, budget=budget).call(kit.request(), turn=1)
        await s.caller(route, budget=budget).call(
            kit.request(sampling=Sampling(max_tokens=77)), turn=1
        )
        assert sent(server) == [custom, OUTPUT_MAX, 77]
        assert [x.max_output_tokens for x in s.events.starts] == [None, OUTPUT_MAX, 77]


@pytest.mark.parametrize(
    ("budget", "prices", "bound"),
    [
        (budget_of(run_usd=NANO), priced(), OUTPUT_MAX),
        (budget_of(run_usd=NANO), priced(output_max=90_000), None),  # the table says it
        (budget_of(run_usd=NANO), priced(output=0), None),  # answers cost nothing
        (budget_of(run_usd=NANO), None, None),  # no price, so it takes nothing from the budget
        (budget_of(run_usd=NANO, run_tokens=10**6), None, OUTPUT_MAX),
        (budget_of(model_noop_tokens=10**6), None, OUTPUT_MAX),
        (budget_of(model_other_tokens=10**6), None, None),
        (Budget({}, limits={"unit:tokens": 10**6}), None, OUTPUT_MAX),
        (Budget(budget_of(run_tokens=10**6).leases, limits={"unit:usd": NANO}), None, OUTPUT_MAX),
        (Budget({}, limits={"unit:usd": NANO}), priced(), OUTPUT_MAX),
        (Budget(budget_of(run_usd=NANO).leases, limits={"unit:usd": NANO}), None, None),
    ],
)
async def test_calls_that_a_budget_limits(kit, stage, budget, prices, bound):
    async with stage() as s:
        server = await s.server()
        route = replace(s.route(server, "noop"), prices=prices)
        await s.caller(route, budget=budget).call(kit.request(), turn=1)
        assert sent(server) == [bound]


async def test_output_limit_in_extra_fields_is_used(kit, stage):
    async with stage() as s:
        server = await s.server()
        model_request = kit.request(extra={"max_completion_tokens": 60})
        await s.caller(s.route(server, "noop"), budget=budget_of(run_tokens=200)).call(
            model_request, turn=1
        )
        assert sent(server) == [60]
        assert [x.max_output_tokens for x in s.events.starts] == [60]
        with pytest.raises(e.CostLimit):
            await s.caller(s.route(server, "noop"), budget=budget_of(run_tokens=60)).call(
                model_request, turn=1
            )


class Noting(Limiter):
    """Keeps what calls were taken for."""

    def __init__(self):
        super().__init__(4)
        self.estimates = []

    def slot(self, estimate):
        self.estimates.append(estimate.output_tokens)
        return super().slot(estimate)


async def test_imposed_limit_is_not_an_output_estimate(kit, stage):
    async with stage() as s:
        limiter = Noting()
        route = Route.single("noop", s.client(await s.server()), limiter)
        calling = s.caller(route, budget=budget_of(run_tokens=10**6))
        for most in (None, 70):
            await calling.call(kit.request(sampling=Sampling(max_tokens=most)), turn=1)
        assert limiter.estimates == [0, 70]


@pytest.mark.parametrize(("total", "answer"), [(9000, 9500), (9000, 9000)])
def test_inconsistent_numbers_give_no_prompt_size(total, answer):
    text = f"context length is 8192 tokens. You requested {total} tokens ({answer} in the output)"
    assert read_error_facts(text) == e.Facts(context_limit=8192)


LEFT = WINDOW - PROMPT


@pytest.mark.parametrize(
    ("fault", "model_request", "limit", "bounds"),
    [
        ("over_cap", None, 10**6, [OUTPUT_MAX, OUTPUT_CAP, OUTPUT_CAP]),
        ("over_cap", 99_999, None, [99_999, OUTPUT_CAP, OUTPUT_CAP]),
        ("over_window", None, 10**6, [OUTPUT_MAX, LEFT, range(WINDOW // 8, LEFT)]),
        ("over_window", 5_000, None, [5_000, LEFT, range(WINDOW // 8, LEFT)]),
        ("over_window", 5_000, 10**6, [5_000, LEFT, range(WINDOW // 8, LEFT)]),
    ],
)
async def test_refused_output_limit_is_lowered_to_the_servers(
    kit, stage, fault, model_request, limit, bounds
):
    """A cap of the model is remembered, and so is its window."""
    async with stage() as s:
        server = await s.server()
        calling = s.caller(s.route(server), budget=limit and budget_of(run_tokens=limit))
        request = kit.request("hi", f"fault-{fault}", sampling=Sampling(max_tokens=model_request))
        for turn in (1, 2):
            await calling.call(request, turn=turn)
        found = sent(server)
        assert [x.max_output_tokens for x in s.events.starts] == found
        pairs = zip(found, bounds, strict=True)
        assert all(f in b if isinstance(b, range) else f == b for f, b in pairs)
        refused = [end.outcome == "refused" for end in s.events.ends]
        assert refused == [True, False, len(found) == 4, False][: len(found)]


NEW = (
    "'max_tokens' or 'max_completion_tokens' is too large: {most}. This model's maximum context"
    " length is {window} tokens and your request has {prompt} input tokens"
    " ({most} > {window} - {prompt})."
)
OLD = (
    "This model's maximum context length is {window} tokens. However, you requested {sum} tokens"
    " ({prompt} in the messages, {most} in the completion). Please reduce the length of the"
    " messages or completion."
)
SGLANG = (
    "Requested token count exceeds the model's maximum context length of {window} tokens. You"
    " requested a total of {sum} tokens: {prompt} tokens from the input messages and {most} tokens"
    " for the completion."
)
SILENT = "The prompt and the answer exceed the context window of this model."


@asynccontextmanager
async def small_window(stage, texts, limit=10**6):
    """(a caller, the log: prompt, bound, answered) at a server that refuses what does not fit."""
    log, window = [], 8192

    async def answer(request):
        body = await request.read()
        most = json.loads(body).get("max_tokens")
        prompt = len(body) // 4
        fits = prompt + (most or 1) <= window
        log.append((prompt, most, fits))
        if not fits:
            message = texts.format(
                most=most, window=window, prompt=prompt, sum=prompt + (most or 0)
            )
            error = {"message": message, "type": "BadRequestError", "code": 400}
            return web.json_response({"error": error}, status=400)
        reported = {"prompt_tokens": prompt, "completion_tokens": 3, "total_tokens": prompt + 3}
        choice = {"index": 0, "message": {"role": "assistant", "content": "so"}}
        return web.json_response(
            {"id": "x", "choices": [{**choice, "finish_reason": "stop"}], "usage": reported}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server, stage() as s:
        client = connect(Endpoint(str(server.make_url("/v1"))))
        s.stack.push_async_callback(client.aclose)
        budget = budget_of(run_tokens=limit) if limit else None
        yield s.caller(Route.single("m", client, Limiter(4)), budget=budget), log


async def talk(kit, calling, turns, chars):
    model_request = kit.request([UserMessage(content="x" * chars)])
    for turn in range(1, turns + 1):
        answer = await calling.call(model_request, turn=turn)
        model_request.conversation.append(answer.message)
        model_request.conversation.append(UserMessage(content="y" * chars))


@pytest.mark.parametrize("texts", [NEW, OLD, SGLANG])
async def test_small_window_costs_one_refused_call(kit, stage, texts):
    async with small_window(stage, texts) as (calling, log):
        await talk(kit, calling, 10, 2000)
    assert [fits for _, _, fits in log] == [False] + [True] * 10
    assert log[0][1] == OUTPUT_MAX
    # An estimate, never far below what the window leaves:
    assert all(8192 - prompt - most <= prompt // 8 for prompt, most, fits in log if fits)


@pytest.mark.parametrize("texts", [NEW, OLD, SGLANG])
@pytest.mark.parametrize("limit", [None, 10**6])
async def test_window_is_used_completely(kit, stage, texts, limit):
    """The last answers may use exactly what is left of the window."""
    async with small_window(stage, texts, limit) as (calling, log):
        await talk(kit, calling, 1, 4 * 8000)
    prompt, most, fits = log[-1]
    assert fits
    assert most == (8192 - prompt if limit else None)
    assert 8192 - prompt < 256


async def test_small_limit_is_tried_once_without_numbers(kit, stage):
    async with small_window(stage, SILENT) as (calling, log):
        await talk(kit, calling, 1, 400)
        assert [(most, fits) for _, most, fits in log] == [(OUTPUT_MAX, False), (4096, True)]
        with pytest.raises(e.ContextOverflow):
            await talk(kit, calling, 1, 40_000)
