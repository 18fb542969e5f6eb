"""Two runs made by the project's own environment, for the programs of other people to read.

The readers run in `.venv-consumers` (make test-consumers), where hermes_rl is not installed:
nothing of ours helps them.
"""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
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
    """Trajectory -> `said` (sampled texts in order), `ids`, `logprobs` and `prompts` of the same,
    `first` (how many of them come before an assistant message of somebody else), `not_said`,
    `reward`, `group`."""
    opened: set[str] = field(default_factory=set)
    """Formats whose files were asked for."""

    def export(self, name: str) -> str:
        """The file of a format."""
        (path,) = (self.folder / "exports").glob(f"{name}.*")
        self.opened.add(name)
        return str(path)

    def said(self) -> Counter[str]:
        """Every sampled text, as often as it was sampled."""
        return Counter(text for facts in self.truth.values() for text in facts["said"])

    def said_first(self) -> list[str]:
        """Those before any assistant message of somebody else: what formats have room for whose
        readers train on each assistant message."""
        return [text for facts in self.truth.values() for text in facts["said"][: facts["first"]]]

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

    def check_tokens(self, rows: Iterable[tuple[Sequence[int], Sequence[Any]]]) -> None:
        """Each sampled token is trained exactly once, in the order in which it was sampled, and
        nothing else is.

        Args:
            rows: the ids of each training row, and beside each whether it is trained.
        """
        trained: Counter[tuple[int, ...]] = Counter()
        for ids, marks in rows:
            pairs = zip(ids, map(bool, marks), strict=True)
            for own, run in groupby(pairs, key=itemgetter(1)):
                trained[tuple(int(token) for token, _ in run)] += own
        sampled = [tuple(ids) for facts in self.truth.values() for ids in facts["ids"]]
        assert +trained == Counter(sampled)


def pytest_configure(config: pytest.Config) -> None:
    line = "reads(*formats): the test has a program of other people read these exports"
    config.addinivalue_line("markers", line)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that is left out is a failure: it would hide that nobody reads a format."""
    report = yield
    if report.skipped:
        report.outcome, report.longrepr = "failed", f"left out: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a whole file."""
    report = yield
    if report.skipped:
        report.outcome, report.longrepr = "failed", f"left out: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def opened_what_it_says(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that is marked as a reader of formats reads these, and no others. (The guard in
    tests/export counts on the marks.)"""
    given = {"told", "played", "taught"} & set(request.fixturenames)
    runs = [request.getfixturevalue(name) for name in given]
    for run in runs:
        run.opened.clear()
    yield
    marks = {name for mark in request.node.iter_markers("reads") for name in mark.args}
    assert {name for run in runs for name in run.opened} == marks


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
def fake_server(producer: str, *options: str) -> Iterator[str]:
    """The base URL of a fake model server that lives as long as the context."""
    command = [producer, "-m", "hermes_rl.testing.fake_server", "--until-eof", *options]
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
    return made_by("told_run.py", request, tmp_path_factory)


@pytest.fixture(scope="session")
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A whole run against the token-exact engine, whose log is the truth, in all formats."""
    return made_by("played_run.py", request, tmp_path_factory)


@pytest.fixture(params=["told", "played"])
def taught(request: pytest.FixtureRequest) -> Told:
    """Each of the two."""
    run: Told = request.getfixturevalue(request.param)
    return run


def made_by(
    script: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Told:
    producer = request.config.getoption("--producer")
    if not producer:
        pytest.fail("say --producer=.venv/bin/python (make test-consumers does)")
    out = tmp_path_factory.mktemp(Path(script).stem)
    command = [producer, str(HERE / script), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return Told(out, json.loads((out / "truth.json").read_text(encoding="utf-8")))
