"""An image by configuration: recorded by digest, part of the run's identity, kept for grading."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_rl.config import parse_config
from hermes_rl.identity import digest
from hermes_rl.wiring import identity_of

from .conftest import Open, script


@pytest.fixture
def image() -> Iterator[Path]:
    """A root file system with a shell, where sandboxes' user ids can reach it."""
    root = Path("/var/tmp") / f"hermes-rl-image-{os.getpid()}"
    for folder in ("usr/bin", "etc", "proc", "dev", "tmp", "run", "workspace", "hx", "opt"):
        (root / folder).mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    for program in ("bash", "cat", "mkdir", "test"):
        binary = shutil.which(program)
        assert binary is not None
        shutil.copy(binary, root / "usr/bin")
        listed = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True)
        for text in (w for w in listed.stdout.split() if w.startswith("/")):
            target = root / text.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(text, target)
    for path in [root, *root.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
        if os.geteuid() == 0:
            os.lchown(path, 54321, 54321)
    yield root
    shutil.rmtree(root)


async def test_a_task_in_an_image(stage: Open, image: Path) -> None:
    s = await stage(sandbox={"image": str(image)})
    steps = ({"run": "echo built > /opt/thing"}, "ok")
    got = await s.attempt({"prompt": script(*steps), "verify": "test -s /opt/thing"})
    assert (got.reward, got.error) == (1.0, None)
    assert got.sandbox is not None
    assert got.sandbox.image == str(image)
    assert (got.sandbox.digest or "").startswith("listing-sha256:")
    assert not (image / "opt" / "thing").exists()


def test_another_content_is_another_configuration(image: Path) -> None:
    data = {"dataset": {"path": "x"}, "model": {"name": "m"}, "sandbox": {"image": str(image)}}

    def config_hash() -> str:
        return digest(identity_of(parse_config(data)))

    before = config_hash()
    assert config_hash() == before
    (image / "etc" / "motd").write_text("changed")
    assert config_hash() != before
