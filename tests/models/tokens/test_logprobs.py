"""What logprobs are of, and how a run gets its ids: found out at a real engine, never assumed."""

import asyncio
import math
from dataclasses import replace

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from engines_kit import FREE, ROUTES, WIRES, engine_at, request_of, script, user_turn
from hypothesis import given
from hypothesis import strategies as st
from simulated_time import with_sockets

from hermes_rl.config_endpoint import EndpointSection
from hermes_rl.errors import AuthError, ProtocolError, UserError
from hermes_rl.messages import AssistantMessage
from hermes_rl.models import (
    Completion,
    Conversation,
    Endpoint,
    ModelRequest,
    Sampling,
    TokenCapture,
    connect,
)
from hermes_rl.models.providers import Probe, exact_clients
from hermes_rl.models.tokens import (
    ChatIdsClient,
    TokenPlan,
    classify_logprobs,
    client_for,
    load_renderer,
    logprobs_follow_filters,
)
from hermes_rl.testing import (
    FakeConfig,
    FakeServer,
    FaultPlan,
    log_softmax,
    tiny_renderer,
    write_tiny_tokenizer,
)
from hermes_rl.usage import Usage

logits = st.lists(st.floats(-8, 8), min_size=4, max_size=30, unique=True)


@given(logits, st.integers(3, 20))
def test_scaled_and_raw_logprobs_are_distinguished(values, most):
    table = dict(enumerate(values))
    raw, half = log_softmax(table), log_softmax(table, 0.5)
    best = sorted(table, key=lambda t: -table[t])[:most]
    reported = {t: raw[t] for t in best}
    if sum((raw[t] - raw[best[0]]) ** 2 for t in best) < 0.02:
        return  # all equally likely: undecidable
    assert classify_logprobs(reported, {t: half[t] for t in best}) == "sampling"
    assert classify_logprobs(reported, {t: raw[t] for t in best}) == "raw"


SAMPLINGS = {
    "free": Sampling(temperature=0.7, top_p=1.0, top_k=-1),
    "top_p": Sampling(temperature=1.0, top_p=0.5, top_k=-1),
    "top_k": Sampling(temperature=1.0, top_p=1.0, top_k=2),
    "min_p": Sampling(temperature=1.0, top_p=1.0, top_k=-1, min_p=0.3),
    "greedy": Sampling(temperature=0.0, top_p=1.0, top_k=-1),
}


@pytest.mark.parametrize("way", ["sglang", "vllm", "chat"])
@pytest.mark.parametrize("kind", ["scaled", "processed"])
async def test_logprobs_before_filters_are_unknown_under_filters(tmp_path, way, kind):
    text = {}
    async with engine_at(tmp_path / "t", logprobs=kind) as engine:
        plan = await search_at(engine).plan(way)
        client = client_for(plan, Endpoint(engine.base_url), load_renderer(tmp_path / "t"))
        for name, sampling in SAMPLINGS.items():
            request = request_of(Conversation(user_turn("Say.")), sampling=sampling)
            answer = await client.complete(replace(request, call_id=name))
            reported, entry = answer.tokens, engine.truth[-1]
            text[name] = reported.logprobs_kind
            if text[name] == "sampling" and name == "free":
                assert reported.logprobs == pytest.approx(entry.scaled_logprobs)
        await client.aclose()
    filters = "sampling" if kind == "processed" else "unknown"
    cut = dict.fromkeys(("top_p", "top_k", "min_p"), filters)
    assert text == {"free": "sampling", **cut, "greedy": "unknown"}
    reported = {name: "\n".join(plan.lines(sampling)) for name, sampling in SAMPLINGS.items()}
    in_vain = {name for name, lines in reported.items() if "nothing will be trainable" in lines}
    assert in_vain == {name for name, found in text.items() if found == "unknown"}


IN_VAIN = [
    ("raw", False, Sampling(), None),
    ("raw", False, SAMPLINGS["free"], "before temperature and filters. Use temperature 1"),
    ("raw", False, SAMPLINGS["top_p"], "before temperature and filters"),
    ("sampling", False, Sampling(), None),
    ("sampling", False, SAMPLINGS["free"], None),
    ("sampling", False, SAMPLINGS["top_p"], "do not show top_p, top_k, min_p. Leave these out"),
    ("sampling", True, SAMPLINGS["top_p"], None),
    ("sampling", True, SAMPLINGS["greedy"], "at temperature 0 the likeliest token is taken"),
    ("unknown", False, SAMPLINGS["top_p"], None),
]


@pytest.mark.parametrize(("kind", "filtered", "sampling", "text"), IN_VAIN)
def test_untrainable_logprobs_are_reported_at_the_start(kind, filtered, sampling, text):
    plan = TokenPlan(way="sglang", logprobs=kind, filtered=filtered)
    assert len(plan.lines()) == 1
    _, *more = plan.lines(sampling)
    assert [line for line in more if line.startswith("nothing will be trainable: ")] == more
    assert (text in more[0]) if text else not more


class Answering:
    """A chat client that keeps its requests and gives one answer."""

    api_mode, endpoint = "chat_completions", "here"

    sampled = (4, 5)

    def __init__(self, **usage: int) -> None:
        self.requests: list[ModelRequest] = []
        self._usage = Usage(**usage) if usage else None

    def bound(self, request: ModelRequest) -> int:
        return 1

    async def complete(self, request: ModelRequest) -> Completion:
        self.requests.append(request)
        tokens = TokenCapture((1, 2, 3), self.sampled, (-0.5, -0.25))
        return Completion(AssistantMessage(content="a"), "stop", self._usage, tokens=tokens)

    async def aclose(self) -> None:
        pass


async def test_chat_endpoint_gets_explicit_sampling():
    """vLLM takes a repetition penalty from a model's files (Qwen 2.5: 1.05), and llama.cpp min-p
    0.05 from itself: neither would show in the logprobs."""
    inner = Answering()
    client = ChatIdsClient(inner, kind="raw")
    answer = await client.complete(
        request_of(Conversation(user_turn("a")), sampling=Sampling(seed=3))
    )
    body = {**inner.requests[0].sampling.as_dict(), **inner.requests[0].extra}
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "seed": 3}
    off = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    off["return_weight_versions"] = True
    assert body == plain | off
    assert answer.tokens.sampling == inner.requests[0].sampling
    custom = {"repetition_penalty": 1.2}
    await client.complete(request_of(Conversation(user_turn("a")), sampling=FREE, extra=custom))
    assert inner.requests[1].extra == off | custom


@pytest.mark.parametrize(
    ("usage", "kept"),
    [
        ({}, True),
        ({"input_tokens": 3, "output_tokens": 2}, True),
        ({"input_tokens": 3, "output_tokens": 3}, False),
        ({"input_tokens": 4, "output_tokens": 2}, False),
    ],
)
async def test_incomplete_ids_are_not_trained_on(usage, kept):
    """An answer's end token that a server counts and does not give: what is left was not sampled
    as it stands."""
    client = ChatIdsClient(Answering(**usage), kind="sampling", filtered=True)
    answer = await client.complete(request_of(Conversation(user_turn("a"))))
    assert answer.tokens.completion_ids == (4, 5)
    assert (answer.tokens.logprobs is not None) == kept


async def test_ids_of_a_chat_endpoint_that_cannot_be_stored_are_refused():
    inner = Answering()
    inner.sampled = (4, 1 << 31)
    with pytest.raises(ProtocolError, match="at here returned token id 2147483648, outside of"):
        await ChatIdsClient(inner).complete(request_of(Conversation(user_turn("a"))))


@given(logits, st.integers(3, 20))
def test_logprobs_after_filters_are_detected(values, most):
    table = dict(enumerate(values))
    likely = sorted(table, key=lambda t: -table[t])[:most]
    open_, best = log_softmax(table), log_softmax({t: table[t] for t in likely[:2]})
    reported = {t: open_[t] for t in likely}
    assert not logprobs_follow_filters(reported, reported)
    assert logprobs_follow_filters(reported, best) == (
        sum(math.exp(open_[t]) for t in likely[:2]) < 0.98
    )
    assert not logprobs_follow_filters(reported, {})


async def test_logprobs_of_unprobed_places_are_unknown(tmp_path):
    async with (
        engine_at(tmp_path / "a", logprobs="processed") as first,
        engine_at(tmp_path / "b", logprobs="raw") as other,
    ):
        plan = await search_at(first, tokenizer=False).plan("chat")
        make = exact_clients(EndpointSection(tokens="chat"), plan, first.base_url)
        kinds = []
        for engine in (first, other):
            client = make(Endpoint(engine.base_url))
            answer = await client.complete(request_of(Conversation(user_turn("Say."))))
            kinds.append(answer.tokens.logprobs_kind)
            await client.aclose()
    assert kinds == ["sampling", "unknown"]


@pytest.mark.parametrize(
    ("at_one", "at_half"),
    [
        ({}, {}),
        ({1: -1.0}, {1: -1.0}),
        ({1: -1.0, 2: -1.0}, {1: -1.0, 2: -1.0}),
        ({1: -1.0, 2: -2.0}, {1: -1.0, 2: -2.5}),
        ({1: -1.0, 2: -2.0, 3: -3.0}, {1: -1.0, 2: -4.5, 3: -4.5}),
        ({1: -1.0, 2: -9999.0}, {1: -1.0, 2: -9999.0}),
        ({1: -1.0, 2: math.nan}, {1: -1.0, 2: math.nan}),
    ],
)
def test_undecidable_logprobs_are_unknown(at_one, at_half):
    assert classify_logprobs(at_one, at_half) == "unknown"


def search_at(engine, *, tokenizer: bool = True) -> Probe:
    renderer = load_renderer(engine.config.tokenizer) if tokenizer else None
    return Probe(Endpoint(engine.base_url), "toy", renderer)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("kind", ["raw", "scaled", "processed"])
async def test_auto_finds_the_available_route_and_its_logprobs(tmp_path, wire, kind):
    routes = frozenset({ROUTES[wire], ROUTES["chat"]})
    async with engine_at(tmp_path / "t", routes=routes, logprobs=kind) as engine:
        plan = await search_at(engine).plan("auto")
        by_name = await search_at(engine).plan("vllm" if wire.startswith("vllm") else wire)
    assert (plan.way, plan.logprobs) == (by_name.way, by_name.logprobs)
    assert plan.way == wire
    kind = "processed" if wire == "llamacpp" else kind  # it is asked for those after sampling
    assert plan.logprobs == ("raw" if kind == "raw" else "sampling")
    assert plan.filtered == (kind == "processed")
    looks = [wire, f"{wire}, T 0.5", *([] if kind == "raw" else [f"{wire}, top_k 2"])]
    looks += ["vllm_generate"] if wire == "vllm" else []  # whether it names versions of tokens
    assert [call.what for call in plan.calls][-len(looks) - 1 :] == [*looks, "tokenize"]
    assert plan.lines()[0] == f"token ids by {wire}; logprobs: {plan.logprobs}"


@pytest.mark.parametrize("named", [True, False])
async def test_the_route_of_vllm_that_names_the_versions_of_tokens_is_preferred(tmp_path, named):
    """vLLM 0.32 names them on its route for ids only, started with `--enable-scale-out`."""

    async def without_versions(request: web.Request) -> web.Response:
        url, body = engine.base_url.removesuffix("/v1") + request.path, await request.read()
        async with ClientSession() as session, session.post(url, data=body) as answer:
            form = await answer.json()
        for choice in form.get("choices", ()):
            if not named or "completions" in request.path:
                choice.pop("weight_versions", None)
        return web.json_response(form, status=answer.status)

    app = web.Application()
    app.router.add_post("/{path:.*}", without_versions)
    version = {"version": "1", "version_by": "token"}
    async with engine_at(tmp_path / "t", **version) as engine, TestServer(app) as server:
        probe = Probe(Endpoint(f"{server.make_url('/v1')}"), "toy", load_renderer(tmp_path / "t"))
        assert (await probe.plan("auto")).way == ("vllm_generate" if named else "vllm")


@pytest.mark.parametrize("spelling", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", ["raw", "scaled"])
async def test_chat_endpoint_gives_ids_without_a_tokenizer(tmp_path, spelling, kind):
    async with engine_at(tmp_path / "t", chat_ids=spelling, logprobs=kind) as engine:
        plan = await search_at(engine, tokenizer=False).plan("auto")
        assert (plan.way, plan.spelling) == ("chat", spelling)
        assert plan.logprobs == {"raw": "raw", "scaled": "sampling"}[kind]
        client = client_for(plan, Endpoint(engine.base_url), None)
        conversation = Conversation(user_turn(script({"text": "yes", "split": "random"})))
        request = replace(request_of(conversation), stream=spelling == "sglang")
        answer = await client.complete(request)
        await client.aclose()
        entry = engine.truth[-1]
    assert answer.tokens.prompt_ids == entry.prompt_ids
    assert answer.tokens.completion_ids == entry.sampled_ids
    reported = entry.raw_logprobs if kind == "raw" else entry.scaled_logprobs
    assert answer.tokens.logprobs == pytest.approx(reported)
    assert answer.tokens.logprobs_kind == plan.logprobs
    assert answer.tokens.source == "engine"


async def test_endpoint_without_ids_is_reported(tmp_path):
    async with engine_at(
        tmp_path / "t", chat_ids="none", routes=frozenset({ROUTES["chat"]})
    ) as engine:
        plan = await search_at(engine).plan("auto")
        assert not plan.exact
        assert "gives none with its answers. Rows get no segments" in plan.lines()[0]
        client = client_for(plan, Endpoint(engine.base_url), None)
        answer = await client.complete(request_of(Conversation(user_turn("Say."))))
        await client.aclose()
    assert answer.tokens is None


async def test_provider_that_ignores_the_request_gives_no_ids():
    async with FakeServer(FakeConfig(script="noop")) as server:
        plan = await Probe(Endpoint(server.base_url), "m").plan("auto")
    assert plan.way == "off"


@pytest.mark.parametrize(
    ("wanted", "tokenizer", "text"),
    [
        ("vllm", False, "endpoint.tokens=vllm needs endpoint.tokenizer"),
        ("sglang", True, "takes no prompt of ids (sglang: ModelNotFound"),
        ("llamacpp", True, "Use another one, or auto"),
        ("chat", True, "endpoint.tokens=chat: 127.0.0.1"),
    ],
)
async def test_route_requested_by_name_must_exist(tmp_path, wanted, tokenizer, text):
    async with engine_at(
        tmp_path / "t", chat_ids="none", routes=frozenset({"/v1/completions", ROUTES["chat"]})
    ) as engine:
        with pytest.raises(UserError) as refused:
            await search_at(engine, tokenizer=tokenizer).plan(wanted)
    assert text in str(refused.value)
    assert "\n" not in str(refused.value)


async def test_wrong_tokenizer_is_detected(tmp_path):
    from hermes_rl.testing import tokenizer_json

    other = write_tiny_tokenizer(tmp_path / "other")
    changed = tokenizer_json().replace('"normalizer":null', '"normalizer":{"type":"NFD"}')
    assert changed != tokenizer_json()
    (other / "tokenizer.json").write_text(changed, encoding="utf-8")
    async with engine_at(tmp_path / "t") as engine:
        search = Probe(Endpoint(engine.base_url), "toy", load_renderer(other))
        with pytest.raises(UserError, match="not the tokenizer of 'toy'"):
            await search.plan("vllm")


@with_sockets
async def test_an_engine_that_is_paused_at_the_start_is_named(tmp_path):
    async with engine_at(tmp_path / "t") as engine:
        engine.running.pause("keep")
        with pytest.raises(UserError, match=r"no answer within 60 s\. Is the engine paused"):
            await search_at(engine).plan("auto")


async def test_transient_probe_faults_are_retried_and_lasting_ones_reported(tmp_path):
    passing = FaultPlan(seed=13, rates={"rate_limit": 0.4, "reset": 0.2}, retry_after_s=0.01)
    async with engine_at(tmp_path / "t", faults=passing) as engine:
        plan = await search_at(engine).plan("auto")
        assert (plan.way, plan.logprobs) == ("vllm", "raw")
        assert any(call.error for call in plan.calls)
        answered = [call for call in plan.calls if call.error is None and call.what != "tokenize"]
        assert all(call.input_tokens and call.output_tokens == 1 for call in answered)
        for fault in ("rate_limit", "reset"):
            engine.faults = FaultPlan(rates={fault: 1.0}, retry_after_s=0.01)
            with pytest.raises(UserError, match="does not say how it gives token ids"):
                await search_at(engine).plan("auto")
        engine.faults = FaultPlan(rates={"auth": 1.0})
        with pytest.raises(AuthError):
            await search_at(engine).plan("vllm")


async def test_off_makes_no_probe():
    assert await Probe(Endpoint("http://127.0.0.1:9/v1"), "m").plan("off") == TokenPlan()
    endpoint = Endpoint("http://127.0.0.1:9/v1")
    clients = [client_for(TokenPlan(), endpoint, None), connect(endpoint)]
    assert type(clients[0]) is type(clients[1])
    for client in clients:
        await client.aclose()


async def test_forking_template_is_reported_at_the_start(tmp_path):
    async with engine_at(tmp_path / "t", family="qwen3") as engine:
        plan = await search_at(engine).plan("auto")
    assert any("reasoning" in line for line in plan.template)
    assert tiny_renderer("qwen3").preserves_prefix().lines() == list(plan.template)


async def test_doctor_shows_how_a_run_gets_ids(tmp_path):
    from hermes_rl.cli import Query, models

    async with engine_at(tmp_path / "t", logprobs="scaled") as engine:
        config = tmp_path / "run.yaml"
        config.write_text(
            f"endpoint:\n  base_url: {engine.base_url}\n"
            f"  tokenizer: {engine.config.tokenizer}\n  tokens: sglang\n"
        )
        found = await asyncio.to_thread(models, Query(model="toy", config=config))
    reported = [f for f in found if f.name == "exact tokens"]
    assert reported[0].good
    assert reported[0].text == "token ids by sglang; logprobs: sampling"
