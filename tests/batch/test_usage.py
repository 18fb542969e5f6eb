"""250 units against a server in its own process: recorded usage equals what it served.

Three models on three dialects, two keys and a more expensive fallback. A fifth of the requests
fails; answers are cut, empty, discarded or malformed calls; units end with a summary at the turn
limit; a worker and two drivers are killed.
"""

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import kit
import pytest
import yaml

from batch_runner import Prices, budgets_of, sum_earlier_spending
from hermes_rl.cli import main, row_faults
from hermes_rl.models.rate import NANO
from hermes_rl.store import RunDir
from hermes_rl.testing import Entry, FakeServer, read_log

UNITS = 250
FLAWED: list[dict[str, Any]] = [
    {"text": ""},
    {"text": "", "reasoning": "I must look."},
    {"text": "One part, ", "finish": "length"},
    {"run": "touch never", "finish": "length"},
    {"calls": [{"name": "Terminal", "arguments": "{,}"}]},
    {"calls": [{"name": "nope", "arguments": {}}]},
    {"text": "A text that is streamed in many pieces. " * 9, "fault": "cut"},
]
REFUSED = {"text": "for another model", "fault": "content_filter"}
VALID: list[dict[str, Any]] = [{"run": "true"}, {"run": "echo more"}, {"text": "Done."}]
PRICES: dict[str, dict[str, float]] = {
    "main": {"input": 3, "output": 15, "cache_read": 0.3},
    "other": {"input": 1.25, "output": 10, "cache_read": 0.125},
    "spare": {"input": 30, "output": 150, "cache_read": 3, "cache_write_5m": 37.5},
}
WIRE_OF = {
    "main": "chat_completions", "other": "codex_responses", "spare": "anthropic_messages",
}  # fmt: skip
KEYS = {"USAGE_KEY_A": "key-a", "USAGE_KEY_B": "key-b"}
SETTLED = ("input_tokens", "output_tokens")


def task(number: int) -> dict[str, Any]:
    """Some steps, each with some flawed answers before a valid one."""
    draw = random.Random(number)
    steps = [[*draw.choices(FLAWED, k=draw.randrange(3)), draw.choice(VALID)] for _ in range(4)]
    if number % 4 == 0:
        steps[number % 3].insert(0, REFUSED)
    return {"id": f"t{number:03}", "prompt": f"Unit {number}.\nSCRIPT: {json.dumps(steps)}"}


@asynccontextmanager
async def run_priced_server(log: Path) -> AsyncIterator[str]:
    """The base URL of a server that records prices."""
    written = {"cache_write_5m": "cache_write"}
    prices = {
        name: {written.get(kind, kind): str(usd) for kind, usd in price.items()}
        for name, price in PRICES.items()
    }
    faults = {"seed": 3, "mixed": 0.2, "retry_after_s": 0.02, "slow_s": 0.02}
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hermes_rl.testing.fake_server", "--until-eof",
        "--log", str(log), "--faults", json.dumps(faults),
        "--conditions", json.dumps({"prices": prices}),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert server.stdin
    assert server.stdout
    try:
        yield json.loads(await server.stdout.readline())["base_url"]
    finally:
        server.stdin.close()
        await server.wait()


def write_config(folder: Path, base_url: str) -> Path:
    """Write run.yaml."""
    config = {
        "dataset": {"path": str(kit.write_rows(folder / "tasks.jsonl", map(task, range(UNITS))))},
        "model": {"mix": {"main": 2, "other": 1}, "max_tokens": 1000},
        "agent": {"toolsets": ["terminal"], "limits": {"max_turns": 3}},
        "sandbox": {"backend": "none"},
        "endpoint": {
            "base_url": base_url, "stream": True, "prices": PRICES,
            "api_key_env": ",".join(KEYS), "key_strategy": "round_robin",
            "places": {"other": {"api_mode": "codex_responses"}},
            "fallbacks": [{"model": "spare", "api_mode": "anthropic_messages"}],
        },
        "run": {
            "out": str(folder / "run"), "allow_unsandboxed": True, "budget_usd": 1000,
            "concurrency": 64, "publish_every_s": 1,
        },
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


async def wait_for_answers(log: Path, requests: int, run: kit.RunProcess) -> None:
    """Wait until the server has answered this many requests."""
    await kit.wait_for(run, lambda: log.exists() and log.read_bytes().count(b"\n") >= requests)


async def run_with_kills(
    config: Path, log: Path, out: Path, cluster: dict[str, str]
) -> kit.RunProcess:
    """Kill the run three times. Returns its last start."""
    env = {**cluster, **KEYS}
    first = await kit.start_run("--config", config, "--workers", "2", env=env)
    workers = await kit.wait_for_workers(out, 2, first)
    await wait_for_answers(log, 150, first)
    kit.kill(workers[0])
    await wait_for_answers(log, 400, first)
    workers = kit.worker_pids(out)
    kit.kill(first.pid)
    await first.wait()
    await kit.check_processes_ended(workers, kit.WAIT_S)
    second = await kit.start_run("--config", config, "--workers", "0", env=KEYS)
    await wait_for_answers(log, len(read_log(log)) + 150, second)
    kit.kill(second.pid)
    await second.wait()
    last = await kit.start_run("--config", config, "--workers", "0", env=KEYS)
    assert await last.wait() in (0, 1), last.errors
    return last


def check_call(call: dict[str, Any], entry: Entry | None) -> None:
    """Known usage equals the server's, and unknown usage is marked as unknown."""
    assert entry is None or entry.api_mode == WIRE_OF[str(entry.model)]
    if call["outcome"] == "refused":
        assert entry is not None
        assert entry.outcome == "refused"
        return
    if call["input_tokens"] is None:
        assert call["output_tokens"] is None
        assert call["cost_usd"] is None
        reported = entry is not None and entry.reported
        assert call["outcome"] == "unknown" or (entry is not None and not reported), (call, entry)
        return
    assert entry is not None
    assert entry.reported
    assert call["model"] == entry.model
    tokens = (entry.prompt_tokens, entry.completion_tokens, entry.cached_tokens)
    assert tuple(call[n] for n in (*SETTLED, "cache_read_tokens")) == tokens
    assert (call["cache_write_tokens"] or 0) == entry.cache_write_tokens
    assert entry.dollars is not None
    assert call["cost_usd"] == pytest.approx(float(entry.dollars), rel=1e-9)


def check_row(row: dict[str, Any], served_by_id: dict[str, Entry]) -> None:
    """Sums of a row are those of its calls; its models are those that answered."""
    calls = row["calls"]
    known = [call for call in calls if call["input_tokens"] is not None]
    unknown = [c for c in calls if c["input_tokens"] is None and c["outcome"] != "refused"]
    assert row["usage"]["unknown_calls"] == row["unpriced_calls"] == len(unknown)
    for name in SETTLED:
        assert (row["usage"][name] or 0) == sum(call[name] for call in known)
    if row["cost_usd"] is not None:
        total = sum(Decimal(str(served_by_id[call["call_id"]].dollars)) for call in known)
        assert row["cost_usd"] == pytest.approx(float(total), rel=1e-9)
    assert (row["cost_usd"] is None) == bool(unknown)
    answered = {call["model"] for call in calls if call["outcome"] == "ok"}
    assert answered <= set(row["served_models"]) <= {row["model"], "spare"}


@pytest.mark.slow
async def test_recorded_usage_is_what_the_server_served(
    tmp_path: Path, cluster: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = tmp_path / "served.jsonl", tmp_path / "run"
    async with run_priced_server(log) as base_url:
        last = await run_with_kills(write_config(tmp_path, base_url), log, out, cluster)
    entries = read_log(log)
    served_by_id = {str(entry.call_id): entry for entry in entries}
    assert len(served_by_id) == len(entries), "a call id was sent twice"
    ended, lost = kit.read_table(out, "trajectories"), kit.read_table(out, "failures")
    rows = [*ended, *lost]
    calls = {call["call_id"]: call for row in rows for call in row["calls"]}
    assert len(calls) == sum(len(row["calls"]) for row in rows), "a call is recorded twice"
    assert set(served_by_id) <= set(calls), "the server served a call that no row records"
    for name, call in calls.items():
        check_call(call, served_by_id.get(name))
    for row in rows:
        check_row(row, served_by_id)
    known = [e for n, e in served_by_id.items() if calls[n]["input_tokens"] is not None]
    check_budget(last, out, rows, known, entries)
    check_variety(ended, lost, calls, entries)
    check_commands(out, ended[0]["unit_id"], capsys)
    assert main(["show", str(out)]) == 0
    sure = sum(entry.dollars or 0 for entry in known)
    shown = capsys.readouterr().out
    assert f"cost ${sure:.4f} + " in shown
    assert "attempts by model: main " in shown
    both = next(row for row in ended if row["served_models"] == ["main", "spare"])
    assert main(["show", str(out), both["unit_id"]]) == 0
    assert "answered by main, spare" in capsys.readouterr().out


def check_budget(
    last: kit.RunProcess,
    out: Path,
    rows: list[dict[str, Any]],
    known: list[Entry],
    entries: list[Entry],
) -> None:
    """The amount spent is at least the known cost and at most the upper bound."""
    manifest = json.loads((out / "manifest.json").read_bytes())
    spent = manifest["budgets"]["run:usd"]["spent"]
    sure = float(sum(entry.dollars or 0 for entry in known))
    whole = float(sum(entry.dollars or 0 for entry in entries))
    worst = sum(
        metric["value"] * PRICES["spare"][kind] / 1e6
        for row in rows
        for metric in row["metrics"]
        for kind in ("input", "output")
        if metric["name"] == f"unknown_{kind}_tokens_max"
    )
    assert sure < whole <= spent <= sure + worst * 1.25  # writing to the cache costs 1.25
    stats = json.loads((out / "stats.json").read_bytes())
    assert stats["cost_usd"] is None
    assert stats["known_cost_usd"] == pytest.approx(sure, abs=1e-6)
    assert stats["calls"]["total"] >= len(entries)
    accounts = {lane["account"] for lane in manifest["rate_limits"]}
    assert len(accounts) == len(KEYS)


def check_variety(
    ended: list[dict[str, Any]],
    lost: list[dict[str, Any]],
    calls: dict[str, Any],
    entries: list[Entry],
) -> None:
    """The run met all kinds of faults, endings and answers."""
    assert len({row["unit_id"] for row in ended}) == len(ended)
    assert len({row["unit_id"] for row in [*ended, *lost]}) == UNITS
    assert len(ended) > UNITS * 0.98
    causes = Counter(row["cause"] for row in lost)
    assert causes["worker_lost"] >= 1
    assert causes["driver_lost"] >= 2
    assert {row["model"] for row in ended} == {"main", "other"}
    assert {"main spare", "other spare"} <= {" ".join(row["served_models"]) for row in ended}
    assert {entry.api_mode for entry in entries} == set(WIRE_OF.values())
    faulty = sum(entry.fault is not None for entry in entries)
    assert faulty > len(entries) * 0.15
    purposes = Counter(call["purpose"] for call in calls.values())
    assert purposes["summary"] > 10
    outcomes = Counter(call["outcome"] for call in calls.values())
    assert set(outcomes) >= {"ok", "refused", "cut", "unknown"}
    errors = Counter(c["error"] for c in calls.values() if c["error"])
    assert errors["discarded: empty answer"] > 5
    assert errors["discarded: cut tool call"] > 5


def check_commands(out: Path, unit: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`check` and `show` report no error."""
    for arguments in (["check", str(out)], ["show", str(out)], ["show", str(out), unit]):
        assert main(arguments) == 0, capsys.readouterr()
        assert capsys.readouterr().err == ""


async def test_unknown_calls_of_a_fallback_count_with_the_price_of_the_fallback(
    tmp_path: Path, server: FakeServer
) -> None:
    steps = [[REFUSED, {"text": "", "fault": "reset"}, "Done."]]
    row = {"id": "t", "prompt": f"Do it.\nSCRIPT: {json.dumps(steps)}"}
    config = kit.make_config(
        tmp_path,
        [row],
        model={"name": "main", "max_tokens": 1000},
        endpoint={
            "base_url": server.base_url, "prices": PRICES,
            "fallbacks": [{"model": "spare", "api_mode": "anthropic_messages"}],
        },
        run={"budget_usd": 10, "model_budgets": {"main": 5, "spare": 5}},
    )  # fmt: skip
    report = await kit.run_config(config)
    assert (report.exit_code, report.unknown_calls) == (0, 1)
    (final,) = kit.read_table(tmp_path / "run", "trajectories")
    answered = [call for call in final["calls"] if call["outcome"] == "ok"]
    assert [call["model"] for call in answered] == final["served_models"] == ["spare"]
    for wrong, says in (({"unpriced_calls": 0}, "unpriced_calls is 0, its calls have 1"),
                        ({"cost_usd": 1.0}, "cost_usd is set although")):  # fmt: skip
        assert any(says in fault for fault in row_faults("trajectories", {**final, **wrong}, {}))
    assert list(row_faults("trajectories", final, {})) == []
    known = report.stats["known_cost_usd"]
    assert known == pytest.approx(answered[0]["cost_usd"], abs=1e-6)
    assert "cost: <$0.01 + 1 call unpriced" in report.lines()[1]
    budgets = json.loads((tmp_path / "run" / "manifest.json").read_bytes())["budgets"]
    before = sum_earlier_spending(
        RunDir(tmp_path / "run"), budgets_of(config), Prices(config).worst
    )
    for budget in ("run:usd", "model:spare:usd"):
        assert before[budget] / NANO == pytest.approx(budgets[budget]["spent"], abs=1e-8)
    assert before["model:main:usd"] == budgets["model:main:usd"]["spent"] == 0
    assert budgets["run:usd"]["spent"] > known + 1000 * PRICES["spare"]["output"] / 1e6
