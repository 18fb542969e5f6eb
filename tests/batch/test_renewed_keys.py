"""Runs whose API key expires several times while a command prints the current one."""

import json
import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import kit
import pytest

from hermes_rl.config import to_yaml
from hermes_rl.testing import FakeConfig, FakeServer

EXPIRES_AT = (8, 26, 44)
"""Requests at which the key expires."""
IN_PROCESS = {"workers": 0, "concurrency": 8}


class KeyIssuer:
    """Issues keys, and checks that no file of the run ever contains one."""

    def __init__(self, folder: Path, out: Path) -> None:
        self.file, self.out = folder / "key", out
        self.keys: list[str] = []
        self.leaks: set[str] = set()
        self.server: FakeServer | None = None
        self.change()

    def change(self) -> None:
        self.keys.append(f"token-of-hour-{len(self.keys)}-Zq8")
        new = self.file.with_suffix(".new")
        new.write_text(self.keys[-1] + "\n")
        new.rename(self.file)  # a worker may print it at this moment
        if self.server is not None:
            self.server.config = replace(self.server.config, key=self.keys[-1])

    def on_request(self, request: int) -> None:
        if request in EXPIRES_AT:
            self.find_leaks()
            self.change()

    def find_leaks(self) -> None:
        """The run may remove files meanwhile."""
        for folder, _, names in os.walk(self.out):
            for path in (Path(folder, name) for name in names):
                with suppress(FileNotFoundError):
                    content = path.read_bytes() if path.is_file() else b""
                    if any(key.encode() in content for key in self.keys):
                        self.leaks.add(path.name)


def config(folder: Path, address: str, command: str, run: dict[str, Any], **endpoint: Any) -> Path:
    endpoint_section = {
        "base_url": address,
        "api_key_env": "HOURLY",
        "key_commands": {"HOURLY": command},
        "fallbacks": ["fake"],
        "outage_seconds": 60,
        **endpoint,
    }
    made = kit.make_config(
        folder, kit.make_rows(12), model={"name": "gone"}, endpoint=endpoint_section, run=run
    )
    path = folder / "run.yaml"
    path.write_text(to_yaml(made))
    return path


async def check(folder: Path, run: dict[str, Any], env: dict[str, str], **endpoint: Any) -> Counter:
    """Check a run whose key expires three times. Returns how often each key was printed."""
    issuer = KeyIssuer(folder, folder / "run")
    printed_keys = folder / "printed_keys"
    command = f"cat {issuer.file} | tee -a {printed_keys}; echo not-a-key >&2"
    async with FakeServer(
        FakeConfig(key=issuer.keys[0], models=("fake",)), issuer.on_request
    ) as server:
        issuer.server = server
        path = config(folder, server.base_url, command, run, **endpoint)
        ended = await kit.finish_run("--config", path, env=env)
        kit.check_usage(issuer.out, server.entries)
        refused = [entry for entry in server.entries if entry.model is None]
    rows = kit.final_rows(issuer.out).values()
    assert len(rows) == kit.count_units(12)
    assert {row["end_reason"] for row in rows} == {"answered"}
    assert kit.read_table(issuer.out, "failures") == []
    calls = [call for row in rows for call in row["calls"]]
    renewed = [call for call in calls if "KeyRenewed: 401" in (call["error"] or "")]
    assert len(renewed) == len(refused) >= len(EXPIRES_AT)
    assert len(issuer.keys) == 1 + len(EXPIRES_AT)
    shown = json.dumps([*rows, ended.events], default=str) + ended.errors
    issuer.find_leaks()
    assert issuer.leaks == set()
    assert [key for key in issuer.keys if key in shown] == []
    return Counter(printed_keys.read_text().split())


async def test_expired_keys_are_renewed_once_per_process(tmp_path: Path) -> None:
    printed = await check(tmp_path, IN_PROCESS, {}, transport="sdk")
    assert len(printed) == 1 + len(EXPIRES_AT)
    assert max(printed.values()) == 1, "eight rollouts share one run of the command"


@pytest.mark.slow
async def test_ray_workers_renew_keys_themselves(tmp_path: Path, cluster: dict[str, str]) -> None:
    printed = await check(tmp_path, {"workers": 2, "concurrency": 8}, cluster)
    assert len(printed) == 1 + len(EXPIRES_AT)
    assert max(printed.values()) <= 2, "once for each worker"


async def test_a_key_command_that_fails_for_a_while_fails_no_unit(tmp_path: Path) -> None:
    """Its login is missing when the key expires, and returns: no unit fails."""
    issuer = KeyIssuer(tmp_path, tmp_path / "run")
    failed = tmp_path / "failed"
    command = (
        f"if grep -q hour-0 {issuer.file} || [ -s {failed} ]; then cat {issuer.file}; "
        f"else echo 1 > {failed}; echo 'no login' >&2; exit 5; fi"
    )

    def on_request(request: int) -> None:
        if request == 10:
            issuer.change()

    async with FakeServer(FakeConfig(key=issuer.keys[0], models=("fake",)), on_request) as server:
        issuer.server = server
        await kit.finish_run("--config", config(tmp_path, server.base_url, command, IN_PROCESS))
    rows = kit.final_rows(issuer.out).values()
    assert len(rows) == kit.count_units(12)
    assert kit.read_table(issuer.out, "failures") == []
    errors = {call["error"] for row in rows for call in row["calls"] if call["error"]}
    assert any(
        "KeyNotRenewed: 401" in e and "ended with exit code 5: no login" in e for e in errors
    )


async def test_a_key_command_that_fails_at_the_start_is_reported(tmp_path: Path) -> None:
    async with FakeServer(FakeConfig(key="k-12345")) as server:
        path = config(tmp_path, server.base_url, "echo 'log in first' >&2; exit 2", IN_PROCESS)
        ended = await kit.finish_run("--config", path, code=2)
        assert server.requests == 0
    assert "the key command of HOURLY ended with exit code 2: log in first" in ended.errors
    assert not (tmp_path / "run").exists()


async def test_a_key_that_is_always_refused_stops_the_run_and_names_its_command(
    tmp_path: Path,
) -> None:
    async with FakeServer(FakeConfig(key="k-12345", models=("fake",))) as server:
        path = config(tmp_path, server.base_url, "cat " + str(tmp_path / "mine"), IN_PROCESS)
        (tmp_path / "mine").write_text("wrong-key-77")
        ended = await kit.finish_run("--config", path, code=3)
    assert ended.report()["hint"] == "Fix the command of HOURLY in endpoint.key_commands"
    assert "prints the same key again" in ended.report()["detail"]
