"""Task folders run in their own images: oracles, no-ops and cheats."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from image_kit import HARBOR, harbor_task, layer, layout

from hermes_rl.cli import main
from hermes_rl.errors import TaskFault
from hermes_rl.sandboxes import Bubblewrap, GradingSpec, ImageStore, SandboxSpec
from hermes_rl.store import load_run

MORE = layer({"app": None, "app/given.txt": "given", "workspace": None, "workspace/w.txt": "w"})
SETTINGS = {"Env": ["PATH=/opt/tools:/usr/local/bin:/usr/bin:/bin", "GREETING=good day"]}
TOML = HARBOR + "[environment]\ndocker_image = 'published'\n"


@pytest.fixture(scope="module")
def stored(shared: Path, base: Path) -> Path:
    """A store with the image `published`."""
    root = shared / "published"
    oci = layout(shared / "oci", [base.read_bytes(), MORE], "gzip", WorkingDir="/app", **SETTINGS)
    ImageStore(root).add(oci, "published")
    return root


@pytest.fixture
def published(stored: Path, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    monkeypatch.setenv("HERMES_RL_IMAGES", str(stored))
    return ImageStore()


@pytest_asyncio.fixture
async def backend(shared: Path) -> AsyncIterator[Bubblewrap]:
    made = Bubblewrap(state_dir=shared / "state")
    yield made
    await made.aclose()


HELLO = "grep -qx hello hello.txt"
TESTS = {
    "text": f"{HELLO} && echo 0.75 >$L/reward.txt",
    "json": HELLO + """ && printf '{"a": 1,\\n "b": 0.5}' >$L/reward.json""",
    "named": HELLO + """ && printf '{"reward": 0.25, "b": 1}' >$L/reward.json""",
    "exit": HELLO,
}
REWARDS = {"text": 0.75, "json": 0.75, "named": 0.25, "exit": 1.0}
SOLVE = "[ \"$GREETING\" = 'good day' ] && cat given.txt && bash /solution/more.sh"


def make_tasks(folder: Path) -> Path:
    for name, test in TESTS.items():
        files = {
            "tests/test.sh": f"#!/bin/bash\nL=/logs/verifier\n{test}\n",
            "solution/solve.sh": SOLVE,
            "solution/more.sh": "echo hello >hello.txt",
        }
        harbor_task(folder / name, files, toml=TOML)
    return folder


def run(dataset: Path, out: Path, model: str) -> Any:
    where = ["--model", model, "--workers", "0", "--out", str(out)]
    main(["run", str(dataset), *where])
    return load_run(out)


def test_rewards_are_read_from_every_file_format(published: ImageStore, tmp_path: Path) -> None:
    dataset = make_tasks(tmp_path / "tasks")
    solved = run(dataset, tmp_path / "solved", "oracle").trajectories
    assert dict(zip(solved["task_id"], solved["reward"], strict=True)) == REWARDS
    parts = {
        row.task_id: {p["name"]: p["score"] for p in row.rewards} for row in solved.itertuples()
    }
    assert parts["json"] == {"a": 1.0, "b": 0.5}
    assert parts["text"] == {"verify": 0.75}
    image = published.find("published")
    assert image is not None
    assert {row["digest"] for row in solved["sandbox"]} == {image.digest}
    unsolved = run(dataset, tmp_path / "unsolved", "noop").trajectories
    assert set(unsolved["reward"]) == {0.0}


def test_check_plays_oracles_and_cheats(
    published: ImageStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = tmp_path / "tasks"
    files = {"solution/solve.sh": "echo hello >hello.txt"}
    harbor_task(dataset / "one", files, toml=TOML)
    assert main(["check", str(dataset), "--run"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("ok\n") == 3
    assert "never name the workspace" not in printed


def test_a_task_without_its_image_fails_alone(
    published: ImageStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = make_tasks(tmp_path / "tasks")
    harbor_task(dataset / "other", {}, toml=TOML.replace("published", "not-there"))
    data = run(dataset, tmp_path / "out", "oracle")
    assert len(data.trajectories) == 4
    (failure,) = data.failures.itertuples()
    assert (failure.task_id, failure.cause) == ("other", "task")
    assert "hermes-rl images pull not-there" in failure.error


async def test_a_sandbox_has_the_files_and_settings_of_its_image(
    published: ImageStore, backend: Bubblewrap
) -> None:
    async with await backend.lease(SandboxSpec(lease="one", image="published")) as sandbox:

        async def output(command: str) -> str:
            return (await sandbox.run(command, timeout_s=60)).output

        assert await output("pwd; id -u; echo $HOME $GREETING") == "/app\n0\n/root good day\n"
        assert await output("cat given.txt /workspace/w.txt") == "givenw"
        assert await output("echo more >>given.txt; echo x >/etc/x; rm /workspace/w.txt") == ""
        assert await output("cat given.txt; ls /workspace") == "givenmore\n"
        denied = await output("echo 1 >/proc/sys/kernel/core_pattern; echo $?")
        assert denied.endswith("1\n"), "uid 0 of the sandbox has no privileges on the host"
        graded = await sandbox.grade(
            GradingSpec("pwd; cat /app/given.txt /etc/x; echo $WORKDIR $GREETING")
        )
        assert graded.output.endswith("/grading\ngivenmore\nx\n/app good day\n")
    async with await backend.lease(SandboxSpec(lease="two", image="published")) as sandbox:
        result = await sandbox.run("cat given.txt; ls /etc/x /workspace", timeout_s=60)
        assert result.output.startswith("given")
        assert "w.txt" in result.output
        assert "No such file" in result.output, "other agents do not see changes"


async def test_sandboxes_over_an_image_have_different_uids(
    published: ImageStore, backend: Bubblewrap
) -> None:
    """In each of them, the user of the sandbox owns the files of the image."""
    spec = SandboxSpec(lease="users", image="published")
    async with await backend.lease(spec) as one, await backend.lease(spec) as two:
        users = {os.stat(f"/proc/{sandbox.host_pid}").st_uid for sandbox in (one, two)}
        assert len(users) == 2
        assert users.isdisjoint({0, os.stat(published.root / "l").st_uid})
        for sandbox in (one, two):
            assert sandbox.info.limits["own_uid"] is True
            result = await sandbox.run("stat -c %u /app/given.txt; >>/app/given.txt", timeout_s=60)
            assert (result.output, result.exit_code) == ("0\n", 0)


TESTED = GradingSpec(
    "/tests/test.sh && read -r reward </logs/verifier/reward.txt; echo reward=${reward:-0} >&3",
    files={"tests/test.sh": b"#!/bin/bash\ngrep -qx hello /app/hello.txt && echo 1 "
           b">/logs/verifier/reward.txt\n"},
    mounts={"/tests": "tests", "/logs/verifier": ""},
    score=True,
)  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [
        "mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt",
        "mkdir -p /logs; ln -s /app /logs/verifier; echo 1 >/app/reward.txt",
        "ln -s /app /logs; mkdir /app/verifier; echo 1 >/app/verifier/reward.txt",
        "ln -s /app /tests; printf 'echo 1 >/logs/verifier/reward.txt' >/app/test.sh",
        "mkdir /tests; printf 'exit 0' >/tests/test.sh; chmod 0555 /tests",
        "printf '#!/bin/sh\\nexit 0\\n' >/usr/local/bin/grep; chmod +x /usr/local/bin/grep",
        "printf '#!/bin/sh\\nexit 0\\n' >/tmp/g; rm /usr/bin/grep; cp /tmp/g /usr/bin/grep; "
        "chmod +x /usr/bin/grep",
        "cp /usr/bin/true /tmp/t; rm -f /usr/bin/bash; cp /tmp/t /usr/bin/bash",
        "echo /app/evil.so >/etc/ld.so.preload",
        "mv /usr/lib /usr/lib2; ",
        "rm -rf /usr/bin; ",
        "rm /bin; mkdir /bin",
        "mkdir -p /opt/tools; printf 'exit 0' >/opt/tools/grep; chmod +x /opt/tools/grep",
        "rm -rf /usr/lib64; ln -s /app /usr/lib64",
        "echo hello >/app/hello.txt; ln -s /app /verify; ln -s /app /grading",
        "echo hello >/app/hello.txt; echo >/etc/ld.so.cache",
        "d=$(echo /usr/lib/*-linux-gnu); mkdir -p $d/glibc-hwcaps/x86-64-v2; "
        "cp $d/libtinfo.so.6 $d/glibc-hwcaps/x86-64-v2; echo hello >/app/hello.txt",
    ],
)
async def test_changes_of_the_image_cannot_forge_the_reward(
    published: ImageStore, backend: Bubblewrap, command: str
) -> None:
    async with await backend.lease(SandboxSpec(lease="cheat", image="published")) as sandbox:
        await sandbox.run(command, timeout_s=60)
        graded = await sandbox.grade(TESTED)
    assert graded.exit_code > 128 or graded.report.strip() == b"reward=0", graded


async def test_solutions_that_change_the_image_are_graded(
    published: ImageStore, backend: Bubblewrap
) -> None:
    """New programs, changed files, and a removed program that the verifier does not use."""
    command = (
        "printf 'x' >/usr/local/bin/new; rm /usr/bin/uniq; echo a >>/etc/passwd; "
        "touch /usr/lib/x86_64-linux-gnu/libc.a; "
        "echo hello >/app/hello.txt"
    )
    async with await backend.lease(SandboxSpec(lease="honest", image="published")) as sandbox:
        await sandbox.run(command, timeout_s=60)
        assert (await sandbox.grade(TESTED)).report.strip() == b"reward=1"


async def test_a_missing_image_names_the_remedy(store: ImageStore, backend: Bubblewrap) -> None:
    for name, remedy in (("task:0", "images build DATASET"), ("a/b:1", "images pull a/b:1")):
        with pytest.raises(TaskFault, match=remedy):
            await backend.lease(SandboxSpec(lease="x", image=name))


def test_the_command_imports_lists_and_prunes(
    store: ImageStore, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["images", "import", str(base), "--name", "mine"]) == 0
    assert main(["images", "list"]) == 0
    assert "  mine\n1 images, 1 layers" in capsys.readouterr().out
    for both in ([], ["--all", "--keep-gb", "1"]):
        assert main(["images", "prune", *both]) == 2
        shown = capsys.readouterr()
        assert "  mine\n1 images" in shown.out
        assert "nothing is removed: add --all" in shown.err
    assert main(["images", "prune", "--all"]) == 0
    assert main(["images", "list"]) == 0
    assert "0 images, 0 layers" in capsys.readouterr().out
    assert main(["images", "import", "/etc/passwd"]) == 2
    assert "not a tar archive" in capsys.readouterr().err


async def test_an_image_may_have_many_layers(
    store: ImageStore, base: Path, backend: Bubblewrap, tmp_path: Path
) -> None:
    many = [layer({f"f{number}": str(number)}) for number in range(100)]
    store.add(layout(tmp_path / "35", [base.read_bytes(), *many[:35]]), "35")
    async with await backend.lease(SandboxSpec(lease="many", image="35")) as sandbox:
        assert (await sandbox.run("cat /f0 /f34", timeout_s=60)).output == "034"
        assert (await sandbox.grade(GradingSpec("cat /f34"))).output.endswith("34")
    store.add(layout(tmp_path / "100", [base.read_bytes(), *many]), "100")
    with pytest.raises(TaskFault, match="has 101 layers, more than one overlay takes"):
        await backend.lease(SandboxSpec(lease="too many", image="100"))


async def test_sandboxes_over_images_leave_no_descriptor_open(
    published: ImageStore, backend: Bubblewrap
) -> None:
    async def descriptors() -> int:
        async with await backend.lease(SandboxSpec(lease="fd", image="published")) as sandbox:
            await sandbox.grade(GradingSpec("true"))
        return len(os.listdir("/proc/self/fd"))

    first = await descriptors()
    assert max([await descriptors() for _ in range(3)]) <= first


@pytest.mark.parametrize("way", ["{host}", "../../../../../../../..{host}"])
async def test_a_verifier_cannot_mount_folders_of_the_host(
    published: ImageStore, backend: Bubblewrap, shared: Path, way: str
) -> None:
    host = shared / os.urandom(4).hex()
    host.mkdir()
    (host / "file").write_text("of the host")
    before = (host / "file").stat()
    spec = GradingSpec("cat /tests/file", mounts={"/tests": way.format(host=host)})
    async with await backend.lease(SandboxSpec(lease="host", image="published")) as sandbox:
        with pytest.raises(TaskFault, match="is not a folder of the verifier's files"):
            await sandbox.grade(spec)
    assert (host / "file").stat() == before
