"""A folder of the host as the workspace: the agent works on your files, and on nothing else."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from hermes_rl.aiagent import AIAgent
from hermes_rl.config import ModelConfig
from hermes_rl.errors import UserError
from hermes_rl.sandboxes import Bubblewrap, SandboxLimits, SandboxSpec
from hermes_rl.testing import FakeServer

from .conftest import ORDINARY

AS_ROOT = os.geteuid() == 0
OWNER = ORDINARY if AS_ROOT else os.geteuid()


@pytest.fixture
def project(state: Path) -> Path:
    """A user's folder with a file in it."""
    path = state / "project"
    path.mkdir()
    (path / "main.py").write_text("print(1)\n")
    if AS_ROOT:
        for each in (path, path / "main.py"):
            os.chown(each, OWNER, OWNER)
    return path


async def test_the_folder_is_the_workspace_and_stays(state: Path, project: Path) -> None:
    backend = Bubblewrap(workspace=project, state_dir=state)
    spec = SandboxSpec(lease="host", limits=SandboxLimits(workspace_files=1))
    for number in range(2):  # a closed backend can be used again
        async with await backend.lease(spec) as sandbox:
            script = "cat main.py; echo new > made; mkdir -p sub; echo x > ~/cache; echo $PWD $UID"
            said = await sandbox.run(script, timeout_s=20)
            assert said.output == "print(1)\n/workspace 1000\n"
            await sandbox.write_file(f"sub/{number}", b"here")
            assert await sandbox.read_file("made") == b"new\n"
            assert (await sandbox.run("sleep 0.1", timeout_s=20)).exit_code == 0
            assert "workspace_files" not in sandbox.info.limits
            assert sandbox.info.limits["own_uid"] is False
        await backend.aclose()
    assert sorted(p.name for p in project.iterdir()) == ["made", "main.py", "sub"]
    assert {p.stat().st_uid for p in project.rglob("*")} == {OWNER}


async def test_links_out_of_the_folder_lead_nowhere(state: Path, project: Path) -> None:
    secret = state / "secret"
    secret.write_text("no")
    (project / "link").symlink_to(secret)
    backend = Bubblewrap(workspace=project, state_dir=state)
    try:
        async with await backend.lease(SandboxSpec(lease="link")) as sandbox:
            assert (await sandbox.run("cat link", timeout_s=20)).exit_code == 1
            with pytest.raises(FileNotFoundError):
                await sandbox.read_file("link")
            with pytest.raises(OSError, match=r"no such file|not a regular file"):
                await sandbox.read_file(f"../{secret}")
    finally:
        await backend.aclose()


async def test_root_lends_the_agent_no_rights(state: Path, project: Path) -> None:
    own = project / "root-only"
    own.write_text("of root")
    own.chmod(0o600 if AS_ROOT else 0)
    backend = Bubblewrap(workspace=project, state_dir=state)
    try:
        async with await backend.lease(SandboxSpec(lease="root")) as sandbox:
            with pytest.raises(PermissionError):
                await sandbox.read_file("root-only")
            with pytest.raises(PermissionError):
                await sandbox.write_file("root-only", b"x")
    finally:
        await backend.aclose()
    own.chmod(0o600)
    assert (own.read_text(), own.stat().st_uid) == ("of root", os.geteuid())


@pytest.mark.parametrize("kind", ["absent", "state", "root's"])
async def test_folders_that_cannot_be_used(state: Path, tmp_path: Path, kind: str) -> None:
    folder = {"absent": state / "none", "state": state, "root's": tmp_path}[kind]
    if kind == "root's" and not AS_ROOT:
        folder = Path("/usr")
    said = {"absent": "no such folder", "state": "the folders of all sandboxes"}.get(
        kind, "chown -R USER" if AS_ROOT else "not writable"
    )
    backend = Bubblewrap(workspace=folder, state_dir=state)
    try:
        with pytest.raises(UserError, match=re.escape(said)):
            await backend.lease(SandboxSpec(lease="bad"))
    finally:
        await backend.aclose()


async def test_an_agent_on_a_project(state: Path, project: Path) -> None:
    async with FakeServer() as server:
        model = ModelConfig(name="m", base_url=server.base_url)
        sandbox = Bubblewrap(workspace=project, state_dir=state)
        prompt = 'Do it.\nSCRIPT: [{"run": "echo 2 >> main.py"}, "done"]'
        async with AIAgent(model, toolsets=["terminal"], sandbox=sandbox) as agent:
            assert (await agent.run(prompt))["final_response"] == "done"
    assert (project / "main.py").read_text() == "print(1)\n2\n"
    assert [*state.glob("boxes/*"), *state.glob("owners/*")] == []  # the backend ended too


async def test_an_agent_cannot_destroy_the_project_by_a_known_command(
    state: Path, project: Path
) -> None:
    """The files are the user's: what is free in other sandboxes is not here."""
    async with FakeServer() as server:
        model = ModelConfig(name="m", base_url=server.base_url)
        sandbox = Bubblewrap(workspace=project, state_dir=state)
        prompt = 'Do it.\nSCRIPT: [{"run": "rm -rf ~/*"}, "done"]'
        async with AIAgent(model, toolsets=["terminal"], sandbox=sandbox) as agent:
            result = await agent.run(prompt)
    assert "never allowed" in str(result["messages"])
    assert (project / "main.py").exists()
