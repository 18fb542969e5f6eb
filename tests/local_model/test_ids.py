"""Real ids without a GPU: the tiny model through its real engine, with prompts of token ids."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count

import aiohttp
import pytest
from aiohttp import web

from hermes_rl.config import parse_config
from hermes_rl.errors import UserError
from hermes_rl.messages import SystemMessage, UserMessage
from hermes_rl.models import Conversation, Endpoint, ModelRequest, Sampling
from hermes_rl.models.local import read_tokenizer
from hermes_rl.models.tokens import build_renderer, token_client
from hermes_rl.wiring import open_run_context

pytestmark = pytest.mark.slow

ROLLOUTS = 40
FREE = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4)


@asynccontextmanager
async def tapped(endpoint: Endpoint, seen: dict[str, tuple]) -> AsyncIterator[Endpoint]:
    """A proxy before the engine, which keeps the ids that pass: call -> prompt and answer."""
    url = endpoint.base_url.removesuffix("/v1") + "/completion"
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:

        async def forward(request: web.Request) -> web.Response:
            body = await request.json()
            async with session.post(url, json=body) as response:
                answer = await response.json()
            seen[request.headers["x-hermes-call-id"]] = (body["prompt"], answer["tokens"])
            return web.json_response(answer, status=response.status)

        app = web.Application()
        app.router.add_post("/completion", forward)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            port = runner.addresses[0][1]
            yield replace(endpoint, base_url=f"http://127.0.0.1:{port}/v1")
        finally:
            await runner.cleanup()


async def test_rollouts_of_two_turns_have_the_engine_s_ids(server):
    renderer = build_renderer(read_tokenizer(server.weights))
    end = renderer.tokenizer.id_of("<|im_end|>")
    numbers = count()
    places = asyncio.Semaphore(4)  # as many as the engine has
    seen: dict[str, tuple] = {}

    async def rollout(client, n: int) -> list:
        conversation = Conversation([SystemMessage(content="S"), UserMessage(content=f"{n} é🙂")])
        answers = []
        for _ in range(2):
            request = ModelRequest(
                model="local-tiny",
                conversation=conversation,
                call_id=f"call-{next(numbers)}",
                sampling=replace(FREE, seed=n),
            )
            async with places:
                answer = await client.complete(request)
            answers.append((request.call_id, answer))
            conversation.append(answer.message)
            conversation.append(UserMessage(content="Go <|im_end|>"))
        return answers

    async with tapped(await server.endpoint(), seen) as endpoint:
        client = token_client(endpoint, renderer, "llamacpp", kind="sampling")
        found = await asyncio.gather(*(rollout(client, n) for n in range(ROLLOUTS)))
        await client.aclose()
    cut = 0
    for answers in found:
        for call_id, answer in answers:
            prompt, sampled = seen[call_id]
            tokens = answer.tokens
            assert (tokens.prompt_ids, tokens.completion_ids) == (tuple(prompt), tuple(sampled))
            assert answer.usage.output_tokens == len(sampled)
            if tokens.logprobs is not None:  # llama.cpp has none within a cut character
                assert len(tokens.logprobs) == len(sampled)
                assert all(p <= 0 for p in tokens.logprobs)
        (_, first), (_, second) = answers
        path = first.tokens.prompt_ids + first.tokens.completion_ids
        assert second.tokens.prompt_ids[: len(path)] == path
        ended = first.tokens.completion_ids[-1] == end
        cut += not ended
        assert (second.tokens.prompt_ids[len(path)] == end) is not ended
        assert second.tokens.source == "bridged"
        glue = renderer.decode(second.tokens.prompt_ids[len(path) :])
        assert glue.endswith("<|im_start|>user\nGo <|im_end|><|im_end|>\n<|im_start|>assistant\n")
    assert cut > 0  # some answers met their limit: the glue closed their turns
    assert len(seen) == 2 * ROLLOUTS


async def test_the_file_s_tokenizer_is_the_engine_s(server):
    renderer = build_renderer(read_tokenizer(server.weights))
    where = await server.endpoint()
    texts = ["", "Naïve 12345\t{}\n\n  日本語 🙂 isn't 'it'", "<|im_start|>a<|im_end|>", "x" * 99]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {where.api_key}"}) as http:
        for text in texts:
            url = where.base_url.removesuffix("/v1") + "/tokenize"
            async with http.post(url, json={"content": text}) as response:
                tokens = (await response.json())["tokens"]
            assert tokens == renderer.tokenizer.encode(text), text


async def test_run_context_with_preset_rl_requests_ids_of_the_embedded_model(held, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", held["XDG_RUNTIME_DIR"])
    for tokens, kind, mode in (
        ("llamacpp", "sampling", "llamacpp_completion"),
        ("auto", "raw", "chat_completions"),
    ):
        config = parse_config(
            {
                "dataset": {"path": "x"},
                "model": {"name": "local-tiny"},
                "agent": {"preset": "rl"},
                "endpoint": {"tokens": tokens},
            }
        )
        async with open_run_context(config, run_id="r", concurrency=1, config_hash="c") as context:
            client = context.models.routes("local-tiny")[0].accounts.choose().client
            request = ModelRequest(
                model="local-tiny",
                conversation=Conversation([UserMessage(content="Say yes.")]),
                call_id="c",
                # near its likeliest: llama.cpp has no logprobs of a split character's parts
                sampling=replace(FREE, temperature=0.1, seed=1),
            )
            answer = await client.complete(request)
            assert client.api_mode == mode
        assert answer.tokens.prompt_ids
        assert answer.tokens.logprobs_kind == kind
        assert len(answer.tokens.completion_ids) == answer.usage.output_tokens


def test_a_file_without_a_tokenizer_is_refused(tmp_path):
    path = tmp_path / "a.gguf"
    for data in (b"", b"GGUF", b"GGUF" + b"\x03\0\0\0" + b"\xff" * 16, b"PK" * 40):
        path.write_bytes(data)
        with pytest.raises(UserError, match="cannot be read"):
            read_tokenizer(path)
