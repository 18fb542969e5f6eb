"""The tiny model through its real engine and server (127 MB; plumbing, not skill)."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import jsonschema
import openai
import pytest

from hermes_rl.errors import UserError
from hermes_rl.models.local import local_server

pytestmark = pytest.mark.slow

COMMAND = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
    "required": ["command"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "terminal", "description": "x", "parameters": COMMAND},
    }
]
ASK = [{"role": "user", "content": "List the files."}]
EVIDENCE = {"logprobs": True, "extra_body": {"return_token_ids": True}}


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The user's cache of weights, and a runtime folder of the test's own."""
    return {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of one server for many tests; a process of its own holds it."""
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path_factory.mktemp("shared"))}
    holder = start_holder(env)
    try:
        assert holder.stdout.readline()
        yield env
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


@pytest.fixture
async def endpoint(shared):
    async with local_server("local-tiny", env=shared) as server:
        yield await server.endpoint()


@pytest.fixture
async def client(endpoint):
    async with openai.AsyncOpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0, timeout=300
    ) as client:
        yield client


def ask(client, **more):
    fields = {"model": "local-tiny", "messages": ASK, "temperature": 0, "max_tokens": 120, **more}
    return client.chat.completions.create(**fields)


async def test_every_route_wants_the_key_and_none_opens_to_other_origins(endpoint):
    root = endpoint.base_url.removesuffix("/v1")
    origin = {"Origin": "http://elsewhere.example"}
    async with aiohttp.ClientSession(headers=origin) as session:
        for key in (None, "wrong", "é"):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            for path in ("/health", "/v1/models", "/v1/nothing"):
                async with session.get(root + path, headers=headers) as response:
                    assert response.status == 401
                    assert (await response.json())["error"]["code"] == "invalid_api_key"
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with session.get(f"{root}/health", headers=headers) as response:
            assert await response.json() == {"status": "ok"}
            assert not [name for name in response.headers if name.startswith("Access-Control")]
        async with session.get(f"{root}/v1/nothing", headers=headers) as response:
            assert response.status == 404
            assert "/v1/nothing" in (await response.json())["error"]["message"]
    assert endpoint.api_key not in repr(endpoint)


async def test_the_model_is_named_honestly(client, endpoint):
    (model,) = (await client.models.list()).data
    assert model.id == endpoint.model == "local-tiny"
    assert "SmolLM2-135M" in model.description
    assert model.description == endpoint.description


async def test_a_step_with_tools_is_a_valid_call_with_its_books(client):
    wanted = {"type": "function", "function": {"name": "terminal"}}
    answer = await ask(client, tools=TOOLS, tool_choice=wanted, **EVIDENCE)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "terminal"
    jsonschema.validate(json.loads(call.function.arguments), COMMAND)
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 <= usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens
    assert len(choice.token_ids) == usage.completion_tokens
    assert len(answer.prompt_token_ids) == usage.prompt_tokens
    assert [one.id for one in choice.logprobs.content] == choice.token_ids
    assert all(one.logprob <= 0 for one in choice.logprobs.content)
    assert choice.logprobs_kind == "constrained"


async def test_the_next_turn_goes_on_from_the_prompt_of_the_last(client):
    wanted = {"type": "function", "function": {"name": "terminal"}}
    first = await ask(client, tools=TOOLS, tool_choice=wanted, **EVIDENCE)
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a.txt"}
    history = [*ASK, message.model_dump(exclude_none=True), result]
    second = await ask(client, messages=history, tools=TOOLS, tool_choice=wanted, **EVIDENCE)
    # The answer comes back as text, and a model may write tokens that its tokenizer would not:
    # the prompt before it is what must stand again, token for token.
    seen = first.prompt_token_ids
    assert second.prompt_token_ids[: len(seen)] == seen
    assert second.usage.prompt_tokens_details.cached_tokens >= len(seen) - 1


async def test_a_free_step_is_a_call_or_the_final_text(client):
    for seed in range(6):
        answer = await ask(client, tools=TOOLS, temperature=1.0, seed=seed)
        (choice,) = answer.choices
        if choice.finish_reason == "tool_calls":
            jsonschema.validate(
                json.loads(choice.message.tool_calls[0].function.arguments), COMMAND
            )
        else:
            assert choice.finish_reason in ("stop", "length")
            assert choice.message.tool_calls is None
            assert isinstance(choice.message.content, str)


async def test_a_cut_call_comes_back_as_text(client):
    answer = await ask(client, tools=TOOLS, max_tokens=4, **EVIDENCE)
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert choice.message.content.startswith('{"name"')
    assert answer.usage.completion_tokens == len(choice.token_ids) == 4


@pytest.mark.parametrize("tools", [None, TOOLS])
async def test_a_stream_adds_up_to_the_whole(client, tools):
    more = EVIDENCE if tools is None else {"tools": tools, **EVIDENCE}
    more["max_tokens"] = 60
    await ask(client, **more)  # so that both find the same cache, and the same rounding
    whole = await ask(client, **more)
    stream = await ask(client, stream=True, stream_options={"include_usage": True}, **more)
    text, calls, end, usage, ids, kind = "", [], None, None, None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            end = choice.finish_reason or end
            ids = getattr(choice, "token_ids", ids)
            kind = getattr(choice, "logprobs_kind", kind)
    message = whole.choices[0].message
    assert text == (message.content or "")
    assert [c.function.model_dump() for c in calls] == [
        c.function.model_dump() for c in message.tool_calls or []
    ]
    assert end == whole.choices[0].finish_reason
    assert ids == whole.choices[0].token_ids
    assert kind == whole.choices[0].logprobs_kind == ("raw" if tools is None else "constrained")
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


async def test_a_structured_answer_keeps_to_its_schema(client):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = await ask(client, response_format=form)
    jsonschema.validate(json.loads(answer.choices[0].message.content), schema)


async def test_bad_requests_and_overflow_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="n: this server"):
        await ask(client, n=2)
    with pytest.raises(openai.BadRequestError) as overflow:
        await ask(client, messages=[{"role": "user", "content": "a b " * 5000}])
    assert overflow.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as overflow:
        await ask(client, stream=True, messages=[{"role": "user", "content": "a b " * 5000}])
    assert overflow.value.code == "context_length_exceeded"


async def test_more_requests_than_slots_wait_for_their_turn(client):
    answers = await asyncio.gather(*(ask(client, max_tokens=8) for _ in range(9)))
    assert {answer.usage.completion_tokens for answer in answers} == {8}


HOLDER = """
import asyncio, sys
from hermes_rl.models.local import local_server

async def main():
    async with local_server("local-tiny") as server:
        print((await server.endpoint()).base_url, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def start_holder(env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER], env=env, stdout=subprocess.PIPE, text=True
    )


def servers_in(folder: Path) -> list[int]:
    """The processes whose command line names a socket in this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "hermes_rl.models.local.server" in line and str(folder) in line:
            found.append(int(entry.name))
    return found


def wait_until(condition, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_processes_share_one_server_which_ends_with_the_last_even_if_killed(env, tmp_path):
    holders = [start_holder(env) for _ in range(3)]
    try:
        addresses = {holder.stdout.readline() for holder in holders}
        assert len(addresses) == 1
        assert addresses != {""}
        assert len(servers_in(tmp_path)) == 1
        holders[0].kill()
        holders[0].wait()
        time.sleep(3)
        assert len(servers_in(tmp_path)) == 1
    finally:
        for holder in holders:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            holder.stdout.close()
    assert wait_until(lambda: not servers_in(tmp_path), 30)


async def test_a_wedged_server_is_replaced(env, tmp_path):
    async with local_server("local-tiny", env=env) as first:
        before = await first.endpoint()
        (wedged,) = servers_in(tmp_path)
        os.kill(wedged, signal.SIGSTOP)
        async with local_server("local-tiny", env=env, answer_s=4) as second:
            assert await second.endpoint() != before
            assert servers_in(tmp_path) != [wedged]
            assert len(servers_in(tmp_path)) == 1


async def test_a_dead_server_is_replaced_for_those_who_hold_it(env, tmp_path):
    async with (
        local_server("local-tiny", env=env) as first,
        local_server("local-tiny", env=env) as second,
    ):
        before = await first.endpoint()
        assert before == await second.endpoint() == await first.endpoint()
        (dead,) = servers_in(tmp_path)
        os.kill(dead, signal.SIGKILL)
        for _ in range(600):  # the kernel closes the pipe a moment after the process is gone
            after = {(await server.endpoint()).base_url for server in (first, second)}
            if before.base_url not in after:
                break
            await asyncio.sleep(0.05)
        assert len(after) == 1
        assert before.base_url not in after
        assert len(servers_in(tmp_path)) == 1


async def test_who_hangs_up_frees_the_slots(endpoint):
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    form = {"name": "long", "schema": {"const": "word " * 2500}}  # minutes of work for four slots
    long = {
        "messages": ASK,
        "max_tokens": 3000,
        "response_format": {"type": "json_schema", "json_schema": form},
    }
    async with aiohttp.ClientSession(headers=headers) as session:
        url = f"{endpoint.base_url}/chat/completions"
        waiting = [
            asyncio.create_task(session.post(url, json={**long, "stream": number % 2 == 0}))
            for number in range(4)
        ]
        await asyncio.sleep(2)
        for task in waiting:
            task.cancel()
        gone = await asyncio.gather(*waiting, return_exceptions=True)
        for answer in gone:
            if isinstance(answer, aiohttp.ClientResponse):
                answer.close()
        async with asyncio.timeout(40):
            async with session.post(url, json={"messages": ASK, "max_tokens": 3}) as response:
                assert response.status == 200


async def test_nobody_else_can_reach_the_pipe_or_read_the_key(shared, endpoint):
    folder = Path(shared["XDG_RUNTIME_DIR"]) / "hermes_rl"
    assert folder.stat().st_mode & 0o777 == 0o700
    (server,) = servers_in(folder)
    for hidden in (f"/proc/{server}/cmdline", f"/proc/{server}/environ"):
        assert endpoint.api_key.encode() not in Path(hidden).read_bytes()
    for path in folder.iterdir():
        if path.is_file():
            assert endpoint.api_key not in path.read_text(errors="replace")


async def test_no_key_of_the_environment_reaches_the_server(env, tmp_path):
    async with local_server("local-tiny", env={**env, "OPENAI_API_KEY": "sk-canary"}):
        (server,) = servers_in(tmp_path)
        assert b"sk-canary" not in Path(f"/proc/{server}/environ").read_bytes()


async def test_a_file_that_the_engine_cannot_load_is_said(env, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(1000))
    with pytest.raises(UserError, match=r"cannot load .*broken\.gguf"):
        async with local_server("local-tiny", model_path=broken, env=env):
            pass


async def test_a_path_that_is_no_model_is_said(env, tmp_path):
    with pytest.raises(UserError, match="nothing-there: No such file"):
        async with local_server("local-tiny", model_path=tmp_path / "nothing-there", env=env):
            pass


async def test_a_very_long_runtime_folder_is_no_hindrance(env, tmp_path):
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    async with local_server("local-tiny", env={**env, "XDG_RUNTIME_DIR": str(folder)}) as server:
        assert (await server.endpoint()).base_url.startswith("http://127.0.0.1:")


THREADS = """
import os
from hermes_rl.models.local.client import threads_of_this_machine
cores = sorted(os.sched_getaffinity(0))
for count in (1, 2, len(cores)):
    os.sched_setaffinity(0, cores[:count])
    print(threads_of_this_machine(), max(1, len(cores[:count]) - 1))
"""


def test_one_core_is_left_to_the_agents():
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    said = [line.split() for line in done.stdout.splitlines()]
    assert len(said) == 3, done.stderr
    assert said[0] == ["1", "1"]
    assert all(threads == wanted for threads, wanted in said)


def test_the_package_loads_nothing_heavy():
    code = (
        "import sys, hermes_rl.models.local\n"
        "print([m for m in ('xllamacpp', 'aiohttp', 'openai', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
