"""Runs of earlier versions resume, although the keys of configurations have changed."""

import asyncio
import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import kit
import msgspec
import pytest

from batch_runner import Silent, arun_batch, as_config, resolve_settings, run_batch, settings
from hermes_rl.cli import main
from hermes_rl.errors import ExitCode, StoreError
from hermes_rl.store import Epoch, load_run
from hermes_rl.testing import FakeServer

Change = Callable[[dict[str, Any]], None]


def config(folder: Path, **agent: Any) -> dict[str, Any]:
    rows = [{"prompt": f"Say {n}"} for n in range(3)]
    return kit.make_config(folder, rows, model={"name": "noop"}, agent=agent).model_dump()


def write_run(folder: Path, change: Change) -> dict[str, Any]:
    """Write the first epoch of a run by a version with another identity."""
    identity = resolve_settings(as_config(config(folder))).identity
    change(identity)
    epoch = Epoch(epoch=1, schema_version=1, run_id="r" * 32, identity=identity)
    (folder / "run" / "epochs").mkdir(parents=True)
    (folder / "run" / "epochs" / "1.json").write_bytes(msgspec.json.encode(epoch))
    return identity


def make_older(identity: dict[str, Any]) -> None:
    """It had a switch and a limit that were removed since, and lacked three switches, a limit and a
    key of the sandbox."""
    preset, agent = identity["agent"]["preset"], identity["agent"]
    del preset["repair_history"], preset["tool_loop_limit"], preset["command_timeout_s"]
    preset["removed_since"] = True
    del agent["limits"]["wall_seconds"], identity["sandbox"]["network"]
    agent["limits"]["max_removed"] = 3


def test_a_run_of_another_version_resumes_with_its_own_defaults(tmp_path: Path) -> None:
    write_run(tmp_path, make_older)
    for _ in range(2):
        settings = resolve_settings(as_config(config(tmp_path)))
        switches = settings.config.agent.switches
        off = {"repair_history": False, "tool_loop_limit": None, "command_timeout_s": 180}
        assert switches == off
        report = run_batch(config(tmp_path), progress=Silent())
        assert (report.done, report.units) == (3, 3)
    run = load_run(tmp_path / "run")
    assert len(run.trajectories) == 3, "nothing ran twice"
    assert set(run.trajectories["config_hash"]) == {settings.config_hash}


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ({"switches": {"repair_history": True}}, "made with repair_history none, now true. Keep"),
        ({"limits": {"wall_seconds": 60}}, "made with wall_seconds none, now 60.0. Keep"),
        ({"switches": {"nudge_empty": False}}, "made with nudge_empty true, now false. Keep true"),
        ({"ephemeral_system_prompt": "x"}, "made with ephemeral_system_prompt none, now "),
    ],
)
def test_only_changes_of_the_user_are_refused(
    tmp_path: Path, agent: dict[str, Any], says: str
) -> None:
    write_run(tmp_path, make_older)
    with pytest.raises(StoreError) as caught:
        run_batch(config(tmp_path, **agent), progress=Silent())
    assert says in str(caught.value)
    assert "removed_since" not in str(caught.value)
    assert ";" not in str(caught.value)


def test_unknown_keys_in_run_yaml_of_another_version_are_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path, make_older)
    run_batch(config(tmp_path), progress=Silent())
    settings, manifest = tmp_path / "run" / "run.yaml", tmp_path / "run" / "manifest.json"
    text = settings.read_text().replace("  switches:\n", "  switches:\n    removed_since: true\n")
    settings.write_text(text.replace("run:\n", "run:\n  removed: 1\n"))
    assert main(["run", "--config", str(settings)]) == ExitCode.BAD_INPUT
    assert "run.removed" in capsys.readouterr().err, "an error of the user"

    content = json.loads(manifest.read_bytes())
    content["versions"]["hermes_rl"] = "0.0.9"
    manifest.write_text(json.dumps(content))
    assert main(["run", "--config", str(settings)]) == ExitCode.DONE
    assert "3/3 units done" in capsys.readouterr().out
    assert "'run.removed' is not a key of this version and is ignored" in caplog.text
    assert "removed" not in settings.read_text()


RUN_OF_VERSION_1 = Path(__file__).parents[1] / "data" / "run-of-version-1.tar.xz"
"""A run of version 0.1.0 that was killed twice. Seven units are done and two are given up; two
more are finished in the journal of epoch 4, two were in flight, one never started. It has groups,
grades, token-exact segments and kept workspaces."""


@pytest.fixture
def old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The unpacked run; prompts and tool schemas of its version are restored in the identity."""
    with tarfile.open(RUN_OF_VERSION_1) as archive:
        archive.extractall(tmp_path)  # `filter` exists from 3.11.4 on
    monkeypatch.chdir(tmp_path)
    old_agent = json.loads((tmp_path / "run/epochs/1.json").read_bytes())["identity"]["agent"]
    texts = {name: old_agent[name] for name in ("tools", "system_prompt", "texts")}
    identity_of = settings.identity_of

    def identity_of_version_1(config: Any) -> dict[str, Any]:
        identity = identity_of(config)
        return {**identity, "agent": {**identity["agent"], **texts}}

    monkeypatch.setattr(settings, "identity_of", identity_of_version_1)
    return tmp_path / "run"


def final_rows(run: Path) -> dict[str, Mapping[str, Any]]:
    rows = load_run(run).arrow("trajectories").to_pylist()
    assert len({row["unit_id"] for row in rows}) == len(rows)
    return {f"{row['task_id']}#{row['repeat']}": row for row in rows}


def test_a_run_of_version_1_is_shown_checked_and_exported(
    old_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "run"]) == ExitCode.DONE
    assert "later-2" in capsys.readouterr().out
    assert main(["show", "run", "wrong"]) == ExitCode.DONE
    assert "maybe no" in capsys.readouterr().out
    assert main(["status", "run"]) == ExitCode.DONE
    assert main(["check", "run"]) == ExitCode.DONE, capsys.readouterr().out
    assert main(["export", "run", "--to", "openai", "--out", "openai"]) == ExitCode.DONE
    assert main(["export", "run", "--to", "verl-rl", "--out", "verl"]) == ExitCode.DONE
    assert "echo no > out.txt" in (tmp_path / "openai").read_text()


@pytest.mark.parametrize("merged", [False, True])
async def test_a_run_of_version_1_resumes_and_keeps_its_rows(
    old_run: Path, server: FakeServer, capsys: pytest.CaptureFixture[str], merged: bool
) -> None:
    before = final_rows(old_run)
    if merged:
        assert await asyncio.to_thread(main, ["compact", "run", "--keep-old", "0"]) == ExitCode.DONE
        assert len(list(old_run.glob("trajectories/*.parquet"))) == 1
        assert final_rows(old_run) == before
        assert main(["check", "run"]) == ExitCode.DONE, capsys.readouterr().out
    config = json.loads(Path("config.yaml").read_text())
    config["endpoint"] = {"base_url": server.base_url, "tokens": "off"}
    report = await arun_batch(config, progress=Silent())
    assert (report.units, report.done, report.given_up, report.open) == (14, 12, 2, 0)
    after = final_rows(old_run)
    assert {name: after[name] for name in before} == before
    new = {name: row["attempt"] for name, row in after.items() if name not in before}
    assert new == {"long-2#0": 1, "open-0#0": 1, "open-1#0": 0}
    assert {row["task_id"] for row in load_run(old_run).arrow("segments").to_pylist()} >= {"long-1"}
    assert main(["check", "run"]) == ExitCode.DONE, capsys.readouterr().out
    assert main(["env", "regrade", "run"]) in (ExitCode.DONE, ExitCode.GIVEN_UP)
