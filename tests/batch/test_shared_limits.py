"""Workers on real Ray share limits, budgets and cooldowns of keys."""

import json
from pathlib import Path

import kit
import pytest

from hermes_rl.testing import FakeConfig, FakeServer


@pytest.mark.slow
async def test_two_workers_share_limits_and_a_budget(tmp_path: Path) -> None:
    rows = [kit.task(n, turns=3) for n in range(24)]
    dataset, out = kit.write(tmp_path / "tasks.jsonl", rows), tmp_path / "run"
    async with FakeServer() as server:
        arguments = kit.played(dataset, out, server.base_url, "--workers", "2")
        budget = ("--set", "run.budget_tokens=1000000000")
        run = await kit.finish(*arguments, "--concurrency", "8", *budget)
        asked = server.requests
    assert run.process.returncode == 0, run.errors
    manifest = json.loads((out / "manifest.json").read_bytes())
    used = sum(row["usage"]["total_tokens"] for row in kit.table(out, "trajectories"))
    assert manifest["budgets"]["run:tokens"]["spent"] == used
    (lane,) = manifest["rate_limits"]
    assert lane["requests"] == {"clean": asked, "throttled": 0, "server_trouble": 0}
    assert lane["limits"][0] == [0.0, 8, "start"]


@pytest.mark.slow
async def test_a_key_that_one_worker_saw_refused_rests_at_the_other(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    """Two Ray workers with a unit each; the second begins when the first was turned away with the
    first key, and has been answered with the second one for some seconds."""
    opened = tmp_path / "open"
    first = kit.task(0, turns=6, latency_s=0.7)
    second = kit.task(1) | {"setup": f"until [ -e {opened} ]; do sleep 0.1; done"}
    dataset = kit.write(tmp_path / "tasks.jsonl", [first, second])
    keys = {"KEY_REFUSED": "no", "KEY_GOOD": "yes"}
    async with FakeServer(FakeConfig(key="yes")) as server:
        arguments = kit.played(dataset, tmp_path / "run", server.base_url, "--workers", "2")
        run = await kit.launch(
            *arguments, "--concurrency", "2", "--api-key-env", ",".join(keys), env=cluster | keys
        )
        await kit.asked(server, 5, run)
        opened.touch()
        assert await run.wait() == 0, run.errors
        asked = [(entry.outcome, entry.fault) for entry in server.entries]
    writers = [event["writer"] for event in run.events if event["event"] == "attempt"]
    assert len(set(writers)) == 2, "both units ran at one worker"
    assert asked[0][0] == "refused"
    assert [outcome for outcome, _ in asked].count("refused") == 1, asked
