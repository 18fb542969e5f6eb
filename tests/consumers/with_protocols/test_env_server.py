"""verifiers' EnvServer runs an environment of hermes_rl; its client takes the episode."""

import asyncio
import sys
from pathlib import Path

import pytest
from conftest import fake_server, serving
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.episode import WireEpisode
from verifiers.v1.serve import EnvClient, EnvServer
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import resolve_env_config

HERE = Path(__file__).parents[1]
EXAMPLES = HERE.parents[1] / "examples"


def test_env_server_runs_an_environment_of_hermes_rl(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    producer = request.config.getoption("--producer")
    served = [producer, "-m", "hermes_rl.rl.openenv_server", str(HERE / "talk.py"), "--port", "0"]
    with serving(*served) as url, fake_server(producer) as model:
        episode = asyncio.run(run(url, model))
    assert episode.ok, episode.errors
    (trace,) = episode.traces
    assert trace.reward == 1.0
    texts = [message.content for message in trace.assistant_messages]
    assert texts[1:] == ["It is 6.", "Yes."]
    roles = [message.role for message in trace.branches[-1].messages]
    assert roles[-6:] == ["user", "assistant", "tool", "assistant", "user", "assistant"]


async def run(url: str, model: str) -> WireEpisode:
    """One rollout of the fourth task, through a server and its client."""
    taskset = {"id": "verifiers_env", "base_url": url, "tasks": 4}
    config = {"taskset": taskset, "agent": {"runtime": {"type": "subprocess"}}}
    server = EnvServer(resolve_env_config(config), "tcp://127.0.0.1:0")
    task = list(server.env.taskset)[3]
    serving = asyncio.create_task(server.run())
    client = EnvClient(server.address)
    try:
        await client.wait_for_server_startup()
        endpoint = EvalClientConfig(base_url=model, api_key_var="NO_KEY")
        return await client.run(endpoint, "scripted", SamplingConfig(), task.data.model_dump())
    finally:
        await client.close()
        serving.cancel()
        await asyncio.wait((serving,))
