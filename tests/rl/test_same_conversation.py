"""One conversation through `AIAgent`, a batch run and an environment: the same messages."""

import json
from pathlib import Path
from typing import Any

from runs import run_environment

from batch_runner import Silent, arun_batch
from hermes_rl import AIAgent, ModelConfig, load_run
from hermes_rl.config import parse_config
from hermes_rl.testing import FakeConfig, FakeServer

STEPS: list[Any] = [
    {"run": "echo one > f; cat f", "text": "I write.", "reasoning": "First a file."},
    [{"run": "echo two", "finish": "length"}, {"calls": [{"name": "nope"}]}],
    {"text": ""},
    {"text": "There is ", "finish": "length"},
    "one file.",
]
HISTORY = [
    {"role": "user", "content": "Do it.\nSCRIPT: " + json.dumps(["Hello.", *STEPS])},
    {"role": "tool", "tool_call_id": "gone", "name": "terminal", "content": "an orphan"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Now begin."},
    {"role": "user", "content": ""},
]
ENVIRONMENT = f"""
import json
from hermes_rl.rl import EnvConfig, Environment, make_task

class Same(Environment[EnvConfig]):
    name = "same"

    def tasks(self, split, seed):
        yield make_task(json.loads({json.dumps(json.dumps([*HISTORY, "LAST"]))})[:-1]
                        + [{{"role": "user", "content": "Go."}}])

    async def compute_reward(self, task, trajectory, ctx):
        return 1.0
"""


def row_of(run: Path) -> dict[str, Any]:
    """Return what must be equal in the only row."""
    (row,) = load_run(run).trajectories.to_dict("records")
    infos = [{**dict(info), "raw_content": None} for info in row["message_info"]]
    return {
        "messages": row["messages"],
        "message_info": [{k: repr(v) for k, v in info.items()} for info in infos],
        "tools": row["tools"],
        "end": (row["end_reason"], row["final_response"], row["turns"]),
        "tokens": row["usage"]["total_tokens"],
        "outcomes": [(c["turn"], c["outcome"], c["error"]) for c in row["calls"]],
        "metrics": dict(row["metrics"]),
    }


async def test_an_agent_a_batch_run_and_an_environment_give_the_same_messages(
    tmp_path: Path,
) -> None:
    rows: list[dict[str, Any]] = []
    async with FakeServer(FakeConfig()) as server:
        model = ModelConfig(name="policy", base_url=server.base_url)
        async with AIAgent(
            model, preset="datagen", sandbox="none", allow_unsandboxed=True
        ) as agent:
            result = await agent.run("Go.", conversation_history=HISTORY)
            agent.save_trajectory(tmp_path / "agent")
        rows.append(row_of(tmp_path / "agent"))
    async with FakeServer(FakeConfig()) as server:
        prompt = [*HISTORY, {"role": "user", "content": "Go."}]
        config = parse_config(
            {
                "dataset": {"path": [{"prompt": prompt}]},
                "model": {"name": "policy"},
                "endpoint": {"base_url": server.base_url},
                "sandbox": {"backend": "none"},
                "run": {"out": str(tmp_path / "batch"), "workers": 0, "allow_unsandboxed": True},
            }
        )
        await arun_batch(config, progress=Silent())
        rows.append(row_of(tmp_path / "batch"))
    async with FakeServer(FakeConfig()) as server:
        path = tmp_path / "same.py"
        path.write_text(ENVIRONMENT)
        limits = {"dataset": {"limit": 1, "repeats": 1}, "agent": {"preset": "datagen"}}
        await run_environment(f"{path}:Same", tmp_path / "env", server, **limits)
        rows.append(row_of(tmp_path / "env"))
    by_agent, by_run, by_environment = rows
    assert by_agent == by_run == by_environment
    assert by_agent["end"][:2] == ("answered", "There is one file.")
    assert list(by_agent["messages"][1:6]) == HISTORY  # unchanged
    assert result["messages"][-1]["content"] == "There is one file."
