"""manifest.json: kept entries, the dataset fingerprint and the capabilities of the endpoint."""

import hashlib
import platform
from pathlib import Path
from typing import Any, cast

import kit
import pytest

from batch_runner import capabilities, read_manifest, resolve_settings, run_batch, write_manifest
from hermes_rl.config import parse_config
from hermes_rl.errors import UserError
from hermes_rl.models.providers import EndpointReport
from hermes_rl.store import open_run
from hermes_rl.testing import FakeConfig, FakeServer
from hermes_rl.wiring import reach


async def test_manifest_keeps_entries_and_updates_the_dataset_fingerprint(tmp_path: Path) -> None:
    dataset = tmp_path / "tasks.jsonl"
    settings = resolve_settings(
        kit.make_config(tmp_path, [{"prompt": "p"}], model={"name": "noop"})
    )
    async with await open_run(settings.out, settings.identity) as driver:
        write_manifest(driver, settings, {"rate_limits": [{"limit": 7}], "plan": {"units": 1}})
        write_manifest(driver, settings, {"rate_limits": []})
        kept = read_manifest(driver.run_dir)
        assert kept["rate_limits"] == [{"limit": 7}]
        assert "plan" not in kept, "the plan belongs to the earlier start"
        machine = {"system": platform.platform(), "machine": platform.machine()}
        assert kept["platform"] == machine
        assert kept["dataset"]["sha256"] == hashlib.sha256(dataset.read_bytes()).hexdigest()

        dataset.write_text('{"prompt": "other"}\n')
        write_manifest(driver, settings, {})
        changed = read_manifest(driver.run_dir)["dataset"]
        assert changed["sha256"] == hashlib.sha256(dataset.read_bytes()).hexdigest()

        (driver.run_dir.path / "manifest.json").write_text("{torn")
        write_manifest(driver, settings, {})
        assert read_manifest(driver.run_dir)["dataset"] == changed


def test_run_batch_accepts_plain_data_and_reports_bad_input(tmp_path: Path) -> None:
    data = kit.make_config(tmp_path, [], model={"name": "noop"}).model_dump()
    data["dataset"]["path"] = str(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match=r"none\.jsonl: no such file"):
        run_batch(data)
    with pytest.raises(UserError, match="run_batch: unknown key 'wat'"):
        run_batch({**data, "wat": 1})
    with pytest.raises(UserError, match="takes a RunConfig or a mapping, not str"):
        run_batch(cast(Any, "smoke"))


def test_manifest_capabilities_come_from_the_endpoint_probe() -> None:
    config = parse_config({"dataset": {"path": "smoke"}, "model": {"name": "m"}})
    assert "models" not in capabilities(config, None)
    found = capabilities(config, EndpointReport(models=("a", "b")))
    assert (found["models"], found["models_listed"]) == (["a", "b"], 2)
    assert found["stream"] is False


async def test_calls_of_a_full_probe_are_listed_with_their_usage(
    tmp_path: Path,
) -> None:
    async with FakeServer(FakeConfig(models=("fake",))) as server:
        prices = {"fake": {"input": 1, "output": 1, "cache_read": 1}}
        endpoint = {"base_url": server.base_url, "prices": prices}
        config = kit.make_config(tmp_path, [], endpoint=endpoint, run={"probe": "full"})
        found_capabilities = capabilities(config, await reach(config))
        served = [entry for entry in server.entries if entry.outcome == "served"]
    found = found_capabilities["probed"]
    assert (found_capabilities["api_mode"], found["model"], found["listed"]) == (
        "chat_completions",
        "fake",
        True,
    )
    assert all(found[name] for name in ("answers", "streaming", "usage_in_streams"))
    known = [call for call in found["calls"] if call["usage"]]
    listed = [(c["usage"]["input_tokens"], c["usage"]["output_tokens"]) for c in known]
    assert listed == [(entry.prompt_tokens, entry.completion_tokens) for entry in served]
    assert all(call["cost_usd"] for call in known)
