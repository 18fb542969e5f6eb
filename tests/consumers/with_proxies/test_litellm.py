"""A run through LiteLLM's proxy: three wire formats of the run, two of the provider.

The provider behind the proxy is the fake model server, which logs what it served.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from conftest import fake_server, free_port, get_json, run_hermes_rl, started

TASKS = 4
MODELS = {"claude": "anthropic/claude-sonnet-4-5", "gpt": "openai/gpt-5-mini"}
"""Model of the run -> the provider and model that the proxy calls."""


@dataclass(frozen=True)
class Proxy:
    """A proxy and the log of the provider behind it."""

    base_url: str
    log: Path

    def served(self) -> list[dict[str, Any]]:
        """The log entries so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture(scope="module")
def proxy(producer: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("proxy")
    log = folder / "served.jsonl"
    with fake_server(producer, "--log", str(log)) as url:
        models = [
            {
                "model_name": name,
                "litellm_params": {
                    "model": model,
                    "api_key": "k",
                    # LiteLLM adds the /v1 of Anthropic's addresses itself.
                    "api_base": url if name == "gpt" else url.removesuffix("/v1"),
                },
            }
            for name, model in MODELS.items()
        ]
        config = folder / "config.yaml"
        config.write_text(json.dumps({"model_list": models}))
        port = free_port()
        command = [str(Path(sys.executable).parent / "litellm"), "--config", str(config)]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        env = {
            **os.environ,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # nothing is fetched from the network
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        }
        alive = f"http://127.0.0.1:{port}/health/liveliness"
        with started(command, folder / "output.txt", lambda: bool(get_json(alive)), env):
            yield Proxy(f"http://127.0.0.1:{port}/v1", log)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    with path.open("w") as file:
        for n in range(TASKS):
            script = json.dumps([{"run": f"echo {n} > out"}, "Done."])
            row = {"prompt": f"Task {n}.\nSCRIPT: {script}"}
            file.write(json.dumps({**row, "verify": f"[ $(cat /workspace/out) = {n} ]"}) + "\n")
    return path


@pytest.mark.parametrize("options", [(), ("--seed", "7"), ("--set", "endpoint.stream=true")])
@pytest.mark.parametrize("wire", ["chat_completions", "anthropic_messages", "codex_responses"])
@pytest.mark.parametrize("model", MODELS)
def test_a_run_through_the_proxy_has_the_usage_of_the_provider(
    proxy: Proxy, producer: str, tasks: Path, tmp_path: Path,
    model: str, wire: str, options: tuple[str, ...],
) -> None:  # fmt: skip
    """Also if the proxy refuses a seed, as it does for Claude over Chat Completions."""
    before = len(proxy.served())
    where = ("--model", model, "--base-url", proxy.base_url, "--set", f"endpoint.api_mode={wire}")
    run_hermes_rl(producer, tasks, tmp_path / "run", *where, *options)
    rows = pq.read_table(tmp_path / "run" / "trajectories").to_pylist()
    assert [row["reward"] for row in rows] == [1.0] * TASKS
    assert [row["usage"]["unknown_calls"] for row in rows] == [0] * TASKS
    served = [entry for entry in proxy.served()[before:] if entry["outcome"] == "served"]
    for column, counted in (
        ("input_tokens", "prompt_tokens"),
        ("output_tokens", "completion_tokens"),
    ):
        assert sum(row["usage"][column] for row in rows) == sum(entry[counted] for entry in served)
