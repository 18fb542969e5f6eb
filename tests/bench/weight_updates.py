"""Measure rollouts through weight updates: the engine cuts all answers off again and again.

    python tests/bench/weight_updates.py --seconds 60

Prints JSON lines: answers per minute without aborts and with one every 2 s and every 0.8 s (64
agents, answers of 1 s); whether the lengths of accepted answers are those that the engine drew (a
two-sample Kolmogorov-Smirnov test over answers whose duration grows with their length); whether
every token that was sampled is in `segments` once with its logprob and version; whether the lengths
are right where connections are closed, for each engine, and for SGLang's answers that take several
requests; and how long a run takes to end after
SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from hermes_rl.rl import Policy, rollouts
from hermes_rl.store import load_run
from hermes_rl.testing import Truth, read_truth, write_tiny_tokenizer

ENV = """
from hermes_rl.rl import EnvConfig, Environment, make_task

class Config(EnvConfig):
    sandboxed: bool = False
    toolsets: tuple[str, ...] | None = ()

class Numbers(Environment[Config]):
    name, endless, Config = "numbers", True, Config

    def tasks(self, split, seed):
        n = 0
        while True:
            yield make_task(f"Number {n}.", id=f"n{n}")
            n += 1

    async def compute_reward(self, task, trajectory, ctx):
        return float(ctx.member % 2)
"""
MAX_TOKENS = 64
CONFIG = {"sandbox": {"backend": "none"}, "run": {"allow_unsandboxed": True}}


@asynccontextmanager
async def engine_at(folder: Path, *options: str) -> AsyncIterator[str]:
    """Start the engine in a process of its own, and return its address."""
    command = [sys.executable, "-m", "hermes_rl.testing.exact_engine", "--until-eof", *options]
    files = ["--tokenizer", str(folder / "tokenizer"), "--log", str(folder / "truth.jsonl")]
    process = await asyncio.create_subprocess_exec(
        *command, *files, "--version", "1", stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout
    assert process.stdin
    try:
        yield json.loads(await process.stdout.readline())["base_url"]
    finally:
        process.stdin.close()
        await process.wait()


@asynccontextmanager
async def aborts(base_url: str, every_s: float | None) -> AsyncIterator[None]:
    """Cut all answers off every so often, and change the version of the weights."""
    root = base_url.removesuffix("/v1")

    async def update() -> None:
        async with aiohttp.ClientSession() as session:
            for version in range(2, 1 << 30):
                await asyncio.sleep(every_s or 1e9)
                for path in ("abort_requests", "update_weight_version"):
                    form = {"weight_version": str(version)}
                    async with session.post(f"{root}/{path}", json=form):
                        pass

    task = asyncio.create_task(update())
    try:
        yield
    finally:
        task.cancel()


def finished(truth: Sequence[Truth]) -> int:
    """Number of complete answers to rollouts."""
    return sum(one.call_id is not None and one.finish in ("stop", "length") for one in truth)


async def roll(
    folder: Path,
    every_s: float | None,
    seconds: float,
    *engine: str,
    answers: int | None = None,
    tokens: str = "vllm",
    max_tokens: int = MAX_TOKENS,
) -> dict[str, Any]:
    """Roll out for some seconds from the first group, or until there are enough answers."""
    write_tiny_tokenizer(folder / "tokenizer")
    (folder / "numbers.py").write_text(ENV)
    log = folder / "truth.jsonl"
    async with engine_at(folder, *engine) as url, aborts(url, every_s):
        policy = Policy(model="toy", base_url=url, tokens=tokens, tokenizer=folder / "tokenizer")
        stream = rollouts(
            str(folder / "numbers.py"), policy, out=folder / "run", group_size=4, concurrency=64,
            ahead=1000, config=CONFIG | {"model": {"max_tokens": max_tokens}},
        )  # fmt: skip
        async with stream:
            group = await anext(stream)
            began, before, taken = time.monotonic(), finished(read_truth(log)), [group]
            while time.monotonic() - began < seconds and len(taken) * 4 < (answers or 1e9):
                group = await anext(stream)
                await group.ack(step=1)
                taken.append(group)
            spent = time.monotonic() - began
            count = finished(read_truth(log)) - before
    return {"taken": taken, "truth": read_truth(log), "per_minute": round(60 * count / spent)}


def ks(one: Sequence[int], other: Sequence[int]) -> tuple[float, float]:
    """Return the statistic of a two-sample Kolmogorov-Smirnov test and its p-value (asymptotic)."""
    points = sorted({*one, *other})
    a, b = sorted(one), sorted(other)
    i = j = 0
    distance = 0.0
    for point in points:
        while i < len(a) and a[i] <= point:
            i += 1
        while j < len(b) and b[j] <= point:
            j += 1
        distance = max(distance, abs(i / len(a) - j / len(b)))
    n = len(a) * len(b) / (len(a) + len(b))
    x = distance * math.sqrt(n)
    p = 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, 101))
    return distance, min(1.0, max(0.0, p)) if x > 0.2 else 1.0


def faults_of(groups: Sequence[Any], truth: Sequence[Truth]) -> dict[str, int]:
    """Compare segments with the engine's log, token by token."""
    by_call = {one.call_id: one for one in truth if one.call_id and one.sampled_ids}
    seen: dict[str, int] = {}
    wrong = tokens = 0
    for group in groups:
        for segment in (s for m in group.members for s in m.segments):
            for call_id, start in zip(segment.call_ids, segment.call_starts, strict=True):
                known = by_call[call_id]
                end = start + len(known.sampled_ids)
                versions: list[int] = []
                for version, stop in known.versions:
                    versions += [int(version or -1)] * (stop - len(versions))
                same = (
                    tuple(segment.input_ids[:end]) == (*known.prompt_ids, *known.sampled_ids)
                    and segment.version_ids[start:end] == versions
                    and all(
                        abs((a or 0.0) - b) < 1e-5
                        for a, b in zip(
                            segment.logprobs[start:end], known.raw_logprobs, strict=True
                        )
                    )
                )
                wrong += not same
                if all(segment.loss_mask[start:end]):
                    seen[call_id] = seen.get(call_id, 0) + 1
                    tokens += end - start
    rows = [m.trajectory for g in groups for m in g.members if m.trajectory]
    calls = {call["call_id"] for row in rows for call in row["calls"]} & by_call.keys()
    return {
        "trained_tokens": tokens,
        "calls": len(calls),
        "wrong": wrong,
        "not_trained": len(calls - seen.keys()),
        "trained_twice": sum(count > 1 for count in seen.values()),
        "redrawn": sum("redrawn_answers" in row["metrics"] for row in rows),
        "failed_members": sum(m.trajectory is None for g in groups for m in g.members),
    }


def accepted_lengths(groups: Sequence[Any]) -> list[int]:
    """Return the tokens of each answer."""
    return [sum(s.n_sampled for s in m.segments) for g in groups for m in g.members]


def compared(accepted: list[int], drawn: list[int]) -> dict[str, Any]:
    """Compare the lengths of answers with those of uncut ones."""
    distance, p = ks(accepted, drawn)
    means = [round(sum(x) / len(x), 2) for x in (accepted, drawn)]
    return {"accepted": len(accepted), "drawn": len(drawn), "means": means,
            "ks": round(distance, 4), "p": round(p, 3)}  # fmt: skip


def lengths_of(groups: Sequence[Any], truth: Sequence[Truth]) -> dict[str, Any]:
    """Compare the lengths of accepted answers with those that the engine drew."""
    rows = [m.trajectory for g in groups for m in g.members if m.trajectory]
    calls = {call["call_id"] for row in rows for call in row["calls"]}
    firsts = (s for g in groups for m in g.members for s in m.segments)
    prompts = {tuple(s.input_ids[: s.call_starts[0]]) for s in firsts}
    drawn = [
        one.drawn
        for one in truth
        if one.call_id in calls and one.drawn and one.prompt_ids in prompts
    ]
    return compared(accepted_lengths(groups), drawn)


async def drain(folder: Path) -> float:
    """Return the seconds from SIGTERM to the end of a run, with aborts every 0.8 s."""
    write_tiny_tokenizer(folder / "tokenizer")
    (folder / "numbers.py").write_text(ENV)
    async with engine_at(folder, "--latency", "1") as url, aborts(url, 0.8):
        code = "import sys; from hermes_rl.cli import main; sys.exit(main())"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, "env", "process", str(folder / "numbers.py"),
            "--model", "toy", "--base-url", url, "--out", str(folder / "run"), "--limit", "100000",
            "--sandbox", "none", "--allow-unsandboxed", "--workers", "0", "--concurrency", "64",
            "--set", "endpoint.tokens=vllm", "--set", f"endpoint.tokenizer={folder}/tokenizer",
            "--set", f"model.max_tokens={MAX_TOKENS}", "--json", stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        log = folder / "truth.jsonl"
        while True:
            if log.exists() and finished(read_truth(log)) > 100:
                break
            await asyncio.sleep(0.5)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        await process.wait()
        spent = time.monotonic() - began
    run = load_run(folder / "run")
    failed = 0 if run.failures.empty else len(run.failures)
    print(
        json.dumps(
            {"drain_s": round(spent, 1), "rows": len(run.arrow("trajectories")), "failures": failed}
        )
    )
    return spent


CLOSED = (
    *(("vllm", "/v1/completions"), ("vllm", "/inference/v1/generate")),
    *(("sglang", "/generate"), ("llamacpp", "/completion")),
)
"""Ways to get ids, and the engine's only route."""


async def closes(answers: int) -> None:
    """Compare the lengths of answers whose connections are closed after 20 tokens on average."""
    for tokens, route in CLOSED:
        options = ("--route", route, "--close-every", "20", "--whole-characters")
        with tempfile.TemporaryDirectory() as folder:
            result = await roll(Path(folder), None, 900.0, *options, answers=answers, tokens=tokens)
        line = lengths_of(result["taken"], result["truth"])
        print(json.dumps({"closed": route} | line), flush=True)


async def pieces(answers: int) -> None:
    """Compare the lengths of SGLang's answers in pieces with those of answers that are not cut.
    Connections are closed after 150 tokens on average."""
    lengths: list[list[int]] = []
    common = ("--route", "/generate", "--whole-characters", "--end-logit", "-2")
    for options in ((), ("--close-every", "150")):
        with tempfile.TemporaryDirectory() as folder:
            result = await roll(
                Path(folder), None, 1800.0, *common, *options,
                answers=answers, tokens="sglang", max_tokens=600,
            )  # fmt: skip
        lengths.insert(0, accepted_lengths(result["taken"]))
    rows = [m.trajectory for g in result["taken"] for m in g.members if m.trajectory]
    calls = [call for row in rows for call in row["calls"]]
    counts = {"calls": len(calls), "redrawn": sum("redrawn_answers" in r["metrics"] for r in rows)}
    print(json.dumps({"pieces": "/generate"} | counts | compared(*lengths)), flush=True)


async def main(seconds: float, answers: int) -> None:
    base = 0
    for every_s in (None, 2.0, 0.8):
        with tempfile.TemporaryDirectory() as folder:
            result = await roll(Path(folder), every_s, seconds, "--latency", "1")
        base = base or result["per_minute"]
        line = {"abort_every_s": every_s, "answers_per_minute": result["per_minute"],
                "share": round(result["per_minute"] / base, 3)}  # fmt: skip
        print(json.dumps(line | faults_of(result["taken"], result["truth"])), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        result = await roll(Path(folder), 2.0, 900.0, "--token-s", "0.04", answers=answers)
    taken, truth = result["taken"], result["truth"]
    print(json.dumps(lengths_of(taken, truth) | faults_of(taken, truth)), flush=True)
    await closes(answers)
    await pieces(answers)
    with tempfile.TemporaryDirectory() as folder:
        await drain(Path(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--answers", type=int, default=2400, help="of the test of lengths")
    asyncio.run(main(**vars(parser.parse_args())))
