"""The notebooks run in a fresh clone and on existing runs."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from batch_runner import arun_batch
from hermes_rl import RunConfig
from hermes_rl.testing import FakeServer

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
pytestmark = pytest.mark.slow


class ThisPython(AsyncKernelManager):
    """A kernel of this interpreter instead of an installed one."""

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="this Python", language="python")


async def execute(*plays: tuple[str, Path], refusing: Path | None = None) -> list[Any]:
    """Run notebooks in `root/notebooks` and return them with outputs.

    One kernel runs them all, to save its start and imports. Each notebook starts in its folder
    without earlier names, unless it runs a second time ("Run all" in the same kernel).

    Args:
        refusing: the root in which cells may end with an error of hermes_rl.
    """
    made: list[Any] = []
    client = NotebookClient(
        nbformat.v4.new_notebook(), timeout=300, kernel_manager_class=ThisPython, allow_errors=True
    )
    async with client.async_setup_kernel():
        for name, root in plays:
            folder = root / "notebooks"
            folder.mkdir(exist_ok=True)
            copy = Path(shutil.copy(NOTEBOOKS / name, folder))
            client.nb = notebook = nbformat.read(copy, as_version=4)
            if plays.index((name, root)) == len(made):  # the first run of this notebook
                start = nbformat.v4.new_code_cell(f"%cd -q {folder}\n%reset -f")
                notebook.cells.insert(0, start)
            for index, cell in enumerate(notebook.cells):
                await client.async_execute_cell(cell, index)
            errors = {o.ename for o in outputs(notebook) if o.output_type == "error"}
            assert errors == ({"UserError"} if root == refusing else set()), (name, errors)
            made.append(notebook)
    return made


def printed(notebook: Any) -> str:
    return "".join(o.text for o in outputs(notebook) if o.output_type == "stream")


def shown(notebook: Any) -> str:
    """Return the text of all values of cells."""
    values = [o for o in outputs(notebook) if o.output_type == "execute_result"]
    return "\n".join(o.data["text/plain"] for o in values)


def figures(notebook: Any) -> int:
    return sum("image/png" in o.get("data", {}) for o in outputs(notebook))


def outputs(notebook: Any) -> list[Any]:
    return [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]


WRONG, RIGHT = {"run": "echo 0 > out.txt"}, {"run": "echo 1 > out.txt"}
TASKS: dict[str, list[Any]] = {
    **{f"easy-{n}": [RIGHT, "done"] for n in range(3)},
    **{f"hard-{n}": [WRONG, RIGHT, "done"] for n in range(4)},
    **{f"never-{n}": [WRONG, "done"] for n in range(2)},
    "refused": [{"text": "", "fault": "content_filter"}],
}
"""Task -> steps of the model. One turn solves 3 of 9, two solve 7; the tenth has no verdict."""


async def made_run(out: Path, base_url: str, max_turns: int, only: str = "") -> None:
    """Run these tasks (`only`: those with such names), two repeats each, with a fake server."""
    dataset = out.parent / "tasks.jsonl"
    dataset.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "id": name,
            "prompt": f"Write 1 to out.txt.\nSCRIPT: {json.dumps(steps)}",
            "verify": 'test "$(cat "$WORKSPACE/out.txt")" = 1',
        }
        for name, steps in TASKS.items()
        if name.startswith(only)
    ]
    for number, row in enumerate(rows):
        row["number"] = str(number)  # equal rows would be the same task
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RunConfig.model_validate(
        {
            "dataset": {"path": str(dataset), "repeats": 2},
            "model": {"name": "fake"},
            "agent": {"toolsets": ["terminal"], "preset": "rl", "limits": {"max_turns": max_turns}},
            "endpoint": {"base_url": base_url},
            "sandbox": {"backend": "none"},
            "run": {"out": str(out), "workers": 0, "allow_unsandboxed": True, "max_attempts": 1},
        }
    )
    await arun_batch(config)


async def test_notebooks_run_in_a_fresh_clone(tmp_path: Path) -> None:
    clones = [tmp_path / "one", tmp_path / "two"]
    for clone in clones:
        clone.mkdir()
    plays = list(zip(("first_look.ipynb", "evaluate.ipynb"), clones, strict=True))
    look, look_again, compared, compared_again = await execute(*plays[:1] * 2, *plays[1:] * 2)
    for notebook in (look, compared):
        assert "20/20 units done, 20 solved" in printed(notebook)
        assert "Traceback" not in printed(notebook)
    assert "notebook-oracle: solved 100%" in printed(look)
    assert figures(look) == 2
    assert "20/20 units done, 0 solved" in printed(compared)
    assert "notebook-oracle less notebook-noop: +100%" in printed(compared)
    assert figures(compared) == 3
    for again in (look_again, compared_again):
        assert "20/20 units done, 20 solved" in printed(again)


ANALYSES = (
    "failure_modes.ipynb",
    "cost_quality.ipynb",
    "group_health.ipynb",
    "export_training.ipynb",
)


async def test_analyses_find_failures_costs_and_groups(tmp_path: Path) -> None:
    async with FakeServer() as server:
        await made_run(tmp_path / "runs/demo-rehearsal", server.base_url, max_turns=1)
        await made_run(tmp_path / "runs/demo", server.base_url, max_turns=5)
    plays = ((name, tmp_path) for name in ANALYSES)
    failures, costs, groups, exports = await execute(*plays)
    assert "Trajectory never-0 #0: reward 0.0" in shown(failures)
    html = [o.data["text/html"] for o in outputs(failures) if "text/html" in o.get("data", {})]
    assert "echo 0 &gt; out.txt" in html[-1]  # the trajectory
    assert "demo-rehearsal" in shown(costs)
    assert [figures(one) for one in (failures, costs, groups)] == [3, 7, 2]
    counts = dict(line.rsplit(None, 1) for line in shown(groups).splitlines()[:6])
    assert (counts["groups"], counts["all solved"], counts["with a gradient"]) == ("10", "10", "0")
    assert "10 samples of 40 rollouts" in printed(exports)
    assert "30  samples equal to an earlier one" in printed(exports)


async def test_notebooks_use_existing_runs(tmp_path: Path) -> None:
    async with FakeServer() as server:
        await made_run(tmp_path / "runs/demo-rehearsal", server.base_url, max_turns=1)
        await made_run(tmp_path / "runs/demo", server.base_url, max_turns=5)
        nothing = tmp_path / "nothing"
        await made_run(nothing / "runs/demo", server.base_url, max_turns=1, only="refused")
        for name in ("commits", "failures"):  # as of a run that was killed at once
            shutil.rmtree(nothing / "runs/demo" / name)
    look, compared, unlooked, unexplained = await execute(
        *((f"{name}.ipynb", tmp_path) for name in ("first_look", "evaluate")),
        *((f"{name}.ipynb", nothing) for name in ("first_look", "failure_modes")),
        refusing=nothing,
    )
    assert "No unit has finished." in printed(unlooked)
    assert "No unit has finished." in shown(unlooked)
    assert "No attempt has ended." in shown(unexplained)
    assert "demo: solved 78%" in printed(look)
    assert "9 tasks, 18 units; 2 attempts left out" in printed(look)
    assert figures(look) == 2
    assert "content_filter" in shown(look)
    text = printed(compared)
    assert "demo-rehearsal: solved 33%" in text
    assert "demo less demo-rehearsal: +44% (95 % interval +4% to +85%) over 9 common" in text
    assert "no difference shown (p = 0.12, sign flips)" in text
    assert figures(compared) == 3
    bounds = shown(compared).splitlines()[-2:]
    assert [float(text) for text in bounds[0].split()[1:]] == [18, 2, 0.3, 0.4]
    assert [float(text) for text in bounds[1].split()[1:]] == [18, 2, 0.7, 0.8]
    assert not (tmp_path / "runs/notebook-noop").exists()


@pytest.mark.parametrize("name", ["first_look.ipynb", "evaluate.ipynb", *ANALYSES])
def test_notebooks_are_committed_without_outputs(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    assert outputs(notebook) == []
    assert all(cell.execution_count is None for cell in notebook.cells if "execution_count" in cell)
