"""Runs that the project's own environment makes, for other projects' programs to read.

The readers run in environments of their own (make test-consumers), without hermes_rl.
"""

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

# huggingface_hub reads this at import. No test here may use a hub or a GPU.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

HERE = Path(__file__).parent
START_S = 120.0


@dataclass(frozen=True)
class ExportedRun:
    """The files that `synthetic_run.py` or `engine_run.py` wrote."""

    folder: Path
    truth: dict[str, dict[str, Any]]
    """Trajectory -> `texts` (sampled, in order) with their `ids`, `logprobs` and `prompts`; `first`
    (how many of them come before an assistant message that was not sampled); `other_texts`,
    `reward`, `group`."""
    opened: set[str] = field(default_factory=set)
    """Formats whose files were read."""

    def export(self, name: str) -> str:
        """The file of a format."""
        (path,) = (self.folder / "exports").glob(f"{name}.*")
        self.opened.add(name)
        return str(path)

    def sampled_texts(self) -> Counter[str]:
        """Every sampled text, as often as it was sampled."""
        return Counter(text for facts in self.truth.values() for text in facts["texts"])

    def texts_before_foreign_answers(self) -> list[str]:
        """The sampled texts before any other assistant message.

        Formats whose readers train on every assistant message contain only these.
        """
        return [text for facts in self.truth.values() for text in facts["texts"][: facts["first"]]]

    def other_texts(self) -> set[str]:
        """Tool results, and assistant messages that were not sampled."""
        return {text for facts in self.truth.values() for text in facts["other_texts"]}

    def check(self, trained: list[str], end: str = "<|im_end|>") -> None:
        """Each sampled text is trained exactly once, and nothing else is.

        Args:
            trained: decoded labels, one text per training row, in which each turn ends with `end`.
        """
        turns = [turn + end for text in trained for turn in text.split(end)[:-1]]
        assert Counter(turns) == self.sampled_texts()
        assert all(text.endswith(end) for text in trained)
        assert not any(foreign in text for foreign in self.other_texts() for text in trained)

    def check_tokens(self, rows: Iterable[tuple[Sequence[int], Sequence[Any]]]) -> None:
        """Each sampled token is trained exactly once, in the sampled order, and nothing else is.

        Args:
            rows: the ids of each training row, and for each id whether it is trained.
        """
        trained: Counter[tuple[int, ...]] = Counter()
        for ids, marks in rows:
            pairs = zip(ids, map(bool, marks), strict=True)
            for is_trained, run in groupby(pairs, key=itemgetter(1)):
                trained[tuple(int(token) for token, _ in run)] += is_trained
        sampled = [tuple(ids) for facts in self.truth.values() for ids in facts["ids"]]
        assert +trained == Counter(sampled)


def pytest_configure(config: pytest.Config) -> None:
    line = "reads(*formats): another project's program reads these exports in the test"
    config.addinivalue_line("markers", line)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skipped test is a failure: it would hide that a format is not read."""
    report = yield
    if report.skipped:
        report.outcome, report.longrepr = "failed", f"skipped: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a whole file."""
    report = yield
    if report.skipped:
        report.outcome, report.longrepr = "failed", f"skipped: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def read_only_marked_formats(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test reads exactly the formats of its mark (tests/export/test_readers.py relies on it)."""
    names = {"synthetic_run", "engine_run", "exported_run"} & set(request.fixturenames)
    runs = [request.getfixturevalue(name) for name in names]
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
def producer(request: pytest.FixtureRequest) -> str:
    """The Python that has hermes_rl."""
    found = request.config.getoption("--producer")
    if not found:
        pytest.fail("add --producer=.venv/bin/python (make test-consumers does)")
    return str(found)


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run of oracles, and one in which a fake model server calls several tools."""
    if folders := request.config.getoption("--run-dir"):
        return [Path(path) for path in folders]
    producer = request.config.getoption("--producer")
    if not producer:
        pytest.fail("add --producer=.venv/bin/python (make test-consumers does) or --run-dir=RUN")
    out = tmp_path_factory.mktemp("runs")
    run_hermes_rl(producer, HERE / "tasks.jsonl", out / "oracle", "--model", "oracle")
    with fake_server(producer) as url:
        scripted = ["--model", "scripted", "--base-url", url, "--toolsets", "terminal,file"]
        # The mistake in one of the answers must stay in its row.
        for switch in ("reask_cut_calls", "reask_arguments"):
            scripted += ["--set", f"agent.switches.{switch}=false"]
        run_hermes_rl(producer, HERE / "scripted.jsonl", out / "scripted", *scripted)
    return [out / "oracle", out / "scripted"]


def run_hermes_rl(producer: str, tasks: Path, out: Path, *options: str) -> None:
    command = [str(Path(producer).parent / "hermes-rl"), "run", str(tasks), "--out", str(out)]
    command += ["--workers", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def fake_server(producer: str, *options: str) -> Iterator[str]:
    """Start a fake model server and return its base URL."""
    command = [producer, "-m", "hermes_rl.testing.fake_server", "--until-eof", *options]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin
        assert server.stdout
        yield json.loads(server.stdout.readline())["base_url"]
        server.stdin.close()
        server.wait(timeout=60)


@contextmanager
def started(
    command: Sequence[str],
    output: Path,
    ready: Callable[[], bool],
    env: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Start a server, with a file for its output, and wait until it is ready."""
    with (
        output.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env) as server,
    ):
        try:
            until = time.monotonic() + START_S
            while not ready():
                assert server.poll() is None, output.read_text()
                assert time.monotonic() < until, output.read_text()
                time.sleep(0.1)
            yield
        finally:
            server.kill()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def get_json(url: str) -> Any:
    """What a server answers; None while it does not."""
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return json.load(reply)
    except OSError:
        return None


@contextmanager
def serving(*command: str) -> Iterator[str]:
    """Start a server that prints its address; return it."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=HERE.parents[1]
    ) as server:
        try:
            assert server.stdout
            yield json.loads(server.stdout.readline())["base_url"]
        finally:
            server.kill()


@contextmanager
def live_engine(producer: str, folder: Path) -> Iterator[str]:
    """Start the engine of `live_engine.py` in a folder and return its base URL."""
    command = [producer, str(HERE / "live_engine.py"), str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdin
        assert engine.stdout
        yield json.loads(engine.stdout.readline())["base_url"]
        engine.stdin.close()
        engine.wait(timeout=60)


def write_tiny_model(folder: Path) -> None:
    """Write a model of about ten thousand random weights beside its tokenizer."""
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>"
    )
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="session")
def parquet(runs: list[Path]) -> list[str]:
    """Patterns of the files of the runs."""
    return [str(run / "trajectories" / "*.parquet") for run in runs]


@pytest.fixture
def cache(tmp_path: Path) -> str:
    """A new cache for `datasets`, so that no earlier file is read."""
    return str(tmp_path / "cache")


@pytest.fixture(scope="session")
def synthetic_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ExportedRun:
    """A run made from events, in all formats."""
    return run_script("synthetic_run.py", request, tmp_path_factory)


@pytest.fixture(scope="session")
def engine_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ExportedRun:
    """A run on the token-exact engine, whose log is the truth, in all formats."""
    return run_script("engine_run.py", request, tmp_path_factory)


@pytest.fixture(params=["synthetic_run", "engine_run"])
def exported_run(request: pytest.FixtureRequest) -> ExportedRun:
    """Each of the two."""
    run: ExportedRun = request.getfixturevalue(request.param)
    return run


def run_script(
    script: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ExportedRun:
    producer = request.config.getoption("--producer")
    if not producer:
        pytest.fail("add --producer=.venv/bin/python (make test-consumers does)")
    out = tmp_path_factory.mktemp(Path(script).stem)
    command = [producer, str(HERE / script), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return ExportedRun(out, json.loads((out / "truth.json").read_text(encoding="utf-8")))
