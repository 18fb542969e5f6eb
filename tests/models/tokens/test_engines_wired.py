"""From a configuration to exact ids: what a run's context opens, under faults and retries."""

import asyncio
import json
from itertools import pairwise

import pytest
from engines_kit import (
    FREE,
    ROUTES,
    TOOLS,
    WIRES,
    config_of,
    continues,
    engine_at,
    script,
    user_turn,
)

from hermes_rl.config import parse_config
from hermes_rl.errors import UserError
from hermes_rl.events import CallEnded, EventLog
from hermes_rl.messages import ToolMessage
from hermes_rl.models import Completion, Conversation, ModelRequest
from hermes_rl.models.calls import ModelCaller, RetryPolicy
from hermes_rl.models.providers import wanted_token_ids
from hermes_rl.testing import FaultPlan, write_tiny_tokenizer
from hermes_rl.wiring import open_run_context, reach

STEPS = ({"reasoning": "so", "run": "ls"}, {"text": "on", "calls": [{}, {}]}, "end")
MIXED = FaultPlan(
    seed=4,
    # what is lost behind the sampler is rare: a caller does not often pay twice, and waits instead
    rates={"server_error": 0.15, "unavailable": 0.1, "reset": 0.02, "cut": 0.02, "garbage": 0.02},
)


async def episode(caller: ModelCaller, prompt: str) -> list[Completion]:
    request = ModelRequest("toy", Conversation(user_turn(prompt)), "", tools=TOOLS, sampling=FREE)
    answers = []
    for turn in range(1, 9):
        answers.append(await caller.call(request, turn=turn))
        request.conversation.append(answers[-1].message)
        for call in answers[-1].message.tool_calls:
            request.conversation.append(
                ToolMessage(tool_call_id=call.id, name=call.name, content="a result")
            )
        if not answers[-1].message.tool_calls:
            break
    return answers


@pytest.mark.parametrize("way", ROUTES)
async def test_every_token_wire_keeps_ids_through_retries(tmp_path, way):
    routes = frozenset({ROUTES[way]})
    async with engine_at(tmp_path / "t", routes=routes, split="random", version="v3") as engine:
        named = {} if way == "chat" else {"tokenizer": str(engine.config.tokenizer)}
        config = parse_config(config_of(engine, endpoint={"tokens": "auto", **named}))
        probed = await reach(config)
        assert probed.tokens.way == way
        engine.faults = MIXED
        logs = [EventLog() for _ in range(16)]
        async with open_run_context(
            config, run_id="r", concurrency=8, config_hash="c", tokens=probed.tokens
        ) as context:
            patience = RetryPolicy(base_s=0.01, cap_s=0.02, max_attempts=50)
            routes = context.models.routes("toy")
            played = await asyncio.gather(
                *(episode(ModelCaller(routes, log, patience), script(*STEPS)) for log in logs)
            )
    truth = {entry.request_id: entry for entry in engine.truth}
    ends = [e for log in logs for e in log.events if isinstance(e, CallEnded)]
    assert sum(e.outcome != "ok" for e in ends) > 0
    for answers in played:
        assert answers[-1].message.content == "end"
        for answer in answers:
            entry = truth[answer.request_id]
            assert entry.outcome == "served"
            assert answer.tokens.prompt_ids == entry.prompt_ids
            assert answer.tokens.completion_ids == entry.sampled_ids
            assert answer.tokens.logprobs_kind == probed.tokens.logprobs != "unknown"
            # A header names the version of llama.cpp's streams: it says nothing about their end.
            assert answer.policy_version in (("v3", None) if way == "llamacpp" else ("v3",))
        if way == "chat":
            continue  # the server renders the history again: what it makes of it forks or not
        for before, after in pairwise(answers):
            assert continues(after, before)
            assert after.tokens.fork_reason is None


@pytest.mark.parametrize("way", WIRES)
async def test_token_ids_outside_of_the_vocabulary_are_refused_and_the_answer_drawn_again(
    tmp_path, way
):
    """The engine has one token more than the tokenizer of the run, until config.json names it."""
    folder = write_tiny_tokenizer(tmp_path / "smaller")
    form = json.loads((folder / "tokenizer.json").read_bytes())
    last = form["added_tokens"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(form))
    async with engine_at(tmp_path / "t", routes=frozenset({ROUTES[way]})) as engine:
        named = {"tokens": "auto", "tokenizer": str(folder)}
        config = parse_config(config_of(engine, endpoint=named))
        tokens = (await reach(config)).tokens
        calls, port = [], engine.port
        for vocabulary in ({}, {"vocab_size": last["id"] + 1}):
            (folder / "config.json").write_text(json.dumps(vocabulary))
            log = EventLog()
            async with open_run_context(
                config, run_id="r", concurrency=1, config_hash="c", tokens=tokens
            ) as context:
                patience = RetryPolicy(base_s=0.01, cap_s=0.02)
                caller = ModelCaller(context.models.routes("toy"), log, patience)
                text = f"{vocabulary} {script([{'raw': last['content']}, 'done'])}"
                answers = await episode(caller, text)
            assert [a.message.content for a in answers] == ["" if vocabulary else "done"]
            calls.append([e for e in log.events if isinstance(e, CallEnded)])
    (refused, repeated), (accepted,) = calls
    assert (refused.outcome, repeated.error, accepted.error) == ("cut", None, None)
    assert f" at 127.0.0.1:{port} returned token id {last['id']}, outside of " in refused.error
    assert f"the vocabulary of {last['id']} tokens" in refused.error


async def test_run_context_probes_for_ids_only_with_preset_rl(tmp_path):
    async with engine_at(tmp_path / "t") as engine:
        tokenizer = {"tokenizer": str(engine.config.tokenizer)}
        config = parse_config(config_of(engine, endpoint=tokenizer))
        async with open_run_context(config, run_id="r", concurrency=1, config_hash="c") as context:
            assert context.models.seen("toy").api_mode == "vllm_completions"
        requests_before = len(engine.truth)
        datagen = {"preset": "datagen"}
        assert (await reach(parse_config(config_of(engine, agent=datagen)))).tokens is None
        assert len(engine.truth) == requests_before
        chat = config_of(engine, agent=datagen, endpoint={"tokens": "chat"})
        assert (await reach(parse_config(chat))).tokens.way == "chat"


CHAT = {"endpoint": {"tokens": "chat"}}
SAME_ADDRESS = {"tokens": "vllm", "fallbacks": ["other"]}
ELSEWHERE = {
    "tokens": "vllm",
    "fallbacks": [{"model": "other", "base_url": "http://127.0.0.1:9/v1"}],
}


@pytest.mark.parametrize(
    ("changes", "reason", "instead", "way"),
    [
        (
            {"model": {"reasoning": "high"}},
            r"model\.reasoning is not sent with prompts",
            CHAT,
            "chat",
        ),
        ({"model": {"stop": "END"}}, r"model\.stop is text, and prompts of ids", CHAT, "chat"),
        (
            {"model": {"extra_body": {"repetition_penalty": 1.1}}},
            r"model\.extra_body applies to chat requests",
            CHAT,
            "chat",
        ),
        (
            {"agent": {"preset": "datagen"}, "endpoint": SAME_ADDRESS},
            "not belong to the fallback other at the same",
            {"endpoint": ELSEWHERE},
            "vllm",
        ),
    ],
)
async def test_options_unsupported_with_prompts_of_ids_are_refused(
    tmp_path, changes, reason, instead, way
):
    async with engine_at(tmp_path / "t") as engine:
        changes = {"endpoint": {}, **changes}
        tokenizer = {"tokenizer": str(engine.config.tokenizer)}
        refused = {**changes, "endpoint": {**tokenizer, **changes["endpoint"]}}
        with pytest.raises(UserError, match=reason):
            await reach(parse_config(config_of(engine, **refused)))
        accepted = {**changes, "endpoint": {**tokenizer, **instead["endpoint"]}}
        assert (await reach(parse_config(config_of(engine, **accepted)))).tokens.way == way


def test_one_tokenizer_for_several_models_is_refused():
    form = {
        "dataset": {"path": "x"},
        "model": {"mix": {"a": 1, "b": 1}},
        "agent": {"preset": "rl"},
        "endpoint": {"base_url": "http://127.0.0.1:9/v1", "tokenizer": "t"},
    }
    with pytest.raises(UserError, match=r"model\.mix has several"):
        wanted_token_ids(parse_config(form))
    form["endpoint"]["tokens"] = "chat"
    assert wanted_token_ids(parse_config(form)) == "chat"


async def test_embedded_model_supports_chat_and_llamacpp():
    form = {
        "dataset": {"path": "x"},
        "model": {"name": "local-tiny"},
        "agent": {"preset": "rl"},
        "sandbox": {"backend": "none"},
        "run": {"allow_unsandboxed": True},
    }
    for tokens, way in (("auto", "chat"), ("chat", "chat"), ("llamacpp", "llamacpp")):
        form["endpoint"] = {"tokens": tokens}
        plan = (await reach(parse_config(form))).tokens
        assert plan.way == way
        assert plan.lines() == [f"token ids by {way}; logprobs: as its answers report"]
    form["endpoint"] = {"tokens": "sglang"}
    with pytest.raises(UserError, match="Use llamacpp"):
        await reach(parse_config(form))
