"""Root that is none: in a user namespace there may be no user ids for slots."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_rl.sandboxes import slots

ROOT = Path(__file__).parents[2]
SAYS = (
    "from hermes_rl.sandboxes import slots as p, probe;"
    "print(p.has_slots(), p.is_host_root(), p.account(), probe.probe_machine().works)"
)


def in_namespace(*before: str) -> list[str]:
    """What a Python in a user namespace with one id says of itself."""
    python = "/usr/bin/python3" if before else sys.executable
    packages = next(p for p in sys.path if p.endswith("site-packages"))
    done = subprocess.run(
        [*before, "unshare", "-r", python, "-c", SAYS],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{packages}", "TMPDIR": "/tmp"},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_here() -> None:
    assert slots.has_slots() == (os.geteuid() == 0)
    assert slots.is_host_root() == (os.geteuid() == 0)
    assert slots.account() == str(os.geteuid())


def test_sandboxes_have_user_ids_that_nobody_is_given() -> None:
    """useradd gives users ranges of 65,536 ids for their containers from 100,000 to 600,100,000:
    whoever has such an id could write into the pipes of the sandbox that has it too."""
    found = slots.first_slot()
    assert found is None if os.geteuid() != 0 else found is not None and found > 600_100_000


def test_root_of_a_namespace_of_ours() -> None:
    has_slots, host_root, account, works = in_namespace()
    assert has_slots == "False"
    if os.geteuid() == 0:  # the kernel still takes it for root: no sandbox may start so
        assert (host_root, account, works) == ("True", "0", "False")
    else:
        assert (host_root, account, works) == ("False", f"0-{os.geteuid()}", "True")


@pytest.mark.skipif(
    os.geteuid() != 0 or not all(p.stat().st_mode & 0o001 for p in (ROOT, *ROOT.parents)),
    reason="only root becomes somebody else, who must be able to read this checkout",
)
def test_root_of_an_ordinary_users_namespace_starts_sandboxes() -> None:
    become = ["setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups"]
    assert shutil.which("setpriv")
    found = in_namespace(*become)
    assert found == ["False", "False", "0-54321", "True"]
