"""Task folders as rows: formats, unsupported features, limits and names of images."""

from __future__ import annotations

from pathlib import Path

import pytest
from image_kit import HARBOR, harbor_task

from hermes_rl.cli import main
from hermes_rl.errors import UserError
from hermes_rl.sources import read_tasks
from hermes_rl.task_folders import build_contexts, describe_network_requests
from hermes_rl.tasks import TaskRow


def single_row(path: Path) -> TaskRow:
    (row,) = read_tasks(str(path))
    return row


def test_a_harbor_folder_is_a_row(tmp_path: Path) -> None:
    more = {"tests/data/expected.bin": "x", "solution/solve.sh": "echo hello >hello.txt\n"}
    row = single_row(harbor_task(tmp_path / "my-task", more))
    assert row.task is not None
    assert row.error is None
    assert (row.task.id, row.task.prompt_text) == ("my-task", "Write hello to hello.txt.\n")
    assert row.task.image is not None
    assert row.task.image.startswith("task:")
    assert row.task.limits == {"wall_seconds": 60.0}
    assert row.task.metadata["difficulty"] == "easy"
    assert row.task.metadata["tags"] == ["a", "b"]
    verifier = row.task.verify
    assert verifier is not None
    assert set(verifier.files) == {"tests/test.sh", "tests/data/expected.bin"}
    assert verifier.mounts == {"/tests": "tests", "/logs/verifier": ""}
    assert verifier.timeout_s == 30.0
    assert "solve.sh" in (row.task.oracle or "")
    assert "hello" not in str(row.task.setup)


def test_a_terminal_bench_folder_is_a_row(tmp_path: Path) -> None:
    folder = tmp_path / "old-task"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.yaml").write_text(
        "instruction: |-\n  Write hello.\ndifficulty: hard\nmax_agent_timeout_sec: 90\n"
        "max_test_timeout_sec: 12\n"
    )
    (folder / "docker-compose.yaml").write_text("services:\n  client:\n    build: .\n")
    (folder / "Dockerfile").write_text("FROM base\n")
    (folder / "run-tests.sh").write_text("true\n")
    (folder / "tests/test_outputs.py").write_text("def test(): pass\n")
    (folder / "solution.yaml").write_text("- command: echo a\n- command: echo b\n")
    task = single_row(folder).task
    assert task is not None
    assert (task.prompt_text, task.oracle) == ("Write hello.", "echo a\necho b\n")
    assert task.limits == {"wall_seconds": 90.0}
    assert task.verify is not None
    assert set(task.verify.files) == {"tests/test_outputs.py", "tests/run-tests.sh"}
    assert task.verify.timeout_s == 12.0
    (folder / "solution.yaml").write_text("- command: echo c\n")
    (folder / "tests/test_outputs.py").write_text("def test(): assert True\n")
    again = single_row(folder).task
    assert again is not None
    assert again.image == task.image, "neither solution nor tests are part of the image"


@pytest.mark.parametrize(
    ("files", "toml", "message"),
    [
        ({}, "[environment]\ngpus = 1", "GPUs (environment.gpus), which is not supported"),
        ({}, "[[environment.mcp_servers]]\nname = 'x'", "MCP servers"),
        ({}, "[[steps]]\nname = 'one'", "several steps"),
        ({}, "[verifier]\nenvironment_mode = 'separate'", "a separate image for the verifier"),
        ({}, "[verifier]\nenv = { KEY = '${SECRET}' }", "takes SECRET from the machine's"),
        ({}, "[agent]\ntimeout_sec = 0", "timeout_sec must be a number of seconds above 0"),
        ({}, "not toml", "the task folder cannot be read"),
        ({"environment/docker-compose.yaml": "services: {a: {}, b: {}}"}, "", "2 services (a, b)"),
        ({"environment/docker-compose.yaml": "services: []"}, "", "names no services"),
        ({"environment/docker-compose.yaml": "a: ]"}, "", "the task folder cannot be read"),
    ],
)
def test_unsupported_features_fail_only_their_row(
    tmp_path: Path, files: dict[str, str], toml: str, message: str
) -> None:
    harbor_task(tmp_path / "bad", files, toml=toml)
    harbor_task(tmp_path / "good", {})
    bad, good = read_tasks(str(tmp_path))
    assert bad.error is not None
    assert message in bad.error
    assert bad.error.count("\n") == 0
    assert bad.place == str(tmp_path / "bad")
    assert good.error is None
    assert list(build_contexts(tmp_path)) == [good.task and good.task.image]


@pytest.mark.parametrize("missing", ["environment/Dockerfile", "tests/test.sh"])
def test_missing_files_are_named(tmp_path: Path, missing: str) -> None:
    folder = harbor_task(tmp_path / "bad", {})
    (folder / missing).unlink()
    assert f"{missing} is missing" in (single_row(folder).error or "")


def test_defaults_of_variables_are_used(tmp_path: Path) -> None:
    toml = "[environment.env]\nMODE = '${MODE:-fast one}'\n[verifier.env]\nN = '1'\n"
    task = single_row(harbor_task(tmp_path / "task", {}, toml=toml)).task
    assert task is not None
    assert task.env_vars == {"MODE": "fast one"}
    assert task.verify is not None
    assert "export MODE='fast one'\nexport N=1\n" in task.verify.script


def test_the_name_of_an_image_depends_only_on_its_build_context(tmp_path: Path) -> None:
    first = harbor_task(tmp_path / "a", {"environment/src/x": "1"})
    second = harbor_task(tmp_path / "b", {"environment/src/x": "1", "instruction.md": "other"})
    assert len(build_contexts(tmp_path)) == 1, "equal contexts are built once"
    names = {next(iter(build_contexts(first)))}
    (second / "environment/src/x").write_text("2")
    names.add(next(iter(build_contexts(second))))
    (second / "environment/src/x").chmod(0o755)
    names.add(next(iter(build_contexts(second))))
    (second / "environment/src/link").symlink_to("x")
    names.add(next(iter(build_contexts(second))))
    (second / "environment/.hidden").write_text("")
    names.add(next(iter(build_contexts(second))))
    assert len(names) == 5


def test_a_published_image_needs_no_build(tmp_path: Path) -> None:
    toml = HARBOR + "[environment]\ndocker_image = 'ubuntu:24.04'\nworkdir = '/srv'\n"
    folder = harbor_task(tmp_path / "task", {}, toml=toml)
    task = single_row(folder).task
    assert task is not None
    assert (task.image, task.cwd) == ("ubuntu:24.04", "/srv")
    assert build_contexts(folder) == {}


def test_tests_that_link_out_of_their_folder_are_refused(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "task", {})
    (folder / "tests/secret").symlink_to("/etc/passwd")
    assert "a link to a file outside the folder" in (single_row(folder).error or "")


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(UserError, match="no task folders"):
        list(read_tasks(str(tmp_path)))


@pytest.mark.parametrize(
    ("toml", "compose", "limits"),
    [
        ("cpus = 2\nmemory_mb = 512\nstorage_mb = 10240\n", "", (2, 512 << 20, 10 << 30)),
        ("memory = '2G'\nstorage = '1.5GB'\n", "", (None, 2 << 30, 3 << 29)),
        ("", "{cpus: '0.5', mem_limit: 512m}", (0.5, 512 << 20, None)),
        ("", "{deploy: {resources: {limits: {cpus: '1', memory: 1GiB}}}}", (1, 1 << 30, None)),
        ("memory_mb = 64\n", "{cpus: '${N:-3}', mem_limit: 1g}", (3, 64 << 20, None)),
    ],
)
def test_resources_of_task_folders_become_limits(
    tmp_path: Path, toml: str, compose: str, limits: tuple[float | None, ...]
) -> None:
    files = {"environment/docker-compose.yaml": f"services: {{main: {compose}}}"} if compose else {}
    folder = harbor_task(tmp_path / "a", files, toml=HARBOR + "[environment]\n" + toml)
    names = ("cpus", "memory_bytes", "storage_bytes")
    wanted = {k: v for k, v in zip(names, limits, strict=True) if v is not None}
    (task,) = [row.task for row in read_tasks(str(folder))]
    assert task is not None
    assert task.limits == {"wall_seconds": 60.0, **wanted}


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("cpus = 'many'", "cpus must be a number above 0, not 'many'"),
        ("memory = 'a lot'", "memory must be a size such as 2G, not 'a lot'"),
        ("memory = '1..2G'", "memory must be a number above 0"),
        ("memory_mb = 1", "'limits.memory_bytes' must be 33,554,432 or more"),
    ],
)
def test_invalid_resources_fail_the_row(tmp_path: Path, toml: str, message: str) -> None:
    row = single_row(harbor_task(tmp_path / "a", {}, toml=HARBOR + "[environment]\n" + toml))
    assert message in (row.error or "")


@pytest.mark.parametrize(
    ("table", "asks"),
    [
        ("[environment]\nallow_internet = true\n", True),
        ('[environment]\nnetwork_mode = "public"\n', True),
        ('[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.example"]\n', True),
        ("[environment]\nallow_internet = false\n", False),
        ('[environment]\nnetwork_mode = "no-network"\n', False),
        ('[verifier]\nnetwork_mode = "public"\n', False),
        ("", False),
    ],
)
def test_requests_for_the_network_are_detected(tmp_path: Path, table: str, asks: bool) -> None:
    harbor_task(tmp_path / "a", {}, toml="")
    harbor_task(tmp_path / "b", {}, toml=table)
    line = "1 of 2 tasks ask for the network (first: b)"
    assert describe_network_requests(tmp_path) == (line if asks else None)
    assert describe_network_requests(tmp_path, 1) is None


def test_a_run_warns_once_that_tasks_request_the_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = '[environment]\ndocker_image = "/no/such/image"\nallow_internet = true\n'
    for name in ("a", "b"):
        harbor_task(tmp_path / "tasks" / name, {}, toml=toml)
    assert main(["check", str(tmp_path / "tasks")]) == 0
    wish = "2 of 2 tasks ask for the network (first: a)"
    assert capsys.readouterr().out.count(wish) == 1
    command = ["run", str(tmp_path / "tasks"), "--model", "noop", "--workers", "0"]
    for network, lines in (("off", 1), ("on", 0), ("a.example", 0)):
        main([*command, "--network", network, "--out", str(tmp_path / network)])
        assert capsys.readouterr().err.count(f"warning: {wish}") == lines
