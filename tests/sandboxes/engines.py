"""Engines of containers for tests: a docker daemon or a podman service in a new folder,
with an image that is made of this machine's programs."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pip

from hermes_rl.errors import SandboxStartError
from hermes_rl.sandboxes import Check, Engine, conformance

IMAGE = "tested:1"
PROGRAMS = {"docker": "dockerd", "podman": "podman"}
OF_THE_BACKEND: tuple[Check, ...] = (
    *(conformance.keeps_state, conformance.names_the_culprit, conformance.ends_when_closed),
    *(conformance.keeps_neighbours_apart, conformance.moves_bytes, conformance.moves_large_files),
    *(conformance.grades_what_was_left, conformance.reports_and_times_out),
    *(conformance.grades_after_a_kill, conformance.keeps_whatever_was_left),
    *(conformance.nothing_runs_during_grading, conformance.starts_from_a_snapshot),
    *(conformance.ends_what_takes_too_long, conformance.cancelled_commands_end),
    conformance.runs_background_processes,
)
"""Checks in which a backend itself starts, ends, copies, grades or forks. In the others a shell
works, through a channel that another backend has too, which passes the whole suite."""
_START_S = 60.0
_CONTAINERS_CONF = """
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=32768:32768"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
"""For machines without an init, and with control groups of both versions."""
_INSTALLED = """
awk base64 basename bash bunzip2 bzip2 cat chmod chown cmp comm cp cut date dd df diff dirname du
echo env expr false find fold getconf grep gunzip gzip head hostname id install join kill ln ls
md5sum mkdir mkfifo mktemp mv nl nohup nproc od paste pgrep ping printf ps pwd python3 readlink
realpath rm rmdir rev sed seq setsid sh sha1sum sha256sum shuf sleep sort split stat sync tac tail
tar tee test timeout touch tr true truncate uname uniq wc who xargs xz yes zcat
"""


_PACKAGING = "git dpkg dpkg-deb dpkg-split dpkg-query ldconfig start-stop-daemon"


@contextlib.contextmanager
def engine(name: str, folder: Path) -> Iterator[Engine]:
    """A running engine that knows the image `tested:1`."""
    path = folder / f"{name}.sock"
    conf = folder / "containers.conf"
    conf.write_text(_CONTAINERS_CONF)
    data, run = str(folder / "data"), str(folder / "run")
    command = {
        "docker": [
            *("dockerd", "--data-root", data, "--exec-root", run, "-H", f"unix://{path}"),
            *("--pidfile", str(folder / "pid"), "--iptables=false", "--ip6tables=false"),
            "--bridge=none",
        ],
        "podman": [
            *("podman", "--root", data, "--runroot", run),
            *("system", "service", "--time=0", f"unix://{path}"),
        ],
    }[name]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,  # podman's monitor writes a file named oom there
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "CONTAINERS_CONF": str(conf)},
        )
    try:
        made = Engine(name, str(path))
        _answered(made, process, log)
        archive = root_file_system(folder)
        with archive.open("rb") as file:
            import_image(made, file, "tested")
        yield made
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        end_left(folder)


def end_left(folder: Path) -> None:
    """End what an engine left below a folder: containerd and shims of a killed one, and mounts."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            mine = int(path.parent.name) == os.getpid()
            if os.fsencode(folder) in path.read_bytes() and not mine and _is_engines(path.parent):
                os.kill(int(path.parent.name), signal.SIGKILL)
    mounts = Path("/proc/mounts").read_text().splitlines()
    for target in sorted((line.split()[1] for line in mounts), reverse=True):
        if target.startswith(f"{folder}/"):
            subprocess.run(["umount", "-l", target], check=False)


def _is_engines(process: Path) -> bool:
    name = (process / "comm").read_text().strip()
    return name.startswith(("containerd", "dockerd", "podman", "conmon"))


def import_image(made: Engine, archive: io.BufferedIOBase, name: str) -> None:
    """Make the image NAME:1 of a root file system."""
    repository = f"docker.io/library/{name}"
    query = {"fromSrc": "-", "repo": repository}
    answer = made.request("POST", "/images/create", archive, query=query)
    tag = {"repo": repository, "tag": "1"}  # podman leaves out a tag of the import
    made.request("POST", f"/images/{answer['status']}/tag", query=tag)


def _answered(made: Engine, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            made.version()
            return
        except SandboxStartError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(log.read_text()[-2000:]) from None
            time.sleep(0.05)


def root_file_system(folder: Path, packaging: bool = False) -> Path:
    """An archive of a root file system: programs of this machine, their libraries, Python.

    Args:
        packaging: with git, dpkg and pip, for images that install packages.
    """
    root = folder / "rootfs"
    for name in ("usr/bin", "usr/lib", "usr/lib64", "etc", "root", "tmp", "usr/local/bin", "var"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    libraries: set[str] = set()
    for name in (_INSTALLED + (_PACKAGING if packaging else "")).split():
        found = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")
        if found is None:
            continue
        real = Path(found).resolve()
        shutil.copy(real, root / "usr/bin" / name)
        listed = subprocess.run(["ldd", str(real)], capture_output=True, text=True).stdout
        libraries |= {path for path in listed.split() if path.startswith("/")}
    for library in libraries:
        target = root / ("usr" + library.removeprefix("/usr"))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(library).resolve(), target)
    version = subprocess.run(
        ["/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    source = Path(f"/usr/lib/python{version}")
    unwanted = shutil.ignore_patterns(
        *("test", "idlelib", "tkinter", "lib2to3", "__pycache__", "config-*", "ensurepip"),
        *("pydoc_data", "unittest", "distutils", "dist-packages"),
        *(() if packaging else ("lib-dynload",)),
    )
    shutil.copytree(source, root / f"usr/lib/python{version}", ignore=unwanted)
    shutil.copytree("/usr/lib/locale/C.utf8", root / "usr/lib/locale/C.utf8")
    if packaging:
        shutil.copytree(Path(pip.__file__).parent, root / f"usr/lib/python{version}/pip")
        for name in ("info", "updates"):
            (root / "var/lib/dpkg" / name).mkdir(parents=True)
        (root / "var/lib/dpkg/status").touch()
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\napp:x:1000:1000::/home:\n")
    (root / "etc/group").write_text("root:x:0:\napp:x:1000:\n")
    archive = folder / "rootfs.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(root, arcname=".")
    shutil.rmtree(root)
    return archive


if __name__ == "__main__":
    with engine(sys.argv[1], Path(sys.argv[2])) as started:
        print(started.path, flush=True)
        sys.stdin.read()
