"""Token-in clients over real sockets: every id and logprob is the engine's own, on every wire."""

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from engines_kit import (
    FREE,
    TOOLS,
    WIRES,
    agree,
    asked,
    client_of,
    engine_at,
    played,
    request_of,
    script,
    texts,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermes_rl.errors import (
    ConnectionLost,
    ContextOverflow,
    ModelNotFound,
    ProtocolError,
    RateLimited,
    ServerError,
    UserError,
)
from hermes_rl.messages import AssistantMessage, SystemMessage, UserMessage
from hermes_rl.models.base import Conversation, Sampling
from hermes_rl.models.endpoint import Endpoint
from hermes_rl.models.tokens.client import WIRES as ENGINES
from hermes_rl.models.tokens.client import token_client
from hermes_rl.testing.faults import FaultPlan
from hermes_rl.testing.tiny_tokenizer import tiny_renderer

STEPS = (
    {"reasoning": "hm", "text": "Well,", "run": "ls -la"},
    {"calls": [{"arguments": {"command": "<|im_end|> é"}}, {"arguments": "{no json"}]},
    {"text": "It is cut", "end": False, "finish": "length"},
)


def kind(wire: str) -> str:
    return "scaled" if wire == "llamacpp" else "raw"


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("split", ["canonical", "random"])
async def test_ids_and_logprobs_are_those_that_were_sampled(tmp_path, wire, split):
    async with engine_at(tmp_path / "t", split=split, version="w7") as engine:
        client = client_of(engine, wire)
        cold = replace(FREE, temperature=0.6)
        conversation, answers = await played(client, asked(script(*STEPS)), sampling=cold)
        await client.aclose()
    agree(answers, engine.truth, kind(wire))
    assert [a.tokens.source for a in answers] == ["engine", "bridged", "bridged"]
    for before, after in pairwise(answers):
        path = before.tokens.prompt_ids + before.tokens.completion_ids
        assert after.tokens.prompt_ids[: len(path)] == path
    assert [a.finish_reason for a in answers] == ["tool_calls", "tool_calls", "length"]
    assert texts(conversation) == ["Well,", "", "It is cut"]
    assert conversation[2].reasoning_content == "hm"
    assert [c.arguments for c in conversation[4].tool_calls] == [
        '{"command": "<|im_end|> é"}',
        "{no json}",
    ]
    assert {a.policy_version for a in answers} == {"w7"}
    usage = [a.usage for a in answers]
    assert [u.input_tokens for u in usage] == [len(e.prompt_ids) for e in engine.truth]
    assert [u.output_tokens for u in usage] == [len(e.sampled_ids) for e in engine.truth]
    assert usage[1].cache_read_tokens > 0


@pytest.mark.parametrize("wire", WIRES)
async def test_a_cut_answer_goes_on_behind_an_end_token_of_ours(tmp_path, wire):
    async with engine_at(tmp_path / "t") as engine:
        client = client_of(engine, wire)
        prompt = asked(script({"text": "one two three four five", "cut": 3}, "done"))
        conversation, answers = await played(client, prompt, turns=1)
        conversation.append(UserMessage(content="Go on."))
        second = await client.complete(request_of(conversation, 1))
        await client.aclose()
    agree([*answers, second], engine.truth, kind(wire))
    end = engine.lexicon.added["<|im_end|>"]
    cut = engine.truth[0]
    assert cut.finish == "length"
    assert cut.sampled_ids[-1] != end
    assert second.tokens.prompt_ids[len(cut.prompt_ids) + 3] == end


async def test_an_end_token_that_the_engine_leaves_out_is_glue_and_one_that_it_gives_is_not_doubled(
    tmp_path,
):
    async with engine_at(tmp_path / "t") as engine:
        client = client_of(engine, "vllm")
        end = engine.lexicon.added["<|im_end|>"]
        for step in ({"run": "ls", "end": False}, {"run": "ls"}):
            _, answers = await played(client, asked(script(step, "done")))
            first, second = answers
            path = first.tokens.prompt_ids + first.tokens.completion_ids
            glue = second.tokens.prompt_ids[len(path) :]
            ended = first.tokens.completion_ids[-1] == end
            assert ended == ("end" not in step)
            assert (glue[0] == end) != ended
            assert path.count(end) + glue.count(end) == 4  # system, user, assistant, result
        await client.aclose()


async def test_another_end_token_is_no_text_and_the_turn_is_closed_behind_it(tmp_path):
    async with engine_at(tmp_path / "t") as engine:
        client = client_of(engine, "vllm")
        step = {"text": "Over.", "run": "ls", "end": "<|endoftext|>"}
        _, answers = await played(client, asked(script(step, "done")))
        await client.aclose()
    agree(answers, engine.truth)
    first, second = answers
    assert "endoftext" not in (first.message.raw_content or "") + first.message.content
    other, end = (engine.lexicon.added[t] for t in ("<|endoftext|>", "<|im_end|>"))
    place = len(first.tokens.prompt_ids) + len(first.tokens.completion_ids)
    assert second.tokens.prompt_ids[place - 1 : place + 1] == (other, end)


async def test_an_answer_that_was_thrown_away_is_asked_for_again_from_the_same_prompt(tmp_path):
    async with engine_at(tmp_path / "t", split="random") as engine:
        client = client_of(engine, "sglang")
        steps = ({"run": "ls"}, [{"text": "no"}, {"text": "yes"}], "end")
        conversation, _ = await played(client, asked(script(*steps)), turns=1)
        conversation.append(UserMessage(content="And?"))
        answers = [await client.complete(request_of(conversation, n)) for n in (1, 2)]
        conversation.append(answers[0].message)  # the first one is kept after all
        conversation.append(UserMessage(content="Then?"))
        last = await client.complete(request_of(conversation, 3))
        await client.aclose()
    first, again = answers
    assert first.tokens.prompt_ids == again.tokens.prompt_ids
    assert again.tokens.fork_reason == "retry"
    assert (first.message.content, again.message.content) == ("no", "yes")
    path = first.tokens.prompt_ids + first.tokens.completion_ids
    assert last.tokens.prompt_ids[: len(path)] == path
    assert last.tokens.fork_reason == "edited_history"


async def test_of_two_equal_answers_the_conversation_goes_on_from_the_one_that_it_holds(tmp_path):
    async with engine_at(tmp_path / "t", split="random") as engine:
        client = client_of(engine, "vllm")
        conversation = Conversation(asked(script("The very same words, twice.", "end")))
        twice = [await client.complete(request_of(conversation, n)) for n in (0, 1)]
        assert twice[0].message == twice[1].message
        assert twice[0].tokens.completion_ids != twice[1].tokens.completion_ids
        for kept in twice:
            going_on = conversation_with(conversation, kept.message)
            answer = await client.complete(request_of(going_on, 2))
            path = kept.tokens.prompt_ids + kept.tokens.completion_ids
            assert answer.tokens.prompt_ids[: len(path)] == path
        await client.aclose()


def conversation_with(conversation: Conversation, message: AssistantMessage) -> Conversation:
    going_on = Conversation([*conversation, message, UserMessage(content="And?")])
    going_on.attachments.update(conversation.attachments)
    return going_on


async def test_what_this_conversation_did_not_sample_is_rendered(tmp_path):
    async with engine_at(tmp_path / "t", split="random") as engine:
        client = client_of(engine, "vllm")
        shot = [UserMessage(content="Two?"), AssistantMessage(content="Four.")]
        prompt = [
            *asked("x")[:1],
            *shot,
            *asked(script("shot", *STEPS[:1], "on", "mine", "end"))[1:],
        ]
        conversation, answers = await played(client, prompt)
        renderer = tiny_renderer()
        assert answers[0].tokens.prompt_ids == tuple(renderer.render(prompt, TOOLS))
        path = answers[1].tokens.prompt_ids + answers[1].tokens.completion_ids
        said = [UserMessage(content="?"), AssistantMessage(content="Mine."), *shot[:1]]
        for message in said:  # turns that a harness wrote itself, behind a sampled one
            conversation.append(message)
        answer = await client.complete(request_of(conversation, 9))
        await client.aclose()
    assert answer.tokens.source == "bridged"
    assert answer.tokens.prompt_ids[: len(path)] == path
    assert "Mine." in engine.lexicon.text(answer.tokens.prompt_ids[len(path) :])


async def test_an_edited_answer_begins_a_new_branch(tmp_path):
    async with engine_at(tmp_path / "t", split="random") as engine:
        client = client_of(engine, "vllm")
        conversation, answers = await played(client, asked(script(*STEPS[:1], "on")))
        other = AssistantMessage(content="Said by somebody else.")
        edited = Conversation([*list(conversation)[:-1], other, UserMessage(content="And?")])
        edited.attachments.update(conversation.attachments)
        answer = await client.complete(request_of(edited, 5))
        await client.aclose()
    assert answer.tokens.fork_reason == "edited_history"
    path = answers[0].tokens.prompt_ids + answers[0].tokens.completion_ids
    assert answer.tokens.prompt_ids[: len(path)] == path  # but for what was kept


async def test_a_template_that_drops_reasoning_forks_and_says_so(tmp_path):
    async with engine_at(tmp_path / "t", family="qwen3", split="random") as engine:
        client = client_of(engine, "vllm")
        steps = ({"reasoning": "Let me see.", "text": "A."}, "B.")
        conversation, answers = await played(client, asked(script(*steps)), turns=1)
        conversation.append(UserMessage(content="And now?"))
        answer = await client.complete(request_of(conversation, 1))
        await client.aclose()
    agree([*answers, answer], engine.truth)
    assert (answer.tokens.source, answer.tokens.fork_reason) == ("engine", "dropped_reasoning")


async def test_layers_that_are_sent_and_not_stored_are_rendered_and_bridge_as_well(tmp_path):
    async with engine_at(tmp_path / "t", split="random") as engine:
        client = client_of(engine, "vllm")
        layers = {
            "ephemeral": "Today is a secret.",
            "prefill": (UserMessage(content="Hi"), AssistantMessage(content="Hello")),
        }
        conversation = Conversation(asked(script(*STEPS[:1], "on")))
        first = await client.complete(request_of(conversation, 0, **layers))
        conversation.append(first.message)
        conversation.append(UserMessage(content="Go on."))
        second = await client.complete(request_of(conversation, 1, **layers))
        await client.aclose()
    assert "secret" in engine.lexicon.text(first.tokens.prompt_ids)
    assert "Hello" in engine.lexicon.text(first.tokens.prompt_ids)
    path = first.tokens.prompt_ids + first.tokens.completion_ids
    assert second.tokens.prompt_ids[: len(path)] == path
    assert second.tokens.source == "bridged"


@pytest.mark.parametrize(
    "fields",
    [{"sampling": Sampling(stop=("</s>",))}, {"extra": {"stop": ["x"]}}, {"extra": {"n": 2}}],
)
async def test_what_would_break_the_ids_is_refused(tmp_path, fields):
    async with engine_at(tmp_path / "t") as engine:
        client = client_of(engine, "vllm")
        request = request_of(Conversation(asked("a")), **fields)
        with pytest.raises(UserError, match="exact tokens"):
            await client.complete(request)
        await client.aclose()
    assert not engine.truth


@pytest.mark.parametrize("wire", WIRES)
async def test_the_sdk_s_transport_carries_ids_as_well(tmp_path, wire):
    async with engine_at(tmp_path / "t", split="random") as engine:
        endpoint = Endpoint(engine.base_url, transport="sdk", api_key="k")
        client = token_client(endpoint, tiny_renderer(), wire)
        _, answers = await played(client, asked(script({"run": "ls"}, "done")))
        await client.aclose()
    agree(answers, engine.truth, kind(wire))


async def test_images_are_refused_before_anything_is_sent(tmp_path):
    async with engine_at(tmp_path / "t") as engine:
        client = client_of(engine, "vllm")
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
        request = request_of(Conversation([UserMessage(content=[picture])]))
        with pytest.raises(UserError, match="image"):
            client.bound(request)
        with pytest.raises(UserError, match="image"):
            await client.complete(request)
        await client.aclose()
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
async def test_a_failed_call_leaves_no_trace_and_the_next_has_the_same_prompt(
    tmp_path, wire, fault, error
):
    async with engine_at(tmp_path / "t", split="random") as engine:
        client = client_of(engine, wire)
        steps = ({"run": "ls"}, [{"text": "lost", "fault": fault}, {"text": "found"}], "end")
        conversation, answers = await played(client, asked(script(*steps)), turns=1)
        conversation.append(UserMessage(content="And?"))
        with pytest.raises(error):
            await client.complete(request_of(conversation, 1))
        answer = await client.complete(request_of(conversation, 2))
        await client.aclose()
    agree([*answers, answer], engine.truth, kind(wire))
    assert answer.message.content == "found"
    assert answer.tokens.source == "bridged"
    assert answer.tokens.fork_reason is None
    lost = [entry.prompt_ids for entry in engine.truth if entry.outcome == "cut"]
    assert all(prompt == answer.tokens.prompt_ids for prompt in lost)


@pytest.mark.parametrize("wire", WIRES)
async def test_a_prompt_that_does_not_fit_is_an_overflow(tmp_path, wire):
    async with engine_at(tmp_path / "t", window=64) as engine:
        client = client_of(engine, wire)
        with pytest.raises(ContextOverflow) as refused:
            await client.complete(request_of(Conversation(asked("word " * 100))))
        await client.aclose()
    assert refused.value.facts.context_limit == 64


async def test_a_route_that_is_not_served_is_said(tmp_path):
    async with engine_at(tmp_path / "t", routes=frozenset({"/generate"})) as engine:
        client = client_of(engine, "vllm")
        with pytest.raises(ModelNotFound):
            await client.complete(request_of(Conversation(asked("a"))))
        await client.aclose()


async def test_calls_side_by_side_keep_their_own_ids(tmp_path):
    async with engine_at(
        tmp_path / "t", split="random", latency_s=0.01, faults=FaultPlan(seed=3, rates={"slow": 0})
    ) as engine:
        client = client_of(engine, "vllm")
        parallel = Conversation(asked("Say something."))
        same = [client.complete(request_of(parallel, n)) for n in range(8)]
        runs = [played(client, asked(script(*STEPS[:1], f"end {n}"))) for n in range(12)]
        together = await asyncio.gather(asyncio.gather(*same), asyncio.gather(*runs))
        parallel.append(together[0][0].message)
        parallel.append(UserMessage(content="Go on."))
        gone_on = await client.complete(request_of(parallel, 99))
        await client.aclose()
    answers, played_runs = together
    truth = {entry.request_id: entry for entry in engine.truth}
    for answer in [*answers, *(a for _, run in played_runs for a in run)]:
        entry = truth[answer.request_id]
        assert answer.tokens.prompt_ids == entry.prompt_ids
        assert answer.tokens.completion_ids == entry.sampled_ids
    assert len({a.tokens.prompt_ids for a in answers}) == 1
    first = answers[0]  # seven calls later it is still known
    path = first.tokens.prompt_ids + first.tokens.completion_ids
    assert gone_on.tokens.prompt_ids[: len(path)] == path
    for n, (_, run) in enumerate(played_runs):
        assert run[-1].message.content == f"end {n}"


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_not_said_is_sent_as_what_it_means(wire):
    """A server's own defaults (a model's generation_config) would shape the distribution."""
    ends = tiny_renderer().end_ids
    request = request_of(Conversation(), sampling=Sampling())
    form = ENGINES[wire](ends).body(request, [1, 2])
    params = form.get("sampling_params", form)
    assert params["temperature"] == params["top_p"] == 1.0
    assert params["min_p"] == 0.0
    assert params["top_k"] == (0 if wire == "llamacpp" else -1)
    assert not params.get("stop")
    if wire != "llamacpp":
        assert set(params["stop_token_ids"]) == ends


async def test_an_unknown_engine_is_said():
    with pytest.raises(UserError, match="no token wire 'tgi'"):
        token_client(Endpoint("http://127.0.0.1:9/v1"), tiny_renderer(), "tgi")


said = st.text(st.characters(codec="utf-8"), max_size=30)
steps = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "text": said,
            "reasoning": said,
            "plain": st.sampled_from(["<|im_end|>", "<tool_call>", "</think>", "é\u200d🙂"]),
            "run": said,
            "lookalike": st.booleans(),
            "end": st.sampled_from([True, True, False, "<|endoftext|>"]),
            "cut": st.integers(1, 40),
            "split": st.sampled_from(["canonical", "random"]),
        },
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps, family=st.sampled_from(["chatml", "coder", "text_arguments"]))
def test_whatever_is_said_the_ids_are_the_engine_s(tmp_path, steps, family):
    async def episode() -> None:
        async with engine_at(tmp_path / family, family=family) as engine:
            client = client_of(engine, "vllm")
            conversation = Conversation([SystemMessage(content="S"), *asked(script(*steps))[1:]])
            answers = []
            for number in range(len(steps)):
                answers.append(await client.complete(request_of(conversation, number)))
                conversation.append(answers[-1].message)
                conversation.append(UserMessage(content="Go on. <|im_start|>"))
            await client.aclose()
        agree(answers, engine.truth)
        for before, after in pairwise(answers):
            path = before.tokens.prompt_ids + before.tokens.completion_ids
            assert after.tokens.prompt_ids[: len(path)] == path

    asyncio.run(episode())
