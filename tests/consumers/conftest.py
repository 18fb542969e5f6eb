"""Two runs made by the project's own environment, for the programs of other people to read.

The readers run in `.venv-consumers` (make test-consumers), where hermes_rl is not installed:
nothing of ours helps them.
"""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Read by huggingface_hub at import: no test here may ask a hub, and none may use a GPU.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Told:
    """What `told_run.py` made."""

    folder: Path
    truth: dict[str, dict[str, Any]]
    """Trajectory -> `said` (sampled texts in order), `not_said`, `reward`, `group`."""

    def export(self, name: str) -> str:
        """The file of a format."""
        (path,) = (self.folder / "exports").glob(f"{name}.*")
        return str(path)

    def said(self) -> Counter[str]:
        """Every sampled text, as often as it was sampled."""
        return Counter(text for facts in self.truth.values() for text in facts["said"])

    def not_said(self) -> set[str]:
        """Results of tools, and what others wrote in an assistant's name."""
        return {text for facts in self.truth.values() for text in facts["not_said"]}

    def check(self, trained: list[str], end: str = "<|im_end|>") -> None:
        """Each sampled text is trained exactly once, and nothing else is.

        Args:
            trained: decoded labels, one text per training row, in which each turn ends with `end`.
        """
        turns = [turn + end for text in trained for turn in text.split(end)[:-1]]
        assert Counter(turns) == self.said()
        assert all(text.endswith(end) for text in trained)
        assert not any(foreign in text for foreign in self.not_said() for text in trained)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--producer", help="the Python that has hermes_rl")
    parser.addoption(
        "--run-dir", action="append", default=[], help="read this run directory, make none"
    )


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run of oracles, and one of scripted calls of several tools, made by a fake model server."""
    given = request.config.getoption("--run-dir")
    if given:
        return [Path(path) for path in given]
    producer = request.config.getoption("--producer")
    if not producer:
        pytest.fail("say --producer=.venv/bin/python (make test-consumers does) or --run-dir=RUN")
    out = tmp_path_factory.mktemp("runs")
    produce(producer, HERE / "tasks.jsonl", out / "oracle", "--model", "oracle")
    with fake_server(producer) as url:
        scripted = ["--model", "scripted", "--base-url", url, "--toolsets", "terminal,file"]
        # The slip of one of them must stand in its row, not be asked for again.
        for switch in ("reask_cut_calls", "reask_arguments"):
            scripted += ["--set", f"agent.switches.{switch}=false"]
        produce(producer, HERE / "scripted.jsonl", out / "scripted", *scripted)
    return [out / "oracle", out / "scripted"]


def produce(producer: str, tasks: Path, out: Path, *options: str) -> None:
    command = [str(Path(producer).parent / "hermes-rl"), "run", str(tasks), "--out", str(out)]
    command += ["--workers", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def fake_server(producer: str) -> Iterator[str]:
    """The base URL of a fake model server that lives as long as the context."""
    command = [producer, "-m", "hermes_rl.testing.fake_server", "--until-eof"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin
        assert server.stdout
        yield json.loads(server.stdout.readline())["base_url"]
        server.stdin.close()
        server.wait(timeout=30)


@pytest.fixture(scope="session")
def parquet(runs: list[Path]) -> list[str]:
    """The files as a user would name them."""
    return [str(run / "trajectories" / "*.parquet") for run in runs]


@pytest.fixture
def cache(tmp_path: Path) -> str:
    """A cache of its own for `datasets`, so that no earlier run answers for this one."""
    return str(tmp_path / "cache")


@pytest.fixture(scope="session")
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A told run in all formats that `hermes-rl export` offers."""
    producer = request.config.getoption("--producer")
    if not producer:
        pytest.fail("say --producer=.venv/bin/python (make test-consumers does)")
    out = tmp_path_factory.mktemp("told")
    command = [producer, str(HERE / "told_run.py"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return Told(out, json.loads((out / "truth.json").read_text(encoding="utf-8")))
