"""Token-in clients when something is wrong: requests that cannot keep ids, servers that fail."""

import asyncio
from dataclasses import replace

import pytest
from engines_kit import (
    FREE,
    STEPS,
    WIRES,
    agree,
    client_at,
    client_of,
    continues,
    engine_at,
    kind,
    played,
    request_of,
    script,
    user_turn,
)
from simulated_time import with_sockets

from hermes_rl.errors import (
    ConnectionLost,
    ContextOverflow,
    ModelNotFound,
    ProtocolError,
    RateLimited,
    ServerError,
    UserError,
)
from hermes_rl.messages import AssistantMessage, UserMessage
from hermes_rl.models import (
    Completion,
    Conversation,
    Endpoint,
    ModelRequest,
    Sampling,
    TokenCapture,
)
from hermes_rl.models.calls import RetryPolicy, Route
from hermes_rl.models.rate import Limiter
from hermes_rl.models.tokens import ChatIdsClient, TokenClient, TokenWire, token_client
from hermes_rl.testing import FaultPlan, tiny_renderer


@pytest.mark.parametrize(
    "fields",
    [{"sampling": Sampling(stop=("</s>",))}, {"extra": {"stop": ["x"]}}, {"extra": {"n": 2}}],
)
async def test_options_that_break_ids_are_refused(tmp_path, fields):
    async with client_at("vllm", tmp_path / "t") as (engine, client):
        request = request_of(Conversation(user_turn("a")), **fields)
        with pytest.raises(UserError, match="exact tokens"):
            await client.complete(request)
    assert not engine.truth


@pytest.mark.parametrize("wire", WIRES)
async def test_sdk_transport_carries_ids(tmp_path, wire):
    async with engine_at(tmp_path / "t", split="random") as engine:
        endpoint = Endpoint(engine.base_url, transport="sdk", api_key="k")
        client = token_client(endpoint, tiny_renderer(), wire)
        _, answers = await played(client, user_turn(script({"run": "ls"}, "done")))
        await client.aclose()
    agree(answers, engine.truth, kind(wire))


async def test_images_are_refused_before_sending(tmp_path):
    async with client_at("vllm", tmp_path / "t") as (engine, client):
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
        request = request_of(Conversation([UserMessage(content=[picture])]))
        with pytest.raises(UserError, match="image"):
            client.bound(request)
        with pytest.raises(UserError, match="image"):
            await client.complete(request)
    assert not engine.truth


FAULTS = {
    "server_error": ServerError,
    "rate_limit": RateLimited,
    "reset": ConnectionLost,
    "cut": ProtocolError,
    "garbage": ServerError,  # no answer at all, but a page
    "not_found": ModelNotFound,
}


@pytest.mark.parametrize(("fault", "error"), FAULTS.items())
@pytest.mark.parametrize("wire", WIRES)
async def test_failed_call_does_not_change_the_next_prompt(tmp_path, wire, fault, error):
    async with client_at(wire, tmp_path / "t", split="random") as (engine, client):
        steps = ({"run": "ls"}, [{"text": "lost", "fault": fault}, {"text": "found"}], "end")
        conversation, answers = await played(client, user_turn(script(*steps)), turns=1)
        conversation.append(UserMessage(content="And?"))
        with pytest.raises(error):
            await client.complete(request_of(conversation, 1))
        answer = await client.complete(request_of(conversation, 2))
    agree([*answers, answer], engine.truth, kind(wire))
    assert answer.message.content == "found"
    assert answer.tokens.source == "bridged"
    assert answer.tokens.fork_reason is None
    lost = [entry.prompt_ids for entry in engine.truth if entry.outcome == "cut"]
    assert all(prompt == answer.tokens.prompt_ids for prompt in lost)


@pytest.mark.parametrize(
    ("form", "pieces"),
    [
        *((form, [[128, 128, 256, 188], [128, 128, 256, 188]]) for form in ("cumulative", "mixed")),
        ("incremental", [[128, 572], [700]]),
    ],
)
async def test_sglang_streams_in_growing_pieces_only_where_events_repeat_the_answer(
    tmp_path, form, pieces
):
    seen = []
    async with client_at("sglang", tmp_path / "t", end_logit=-30.0, stream_form=form) as (
        engine,
        client,
    ):
        engine.faults = FaultPlan(rates={"reset": 1.0})
        with pytest.raises(ConnectionLost):
            await client.complete(request_of(Conversation(user_turn("a"))))
        engine.faults = FaultPlan()
        for number in range(len(pieces)):
            conversation = Conversation(user_turn(f"Number {number}."))
            sampling = Sampling(temperature=1.0, max_tokens=700)
            request = request_of(conversation, number, sampling=sampling)
            answer = await client.complete(request)
            seen.append([len(answer.tokens.completion_ids)])
            while answer.finish_reason == "abort":
                request = replace(request, partial=answer.partial)
                answer = await client.complete(request)
                seen[-1].append(len(answer.tokens.completion_ids))
            assert answer.finish_reason == "length"
    assert seen == pieces
    assert [len(one.sampled_ids) for one in engine.truth[1:]] == [
        n for each in pieces for n in each
    ]


@pytest.mark.parametrize("wire", WIRES)
async def test_prompt_beyond_the_window_is_an_overflow(tmp_path, wire):
    async with client_at(wire, tmp_path / "t", window=64) as (_engine, client):
        with pytest.raises(ContextOverflow) as refused:
            await client.complete(request_of(Conversation(user_turn("word " * 100))))
    assert refused.value.facts.context_limit == 64


async def test_concurrent_calls_keep_their_ids(tmp_path):
    slow = {"split": "random", "latency_s": 0.01}
    async with client_at("vllm", tmp_path / "t", **slow) as (engine, client):
        parallel = Conversation(user_turn("Say something."))
        same = [client.complete(request_of(parallel, n)) for n in range(8)]
        runs = [played(client, user_turn(script(*STEPS[:1], f"end {n}"))) for n in range(12)]
        together = await asyncio.gather(asyncio.gather(*same), asyncio.gather(*runs))
        parallel.append(together[0][0].message)
        parallel.append(UserMessage(content="Continue."))
        gone_on = await client.complete(request_of(parallel, 99))
    answers, played_runs = together
    truth = {entry.request_id: entry for entry in engine.truth}
    for answer in [*answers, *(a for _, run in played_runs for a in run)]:
        entry = truth[answer.request_id]
        assert answer.tokens.prompt_ids == entry.prompt_ids
        assert answer.tokens.completion_ids == entry.sampled_ids
    assert len({a.tokens.prompt_ids for a in answers}) == 1
    first = answers[0]  # seven calls later it is still known
    assert continues(gone_on, first)
    for n, (_, run) in enumerate(played_runs):
        assert run[-1].message.content == f"end {n}"


class Gated:
    """An engine whose first answer waits until it is let through."""

    api_mode, endpoint = "exact", "here"

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.prompts: list[tuple[int, ...]] = []

    def bound(self, request: ModelRequest) -> int:
        return 1

    async def complete(self, request: ModelRequest) -> Completion:
        self.prompts.append(request.prompt_ids)
        number = len(self.prompts)
        if number == 1:
            await self.gate.wait()
        if number == 2:
            raise ConnectionLost("the answer was lost")
        text = tuple(tiny_renderer().tokenizer.encode("Well."))
        tokens = TokenCapture(request.prompt_ids, text, (-0.5,) * len(text))
        return Completion(AssistantMessage(), "stop", None, tokens=tokens)

    async def aclose(self) -> None:
        pass


async def test_messages_added_during_a_call_are_not_in_its_prompt():
    engine = Gated()
    client = TokenClient(engine, tiny_renderer())
    conversation = Conversation(user_turn("Say."))
    first = asyncio.create_task(client.complete(request_of(conversation, 0)))
    await asyncio.sleep(0)
    assert len(engine.prompts) == 1
    conversation.append(UserMessage(content="And?"))
    with pytest.raises(ConnectionLost):
        await client.complete(request_of(conversation, 1))
    engine.gate.set()
    await first
    again = await client.complete(request_of(conversation, 2))
    assert engine.prompts[0] != engine.prompts[1] == engine.prompts[2]
    assert again.tokens.fork_reason != "retry"


@pytest.mark.parametrize("wire", WIRES)
def test_unset_sampling_is_sent_explicitly(wire):
    """A server's own defaults (a model's generation_config) would shape the distribution."""
    ends = tiny_renderer().end_ids
    request = request_of(Conversation(), sampling=Sampling())
    form = TokenWire(wire, ends).body(request, [1, 2])
    params = form.get("sampling_params", form)
    assert params["temperature"] == params["top_p"] == 1.0
    assert params["min_p"] == 0.0
    assert params["top_k"] == (0 if wire == "llamacpp" else -1)
    assert not params.get("stop")
    if wire != "llamacpp":  # which stops at its model's own, and strips nothing
        assert set(params["stop_token_ids"]) == ends
        assert params["skip_special_tokens"] is False


async def test_unknown_engine_is_reported():
    with pytest.raises(UserError, match="no token wire 'tgi'"):
        token_client(Endpoint("http://127.0.0.1:9/v1"), tiny_renderer(), "tgi")


@pytest.mark.parametrize("wire", [*WIRES, "chat"])
@with_sockets
async def test_busy_local_engine_is_waited_for(tmp_path, stage, wire):
    """It answers no call for longer than silence may last, but it answers other requests. SGLang on
    a CPU took two minutes for its first answers, and its runs were stopped after one."""
    async with engine_at(tmp_path / "t", latency_s=4.0) as engine, stage() as s:
        chat = wire == "chat"
        client = ChatIdsClient(s.client(engine)) if chat else client_of(engine, wire)
        s.stack.push_async_callback(client.aclose)
        policy = RetryPolicy(first_answer_s=2.0, silence_s=2.0)
        calling = s.in_loop_time(Route.single("toy", client, Limiter(64)), policy=policy)
        request = request_of(Conversation(user_turn("a")), sampling=replace(FREE, max_tokens=8))
        assert await asyncio.gather(*(calling.call(request, turn=1) for _ in range(3)))
        assert s.outcomes == ["ok"] * 3
