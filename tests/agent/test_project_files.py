"""Instructions of a project (`AGENTS.md` and the like) in the system prompt."""

from pathlib import Path
from typing import Any

import pytest

from hermes_rl.agent import context_files, preset
from hermes_rl.sandboxes import Sandbox, SandboxSpec, Subprocess
from hermes_rl.sessions import SessionStore

from .conftest import Make, say

LAYOUT = """
mkdir -p repo/.git repo/src/app repo/docs; echo outside > AGENTS.md
cd repo; echo top > AGENTS.md; echo other > CLAUDE.md; echo docs > docs/AGENTS.md
echo 'follow me' > src/app/.cursorrules; cd src/app
"""


def system_of(result: dict[str, Any]) -> str:
    return str(result["messages"][0]["content"])


async def test_instructions_join_the_prompt_from_the_top_down(tmp_path: Path) -> None:
    backend = Subprocess(state_dir=tmp_path)

    async def text(sandbox: Sandbox, script: str) -> str:
        await sandbox.run(script, timeout_s=20)
        return await context_files(sandbox)

    async with await backend.lease(SandboxSpec(lease="files")) as sandbox:
        assert await text(sandbox, "true") == ""
        found = await text(sandbox, LAYOUT)
        names = [line for line in found.splitlines() if line.startswith("<file")]
        assert names == ["<file path='AGENTS.md'>", "<file path='.cursorrules'>"]
        assert found.index("\ntop\n") < found.index("\nfollow me\n")
        assert "outside" not in found
        assert "docs" not in found
        assert str(tmp_path) not in found  # no path of this machine
        large = await text(sandbox, "printf 'x%.0s' {1..90000} > .hermes.md; rm .cursorrules")
        assert 19_900 <= large.count("x") < 20_100
        odd = await text(sandbox, "rm .hermes.md; mkdir AGENTS.md; ln -s /nowhere CLAUDE.md")
        assert [line for line in odd.splitlines() if line.startswith("<file")] == names[:1]
        assert "top=" not in (await sandbox.run("set", timeout_s=20)).output
    await backend.aclose()


class Project(Subprocess):
    """Sandboxes whose workspace has instructions."""

    async def lease(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await super().lease(spec)
        await sandbox.write_file("AGENTS.md", b"Use tabs.")
        return sandbox


def test_instructions_are_read_once_for_a_conversation(make: Make, tmp_path: Path) -> None:
    change = {"run": "echo Use spaces. > AGENTS.md"}
    with SessionStore(tmp_path / "s.db") as store:
        with make(session=store.open("work"), sandbox=Project(state_dir=tmp_path)) as agent:
            first = system_of(agent.run_conversation(say(change, "ok", "ok")))
            assert first.endswith("<file path='AGENTS.md'>\nUse tabs.\n</file>")
            assert system_of(agent.run_conversation("And?")) == first
        with make(session=store.open("work")) as agent:  # its sandbox has no such file
            assert system_of(agent.run_conversation("And?")) == first


def test_instructions_are_left_out_of_prompts_of_the_user_and_where_they_are_off(
    make: Make, tmp_path: Path
) -> None:
    off = preset("interactive").switched({"context_files": False})
    for settings in ({"system": "Mine."}, {"preset": off}, {"preset": "datagen"}):
        with make(sandbox=Project(state_dir=tmp_path), **settings) as agent:
            assert "tabs" not in system_of(agent.run_conversation(say("ok")))
    with make(sandbox=Project(state_dir=tmp_path)) as agent:
        result = agent.run_conversation(say("ok"), system_message="Mine.")
        assert system_of(result) == "Mine."


def test_skills_and_memory_are_in_the_prompt_as_they_were_at_the_start(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the task's instructions and those of the project."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    add = {"action": "add", "list": "notes", "content": "A fact."}
    remember = {"calls": [{"name": "memory", "arguments": add}]}
    kinds = {"toolsets": ["terminal", "memory", "skills"], "sandbox": Project(state_dir=tmp_path)}
    with make(**kinds) as agent:
        first = system_of(agent.run_conversation(say(remember, "ok")))
        assert "- tabular-report: " in first
        assert "A fact." not in first
        assert first.endswith("Use tabs.\n</file>")
        assert system_of(agent.run_conversation("And?")) == first
    with make(**kinds) as agent:
        second = system_of(agent.run_conversation(say("ok")))
    assert second.index("- tabular-report: ") < second.index("- A fact.") < second.index("tabs")
