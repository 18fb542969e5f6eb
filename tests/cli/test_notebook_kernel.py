"""The synchronous functions in a notebook kernel, where an event loop already runs."""

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cli_runner import clean_environment, scripted_task, write_rows
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager

TWO_TURNS = ({"run": "echo 1 > a"}, "wrote it")


class Kernel:
    """A kernel of this interpreter, cell by cell."""

    def __init__(self, client: Any) -> None:
        self.client = client

    async def run(self, code: str, seconds: float = 240.0) -> str:
        """Run a cell and return its output. Raises: AssertionError with the cell's traceback."""
        printed: list[str] = []

        def collect(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])

        reply = await self.client.execute_interactive(
            code, timeout=seconds, output_hook=collect, allow_stdin=False
        )
        assert reply["content"]["status"] == "ok", "\n".join(reply["content"]["traceback"])
        return "".join(printed)


class ThisPython(AsyncKernelManager):
    """The kernel of this interpreter, whatever kernels the machine has installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="this Python", language="python")


@pytest.fixture
async def kernel(tmp_path: Path) -> AsyncIterator[Kernel]:
    manager = ThisPython()
    await manager.start_kernel(cwd=str(tmp_path), env=clean_environment())
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=240)
        yield Kernel(client)
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)


def agent(base_url: str) -> str:
    return (
        "import hermes_rl\n"
        f"model = hermes_rl.ModelConfig(name='m', base_url={base_url!r})\n"
        "agent = hermes_rl.AIAgent(model, toolsets=['terminal'])\n"
    )


async def test_agent_runs_in_a_notebook_kernel(kernel: Kernel, base_url: str) -> None:
    prompt = scripted_task("chat", *TWO_TURNS)["prompt"]
    await kernel.run(agent(base_url))
    assert await kernel.run(f"print(agent.chat({prompt!r}))") == "wrote it\n"
    result = await kernel.run(
        f"result = agent.run_conversation({prompt!r}, conversation_history=[])\n"
        "import json; print(json.dumps({k: result[k] for k in ('completed', 'end_reason')}))\n"
        "print([m['role'] for m in result['messages']], result['usage']['total_tokens'] > 0)"
    )
    first, second = result.splitlines()
    assert json.loads(first) == {"completed": True, "end_reason": "answered"}
    assert second == "['system', 'user', 'assistant', 'tool', 'assistant'] True"
    awaited = await kernel.run(
        f"r = await agent.run({prompt!r}, conversation_history=[])\nprint(r['final_response'])"
    )
    assert awaited == "wrote it\n"
    assert await kernel.run("import asyncio\nawait asyncio.sleep(0)\nagent.close()") == ""


async def test_user_errors_in_a_notebook_are_one_line(kernel: Kernel) -> None:
    for code, line in (
        ("import hermes_rl; hermes_rl.load_run('nothere')", "UserError: nothere is not a run d"),
        ("from batch_runner import run_batch; run_batch({'modle': {}})", "unknown key 'modle'"),
    ):
        reply = await kernel.client.execute_interactive(code, timeout=240, allow_stdin=False)
        (shown,) = reply["content"]["traceback"]
        assert line in shown
        assert "\n" not in shown


def batch(base_url: str, workers: int) -> str:
    return (
        "import hermes_rl\n"
        "from batch_runner import run_batch\n"
        "config = hermes_rl.RunConfig(dataset={'path': 'my.jsonl'}, model={'name': 'm'},\n"
        f"    endpoint={{'base_url': {base_url!r}}}, agent={{'toolsets': ['terminal']}},\n"
        f"    run={{'out': 'run-{workers}', 'workers': {workers}}})\n"
        "report = run_batch(config)\n"
        "print('REPORT', report.done, report.solved, report.exit_code)\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
async def test_run_batch_in_a_notebook_kernel(
    workers: int, kernel: Kernel, base_url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    rows = [scripted_task(f"t{n}", *TWO_TURNS, verify="grep 1 $WORKSPACE/a") for n in range(3)]
    write_rows(tmp_path / "my.jsonl", *rows)
    if workers:
        cluster = request.getfixturevalue("cluster")
        await kernel.run(f"import os; os.environ.update({cluster!r})")
    assert "REPORT 3 3 0" in await kernel.run(batch(base_url, workers))
    if not workers:  # the same cell again finds the finished run
        assert "REPORT 3 3 0" in await kernel.run(batch(base_url, workers))
    frames = await kernel.run(
        f"run = hermes_rl.load_run('run-{workers}')\n"
        "print(len(run.trajectories), len(run.calls), len(run.messages), run.runs['solved'][0])"
    )
    assert frames == "3 6 15 3\n"
    loaded = await kernel.run("import sys; print('ray' in sys.modules)")
    assert loaded == f"{bool(workers)}\n"


async def test_progress_is_updated_below_the_cell(
    kernel: Kernel, base_url: str, tmp_path: Path
) -> None:
    steps: list[Any] = [{"run": "echo 1 > a", "latency_s": 1.2}, {"text": "<b>", "latency_s": 1.2}]
    write_rows(tmp_path / "my.jsonl", scripted_task("t", *steps, verify="grep 1 $WORKSPACE/a"))
    shown: list[dict[str, Any]] = []

    def collect(message: dict[str, Any]) -> None:
        if message["msg_type"] in ("display_data", "update_display_data"):
            shown.append({"type": message["msg_type"], **message["content"]})

    reply = await kernel.client.execute_interactive(
        batch(base_url, 0), timeout=240, output_hook=collect, allow_stdin=False
    )
    assert reply["content"]["status"] == "ok"
    first, *updates = shown
    assert first["type"] == "display_data"
    assert {one["type"] for one in updates} == {"update_display_data"}
    assert len({one["transient"]["display_id"] for one in shown}) == 1, "one place"
    assert any("1 running" in one["data"]["text/plain"] for one in shown)
    assert updates[-1]["data"]["text/plain"].startswith("1/1 units  1 solved")
    assert '<progress value="1" max="1"' in updates[-1]["data"]["text/html"]
