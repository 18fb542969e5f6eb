"""Run environments on the real batch runner, with a fake server as policy, user and judge."""

import asyncio
import json
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from batch_runner import Report, Silent, arun_batch, sum_earlier_spending
from hermes_rl.config import RunConfig, parse_config
from hermes_rl.messages import AssistantMessage, UserMessage, text_of
from hermes_rl.models.rate import RUN_TOKENS
from hermes_rl.rl import write_evaluation
from hermes_rl.store import RunDir
from hermes_rl.testing import FakeConfig, FakeServer, ServedRequest

if TYPE_CHECKING:
    from forks import ForkedProcess

CLI = "import sys; from hermes_rl.cli import main; sys.exit(main())"
"""Code that runs the command `hermes-rl` in a Python process."""
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def make_config(
    name: str | Path, out: Path, server: FakeServer | None, /, **sections: Mapping[str, Any]
) -> RunConfig:
    """Configure a run without a sandbox, in this process; sections are merged over that."""
    data: dict[str, dict[str, Any]] = {
        "dataset": {"limit": 4},
        "model": {"name": "policy" if server else "oracle"},
        "sandbox": {"backend": "none"},
        "endpoint": {"base_url": server.base_url, "tokens": "off"} if server else {},
        "run": {"out": str(out), "workers": 0, "allow_unsandboxed": True},
        "env": {"name": str(name)},
    }
    for key, section in sections.items():
        data[key] = {**data.get(key, {}), **section}
    return parse_config(data)


async def run_environment(
    name: str | Path, out: Path, server: FakeServer | None = None, /, **sections: Mapping[str, Any]
) -> Report:
    """Run an environment to its end."""
    return await arun_batch(make_config(name, out, server, **sections), progress=Silent())


async def start(
    *arguments: str | Path, env: Mapping[str, str] | None = None, command: str = "env"
) -> "ForkedProcess":
    """Start `hermes-rl COMMAND ARGUMENTS --json` as a process."""
    from forks import start  # not for the programs of tests, which import this module too

    return await start([command, *map(str, arguments), "--json"], {**os.environ, **(env or {})})


def run_flags(out: Path, server: FakeServer, *more: str) -> list[str]:
    """Arguments of a run without a sandbox, in one process."""
    return [
        "--model", "policy", "--base-url", server.base_url, "--out", str(out), "--sandbox", "none",
        "--allow-unsandboxed", "--workers", "0", "--set", "endpoint.tokens=off", *more,
    ]  # fmt: skip


async def events(process: "ForkedProcess", until: int = 1_000_000) -> list[Any]:
    """Read the events of a process to its end, or until so many attempts ended."""
    seen: list[Any] = []
    while sum(e["event"] == "attempt" for e in seen) < until:
        line = await asyncio.wait_for(process.stdout.readline(), 300)
        if not line:
            break
        seen.append(json.loads(line))
    return seen


def report_of(seen: list[Any]) -> dict[str, Any]:
    """Return the report of a run from its events."""
    (report,) = (event for event in seen if event["event"] == "report")
    return dict(report)


def table(out: Path, name: str = "trajectories") -> list[dict[str, Any]]:
    """Read all published rows of a table, in the order of the stream."""
    parts = sorted((out / name).glob("*.parquet"))
    rows = [row for part in parts for row in pq.read_table(part).to_pylist()]
    return sorted(rows, key=lambda r: (r.get("row_index", 0), r.get("repeat", 0)))


def tokens(rows: list[dict[str, Any]]) -> int:
    """Sum the tokens of the calls in rows."""
    calls = [call for row in rows for call in row["calls"]]
    return sum((c["input_tokens"] or 0) + (c["output_tokens"] or 0) for c in calls)


def tokens_spent(out: Path) -> int:
    """Return the tokens that all starts of a run have spent, as its budget counts them."""
    return sum_earlier_spending(RunDir(out), [RUN_TOKENS], lambda *_: None)[RUN_TOKENS]


def start_server(**plays: Any) -> FakeServer:
    """Start a server whose models are functions of a request."""
    return FakeServer(FakeConfig(plays=plays))


async def evaluate_run(out: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Write an evaluation; return the results of metrics.json and the lines of samples.jsonl."""
    metrics = await write_evaluation(out)
    content = json.loads((out / "metrics.json").read_bytes())
    assert content["results"]["all"] == metrics
    assert content["config_general"]["model_name"] == "policy"
    assert float(content["config_general"]["total_evaluation_time_seconds"]) > 0
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    return content["results"], samples


def count_answers(request: ServedRequest) -> int:
    """Count the answers so far."""
    return sum(isinstance(m, AssistantMessage) for m in request.messages)


def first_prompt(request: ServedRequest) -> str:
    """Return the first user text."""
    return next(text_of(m) for m in request.messages if isinstance(m, UserMessage))


@dataclass(frozen=True)
class EnvironmentFile:
    """The file of an environment."""

    path: Path

    def line(self, text: str) -> int:
        """Return the number of the first line that contains a text."""
        lines = self.path.read_text().splitlines()
        return next(n for n, line in enumerate(lines, 1) if text in line)


@dataclass(frozen=True)
class Lab:
    """A folder with an environment and its run in `run`."""

    path: Path

    @property
    def out(self) -> Path:
        return self.path / "run"

    def write(self, body: str, head: str = "", name: str = "made_up") -> EnvironmentFile:
        """Write an environment with this class body."""
        text = "from hermes_rl.rl import *\n" + textwrap.dedent(head)
        text += f'\n\nclass Made(Environment[EnvConfig]):\n    name = "{name}"\n\n'
        text += textwrap.indent(textwrap.dedent(body).strip("\n"), "    ") + "\n"
        path = self.path / f"{name}.py"
        path.write_text(text)
        return EnvironmentFile(path)

    async def run(
        self, body: str | Path, server: FakeServer | None = None, /, **sections: Any
    ) -> Report:
        """Run an environment, given as a file or as a class body, to its end."""
        env = self.write(body).path if isinstance(body, str) else body
        return await run_environment(env, self.out, server, **sections)

    def rows(self, name: str = "trajectories") -> list[dict[str, Any]]:
        return table(self.out, name)

    def row(self, name: str = "trajectories") -> dict[str, Any]:
        """The only row of a table."""
        (row,) = self.rows(name)
        return row

    def groups(self) -> dict[str, dict[str, Any]]:
        """The newest row of each group, by task."""
        rows = sorted(self.rows("groups"), key=lambda row: row["created_at"])
        return {row["task_id"]: row for row in rows}
