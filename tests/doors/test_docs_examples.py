"""The examples of the docs, run as they stand there."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doors_kit import PLAYED, clean_environment, hermes

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.slow
PAGES = ("agent.md", "errors.md", "evaluating.md", "reading.md", "requests.md", "running.md")


@pytest.fixture(scope="module")
def clone(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs that the pages speak of."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(finished / "runs", folder / "runs")
    for model in ("oracle", "noop"):
        words = ("run", "smoke", "--model", model, "--repeats", "2", "--workers", "0")
        assert hermes(*words, cwd=folder).code == 0
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_python_runs_as_it_stands(page: str, clone: Path) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=clone, capture_output=True, text=True, timeout=120,
        env={**clean_environment(), "HF_HOME": str(clone / "hf")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    promised = re.findall(r"prints\n\n```\n(.*?)```", text, re.DOTALL)
    assert done.stdout == "".join(promised) or not promised


def test_the_commands_print_what_the_docs_say(clone: Path) -> None:
    said = hermes("status", "runs/smoke-oracle", cwd=clone).out
    ten = hermes("run", "smoke", *PLAYED, "--out", "ten", cwd=clone)
    assert ten.code == 0
    line = hermes("status", "ten", cwd=clone).out
    assert line in (DOCS / "running.md").read_text(encoding="utf-8")
    assert said.startswith("20/20 units  20 solved")
    checked = hermes("check", "smoke", "--run", cwd=clone).out
    assert checked in (DOCS / "tasks.md").read_text(encoding="utf-8")
    refused = hermes("run", "smoke", *PLAYED, "--temperature", "1", cwd=clone).error
    assert refused in (DOCS / "running.md").read_text(encoding="utf-8")
