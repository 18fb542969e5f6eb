"""Whole runs whose key ends again and again while a command prints the present one."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import kit
import pytest

from hermes_rl.config import to_yaml
from hermes_rl.testing import FakeConfig, FakeServer

ENDS_AT = (8, 26, 44)
"""Requests from which on another key is wanted."""
HERE = {"workers": 0, "concurrency": 8}


class Office:
    """Gives out keys, and knows a run's folder: no file there may hold one at any time."""

    def __init__(self, folder: Path, out: Path) -> None:
        self.file, self.out = folder / "key", out
        self.keys: list[str] = []
        self.leaks: set[str] = set()
        self.server: FakeServer | None = None
        self.change()

    def change(self) -> None:
        self.keys.append(f"token-of-hour-{len(self.keys)}-Zq8")
        self.file.write_text(self.keys[-1] + "\n")
        if self.server is not None:
            self.server.config = replace(self.server.config, key=self.keys[-1])

    def ring(self, request: int) -> None:
        if request in ENDS_AT:
            self.look()
            self.change()

    def look(self) -> None:
        for path in self.out.rglob("*"):
            if path.is_file() and any(key.encode() in path.read_bytes() for key in self.keys):
                self.leaks.add(path.name)


def config(folder: Path, address: str, command: str, run: dict[str, Any], **endpoint: Any) -> Path:
    places = {
        "base_url": address,
        "api_key_env": "HOURLY",
        "key_commands": {"HOURLY": command},
        "fallbacks": ["fake"],
        "outage_seconds": 60,
        **endpoint,
    }
    made = kit.config(folder, kit.rows(12), model={"name": "gone"}, endpoint=places, run=run)
    path = folder / "run.yaml"
    path.write_text(to_yaml(made))
    return path


async def check(folder: Path, run: dict[str, Any], env: dict[str, str], **endpoint: Any) -> Counter:
    """A run through three ends of its key, which nothing is lost by. Returns how often each key was
    printed."""
    office = Office(folder, folder / "run")
    asked = folder / "asked"
    command = f"cat {office.file} | tee -a {asked}; echo not-a-key-of-ours >&2"
    async with FakeServer(FakeConfig(key=office.keys[0], models=("fake",)), office.ring) as server:
        office.server = server
        path = config(folder, server.base_url, command, run, **endpoint)
        ended = await kit.finish("--config", path, env=env)
        assert ended.process.returncode == 0, ended.errors
        kit.check_usage(office.out, server.entries)
        refused = [entry for entry in server.entries if entry.model is None]
    rows = kit.final_rows(office.out).values()
    assert len(rows) == kit.units_of(12)
    assert {row["end_reason"] for row in rows} == {"answered"}
    assert kit.table(office.out, "failures") == []
    calls = [call for row in rows for call in row["calls"]]
    renewed = [call for call in calls if "KeyRenewed: 401" in (call["error"] or "")]
    assert len(renewed) == len(refused) >= len(ENDS_AT)
    assert len(office.keys) == 1 + len(ENDS_AT)
    shown = json.dumps([*rows, ended.events], default=str) + ended.errors
    office.look()
    assert office.leaks == set()
    assert [key for key in office.keys if key in shown] == []
    return Counter(asked.read_text().split())


async def test_a_run_outlives_its_keys(tmp_path: Path) -> None:
    printed = await check(tmp_path, HERE, {}, transport="sdk")
    assert len(printed) == 1 + len(ENDS_AT)
    assert max(printed.values()) == 1, "eight rollouts share one run of the command"


@pytest.mark.slow
async def test_workers_on_ray_ask_for_themselves(tmp_path: Path, cluster: dict[str, str]) -> None:
    printed = await check(tmp_path, {"workers": 2, "concurrency": 8}, cluster)
    assert len(printed) == 1 + len(ENDS_AT)
    assert max(printed.values()) <= 2, "once for each worker"


async def test_a_command_that_fails_for_a_while_is_waited_for(tmp_path: Path) -> None:
    """Its login is away when the key ends, and comes back: no unit fails."""
    office = Office(tmp_path, tmp_path / "run")
    failed = tmp_path / "failed"
    command = (
        f"if grep -q hour-0 {office.file} || [ -s {failed} ]; then cat {office.file}; "
        f"else echo 1 > {failed}; echo 'no login' >&2; exit 5; fi"
    )

    def ring(request: int) -> None:
        if request == 10:
            office.change()

    async with FakeServer(FakeConfig(key=office.keys[0], models=("fake",)), ring) as server:
        office.server = server
        ended = await kit.finish("--config", config(tmp_path, server.base_url, command, HERE))
        assert ended.process.returncode == 0, ended.errors
    rows = kit.final_rows(office.out).values()
    assert len(rows) == kit.units_of(12)
    assert kit.table(office.out, "failures") == []
    errors = {call["error"] for row in rows for call in row["calls"] if call["error"]}
    assert any("NoNewKey: 401" in e and "ended with exit code 5: no login" in e for e in errors)


async def test_a_command_that_fails_at_the_start_is_one_line(tmp_path: Path) -> None:
    async with FakeServer(FakeConfig(key="k-12345")) as server:
        path = config(tmp_path, server.base_url, "echo 'log in first' >&2; exit 2", HERE)
        ended = await kit.finish("--config", path)
        assert server.requests == 0
    assert ended.process.returncode == 2
    assert "the key command of HOURLY ended with exit code 2: log in first" in ended.errors
    assert not (tmp_path / "run").exists()


async def test_a_key_that_never_works_stops_the_run_and_names_its_command(tmp_path: Path) -> None:
    async with FakeServer(FakeConfig(key="k-12345", models=("fake",))) as server:
        path = config(tmp_path, server.base_url, "cat " + str(tmp_path / "mine"), HERE)
        (tmp_path / "mine").write_text("wrong-key-77")
        ended = await kit.finish("--config", path)
    assert ended.process.returncode == 3, ended.errors
    assert ended.report()["hint"] == "Fix the command of HOURLY in endpoint.key_commands"
    assert "prints the same key again" in ended.report()["detail"]
