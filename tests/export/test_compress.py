"""`compress`: long trajectories within a token budget, as another run directory."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import rollouts
from rollouts import message, model_call

from hermes_rl import ModelConfig
from hermes_rl import events as ev
from hermes_rl.aio import LoopThread
from hermes_rl.cli import main
from hermes_rl.errors import Outage, StoreError, UserError
from hermes_rl.export import CompressOptions, compress_run, export_run, samples_of
from hermes_rl.messages import AssistantMessage, SystemMessage, ToolMessage, UserMessage
from hermes_rl.store import load_run
from hermes_rl.testing import FakeConfig, FakeServer, ServedRequest, write_tiny_tokenizer

SUMMARY = "## Done\nThe files were counted."
OPTIONS = CompressOptions(target_tokens=2_000, summary_tokens=100)


def long_work(turns: int, size: int = 400) -> list[ev.Event]:
    """A conversation of so many turns with one command each, and an answer."""
    events: list[ev.Event] = [
        message(SystemMessage(content="Be brief."), 0),
        message(UserMessage(content="Count all files."), 0),
    ]
    for turn in range(1, turns + 1):
        command = rollouts.call(f"c{turn}", json.dumps({"command": f"step {turn}"}))
        result = ToolMessage(tool_call_id=command.id, name="terminal", content="x" * size)
        events += [
            *model_call(turn),
            message(AssistantMessage(content=f"Step {turn}.", tool_calls=(command,)), turn),
            message(result, turn),
        ]
    answer = message(AssistantMessage(content="There are three."), turns + 1)
    return [*events, *model_call(turns + 1), answer]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Four long trajectories, a short one, and one with two contexts."""
    rows = [rollouts.finished(n, long_work(30 + n)) for n in range(4)]
    rows.append(rollouts.finished(4, long_work(3)))
    rows.append(rollouts.finished(5, rollouts.with_two_contexts()))
    return rollouts.write(tmp_path / "run", rows)


@contextmanager
def serving(play: Any = SUMMARY, **more: Any) -> Iterator[FakeServer]:
    """A server whose model writes summaries; its log is kept."""
    with LoopThread() as home:

        def answer(request: ServedRequest) -> Any:
            return play(request) if callable(play) else play

        server = FakeServer(FakeConfig(plays={"small": answer}, **more))
        home.run(server.__aenter__())
        yield server
        home.run(server.aclose())


def model(server: FakeServer) -> ModelConfig:
    return ModelConfig(name="small", base_url=server.base_url)


def rows_of(run: Path) -> dict[str, dict[str, Any]]:
    frame = load_run(run).trajectories
    return {row["unit_id"]: row for row in frame.to_dict("records")}


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def check_legal(messages: list[dict[str, Any]]) -> None:
    waiting: list[str] = []
    last = ""
    for one in messages:
        if one["role"] == "tool":
            waiting.remove(one["tool_call_id"])
        else:
            assert not waiting
            assert one["role"] != last
            waiting = [call["id"] for call in one.get("tool_calls") or ()]
        last = one["role"]
    assert not waiting


def trained(row: Mapping[str, Any]) -> list[str]:
    return [
        one["content"]
        for sample in samples_of(row)
        for one, yes in zip(sample.messages, sample.trained, strict=True)
        if yes
    ]


def test_long_trajectories_keep_their_beginning_and_end(source: Path, tmp_path: Path) -> None:
    before, out = contents(source), tmp_path / "out"
    with serving() as server:
        report = compress_run(source, out, OPTIONS, model=model(server))
        served = {e.call_id: e for e in server.entries}
    assert contents(source) == before
    assert (report.rows, report.compressed, report.over_target) == (6, 4, 0)
    assert (report.static_digests, len(served)) == (0, 4)
    rows, originals = rows_of(out), rows_of(source)
    assert rows.keys() == originals.keys()
    for number in range(4):
        row, was = rows[rollouts.unit(number)], originals[rollouts.unit(number)]
        texts = [m["content"] for m in row["messages"]]
        assert texts[:5] == [m["content"] for m in was["messages"][:4]] + [texts[4]]
        assert texts[4].endswith(f"removed here to save space]\n{SUMMARY}")
        assert [m["content"] for m in was["messages"][-7:]] == texts[-7:]  # the last four turns
        check_legal(row["messages"])
        metrics = row["metrics"]
        assert metrics["tokens_after"] <= OPTIONS.target_tokens < metrics["tokens_before"]
        kept = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        assert trained(row) == kept
        new = [c for c in row["calls"] if c["purpose"] == "summary"]
        entry = served[new[0]["call_id"]]
        assert new[0]["input_tokens"] == entry.prompt_tokens
        more = row["usage"]["input_tokens"] - was["usage"]["input_tokens"]
        assert (len(new), more) == (1, entry.prompt_tokens)
        assert row["metadata"]["compressed_from"] == was["trajectory_id"]
        assert (row["reward"], row["end_reason"]) == (was["reward"], was["end_reason"])
    for number in (4, 5):
        row, was = rows[rollouts.unit(number)], originals[rollouts.unit(number)]
        assert len(row["calls"]) == len(was["calls"])
        assert trained(row) == trained(was)
    assert main(["check", str(out)]) == 0
    assert main(["show", str(out)]) == 0
    assert export_run(out, "trl", tmp_path / "trl.jsonl").samples >= 6


def test_the_same_command_adds_rows_and_pays_nothing_twice(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with serving() as server:
        compress_run(source, out, OPTIONS, model=model(server))
        rollouts.leave_unpublished(source, rollouts.finished(6, long_work(40)))
        report = compress_run(source, out, OPTIONS, model=model(server))
        assert (report.rows, len(server.entries)) == (1, 5)
        assert len(rows_of(out)) == 7
        stats = json.loads((out / "stats.json").read_text())
        assert (stats["units"]["done"], stats["reward"]["graded"]) == (7, 7), stats
        other = CompressOptions(target_tokens=3_000)
        with pytest.raises(StoreError, match="target_tokens 2000, now 3000"):
            compress_run(source, out, other, model=model(server))


BAD = {"fails": {"fault": "bad_request"}, "empty": "", "long": "word " * 2_000}


@pytest.mark.parametrize("bad", BAD)
def test_a_digest_takes_the_place_of_a_bad_summary(bad: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with serving(BAD[bad]) as server:
        report = compress_run(source, out, OPTIONS, model=model(server))
        calls = {e.call_id for e in server.entries}
    assert report.static_digests == report.compressed == 4
    rows = [rows_of(out)[rollouts.unit(n)] for n in range(4)]
    assert all("No summary could be written. Digest" in r["messages"][4]["content"] for r in rows)
    assert {c["call_id"] for r in rows for c in r["calls"] if c["purpose"] == "summary"} == calls
    assert main(["check", str(out)]) == 0


def test_without_a_model_and_with_a_tokenizer(source: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "tokenizer", tmp_path / "out"
    write_tiny_tokenizer(folder)
    options = CompressOptions(target_tokens=4_000, summary_tokens=100)
    report = compress_run(source, out, options, tokenizer=str(folder))
    assert report.compressed == report.static_digests == 4
    assert report.tokens_by != "four bytes per token"
    assert report.usage is None
    for row in rows_of(out).values():
        assert row["metrics"].get("tokens_after", 0) <= options.target_tokens
        check_legal(row["messages"])


def test_a_dry_run_counts_and_writes_nothing(source: Path, tmp_path: Path, capsys: Any) -> None:
    before = contents(tmp_path)
    options = ["--target-tokens", "2000", "--summary-tokens", "100"]
    with serving() as server:
        remote = ["--model", "small", "--base-url", server.base_url]
        assert main(["compress", str(source), *options, *remote, "--dry-run"]) == 0
        assert not server.entries
    assert contents(tmp_path) == before
    text = capsys.readouterr().out
    assert "6 trajectories, 4 longer than the target and compressed" in text
    assert "forecast: 4 calls, about" in text
    assert "cost not known" in text
    assert main(["compress", str(source), *options]) == 2
    assert "names no model that can write summaries" in capsys.readouterr().err
    with pytest.raises(UserError, match="within the run itself"):
        compress_run(source, source / "x", OPTIONS)


def test_a_refused_key_stops_before_more_is_written(source: Path, tmp_path: Path) -> None:
    with serving(key="right") as server, pytest.raises(Outage, match="no summary can be written"):
        compress_run(source, tmp_path / "out", OPTIONS, model=model(server))


def test_a_killed_compression_pays_for_no_summary_twice(source: Path, tmp_path: Path) -> None:
    out, reached = tmp_path / "out", threading.Event()
    options = ["--target-tokens", "2000", "--summary-tokens", "100", "--concurrency", "1"]
    program = str(Path(sys.executable).parent / "hermes-rl")
    command = [program, "compress", str(source), "--out", str(out)]
    with LoopThread() as home:
        config = FakeConfig(plays={"small": lambda _: SUMMARY}, hold_at=3)
        first = FakeServer(config, lambda n: reached.set() if n == 3 else None)
        home.run(first.__aenter__())
        remote = ["--model", "small", "--base-url", first.base_url]
        with subprocess.Popen([*command, *options, *remote]) as killed:
            assert reached.wait(60)
            os.kill(killed.pid, signal.SIGKILL)
        home.run(first.aclose())
    with serving() as second:
        remote = ["--model", "small", "--base-url", second.base_url]
        assert main([*command[1:], *options, *remote]) == 0
        assert len(second.entries) == 2
    rows = rows_of(out)
    calls = [c for row in rows.values() for c in row["calls"] if c["purpose"] == "summary"]
    served = [e.call_id for e in (*first.entries, *second.entries) if e.outcome == "served"]
    assert sorted(c["call_id"] for c in calls if c["outcome"] == "ok") == sorted(served)
    assert [c["outcome"] for c in calls].count("unknown") == 1  # it was held when the kill came
    assert sum(row["usage"]["unknown_calls"] for row in rows.values()) == 1
    assert main(["check", str(out)]) == 0


def test_memory_does_not_depend_on_the_number_of_rows(tmp_path: Path) -> None:
    def peak(rows: int) -> int:
        made = [rollouts.finished(n, long_work(20, 2_000)) for n in range(rows)]
        run = rollouts.write(tmp_path / f"run-{rows}", made)
        del made
        tracemalloc.start()
        compress_run(run, tmp_path / f"out-{rows}", OPTIONS)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(4)  # imports
    assert peak(90) < 1.5 * peak(30)
