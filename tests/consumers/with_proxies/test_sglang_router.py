"""A run with exact tokens through SGLang's router, of which one of two engines is killed.

The engines are the fake one; each logs the ids that it was sent and that it sampled.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from subprocess import Popen
from threading import Thread

import pyarrow.parquet as pq
import pytest
from conftest import free_port, get_json, run_hermes_rl, started

MAKE_TOKENIZER = """
import pathlib, sys
from hermes_rl.testing import write_tiny_tokenizer
write_tiny_tokenizer(pathlib.Path(sys.argv[1]))
"""
TASKS = 40


@contextmanager
def router(folder: Path, engines: list[str]) -> Iterator[str]:
    """Start a router before the engines; return its base URL."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--prometheus-host", "127.0.0.1", "--policy", "round_robin"]
    command += ["--worker-urls", *engines]

    def ready() -> bool:
        found = get_json(f"http://127.0.0.1:{port}/workers") or {"workers": []}
        return sum(worker["is_healthy"] for worker in found["workers"]) == len(engines)

    with started(command, folder / "router.txt", ready):
        yield f"http://127.0.0.1:{port}/v1"


@contextmanager
def engine(producer: str, tokenizer: Path, log: Path) -> Iterator[tuple[str, Popen[str]]]:
    """Start an engine; return its address and its process."""
    command = [producer, "-m", "hermes_rl.testing.exact_engine", "--tokenizer", str(tokenizer)]
    command += ["--log", str(log), "--token-s", "0.01"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout
            url = json.loads(program.stdout.readline())["base_url"]
            yield url.removesuffix("/v1"), program
        finally:
            program.kill()


def kill_after(program: Popen[str], log: Path, answers: int) -> None:
    """Kill an engine when it has given so many answers."""
    while len(log.read_bytes().splitlines()) < answers and program.poll() is None:
        time.sleep(0.05)
    program.kill()


Call = tuple[tuple[int, ...], tuple[int, ...]]
"""The ids before an answer, and its ids."""


def read_sampled(logs: list[Path]) -> dict[Call, list[float]]:
    """What the engines sampled, with its logprobs."""
    lines = [line for log in logs for line in log.read_text().splitlines()]
    return {
        (tuple(entry["prompt_ids"]), tuple(entry["sampled_ids"])): entry["raw_logprobs"]
        for entry in map(json.loads, lines)
        if entry.get("sampled_ids")
    }


def read_trained(run: Path) -> Iterator[tuple[Call, list[float]]]:
    """What a trainer gets: each answer once."""
    for row in pq.read_table(run / "segments").to_pylist():
        ids = row["input_ids"]
        for start, following in pairwise([*row["call_starts"], len(ids)]):
            trained = row["loss_mask"][start:following]
            end = start + (trained.index(False) if False in trained else len(trained))
            if end > start:
                yield (tuple(ids[:start]), tuple(ids[start:end])), row["logprobs"][start:end]


def test_an_engine_that_dies_behind_the_router_loses_no_token(
    producer: str, tmp_path: Path
) -> None:
    tokenizer, tasks, out = tmp_path / "tokenizer", tmp_path / "tasks.jsonl", tmp_path / "run"
    subprocess.run([producer, "-c", MAKE_TOKENIZER, str(tokenizer)], check=True)
    script = json.dumps([{"run": "echo 1"}, {"run": "echo 2"}, "Done."])
    rows = [{"prompt": f"Task {n}.\nSCRIPT: {script}"} for n in range(TASKS)]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    logs = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    with ExitStack() as stack:
        engines = [stack.enter_context(engine(producer, tokenizer, log)) for log in logs]
        url = stack.enter_context(router(tmp_path, [address for address, _ in engines]))
        killer = Thread(target=kill_after, args=(engines[1][1], logs[1], TASKS // 2))
        killer.start()
        stack.callback(killer.join)
        where = ["--model", "toy", "--base-url", url, "--concurrency", "8"]
        where += ["--set", "endpoint.tokens=sglang", "--set", f"endpoint.tokenizer={tokenizer}"]
        run_hermes_rl(producer, tasks, out, *where)
        killed = engines[1][1].poll()
    assert killed is not None, "the engine was killed while the run used it"
    sampled = read_sampled(logs)
    trained = list(read_trained(out))
    assert len(trained) == 3 * TASKS
    for call, logprobs in trained:
        assert logprobs == pytest.approx(sampled[call], abs=1e-6)
