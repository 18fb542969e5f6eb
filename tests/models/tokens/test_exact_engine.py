"""The token-exact fake engine: its spellings, its logprobs, its log."""

import asyncio
import json
import math
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
from engines_kit import client_at, engine_at, played, request_of, script, texts, user_turn
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from hermes_rl.messages import UserMessage
from hermes_rl.models import Conversation, Sampling
from hermes_rl.testing import (
    AnswerTokenizer,
    InvalidScript,
    Params,
    Policy,
    Vocabulary,
    log_softmax,
    parse_scripted,
    pick,
    read_truth,
    tokenizer_json,
    write_tiny_tokenizer,
)

LEXICON = Vocabulary(Tokenizer.from_str(tokenizer_json()))
END = LEXICON.added["<|im_end|>"]


@given(st.text(max_size=60), st.randoms(use_true_random=False))
def test_every_tokenization_decodes_to_the_text(text, random):
    text = text.encode("utf-8", "replace").decode()
    for tokens in (LEXICON.plain(text), LEXICON.plain(text, random)):
        assert LEXICON.text(tokens) == text
        assert not set(tokens) & set(LEXICON.added.values())


def test_markup_becomes_tokens_and_lookalikes_stay_text():
    mouth = AnswerTokenizer(LEXICON, END)
    step = {"text": "<|im_end|> it", "calls": [{"name": "terminal", "arguments": {"a": 1}}]}
    from random import Random

    tokens = mouth.tokens(parse_scripted(step), Random(0))
    assert tokens.count(END) == 1
    assert tokens[-1] == END
    assert tokens.count(LEXICON.added["<tool_call>"]) == 1
    bare = mouth.tokens(parse_scripted({**step, "lookalike": True, "end": False}), Random(0))
    assert not set(bare) & set(LEXICON.added.values())
    assert LEXICON.text(bare) == LEXICON.text(tokens[:-1])
    raw = mouth.tokens(parse_scripted({"raw": "a<|im_end|>b", "end": "<|endoftext|>"}), Random(0))
    assert END in raw
    assert raw[-1] == LEXICON.added["<|endoftext|>"]


@pytest.mark.parametrize("step", [3, {"txt": "a"}, {"cut": "many"}])
def test_invalid_step_is_reported(step):
    with pytest.raises(InvalidScript, match="step of SCRIPT"):
        parse_scripted(step)


def test_logprobs_are_the_log_softmax_and_samples_follow_them():
    policy = Policy(LEXICON, 0, END)
    logits = policy.logits(policy.start([1, 2, 3]))
    for temperature in (0.5, 1.0, 2.0):
        logprobs = log_softmax(logits, temperature)
        assert math.isclose(sum(map(math.exp, logprobs.values())), 1.0)
    params, count = Params(temperature=0.7), 4000
    drawn = [pick(logits, params, (n + 0.5) / count) for n in range(count)]
    expected = log_softmax(logits, 0.7)
    for token in logits:
        assert abs(drawn.count(token) / count - math.exp(expected[token])) < 1e-3
    best = max(logits, key=lambda t: logits[t])
    assert {pick(logits, Params(temperature=0), c) for c in (0.0, 0.99)} == {best}
    assert {pick(logits, Params(top_k=1), c) for c in (0.0, 0.99)} == {best}
    assert {pick(logits, Params(top_p=0.01), c) for c in (0.0, 0.99)} == {best}
    assert {pick(logits, Params(min_p=0.999), c) for c in (0.0, 0.99)} == {best}


async def test_log_file_has_every_id(tmp_path):
    log = tmp_path / "truth.jsonl"
    async with client_at("vllm", tmp_path / "t", log=log) as (engine, client):
        await played(client, user_turn(script({"run": "ls"}, {"text": "cut", "cut": 2})))
        truth = engine.truth
    assert read_truth(log) == truth
    assert [entry.call_id for entry in truth] == ["call-0", "call-1"]
    assert [entry.finish for entry in truth] == ["stop", "length"]
    assert len(truth[1].sampled_ids) == 2
    assert all(entry.scripted for entry in truth)


@pytest.mark.parametrize(
    ("family", "header"),
    [
        ("chatml", "<|im_start|>assistant\n"),
        ("llama3", "<|start_header_id|>assistant<|end_header_id|>"),
        ("mistral", "[/INST]"),
    ],
)
@pytest.mark.parametrize("behind", ["", "\n", " Be quick."])
async def test_script_may_be_the_complete_prompt(tmp_path, family, header, behind):
    """What a template puts before and behind it belongs to no script."""
    steps = json.dumps([{"text": "one"}, {"text": "[two]"}, [{"text": "three"}]])
    async with client_at("vllm", tmp_path / "t", family=family, header=header) as (_engine, client):
        conversation = Conversation([UserMessage(content=f"SCRIPT: {steps}{behind}")])
        for number in range(4):
            answer = await client.complete(request_of(conversation, number))
            conversation.append(answer.message)
            conversation.append(UserMessage(content="And?"))
    assert texts(conversation) == ["one", "[two]", "three", "done"]


async def test_answers_are_deterministic_per_seed(tmp_path):
    async def answers(seed: int, sampling_seed: int) -> list[tuple[int, ...]]:
        async with client_at("vllm", tmp_path / "t", seed=seed) as (engine, client):
            for _ in range(2):
                await played(
                    client, user_turn("Say."), turns=1, sampling=Sampling(seed=sampling_seed)
                )
            return [entry.sampled_ids for entry in engine.truth]

    first, again = await answers(1, 7), await answers(1, 7)
    assert first == again
    assert first[0] != first[1]  # two requests, two samples
    assert await answers(2, 7) != first
    assert await answers(1, 8) != first


async def ask(engine, route: str, body: dict) -> tuple[int, dict]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(engine.root_url + route, json=body) as response,
    ):
        return response.status, await response.json()


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("/v1/completions", {"prompt": [10**6]}, "out of the vocabulary"),
        ("/v1/completions", {"prompt": [[1]]}, "list of token ids"),
        ("/v1/completions", {"prompt": [1], "stop": ["</s>"]}, "stops only at token ids"),
        ("/v1/completions", {"prompt": 'SCRIPT: ["one"'}, "SCRIPT is not a JSON list"),
        ("/generate", {"text": "a"}, "list of token ids"),
        ("/inference/v1/generate", {"token_ids": [1]}, "sampling_params"),
        ("/v1/completions", {"prompt": [1] * 40}, "maximum context length is 32 tokens"),
    ],
)
async def test_unsupported_requests_are_refused(tmp_path, route, body, message):
    async with engine_at(tmp_path / "t", window=32) as engine:
        status, form = await ask(engine, route, body)
        assert status == 400
        assert message in form["error"]["message"]
        assert [entry.outcome for entry in engine.truth] == ["refused"]


async def test_exact_engine_runs_as_a_program(tmp_path):
    folder = write_tiny_tokenizer(tmp_path / "t")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "hermes_rl.testing.exact_engine"),
        *("--tokenizer", str(folder), "--log", str(tmp_path / "log"), "--until-eof"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    try:
        async with asyncio.timeout(60):
            reported = json.loads(await process.stdout.readline())
        url = f"{reported['base_url']}/completions"
        body = {"prompt": [1, 2], "max_tokens": 3}
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            assert (await response.json())["usage"]["completion_tokens"] <= 3
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()
    assert process.returncode == 0
    assert len(read_truth(tmp_path / "log")) == 1
