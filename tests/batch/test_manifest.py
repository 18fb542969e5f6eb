"""manifest.json: what a later start has nothing to say about stays; the fingerprint is true."""

import hashlib
from pathlib import Path

from batch_runner.manifest import capabilities, read_manifest, write_manifest
from batch_runner.settings import settle
from hermes_rl.config import parse_config
from hermes_rl.models.probe import Probed
from hermes_rl.store.driver import open_run


async def test_entries_are_kept_and_the_fingerprint_follows_the_file(tmp_path: Path) -> None:
    dataset = tmp_path / "tasks.jsonl"
    dataset.write_text('{"prompt": "p"}\n')
    data = {
        "dataset": {"path": str(dataset)},
        "model": {"name": "noop"},
        "sandbox": {"backend": "none"},
        "run": {"out": str(tmp_path / "run"), "workers": 0, "allow_unsandboxed": True},
    }
    settings = settle(parse_config(data))
    async with await open_run(settings.out, settings.identity) as driver:
        write_manifest(driver, settings, {"rate_limits": [{"limit": 7}], "plan": {"units": 1}})
        write_manifest(driver, settings, {"rate_limits": []})
        kept = read_manifest(driver.run_dir)
        assert kept["rate_limits"] == [{"limit": 7}]
        assert "plan" not in kept, "that was the earlier start's"
        assert kept["dataset"]["sha256"] == hashlib.sha256(dataset.read_bytes()).hexdigest()

        dataset.write_text('{"prompt": "other"}\n')
        write_manifest(driver, settings, {})
        changed = read_manifest(driver.run_dir)["dataset"]
        assert changed["sha256"] == hashlib.sha256(dataset.read_bytes()).hexdigest()

        (driver.run_dir.path / "manifest.json").write_text("{torn")
        write_manifest(driver, settings, {})
        assert read_manifest(driver.run_dir)["dataset"] == changed


def test_capabilities_are_what_the_endpoint_said() -> None:
    config = parse_config({"dataset": {"path": "smoke"}, "model": {"name": "m"}})
    assert "models" not in capabilities(config, None)
    found = capabilities(config, Probed(models=("a", "b")))
    assert (found["models"], found["models_listed"]) == (["a", "b"], 2)
    assert found["stream"] is False
