"""Sandboxes of apptainer: the shipped suite and more, as an ordinary user, with the fake."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import apptainer_checks
from engines import OF_THE_BACKEND, root_file_system

from hermes_rl.cli import main
from hermes_rl.errors import SandboxStartError
from hermes_rl.sandboxes import (
    Apptainer,
    Check,
    ImageStore,
    SandboxSpec,
    conformance,
    find_binary,
    find_program,
    reachable,
)
from hermes_rl.testing import fake_apptainer

pytestmark = pytest.mark.slow
Engine = dict[str, str]


@pytest.fixture(scope="module")
def engine(code: Path) -> Iterator[Engine]:
    """The fake, and an image that the ordinary user owns."""
    folder = code / "apptainer"
    image = folder / "image"
    image.mkdir(parents=True)
    folder.chmod(0o755)
    with tarfile.open(root_file_system(folder)) as archive:
        archive.extractall(image)
    (folder / "rootfs.tar").unlink()
    for path in (image, *image.rglob("*")):
        os.lchown(path, apptainer_checks.USER, apptainer_checks.USER)
    source = code / "hermes_rl" / "testing" / "fake_apptainer.py"
    bwrap = reachable(find_binary(), code)
    program = fake_apptainer.install(folder, bwrap, "/usr/bin/python3", str(source))
    yield {"name": "apptainer", "program": str(program), "image": str(image)}
    shutil.rmtree(folder)


@pytest.mark.parametrize("check", OF_THE_BACKEND, ids=lambda check: check.__name__)
def test_the_shipped_suite(
    as_ordinary_user: Callable[..., None], engine: Engine, check: Check
) -> None:
    """Its shell and channel are those of bubblewrap."""
    as_ordinary_user(Path(conformance.__file__), check.__name__, engine)


@pytest.mark.parametrize("name", apptainer_checks.NAMES)
def test_an_apptainer_sandbox(
    as_ordinary_user: Callable[..., None], engine: Engine, name: str
) -> None:
    as_ordinary_user(Path(apptainer_checks.__file__), name, engine)


def test_an_image_of_a_task_folder(
    as_ordinary_user: Callable[..., None],
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Built by buildah, converted by apptainer."""
    monkeypatch.setenv("HERMES_RL_IMAGES", str(tmp_path / "images"))
    (tmp_path / "context").mkdir()
    (tmp_path / "context/Dockerfile").write_text(
        f"FROM base\nENV FROM_IMAGE=yes\nWORKDIR /app\nRUN chown -R {apptainer_checks.USER} /app\n"
    )
    store = ImageStore()
    archive = Path(engine["program"]).with_name(apptainer_checks.ARCHIVE)
    store.alias("base", root_file_system(tmp_path))
    store.build(tmp_path / "context", "task:0123", archive=archive)
    archive.chmod(0o644)
    check = apptainer_checks.starts_in_the_working_directory_of_a_task_image
    as_ordinary_user(Path(apptainer_checks.__file__), check.__name__, engine)


def test_each_container_is_closed_to_the_host(engine: Engine) -> None:
    """Every command line that the other tests caused."""
    lines = fake_apptainer.commands(Path(engine["program"]))
    for line in lines:
        if line[0] == "build":
            assert line[1] == "--force"
            continue
        assert line[:6] == [
            *("exec", "--containall", "--cleanenv", "--no-home", "--no-mount", "bind-paths"),
        ]
        open_ones = "--network" not in line
        assert not open_ones or any("network-on" in text for text in line)
        sources = [bind.split(":")[0] for flag, bind in pairwise(line) if flag == "--bind"]
        assert sources
        assert all("/hermes-user-" in path or path.startswith("/dev/shm/") for path in sources)
    assert len(lines) > 2 * len(OF_THE_BACKEND)


async def test_root_starts_none(state: Path, engine: Engine) -> None:
    backend = Apptainer(state_dir=state, program=engine["program"])
    with pytest.raises(SandboxStartError, match="start the run as an ordinary user") as caught:
        await backend.lease(SandboxSpec(lease="x", image=engine["image"]))
    assert "\n" not in str(caught.value)
    await backend.aclose()


def test_without_apptainer_a_run_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = tmp_path / "rows.jsonl"
    dataset.write_text('{"prompt": "x", "image": "a.sif", "verify": "true"}')
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxStartError, match="install the package apptainer"):
        find_program()
    command = ["run", str(dataset), "--model", "noop", "--workers", "0", "--sandbox", "apptainer"]
    for more in ([], ["--network", "a.example"]):
        assert main([*command, *more, "--out", str(tmp_path / "run")]) != 0
        shown = capsys.readouterr().err.strip()
        assert len(shown.splitlines()) == 1, shown
        assert ("cannot limit the network" if more else "install the package") in shown
