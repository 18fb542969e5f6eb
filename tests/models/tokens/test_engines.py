"""Token-in clients over real sockets: every id and logprob is the engine's own, on every wire."""

from dataclasses import replace
from itertools import pairwise

import pytest
from engines_kit import (
    FREE,
    STEPS,
    TOOLS,
    WIRES,
    agree,
    client_at,
    continues,
    kind,
    played,
    request_of,
    script,
    texts,
    user_turn,
)

from hermes_rl.messages import AssistantMessage, UserMessage
from hermes_rl.models import Conversation
from hermes_rl.testing import tiny_renderer


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("split", ["canonical", "random"])
async def test_ids_and_logprobs_equal_those_sampled(tmp_path, wire, split):
    async with client_at(wire, tmp_path / "t", split=split, version="w7") as (engine, client):
        cold = replace(FREE, temperature=0.6)
        conversation, answers = await played(client, user_turn(script(*STEPS)), sampling=cold)
    agree(answers, engine.truth, kind(wire))
    assert [a.tokens.source for a in answers] == ["engine", "bridged", "bridged"]
    for before, after in pairwise(answers):
        assert continues(after, before)
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


async def test_other_end_token_is_not_text_and_turn_is_closed(tmp_path):
    async with client_at("vllm", tmp_path / "t") as (engine, client):
        step = {"text": "Over.", "run": "ls", "end": "<|endoftext|>"}
        _, answers = await played(client, user_turn(script(step, "done")))
    agree(answers, engine.truth)
    first, second = answers
    assert "endoftext" not in (first.message.raw_content or "") + first.message.content
    other, end = (engine.vocabulary.added[t] for t in ("<|endoftext|>", "<|im_end|>"))
    place = len(first.tokens.prompt_ids) + len(first.tokens.completion_ids)
    assert second.tokens.prompt_ids[place - 1 : place + 1] == (other, end)


async def test_discarded_answer_is_requested_from_the_same_prompt(tmp_path):
    async with client_at("sglang", tmp_path / "t", split="random") as (_engine, client):
        steps = ({"run": "ls"}, [{"text": "no"}, {"text": "yes"}], "end")
        conversation, _ = await played(client, user_turn(script(*steps)), turns=1)
        conversation.append(UserMessage(content="And?"))
        answers = [await client.complete(request_of(conversation, n)) for n in (1, 2)]
        conversation.append(answers[0].message)  # the first one is kept after all
        conversation.append(UserMessage(content="Then?"))
        last = await client.complete(request_of(conversation, 3))
    first, again = answers
    assert first.tokens.prompt_ids == again.tokens.prompt_ids
    assert again.tokens.fork_reason == "retry"
    assert (first.message.content, again.message.content) == ("no", "yes")
    assert continues(last, first)
    assert last.tokens.fork_reason == "edited_history"


async def test_conversation_continues_from_the_kept_of_two_equal_answers(tmp_path):
    async with client_at("vllm", tmp_path / "t", split="random") as (_engine, client):
        conversation = Conversation(user_turn(script("The very same words, twice.", "end")))
        twice = [await client.complete(request_of(conversation, n)) for n in (0, 1)]
        assert twice[0].message == twice[1].message
        assert twice[0].tokens.completion_ids != twice[1].tokens.completion_ids
        for kept in twice:
            extended = conversation_with(conversation, kept.message)
            answer = await client.complete(request_of(extended, 2))
            assert continues(answer, kept)


def conversation_with(conversation: Conversation, message: AssistantMessage) -> Conversation:
    extended = Conversation([*conversation, message, UserMessage(content="And?")])
    extended.attachments.update(conversation.attachments)
    return extended


async def test_messages_that_were_not_sampled_are_rendered(tmp_path):
    async with client_at("vllm", tmp_path / "t", split="random") as (engine, client):
        shot = [UserMessage(content="Two?"), AssistantMessage(content="Four.")]
        prompt = [
            *user_turn("x")[:1],
            *shot,
            *user_turn(script("shot", *STEPS[:1], "on", "mine", "end"))[1:],
        ]
        conversation, answers = await played(client, prompt)
        renderer = tiny_renderer()
        assert answers[0].tokens.prompt_ids == tuple(renderer.render(prompt, TOOLS))
        path = answers[1].tokens.prompt_ids + answers[1].tokens.completion_ids
        text = [UserMessage(content="?"), AssistantMessage(content="Mine."), *shot[:1]]
        for message in text:  # turns that a harness wrote itself, behind a sampled one
            conversation.append(message)
        answer = await client.complete(request_of(conversation, 9))
    assert answer.tokens.source == "bridged"
    assert answer.tokens.prompt_ids[: len(path)] == path
    assert "Mine." in engine.vocabulary.text(answer.tokens.prompt_ids[len(path) :])


async def test_edited_answer_starts_a_branch(tmp_path):
    async with client_at("vllm", tmp_path / "t", split="random") as (_engine, client):
        conversation, answers = await played(client, user_turn(script(*STEPS[:1], "on")))
        other = AssistantMessage(content="Written by another model.")
        before = Conversation(list(conversation)[:-1])
        before.attachments.update(conversation.attachments)
        answer = await client.complete(request_of(conversation_with(before, other), 5))
    assert answer.tokens.fork_reason == "edited_history"
    assert continues(answer, answers[0])  # but for what was kept


async def test_template_that_drops_reasoning_forks(tmp_path):
    async with client_at("vllm", tmp_path / "t", family="qwen3") as (engine, client):
        steps = ({"reasoning": "Let me see.", "text": "A."}, "B.")
        conversation, answers = await played(client, user_turn(script(*steps)), turns=1)
        conversation.append(UserMessage(content="And now?"))
        answer = await client.complete(request_of(conversation, 1))
    agree([*answers, answer], engine.truth)
    assert (answer.tokens.source, answer.tokens.fork_reason) == ("engine", "dropped_reasoning")


async def test_ephemeral_layers_are_rendered_and_bridged(tmp_path):
    async with client_at("vllm", tmp_path / "t", split="random") as (engine, client):
        layers = {
            "ephemeral": "Today is a secret.",
            "prefill": (UserMessage(content="Hi"), AssistantMessage(content="Hello")),
        }
        conversation = Conversation(user_turn(script(*STEPS[:1], "on")))
        first = await client.complete(request_of(conversation, 0, **layers))
        conversation.append(first.message)
        conversation.append(UserMessage(content="Continue."))
        second = await client.complete(request_of(conversation, 1, **layers))
    assert "secret" in engine.vocabulary.text(first.tokens.prompt_ids)
    assert "Hello" in engine.vocabulary.text(first.tokens.prompt_ids)
    assert continues(second, first)
    assert second.tokens.source == "bridged"
