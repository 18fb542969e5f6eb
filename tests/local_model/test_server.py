"""The tiny model through its real engine: what a client of it gets, and when its server ends."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest

from hermes_rl.errors import ContextOverflow, UserError
from hermes_rl.messages import ToolMessage, UserMessage
from hermes_rl.models import Completion, Conversation, ModelRequest, Sampling
from hermes_rl.models.local import LocalEndpoint, LocalServer, StepClient, local_server

pytestmark = pytest.mark.slow

COMMAND = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
    "required": ["command"],
}
TERMINAL = {"name": "terminal", "description": "x", "parameters": COMMAND}
TOOLS = ({"type": "function", "function": TERMINAL},)
REQUIRED = {"tool_choice": "required"}
LIST = UserMessage(content="List the files.")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The user's cache of weights, and a runtime folder of the test's own."""
    return {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}


@pytest.fixture
async def endpoint(server: LocalServer) -> LocalEndpoint:
    return await server.endpoint()


@pytest.fixture
async def client(endpoint: LocalEndpoint) -> AsyncIterator[StepClient]:
    client = StepClient(endpoint)
    yield client
    await client.aclose()


async def ask(client: StepClient, *messages: Any, exact: bool = False, **more: Any) -> Completion:
    """One answer. `exact`: with its ids and logprobs."""
    more = {"sampling": Sampling(temperature=0, max_tokens=120), **more}
    request = ModelRequest("local-tiny", Conversation(messages or [LIST]), "call", **more)
    return await client.complete(replace(request, token_ids=exact, logprobs=exact))


async def test_every_route_but_health_requires_the_key_and_none_admits_other_origins(endpoint):
    root = endpoint.base_url.removesuffix("/v1")
    headers = {"Origin": "http://elsewhere.example"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for key, status in ((None, 401), ("wrong", 401), (endpoint.api_key, 200)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            for path in ("/health", "/v1/models", "/props"):
                async with session.get(root + path, headers=headers) as response:
                    assert response.status == (200 if path == "/health" else status)
                    assert not response.headers.get("Access-Control-Allow-Origin")
            for path in ("/completion", "/tokenize", "/apply-template", "/v1/chat/completions"):
                async with session.post(root + path, headers=headers, json={}) as response:
                    assert (response.status == 401) is (status == 401)
    assert endpoint.api_key not in repr(endpoint)


async def test_a_step_with_tools_is_a_valid_call_with_its_usage_and_ids(client):
    answer = await ask(client, tools=TOOLS, extra=REQUIRED, exact=True)
    usage, tokens = answer.usage, answer.tokens
    (call,) = answer.message.tool_calls
    assert (answer.finish_reason, call.name) == ("tool_calls", "terminal")
    assert answer.served_model == "local-tiny"
    jsonschema.validate(json.loads(call.arguments), COMMAND)
    assert 0 <= usage.cache_read_tokens <= usage.input_tokens == len(tokens.prompt_ids)
    assert usage.output_tokens == len(tokens.completion_ids) == len(tokens.logprobs)
    assert all(logprob <= 0 for logprob in tokens.logprobs)
    assert tokens.logprobs_kind == "constrained"


async def test_the_next_turn_continues_the_prompt_of_the_last(client):
    first = await ask(client, tools=TOOLS, extra=REQUIRED, exact=True)
    (call,) = first.message.tool_calls
    result = ToolMessage(tool_call_id=call.id, name=call.name, content="a.txt")
    second = await ask(client, LIST, first.message, result, tools=TOOLS, extra=REQUIRED, exact=True)
    # The answer comes back as text, and a model may write tokens that its tokenizer would not:
    # the prompt before it is what must stand again, token for token.
    prompt = first.tokens.prompt_ids
    assert second.tokens.prompt_ids[: len(prompt)] == prompt
    assert second.usage.cache_read_tokens >= len(prompt) - 1


async def test_a_free_step_is_a_call_or_the_final_text(client):
    for seed in range(3):
        sampling = Sampling(temperature=1.0, seed=seed, max_tokens=120)
        answer = await ask(client, tools=TOOLS, sampling=sampling)
        for call in answer.message.tool_calls:
            jsonschema.validate(json.loads(call.arguments), COMMAND)
        called = answer.finish_reason == "tool_calls"
        assert called or answer.finish_reason in ("stop", "length")
        assert called is bool(answer.message.tool_calls)


async def test_a_cut_call_is_returned_as_text(client):
    sampling = Sampling(temperature=0, max_tokens=4)
    answer = await ask(client, tools=TOOLS, sampling=sampling, exact=True)
    assert answer.finish_reason == "length"
    assert answer.message.tool_calls == ()
    assert answer.message.content.startswith('{"name"')
    assert answer.usage.output_tokens == len(answer.tokens.completion_ids) == 4


@pytest.mark.parametrize("tools", [(), TOOLS])
async def test_stream_equals_the_complete_answer(client, tools):
    more = {"tools": tools, "sampling": Sampling(temperature=0, max_tokens=60)}
    await ask(client, **more)  # so that both find the same cache, and the same rounding
    whole = await ask(client, exact=True, **more)
    pieces: list[str] = []
    stream = await ask(client, on_delta=pieces.append, **more)
    assert "".join(pieces) == stream.message.content
    assert stream.message == whole.message
    assert (stream.finish_reason, stream.usage) == (whole.finish_reason, whole.usage)
    assert whole.tokens.logprobs_kind == ("constrained" if tools else "raw")
    assert stream.tokens is None


async def test_a_structured_answer_keeps_to_its_schema(client):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = await ask(client, extra={"response_format": form})
    jsonschema.validate(json.loads(answer.message.content), schema)


async def test_an_overflow_is_reported_as_such(client):
    for exact in (False, True):
        with pytest.raises(ContextOverflow) as overflow:
            await ask(client, UserMessage(content="a b " * 5000), exact=exact)
        assert overflow.value.facts.context_limit == 4096


async def test_ids_are_complete_where_answers_cut_characters(client):
    """A stream of the engine leaves out tokens within a character; these must not be lost."""
    question = UserMessage(content="Repeat: 🙂🙃🤖日本語🙂🙃🤖日本語")
    sampling = Sampling(temperature=1.5, seed=1, max_tokens=40)
    answer, again = [await ask(client, question, sampling=sampling, exact=True) for _ in range(2)]
    assert len(answer.tokens.completion_ids) == answer.usage.output_tokens
    assert answer.tokens.logprobs is None  # the engine has none for a part of a character
    assert again.tokens == answer.tokens


async def test_server_with_a_long_queue_is_joined_and_closed_requests_leave_it(
    held, endpoint, client, wait_until
):
    (server,) = servers_in(Path(held["XDG_RUNTIME_DIR"]))

    def connections() -> set[str]:
        found = set()
        for link in Path(f"/proc/{server}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.add(os.readlink(link))
        return found

    before = connections()
    url = endpoint.base_url.removesuffix("/v1") + "/completion"
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    endless = {"prompt": [1], "n_predict": 4000, "ignore_eos": True}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as http:
        bodies = [{**endless, "stream": number % 2 == 0} for number in range(40)]
        waiting = [asyncio.create_task(http.post(url, json=body)) for body in bodies]
        # Connections of earlier tests may close meanwhile: only new ones count.
        assert await asyncio.to_thread(wait_until, lambda: len(connections() - before) >= 40, 240)
        async with local_server("local-tiny", env=held) as second:
            assert await second.endpoint() == endpoint
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    async with asyncio.timeout(240):
        await asyncio.gather(*(ask(client, sampling=Sampling(max_tokens=3)) for _ in range(9)))


def servers_in(folder: Path) -> list[int]:
    """The processes whose command line names a socket in this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes()
            if b"hermes_rl.models.local.server" in line and os.fsencode(folder) in line:
                found.append(int(path.parent.name))
    return found


def test_processes_share_one_server_which_ends_with_the_last_even_if_killed(
    env, tmp_path, start_holder, wait_until
):
    with start_holder(env) as first, start_holder(env) as second, start_holder(env) as third:
        addresses = {process.stdout.readline() for process in (first, second, third)}
        assert len(addresses) == 1
        assert addresses != {""}
        assert len(servers_in(tmp_path)) == 1
        first.kill()
        first.wait()
        time.sleep(3)  # longer than a server waits for its next holder
        assert len(servers_in(tmp_path)) == 1
    assert wait_until(lambda: not servers_in(tmp_path), 240)


async def test_a_wedged_server_is_replaced(env, tmp_path):
    async with local_server("local-tiny", env=env) as first:
        before = await first.endpoint()
        (wedged,) = servers_in(tmp_path)
        os.kill(wedged, signal.SIGSTOP)
        async with local_server("local-tiny", env=env, answer_s=4) as second:
            assert await second.endpoint() != before
            assert servers_in(tmp_path) != [wedged]
            assert len(servers_in(tmp_path)) == 1


async def test_dead_server_is_replaced_for_its_holders(env, tmp_path):
    async with (
        local_server("local-tiny", env=env) as first,
        local_server("local-tiny", env=env) as second,
    ):
        before = await first.endpoint()
        assert before == await second.endpoint() == await first.endpoint()
        (dead,) = servers_in(tmp_path)
        os.kill(dead, signal.SIGKILL)
        for _ in range(4800):  # the kernel closes the pipe a moment after the process is gone
            after = {(await server.endpoint()).base_url for server in (first, second)}
            if before.base_url not in after:
                break
            await asyncio.sleep(0.05)
        assert len(after) == 1
        assert before.base_url not in after
        assert len(servers_in(tmp_path)) == 1


async def test_other_users_cannot_reach_socket_or_key(held, endpoint):
    folder = Path(held["XDG_RUNTIME_DIR"]) / "hermes_rl"
    assert folder.stat().st_mode & 0o777 == 0o700
    (server,) = servers_in(folder)
    for hidden in (f"/proc/{server}/cmdline", f"/proc/{server}/environ"):
        assert endpoint.api_key.encode() not in Path(hidden).read_bytes()
    for path in folder.iterdir():
        if path.is_file():
            assert endpoint.api_key not in path.read_text(errors="replace")


async def test_the_server_gets_no_key_of_the_environment_and_leaves_one_core_to_the_agents(
    env, tmp_path
):
    async with local_server("local-tiny", env={**env, "OPENAI_API_KEY": "sk-canary"}):
        (server,) = servers_in(tmp_path)
        assert b"sk-canary" not in Path(f"/proc/{server}/environ").read_bytes()
        *_, settings, _ = Path(f"/proc/{server}/cmdline").read_bytes().split(b"\0")
    assert json.loads(settings)["threads"] == max(1, len(os.sched_getaffinity(0)) - 1)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"GGUF" + bytes(1000), r"cannot load .*a\.gguf"), (None, r"a\.gguf: No such file")],
)
async def test_a_file_that_cannot_be_served_is_named(env, tmp_path, content, reason):
    path = tmp_path / "a.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=reason):
        async with local_server("local-tiny", model_path=path, env=env):
            pass


async def test_a_very_long_runtime_folder_works(env, tmp_path):
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    async with local_server("local-tiny", env={**env, "XDG_RUNTIME_DIR": str(folder)}) as server:
        assert (await server.endpoint()).base_url.startswith("http://127.0.0.1:")
