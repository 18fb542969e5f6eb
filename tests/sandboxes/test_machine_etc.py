"""The /etc of sandboxes, copied while a package manager is at work on the machine's."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hermes_rl.sandboxes import Bubblewrap, SandboxSpec, make_etc


def test_entries_that_come_and_go_stop_no_copy(tmp_path: Path) -> None:
    machine = tmp_path / "etc"
    links, certs = machine / "alternatives", machine / "ssl" / "certs"
    links.mkdir(parents=True)
    certs.mkdir(parents=True)
    for number in range(200):
        (links / f"kept-{number}").symlink_to(f"/usr/bin/program-{number}")
        (certs / f"{number}.pem").write_text(str(number))
    (machine / "ssl" / "openssl.cnf").write_text("[default]")
    done = threading.Event()

    def replace() -> None:
        while not done.is_set():
            for folder in (links, certs):
                (folder / "new.dpkg-tmp").symlink_to("/nowhere")
                os.replace(folder / "new.dpkg-tmp", folder / "new")
            (certs / "made.pem").write_text("made")
            (certs / "made.pem").unlink()

    worker = threading.Thread(target=replace)
    worker.start()
    try:
        copies = [
            make_etc(tmp_path / f"copy-{n}", network=False, machine=machine) for n in range(15)
        ]
    finally:
        done.set()
        worker.join()
    for copy in copies:
        assert os.readlink(copy / "alternatives" / "kept-7") == "/usr/bin/program-7"
        assert sum(p.name.startswith("kept-") for p in (copy / "alternatives").iterdir()) == 200
        assert (copy / "ssl" / "certs" / "199.pem").read_text() == "199"
        assert (copy / "ssl" / "openssl.cnf").read_text() == "[default]"
        assert (copy / "passwd").read_text().startswith("root:")


async def test_the_copy_is_made_in_memory(bubblewrap: Bubblewrap, state: Path) -> None:
    """A disk may take a second for its links, and each start of a run made them four times."""
    free = os.statvfs("/dev/shm")
    if free.f_bavail * free.f_frsize < 256 << 20:
        pytest.skip("the memory file system is too small")
    async with await bubblewrap.lease(SandboxSpec(lease="etc")) as sandbox:
        shown = await sandbox.run("cat /etc/hostname; ls /etc/alternatives", timeout_s=30.0)
        assert shown.output.startswith("sandbox\n")
        assert list(state.rglob("hostname")) == []
