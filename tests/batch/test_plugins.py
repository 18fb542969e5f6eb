"""Plugins in batch runs: hooks of files and entry points, and what their failures do to rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from batch_runner import Silent, arun_batch
from hermes_rl import load_run
from hermes_rl.agent import HOOKS, load_plugins
from hermes_rl.config import parse_config
from hermes_rl.definitions import identity_of
from hermes_rl.errors import StoreError, UserError
from hermes_rl.identity import digest
from hermes_rl.testing import FakeServer

STEPS = [{"run": "echo hi", "text": "I look."}, "Done."]
ROWS = [{"id": f"t{n}", "prompt": f"{n}\nSCRIPT: " + json.dumps(STEPS)} for n in range(4)]

ALL = """
import json
from pathlib import Path

def register(context):
    for name in {names}:
        context.register_hook(name, lambda _name=name, **payload: write(_name, payload))
    context.register_hook("on_memory_write", print)

def write(name, payload):
    with open(Path(__file__).with_name("seen.jsonl"), "a") as file:
        file.write(json.dumps([name, payload.get("task_id"), payload["platform"]]) + "\\n")
"""
HARMFUL = """
import time

def register(context):
    context.register_hook("pre_llm_call", fail)
    context.register_hook("pre_tool_call", number)
    context.register_hook("transform_terminal_output", number)
    context.register_hook("transform_tool_result", fail)
    context.register_hook("post_tool_call", hang, deadline_s=0.1)
    context.register_hook("on_session_end", fail)

def fail(**payload):
    raise ValueError("no")

def number(**payload):
    return 7

async def hang(**payload):
    time.sleep(60)
"""
CHANGES = """
def register(context):
    context.register_hook("transform_tool_result", lambda result: result.upper())
"""


def config(server: FakeServer | None, out: Path, *plugins: Any) -> Any:
    return parse_config(
        {
            "dataset": {"path": ROWS},
            "model": {"name": "fake"},
            "agent": {"plugins": [str(p) for p in plugins]},
            "endpoint": {"base_url": server.base_url if server else "http://127.0.0.1:9/v1"},
            "sandbox": {"backend": "none"},
            "run": {"out": str(out), "workers": 0, "allow_unsandboxed": True},
        }
    )


def plugin(tmp_path: Path, text: str, name: str = "plugin.py") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def rows(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (
        load_run(out).trajectories.sort_values("row_index").to_dict("records")
    )
    return found


async def test_all_hooks_of_a_plugin_are_called_in_a_batch_run(
    server: FakeServer, tmp_path: Path
) -> None:
    names = [name for name in HOOKS if name != "transform_llm_output"]
    path = plugin(tmp_path, ALL.replace("{names}", repr(names)))
    text = path.read_text()
    report = await arun_batch(config(server, tmp_path / "run", path), progress=Silent())
    assert report.done == len(ROWS)
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    without_cause = ("on_session_reset", "error", "approval", "subagent")
    called = {name for name in names if not any(part in name for part in without_cause)}
    assert {name for name, _, _ in seen} == called
    assert {platform for _, _, platform in seen} == {"batch"}
    started = [name for name, *_ in seen if name == "on_session_start"]
    assert len(started) == len(ROWS)
    assert {task for name, task, _ in seen if name == "pre_tool_call"} == {
        row["id"] for row in ROWS
    }
    assert text == path.read_text()


async def test_a_harmful_plugin_changes_nothing_but_counts(
    server: FakeServer, tmp_path: Path
) -> None:
    path = plugin(tmp_path, HARMFUL)
    for name, plugins in (("plain", ()), ("harmed", (path,))):
        report = await arun_batch(config(server, tmp_path / name, *plugins), progress=Silent())
        assert report.done == len(ROWS)
    plain, harmed = rows(tmp_path / "plain"), rows(tmp_path / "harmed")
    for one, other in zip(plain, harmed, strict=True):
        assert list(one["messages"]) == list(other["messages"])
        assert (one["end_reason"], one["turns"]) == (other["end_reason"], other["turns"])
        metrics = dict(other["metrics"])
        assert metrics["hook_errors"] == 3
        assert metrics["hook_bad_returns"] == 2
    late = [dict(row["metrics"]) for row in harmed]
    assert all(m.get("hook_timeouts", 0) + m.get("hook_skips", 0) == 1 for m in late)
    assert any(m.get("hook_timeouts") for m in late)


async def test_plugins_that_change_what_the_model_sees_are_identity(
    server: FakeServer, tmp_path: Path
) -> None:
    observes = plugin(tmp_path, ALL.replace("{names}", "['post_tool_call']"), "observes.py")
    changes = plugin(tmp_path, CHANGES, "changes.py")

    def identity(*plugins: Path) -> str:
        return digest(identity_of(config(None, tmp_path / "out", *plugins)))

    assert identity() == identity(observes) != identity(changes)
    with_plugin = identity(changes)
    report = await arun_batch(config(server, tmp_path / "out", changes), progress=Silent())
    assert report.done == len(ROWS)
    (row, *_) = rows(tmp_path / "out")
    (tool,) = [m for m in row["messages"] if m["role"] == "tool"]
    assert tool["content"] == tool["content"].upper()
    assert dict(row["metrics"]) == {"hook_transforms": 1.0}
    changes.write_text(CHANGES.replace("upper", "lower"))
    assert identity(changes) != with_plugin
    with pytest.raises(StoreError, match="was made with plugins"):
        await arun_batch(config(server, tmp_path / "out", changes), progress=Silent())


def test_plugins_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "my_hooks"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(CHANGES)
    info = tmp_path / "site" / "my_hooks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-hooks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hermes_rl.plugins]\nshout = my_hooks:register\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (found,) = load_plugins(["shout"])
    assert [hook.name for hook in found.hooks] == ["transform_tool_result"]
    assert found.changes_input
    with pytest.raises(UserError, match=r"unknown plugin 'shoot' \(did you mean 'shout'\?\)"):
        load_plugins(["shoot"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "def register(context):\n    context.register_hook('pre_tol_call', print)",
            "pre_tool_call",
        ),
        ("x = 1\nraise ValueError('broken')", r"ValueError: broken \(bad.py:2\). Fix it"),
        ("x = 1", r"has no function register\(context\)"),
        ("def register(context", "SyntaxError"),
        (
            "def register(context):\n    context.register_hook('pre_tool_call', lambda call: 1)",
            "'call' is not one of them",
        ),
        (
            "def register(context):\n"
            "    context.register_hook('post_tool_call', print, deadline_s='1')",
            "deadline_s of the hook post_tool_call must be a number of seconds above 0, not '1'",
        ),
        ("import sys\nsys.exit(0)", r"SystemExit: 0 \(bad.py:2\)"),
        ("async def register(context):\n    pass", "register is an async function"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_one_line(tmp_path: Path, text: str, reason: str) -> None:
    path = plugin(tmp_path, text, "bad.py")
    with pytest.raises(UserError, match=reason) as caught:
        load_plugins([str(path)])
    assert "\n" not in str(caught.value)
    for absent in ("absent.py", Path("absent.py")):
        with pytest.raises(UserError, match=r"absent\.py: no such file"):
            load_plugins([absent])
