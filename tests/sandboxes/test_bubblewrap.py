"""What only bubblewrap has: images, the network by choice, host faults, what the machine allows."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_rl.errors import SandboxDied, SandboxKilled, SandboxStartError, TaskFault
from hermes_rl.sandboxes import (
    Bubblewrap,
    GradingSpec,
    Sandbox,
    SandboxLimits,
    SandboxSpec,
    probe,
    recipe,
    watchdog,
)

PROGRAMS = ("bash", "cat", "ls", "mkdir", "touch", "grep")


@pytest.fixture
def image(state: Path) -> Path:
    """A tiny root file system: a shell, a few programs and their libraries."""
    root = state / "image"
    for folder in ("usr/bin", "etc", "proc", "dev", "tmp", "run", "workspace", "hx", "opt"):
        (root / folder).mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    (root / "etc/release").write_text("tiny\n")
    for program in PROGRAMS:
        binary = shutil.which(program)
        assert binary is not None
        shutil.copy(binary, root / "usr/bin")
        listed = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True)
        for word in listed.stdout.split():
            if word.startswith("/"):
                target = root / word.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(word, target)
    for path in [root, *root.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
        if os.geteuid() == 0:
            os.lchown(path, 54321, 54321)  # an overlay takes no writes to root's files
    return root


async def test_an_image_is_the_root_and_stays_as_it_was(
    bubblewrap: Bubblewrap, image: Path
) -> None:
    spec = SandboxSpec(lease="image", image=str(image))
    async with await bubblewrap.lease(spec) as sandbox:
        said = await sandbox.run("cat /etc/release; ls /usr/bin; touch /opt/made own", timeout_s=20)
        assert said.output.split() == ["tiny", *sorted(PROGRAMS)], said
        assert said.exit_code == 0
        for _ in range(2):
            seen = await sandbox.grade(GradingSpec("ls /opt /workspace; touch /opt/other"))
            assert "made" in seen.output, seen
            assert "own" in seen.output
            assert "other" not in seen.output
    assert [*(image / "opt").iterdir()] == []


async def test_an_image_of_root_can_be_read(bubblewrap: Bubblewrap, image: Path) -> None:
    if os.geteuid() != 0:
        return  # an ordinary user has no such image
    for path in [image, *image.rglob("*")]:
        os.lchown(path, 0, 0)
    async with await bubblewrap.lease(SandboxSpec(lease="image", image=str(image))) as sandbox:
        said = await sandbox.run("cat /etc/release >copy; cat copy; touch /opt/made", timeout_s=20)
        assert said.output.startswith("tiny\n")
        assert said.exit_code == 1
        assert os.stat(f"/proc/{sandbox.host_pid}").st_uid >= 200_000


async def test_an_image_shows_no_solutions_of_bundled_tasks(
    bubblewrap: Bubblewrap, image: Path
) -> None:
    """Copies of this package in it are empty for agents and for what runs in grading boxes; what
    lies beside them is not."""
    site = image / "usr/lib/python3.11/site-packages"
    for name in ("hermes_rl/data", "environments/some", "other"):
        (site / name).mkdir(parents=True)
        (site / name / "oracle").write_text("canary\n")
    for path in [image / "usr/lib", *(image / "usr/lib").rglob("*")]:
        path.chmod(0o755)
    spec = SandboxSpec(lease="image", image=str(image))
    async with await bubblewrap.lease(spec) as sandbox:
        look = "grep -rl canary /usr; touch /usr/lib/python3.11/site-packages/hermes_rl/own"
        seen = await sandbox.run(look, timeout_s=20)
        assert seen.output.splitlines()[0] == "/usr/lib/python3.11/site-packages/other/oracle"
        assert seen.exit_code == 1
        graded = await sandbox.grade(GradingSpec("grep -rl canary /usr"))
        assert graded.output.count("/oracle") == 1


def test_which_folders_tell_how_bundled_tasks_are_solved(state: Path) -> None:
    """Installed copies below /usr, whether we run from them or not, and our checkout as a whole."""
    root = state / "root"
    site, local = (root / f"usr/{n}/python3.12/site-packages" for n in ("lib", "local/lib64"))
    elsewhere = root / "opt/venv/site-packages"
    checkout = root / "usr/src/app"
    for folder in (site / "hermes_rl", local / "environments", site / "numpy", elsewhere):
        folder.mkdir(parents=True)
    for folder in (checkout / "hermes_rl", checkout / "datasets", elsewhere / "hermes_rl"):
        folder.mkdir(parents=True)
    (root / "usr/lib64").symlink_to("lib")  # the same folder by another name
    copies = [
        "/usr/lib/python3.12/site-packages/hermes_rl",
        "/usr/local/lib64/python3.12/site-packages/environments",
    ]
    assert list(recipe.solutions(root, elsewhere)) == copies
    (checkout / "datasets/terminal_tasks.jsonl").touch()
    assert list(recipe.solutions(root, checkout)) == [*copies, "/usr/src/app"]
    if os.geteuid() == 0:  # others get no further, and nothing could be put over it
        recipe.solutions.cache_clear()
        (root / "usr/src").chmod(0o700)
        assert list(recipe.solutions(root, checkout)) == copies


def test_environments_that_are_installed_beside_it_are_hidden_too(state: Path) -> None:
    site = state / "root/usr/local/lib/python3.12/site-packages"
    for name in ("hermes_rl", "word_hunt", "word_lists", "word_hunt-1.dist-info"):
        (site / name).mkdir(parents=True)
    named = "[hermes_rl.environments]\nword_hunt = word_hunt.environment:WordHunt\n"
    (site / "word_hunt-1.dist-info/entry_points.txt").write_text(named)
    code = "from pathlib import Path; from hermes_rl.sandboxes.recipe import solutions; "
    code += f"print(*solutions(Path({str(state / 'root')!r}), Path({str(site)!r})))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(site)!r}); {code}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    place = "/usr/local/lib/python3.12/site-packages"
    assert done.stdout.split() == [f"{place}/hermes_rl", f"{place}/word_hunt"], done.stderr


async def test_a_missing_image_is_the_tasks_fault(bubblewrap: Bubblewrap, state: Path) -> None:
    (state / "empty").mkdir()
    for name in (state / "missing", state / "empty"):
        with pytest.raises(TaskFault, match="image"):
            await bubblewrap.lease(SandboxSpec(lease="image", image=str(name)))
    for itself in ("/", "//usr/.."):
        with pytest.raises(TaskFault, match="this machine's own root"):
            await bubblewrap.lease(SandboxSpec(lease="image", image=itself))


async def test_the_network_is_a_choice(bubblewrap: Bubblewrap) -> None:
    hosts = "cat /proc/net/dev | grep -vc lo:"
    async with await bubblewrap.lease(SandboxSpec(lease="off")) as sandbox:
        assert (await sandbox.run("ls /sys/class/net 2>&1; cat /etc/resolv.conf", timeout_s=20)).raw
        off = (await sandbox.run(hosts, timeout_s=20)).output
    async with await bubblewrap.lease(SandboxSpec(lease="on", network=True)) as sandbox:
        on = (await sandbox.run(hosts, timeout_s=20)).output
        same = await sandbox.run("cat /etc/resolv.conf", timeout_s=20)
    assert off == "2\n"  # two lines of headings
    assert int(on) >= int(off)
    if Path("/etc/resolv.conf").exists():
        assert same.output == Path("/etc/resolv.conf").read_text()


async def test_the_environment_and_cwd_asked_for(bubblewrap: Bubblewrap) -> None:
    spec = SandboxSpec(lease="env", cwd="/tmp/some where", env={"A": "it's $HOME", "B": "1"})
    async with await bubblewrap.lease(spec) as sandbox:
        said = await sandbox.run('pwd; echo "$A$B"; echo $HOME', timeout_s=20)
        assert said.output == "/tmp/some where\nit's $HOME1\n/workspace\n"
        await sandbox.run("unset B; export A=2", timeout_s=20)
        assert (await sandbox.run("echo $A${B-none}", timeout_s=20)).output == "2none\n"
    with pytest.raises(TaskFault, match="no working directory"):
        await bubblewrap.lease(SandboxSpec(lease="env", cwd="/usr/nowhere"))


async def test_limits_in_force_are_told(bubblewrap: Bubblewrap) -> None:
    limits = SandboxLimits(processes=60, memory_bytes=200 << 20)
    async with await bubblewrap.lease(SandboxSpec(lease="limits", limits=limits)) as sandbox:
        told = sandbox.info.limits
        assert told["processes"] == 60
        assert told["workspace_held_by"] == "kernel" if os.geteuid() == 0 else "watching"
        assert (await sandbox.run("ulimit -u", timeout_s=20)).output == "60\n"
        can = await asyncio.to_thread(probe.probe_machine)
        assert ("memory_bytes" in told) == can.cgroups


async def test_memory_of_the_whole_sandbox(bubblewrap: Bubblewrap) -> None:
    """Several processes, none of them too large alone: the agent's own deed, and graded."""
    if not (await asyncio.to_thread(probe.probe_machine)).cgroups:
        return  # then `info.limits` does not claim it (see above)
    limits = SandboxLimits(memory_bytes=150 << 20)
    hog = "python3 -c 'import time; a = bytearray(100 << 20); time.sleep(20)'"
    async with await bubblewrap.lease(SandboxSpec(lease="memory", limits=limits)) as sandbox:
        await sandbox.run("echo 1 >left", timeout_s=20)
        with pytest.raises(SandboxKilled, match="out of memory"):
            await sandbox.run(f"{hog} & {hog} & wait -n; exit", timeout_s=60)
        assert (await sandbox.grade(GradingSpec("cat /workspace/left"))).output == "1\n"


HELD = "touch started; {} until [ -e go ]; do sleep 0.01; done"


@pytest.mark.parametrize("removed", ["", "ctl", "ctl/cmd", "ctl/o1"])
@pytest.mark.parametrize(
    "command", [None, HELD.format(""), HELD.format("sleep 600 &"), "touch started; sleep 600"]
)
async def test_folders_that_vanish_are_the_hosts_fault(
    bubblewrap: Bubblewrap, state: Path, removed: str, command: str | None
) -> None:
    """Single files too, as cleaners of temporary folders remove them: no command is reported to
    have run that could not."""
    async with await bubblewrap.lease(SandboxSpec(lease="vanish")) as sandbox:
        control = control_of(state)
        running = None
        if command is not None:
            running = asyncio.create_task(sandbox.run(command, timeout_s=2))
            await until_there(sandbox, "started")
        path = control.parent / removed if removed else folder_of(state)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        if running is not None and removed:
            await sandbox.write_file("go", b"")
        results = await asyncio.gather(*([running] if running else []), return_exceptions=True)
        with pytest.raises(SandboxDied, match="vanished"):
            await sandbox.run("true", timeout_s=30)
        assert all(type(result) is SandboxDied for result in results)
        assert not any(removed and result.in_command for result in results)
        if not removed:
            with pytest.raises(SandboxDied):
                await sandbox.grade(GradingSpec("true"))


def control_of(state: Path) -> Path:
    """The control directory of the only sandbox: in memory, where there is space."""
    memory = Path(watchdog.memory_folder(str(state)))
    [control] = [*state.glob("*/*/ctl"), *memory.glob("*/ctl")]
    return control


def folder_of(state: Path) -> Path:
    [path] = state.glob(f"*/{control_of(state).parent.name}")
    return path


async def until_there(sandbox: Sandbox, path: str) -> None:
    """Until a command has made that file."""
    async with asyncio.timeout(60):
        while True:
            try:
                await sandbox.read_file(path)
            except FileNotFoundError:
                await asyncio.sleep(0.01)
            else:
                return


async def test_no_process_starts_without_its_folders(bubblewrap: Bubblewrap, state: Path) -> None:
    async with await bubblewrap.lease(SandboxSpec(lease="vanish")) as sandbox:
        shutil.rmtree(control_of(state))
        with pytest.raises(SandboxDied, match="vanished"):
            await sandbox.start_process("true")


@pytest.mark.usefixtures("reference")
async def test_one_clear_message_where_sandboxes_cannot_start(state: Path) -> None:
    broken = state / "bwrap"
    text = "bwrap: No permissions to create new namespace, likely because the kernel does not"
    broken.write_text(f"#!/bin/sh\necho '{text}' >&2\nexit 1\n")
    broken.chmod(0o755)
    backend = Bubblewrap(state_dir=state, binary=str(broken))
    with pytest.raises(SandboxStartError, match="user namespaces are forbidden here") as caught:
        await backend.lease(SandboxSpec(lease="forbidden"))
    assert "\n" not in str(caught.value)
    await backend.aclose()


async def test_a_folder_of_somebody_else_is_refused(state: Path) -> None:
    (state / "elsewhere").symlink_to("/tmp")
    backend = Bubblewrap(state_dir=state / "elsewhere")
    with pytest.raises(SandboxStartError, match="state_dir"):
        await backend.lease(SandboxSpec(lease="refused"))
    await backend.aclose()


def test_probe_tells_what_works() -> None:
    found = probe.probe_machine()
    assert found.works, found.message
    assert found.root == (os.geteuid() == 0)
    assert "bubblewrap" in found.version
    assert found.limits["processes"]


def test_state_folders_are_closed_to_others(state: Path) -> None:
    backend_state = state / "fresh"

    async def use() -> None:
        backend = Bubblewrap(state_dir=backend_state)
        async with await backend.lease(SandboxSpec(lease="modes")):
            modes = {
                name: stat.S_IMODE((backend_state / name).stat().st_mode)
                for name in (".", "boxes", "owners")
            }
            assert modes == {".": 0o711, "boxes": 0o711, "owners": 0o700}
            for sandbox in (backend_state / "boxes").iterdir():
                if (sandbox / "ws").exists():  # else it is in a file system that nobody else sees
                    assert stat.S_IMODE((sandbox / "ws").stat().st_mode) == 0o700
        await backend.aclose()

    asyncio.run(use())
