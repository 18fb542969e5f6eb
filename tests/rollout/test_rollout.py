"""One attempt end to end: what each ending, each fault and each cheat makes of the row."""

import asyncio
import base64
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hermes_rl.sandboxes import probe
from hermes_rl.testing import FakeConfig, FaultPlan

from .conftest import Journal, Open, script

WRITE = {"run": "echo 3 > count.txt"}
THREE = 'test "$(cat "$WORKSPACE/count.txt")" = 3'


@pytest.mark.parametrize("backend", ["bubblewrap", "none"])
async def test_solved_task_and_its_usage_records(stage: Open, backend: str) -> None:
    s = await stage(backend=backend)
    row = {"id": "count", "prompt": script(WRITE, "There are 3."), "verify": THREE, "level": 2}
    got = await s.attempt(row)
    assert (got.status, got.end_reason, got.reward) == ("ok", "answered", 1.0)
    assert (got.task_id, got.turns, got.tool_call_count) == ("count", 2, 1)
    assert got.final_response == "There are 3."
    assert [json.loads(m)["role"] for m in got.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    served = {e.call_id: (e.prompt_tokens, e.completion_tokens) for e in s.server.entries}
    assert {c.call_id: (c.input_tokens, c.output_tokens) for c in got.calls} == served
    assert got.usage.input_tokens == sum(t[0] for t in served.values())
    assert (got.cost_usd, got.unpriced_calls) == (None, 2)
    assert got.sandbox is not None
    assert got.sandbox.backend == backend
    assert json.loads(got.metadata) == {"level": 2}
    assert got.rewards[0].detail == f"{THREE}  -> exit 0"


async def test_an_unsolved_task_is_zero_and_ungraded_is_null(stage: Open) -> None:
    s = await stage(backend="none")
    assert (await s.attempt({"prompt": script("done"), "verify": THREE})).reward == 0.0
    assert (await s.attempt({"prompt": script("done")})).reward is None


async def test_files_setup_and_cwd_are_there_before_the_agent(stage: Open) -> None:
    s = await stage()
    blob = bytes(range(256))
    row = {
        "prompt": script({"run": "pwd; cat made.txt; md5sum ../blob.bin; echo $LEAK"}, "ok"),
        "cwd": "/workspace/deep",
        "files": {"blob.bin": {"base64": base64.b64encode(blob).decode()}, "deep/ü.txt": "x"},
        "setup": "export LEAK=yes; echo made > made.txt; cd /",
        "verify": "cmp /workspace/blob.bin /verify/blob && test -e /workspace/deep/ü.txt",
    }
    row["verify"] = {
        "script": row["verify"],
        "files": {"blob": {"base64": base64.b64encode(blob).decode()}},
    }
    got = await s.attempt(row)
    assert (got.reward, got.error) == (1.0, None)
    output = json.loads(json.loads(got.messages[3])["content"])["output"].splitlines()
    assert output[:2] == ["/workspace/deep", "made"]
    assert output[2].startswith("e2c865db4162bed963bfaa9ef6ac18f0")
    assert "yes" not in output


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": ""}, "row 0: 'prompt' is empty"),
        ({"prompt": "p", "setup": "echo no; exit 3"}, "setup failed with exit code 3: no"),
        ({"prompt": "p", "requires": ["no-such-program"]}, "lacks no-such-program"),
        ({"prompt": "p", "toolsets": ["nonsense"]}, "unknown toolset 'nonsense'"),
        ({"prompt": "p", "image": "/no/such/rootfs"}, "/no/such/rootfs"),
        ({"prompt": "p", "cwd": "/proc/nowhere"}, "no working directory /proc/nowhere"),
    ],
)
async def test_task_faults_have_cause_task(stage: Open, row: dict[str, Any], says: str) -> None:
    s = await stage()
    got = await s.attempt(row)
    assert (got.table, got.owner, got.cause, got.reward) == ("failures", "task", "task", None)
    assert says in (got.error or "")
    assert s.server.requests == 0  # nothing was paid


async def test_a_partial_score(stage: Open) -> None:
    s = await stage(backend="none")
    verify = {"script": "echo reward=1.0; echo reward=0.25 >&3", "score": True}
    got = await s.attempt({"prompt": script("done"), "verify": verify})
    assert got.reward == 0.25


async def test_verifier_that_cannot_judge_gives_no_reward(stage: Open) -> None:
    s = await stage()
    verify = {"script": "echo cannot-judge=no display >&3", "score": True}
    got = await s.attempt({"prompt": script("done"), "verify": verify})
    assert (got.cause, got.owner, got.reward) == ("verifier", "infrastructure", None)
    assert "no verdict in 3 grading boxes" in (got.error or "")
    assert s.server.requests == 1  # the rollout was not rolled again


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("auth", "auth"),
        ("billing", "billing"),
        ("not_found", "model_not_found"),
        ("content_filter", "content_filter"),
        ("bad_request", "model_protocol"),
    ],
)
async def test_model_errors_are_infrastructure_failures(stage: Open, kind: str, cause: str) -> None:
    s = await stage(backend="none", model={"name": f"fault-{kind}"})
    got = await s.attempt({"prompt": "p", "verify": "true"})
    assert (got.cause, got.owner, got.reward) == (cause, "infrastructure", None)
    assert got.usage.unknown_calls == 0
    assert [c.outcome for c in got.calls] == ["refused"]


@pytest.mark.parametrize("fault", ["context_overflow", "too_large"])
async def test_overflow_after_the_first_answer_is_graded(stage: Open, fault: str) -> None:
    s = await stage(backend="none")
    prompt = script(WRITE, {"text": "never", "fault": fault})
    got = await s.attempt({"prompt": prompt, "verify": "true"})
    assert (got.end_reason, got.truncated, got.reward) == ("context_overflow", True, 1.0)
    assert (got.owner, got.cause) == ("policy", None)


@pytest.mark.parametrize("fault", ["context_overflow", "too_large"])
async def test_overflow_before_the_first_answer_is_a_task_fault(stage: Open, fault: str) -> None:
    s = await stage(backend="none", model={"name": f"fault-{fault}"})
    got = await s.attempt({"prompt": "p", "verify": "true"})
    assert (got.status, got.cause, got.owner, got.reward) == ("failed", "task", "task", None)
    assert (got.end_reason, got.truncated, len(got.calls)) == ("error", False, 1)


async def test_task_limits_apply(stage: Open) -> None:
    s = await stage(backend="none", agent={"preset": "rl"})
    row = {"prompt": script(*[WRITE] * 5), "verify": THREE, "limits": {"max_turns": 2}}
    got = await s.attempt(row)
    assert (got.end_reason, got.turns, got.truncated, got.reward) == ("max_turns", 2, True, 1.0)


async def test_wall_limit_is_not_graded(stage: Open) -> None:
    s = await stage(backend="none")
    row = {"prompt": script({"run": "sleep 30"}), "verify": "true", "limits": {"wall_seconds": 0.5}}
    got = await s.attempt(row)
    assert (got.cause, got.reward, got.status) == ("stalled", None, "failed")


async def test_an_agent_that_kills_its_sandbox_is_graded(stage: Open) -> None:
    s = await stage()
    got = await s.attempt({"prompt": script(WRITE, {"run": "kill -9 -1"}), "verify": THREE})
    assert (got.end_reason, got.owner, got.reward) == ("sandbox_killed", "policy", 1.0)


async def test_an_agent_out_of_memory_is_graded(stage: Open) -> None:
    """Several processes, none of them too large alone: the sandbox as a whole is."""
    if not (await asyncio.to_thread(probe.probe_machine)).cgroups:
        return  # then rows do not claim that limit
    hog = "python3 -c 'import time; a = b\"x\" * (1500 << 20); time.sleep(60)'"
    s = await stage()
    got = await s.attempt(
        {"prompt": script(WRITE, {"run": f"{hog} & {hog} & wait -n"}), "verify": THREE}
    )
    assert (got.end_reason, got.owner, got.reward) == ("sandbox_killed", "policy", 1.0)
    assert got.sandbox is not None
    assert json.loads(got.sandbox.limits)["memory_bytes"] == 2 << 30


async def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for something that another process brings about."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def marked_processes(lease: str) -> list[int]:
    """Processes on this machine with a lease's mark in their argv, outermost first."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                phrases = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(lease.encode() in fragment for fragment in phrases):
                found.append(int(folder.name))
    return sorted(found)


def launcher_of(lease: str) -> int:
    """What started a sandbox: bubblewrap, or the zygote."""
    outermost = marked_processes(lease)[0]
    if b"bwrap" in Path(f"/proc/{outermost}/cmdline").read_bytes():
        return outermost
    status = Path(f"/proc/{outermost}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("PPid")).split()[1])


async def test_host_fault_is_sandbox_died(stage: Open) -> None:
    s = await stage()
    row = {"prompt": script(WRITE, WRITE, {"run": "sleep 60"}), "verify": THREE}
    item = s.item(row)
    running = asyncio.create_task(s.attempt(row))
    await until(lambda: s.server.requests >= 3)
    os.kill(launcher_of(item.unit_id[:16]), signal.SIGKILL)
    got = await asyncio.wait_for(running, 240)
    assert (got.cause, got.owner, got.reward) == ("sandbox_died", "infrastructure", None)
    assert got.turns == 3


async def test_cancelling_ends_the_sandbox(stage: Open) -> None:
    s = await stage()
    row = {"prompt": script({"run": "sleep 60"})}
    item = s.item(row)
    running = asyncio.create_task(s.attempt(row))
    await until(lambda: s.server.requests and marked_processes(item.unit_id[:16]))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: not marked_processes(item.unit_id[:16]))


async def test_no_secret_reaches_a_sandbox_or_a_row(
    stage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = "sk-canary-7f3a9b2c1d"
    coded = base64.b64encode(canary.encode()).decode()
    monkeypatch.setenv("CANARY_KEY", canary)
    s = await stage(endpoint={"api_key_env": "CANARY_KEY"}, server=FakeConfig(key=canary))
    looks = "env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'; cat /proc/*/cmdline; set"
    journal = Journal()
    got = await s.attempt({"prompt": script({"run": looks}, "ok")}, journal=journal)
    assert got.end_reason == "answered"
    wrong = await stage(endpoint={"api_key_env": "CANARY_KEY"}, server=FakeConfig(key="other"))
    refused = await wrong.attempt({"prompt": script("ok")})
    assert refused.cause == "auth"
    for thing in (got, refused, journal.events):
        text = msgspec.json.encode(thing).decode()
        assert canary not in text
        assert coded not in text


@pytest.mark.parametrize("backend", ["bubblewrap", "none"])
async def test_harness_text_is_never_recorded_as_the_assistants(stage: Open, backend: str) -> None:
    faults = FaultPlan(seed=3, mixed=0.2, retry_after_s=0.05)
    s = await stage(backend=backend, server=FakeConfig(faults=faults, latency_s=0.0))
    row = {"prompt": script(WRITE, WRITE, WRITE, "There are 3."), "verify": THREE}
    got = await asyncio.gather(*(s.attempt(row, index) for index in range(12)))
    for one in got:
        message = [json.loads(m) for m in one.messages]
        texts = {m["content"] for m in message if m["role"] == "assistant"}
        assert texts <= {"", "There are 3."}
        assert (one.reward is None) == (one.status != "ok")
        if one.status != "ok":
            assert one.cause
    counts = {c.call_id: c for one in got for c in one.calls}
    assert len(counts) == len(s.server.entries)
    for entry in s.server.entries:
        call = counts[entry.call_id or ""]
        assert (call.outcome == "refused") == (entry.outcome == "refused")
        if call.input_tokens is not None:
            assert call.input_tokens == entry.prompt_tokens
            assert entry.reported


@pytest.mark.slow
async def test_64_agents_do_not_share_state(stage: Open) -> None:
    s = await stage(agent={"limits": {"max_turns": 90}})

    def row(mine: str) -> dict[str, Any]:
        reads = [{"run": f"cat /workspace/id; cat /tmp/id; echo $MINE # {n}"} for n in range(50)]
        put = {"run": f"echo {mine} > id; echo {mine} > /tmp/id; export MINE={mine}"}
        return {"prompt": script(put, *reads, "ok"), "verify": f'grep -qx {mine} "$WORKSPACE/id"'}

    names = [f"agent-{n}" for n in range(64)]
    got = await asyncio.gather(*(s.attempt(row(name), n) for n, name in enumerate(names)))
    for name, one in zip(names, got, strict=True):
        assert one.reward == 1.0, (one.end_reason, one.error)
        results = [json.loads(m) for m in one.messages if '"role":"tool"' in m.replace(" ", "")]
        reads = [json.loads(r["content"])["output"] for r in results[1:]]
        assert len(reads) == 50
        assert set(re.findall(r"agent-\d+", "".join(reads))) == {name}
        assert all(read.split() == [name] * 3 for read in reads)


async def test_the_time_limit_counts_the_sandbox_and_its_setup(stage: Open) -> None:
    s = await stage(backend="none")
    row = {"prompt": script("done"), "setup": "sleep 0.4", "limits": {"max_seconds": 0.3}}
    got = await s.attempt(row)
    assert (got.end_reason, got.truncated, got.calls) == ("time_limit", True, [])


async def test_no_tools_and_the_default_tools_are_two_configurations(stage: Open) -> None:
    hashes = []
    for toolsets in (None, [], ["terminal", "file"]):
        s = await stage(backend="none", agent={"toolsets": toolsets})
        hashes.append(s.context.config_hash)
    none, empty, named = hashes
    assert none == named != empty


async def test_a_row_that_cannot_be_stored_fails_alone(stage: Open) -> None:
    s = await stage(backend="none")
    got = await s.attempt({"prompt": "half \ud800"})
    assert (got.cause, got.owner) == ("task", "task")
