"""What a bubblewrap sandbox is made of: images, the command line, and the /etc that it shows."""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import shlex
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from hermes_rl.errors import TaskFault, UserError
from hermes_rl.sandboxes.base import SandboxLimits
from hermes_rl.sandboxes.disks import Writable
from hermes_rl.sandboxes.image_changes import PATH as PATH
from hermes_rl.sandboxes.slots import has_slots, is_host_root

WORKSPACE = "/workspace"
IMAGE_WORKSPACE = "/run/image-workspace"
"""What an image holds at /workspace, to be copied to the sandbox's own."""
CONTROL = "/hx"
STATE = "/run/hx"
SUPERVISOR = "supervisor"
"""File of the control directory."""
LANG = "C.UTF-8"
RUN_BYTES = 16 << 20
OPEN_FILES = 1024
_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ACCOUNTS = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\n"
    "agent:x:1000:1000:agent:/workspace:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "hostname": "sandbox\n",
    "resolv.conf": "",
}
_COPIED = ("alternatives", "ssl/certs", "ssl/openssl.cnf", "ld.so.cache", "localtime")
"""What programs below /usr need of the machine's /etc. Never the whole of it."""
_PACKAGES = ("hermes_rl", "environments")
"""Hold data sets with their oracles, and what judges agents: sandboxes show them empty."""
_BASH = ("bin/bash", "usr/bin/bash")
_ENVIRONMENTS = "hermes_rl.environments"
"""Group of entry points: packages of other people's that do the same."""
_SITES = ("usr/lib*/python3*/*-packages", "usr/local/lib*/python3*/*-packages")
OURS = Path(__file__).resolve().parents[2]
"""The folder that holds this package."""


HOST_FOLDER_HOME = "/tmp"
"""Home of sessions in a host folder: what programs keep in HOME is no part of your files."""


@dataclass(frozen=True)
class HostFolder:
    """A folder that may be bound into a sandbox."""

    path: Path
    uid: int | None
    """Who the sandbox runs as: the folder's owner where we are root; None is ourselves."""


def host_folder(given: Path, state: Path) -> HostFolder:
    """Look at a folder before it is bound.

    Args:
        given: the folder.
        state: our own state folder, which no sandbox may reach.

    Raises: UserError when there is none, when it holds more than files of yours, or when the
        sandbox would have to run as root.
    """
    path = given.expanduser().resolve()
    if not path.is_dir():
        raise UserError(f"workspace {given}: no such folder. Make it, or name another")
    if state.resolve().is_relative_to(path):
        raise UserError(f"workspace {given}: it holds the folders of all sandboxes. Name a smaller")
    if not has_slots():
        if not os.access(path, os.W_OK | os.X_OK):
            raise UserError(f"workspace {given}: not writable for you. Name a folder of your own")
        return HostFolder(path, None)
    uid = path.stat().st_uid
    if uid == 0:
        raise UserError(
            f"workspace {given}: it belongs to root, and no sandbox runs as root. "
            f"Give it to a user (chown -R USER {given}), or start as an ordinary user"
        )
    return HostFolder(path, uid)


@dataclass(frozen=True)
class Root:
    """What an image brings; without directories, the machine's /usr."""

    lower: Sequence[Path] = ()
    """Directories, lowest first."""
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    workspace: Sequence[Path] = ()
    """Its directories of /workspace, lowest first."""
    store: Path | None = None
    """The folder of all its directories, for an image of the store."""
    superuser: bool = False
    """Commands run as the user 0 of the sandbox, who owns all files, and has no capabilities."""


@dataclass(frozen=True)
class Layers:
    """The root file system of a sandbox."""

    etc: Path
    """What /etc shows, without an image."""
    image: Root = Root()
    upper: Writable | None = None
    """Where writes to an image go; kept for the grading sandbox."""
    shown: Path | None = None
    """Where bubblewrap finds the folder `image.store`, its files shown as the sandbox's."""

    def find(self, path: Path) -> Path:
        """A directory of the image as bubblewrap finds it."""
        store = self.image.store
        if self.shown is None or store is None or not path.is_relative_to(store):
            return path
        return self.shown / path.relative_to(store)


@dataclass(frozen=True)
class Box:
    """One sandbox to start."""

    layers: Layers
    control: Path
    limits: SandboxLimits
    network: bool = False
    workspace: Path | None = None
    """Bound to /workspace, writable."""
    mounts: Sequence[str] = ()
    """Further arguments of bubblewrap: mounts of the grading sandbox."""
    cwd: str = WORKSPACE
    state: str = STATE
    command: Sequence[str] = field(default=())
    """The command, as the sandbox sees it."""


def make_etc(folder: Path, network: bool, machine: Path = Path("/etc")) -> Path:
    """Make the /etc of sandboxes without an image; with `network`, the machine's name servers."""
    folder.mkdir(mode=0o755)
    for name, text in _ACCOUNTS.items():
        (folder / name).write_text(text)
    for name in _COPIED:
        source, target = machine / name, folder / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            _copy_folder(source, target)
        elif source.exists():
            shutil.copyfile(source, target)
    if network and (machine / "resolv.conf").exists():
        shutil.copyfile(machine / "resolv.conf", folder / "resolv.conf")
    return folder


def _copy_folder(source: Path, target: Path) -> None:
    """What can be read there; a package manager may be replacing entries just now."""
    target.mkdir()
    shutil.copymode(source, target)
    for entry in os.scandir(source):
        copied = target / entry.name
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if entry.is_symlink():
                copied.symlink_to(os.readlink(entry))
            elif entry.is_dir():
                _copy_folder(Path(entry), copied)
            elif entry.is_file():
                shutil.copy(entry, copied)


def find_image(image: str) -> Root:
    """What an image name means: a directory with a root file system, or an image of the store.

    Raises: TaskFault.
    """
    path = Path(image)
    _refuse_machine_root(path)
    root = Root((path.absolute(),)) if path.is_dir() else _stored(image)
    if not any(os.path.lexists(p / name) for p in root.lower for name in _BASH):
        raise TaskFault(f"image {image!r} holds no bash")
    return root


def _refuse_machine_root(path: Path) -> None:
    if path.resolve() == Path("/"):
        raise TaskFault(
            f"image '{path}' is this machine's own root, with your files in it: leave the image "
            "out to show agents this machine's programs, or name a folder with a root file system"
        )


def _stored(name: str) -> Root:
    from hermes_rl.sandboxes.images import stored_image

    image, folders = stored_image(name)
    workdir = image.workdir if image.workdir != "/" else None
    workspace = tuple(p for folder in folders if (p := folder / WORKSPACE[1:]).is_dir())
    superuser = image.user in ("", "root", "0")
    return Root(folders, image.env, workdir, workspace, folders[0].parent, superuser)


def image_owner(lower: Sequence[Path]) -> int | None:
    """The user whose sandboxes can write in an image: an overlay takes no writes to files of users
    that the sandbox does not know. None for root's images, which can only be read."""
    owner = lower[0].stat().st_uid if lower else 0
    return owner or None


def arguments(box: Box, descriptors: Mapping[str, int]) -> list[str]:
    """All options of bubblewrap. `descriptors` holds the numbers of `seccomp` and `info`."""
    limits = box.limits
    share = ["--share-net"] if box.network else []
    user = "0" if box.layers.image.superuser else "1000"
    return [
        *("--unshare-all", *share, "--unshare-user", "--disable-userns"),
        *("--die-with-parent", "--new-session", "--as-pid-1"),
        *_root(box.layers),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--size", str(limits.shm_bytes), "--perms", "1777", "--tmpfs", "/dev/shm"),
        *("--size", str(limits.tmp_bytes), "--perms", "1777", "--tmpfs", "/tmp"),
        *("--size", str(RUN_BYTES), "--tmpfs", "/run", "--dir", box.state),
        *_image_workspace([box.layers.find(path) for path in box.layers.image.workspace]),
        *(("--bind", str(box.workspace), WORKSPACE) if box.workspace is not None else ()),
        *("--ro-bind", str(box.control), CONTROL),
        *box.mounts,
        # Memory of other processes can be written there: of a session's shell, and of a verifier by
        # the programs that it runs.
        *("--remount-ro", "/proc", "--remount-ro", "/dev"),
        *(() if box.layers.image.lower else ("--remount-ro", "/")),
        *("--uid", user, "--gid", user, "--hostname", "sandbox", "--cap-drop", "ALL"),
        *("--clearenv", "--setenv", "LANG", LANG, "--chdir", box.cwd),
        # A bash without them asks the C library, which loads what /etc/nsswitch.conf names.
        *("--setenv", "HOME", "/", "--setenv", "SHELL", "/bin/bash"),
        *("--seccomp", str(descriptors["seccomp"]), "--info-fd", str(descriptors["info"])),
    ]


def _image_workspace(folders: Sequence[Path]) -> list[str]:
    if len(folders) == 1:  # an overlay that is only read needs two
        return ["--ro-bind", str(folders[0]), IMAGE_WORKSPACE]
    sources = [part for path in folders for part in ("--overlay-src", str(path))]
    return [*sources, "--ro-overlay", IMAGE_WORKSPACE] if sources else []


def _root(layers: Layers) -> list[str]:
    lower = layers.image.lower
    if lower:
        # Later sources lie on top.
        found = [str(layers.find(path)) for path in lower]
        sources = [part for path in found for part in ("--overlay-src", path)]
        top = ["--ro-overlay"] if layers.upper is None else layers.upper.arguments()
        return [*sources, *top, "/", *_emptied(lower)]
    machine = ["--ro-bind", "/usr", "/usr", "--ro-bind", str(layers.etc), "/etc", *_links()]
    return [*machine, *_emptied([Path("/")])]


def _emptied(roots: Sequence[Path]) -> list[str]:
    """Empty folders over what no agent may read."""
    return [
        part
        for path in dict.fromkeys(path for root in roots for path in solutions(root))
        for part in ("--perms", "0555", "--size", "4096", "--tmpfs", path, "--remount-ro", path)
    ]


@lru_cache
def solutions(root: Path, ours: Path = OURS) -> tuple[str, ...]:
    """Folders below the /usr of a root file system that tell how tasks are solved: copies of this
    package with its data sets and environments, the checkout that we run from, and environments
    that are installed beside it there.

    Args:
        root: `/`, or an image.
        ours: the folder that holds the package that runs.
    """
    shown = (root / "usr").resolve()
    homes = [ours, *(home for pattern in _SITES for home in root.glob(pattern))]
    names = {*_PACKAGES, *(_installed() if ours.is_relative_to(shown) else ())}
    found = [home / name for home in homes for name in names]
    if (ours / "datasets" / "terminal_tasks.jsonl").is_file():
        found.append(ours)  # a checkout: tests and data sets too
    there = {path.resolve() for path in found if os.path.isdir(path)}
    inside = sorted(path for path in there if path.is_relative_to(shown) and _can_enter(path))
    # Of folders in each other the outer one is enough.
    outer = [path for path in inside if there.isdisjoint(path.parents)]
    return tuple(f"/usr/{path.relative_to(shown)}" for path in outer)


def _installed() -> set[str]:
    """Packages with environments, by the name of their folder."""
    from importlib.metadata import entry_points

    modules = (e.value.partition(":")[0] for e in entry_points(group=_ENVIRONMENTS))
    return {module.partition(".")[0] for module in modules}


def _can_enter(path: Path) -> bool:
    """Whether sandboxes get as far as to a folder: bubblewrap could put nothing over it else."""
    return not is_host_root() or all(above.stat().st_mode & 1 for above in path.parents)


@lru_cache(maxsize=1)
def machine_links() -> tuple[tuple[str, bool], ...]:
    """The folders of programs and libraries beside /usr, as this machine has them: a name, and
    whether it is a link to the folder of that name in /usr."""
    return tuple((name, os.path.islink(f"/{name}")) for name in _LINKS if os.path.isdir(f"/{name}"))


def _links() -> list[str]:
    found: list[str] = []
    for name, is_link in machine_links():
        bound = ["--symlink", f"usr/{name}"] if is_link else ["--ro-bind", f"/{name}"]
        found += [*bound, f"/{name}"]
    return found


def command(
    limits: SandboxLimits, script: str, *arguments: str, counted: bool = False
) -> list[str]:
    """A command that runs `script` in a bash of its own, process 2 of the sandbox.

    Process 1 is a bash that bounds itself, starts the script and ends with it, and bubblewrap
    (`--as-pid-1`) waits for it. bubblewrap's own process 1 would be left for the machine's
    process 1 to wait for, and that of a container may wait for nothing. The limits are set inside
    the user namespace, where the number of processes counts per sandbox.

    Args:
        script: a file of the control directory, as the sandbox sees it.
        arguments: of the script; the last one names the lease to the reaper.
        counted: a control group limits the memory, so a program that reserves much more than it
            uses, such as a browser, may raise the limit of its address space.
    """
    *bounds, memory = ulimits(limits)
    soft = "-S " if counted else ""
    bound = f"ulimit {' '.join(bounds[:-1])} && ulimit {soft}-v {memory} || exit 125"
    init = f"{bound}; {START_SCRIPT}"
    return ["bash", "--norc", "--noprofile", "-c", init, script, *arguments]


START_SCRIPT = """trap '' HUP INT QUIT TERM USR1 USR2; . "$0" <&0 & exec <&- >&- 2>&-; wait $!"""
"""The channel is closed in process 1, so that it ends with the script."""


def ulimits(limits: SandboxLimits) -> list[str]:
    """Arguments of bash's `ulimit`."""
    return [
        *("-u", str(limits.processes), "-f", str(limits.file_bytes >> 10)),
        *("-n", str(OPEN_FILES), "-c", "0", "-v", str(limits.memory_bytes >> 10)),
    ]


def environment(home: str, extra: Mapping[str, str], image: Root = Root()) -> dict[str, str]:
    """The variables that a session starts with. Raises: UserError for one that no process takes."""
    for name, value in extra.items():
        text = f"{name}={value}"
        if "\0" in text or text.encode(errors="replace") != text.encode(errors="surrogatepass"):
            raise UserError(f"env: {text!a:.80} has a NUL or half of a character. Take it out")
    user = "root" if image.superuser else "agent"
    return {
        "PATH": PATH,
        "HOME": "/root" if image.superuser else home,
        "LANG": LANG,
        "USER": user,
        "LOGNAME": user,
        "SHELL": "/bin/bash",
        "TERM": "dumb",
        "TMPDIR": "/tmp",
        **image.env,
        **extra,
    }


NO_CWD = "no working directory"
"""What the shell writes when a task's `cwd` cannot be made."""


def environment_file(variables: dict[str, str], workspace: str, cwd: str | None) -> str:
    """The state that a session starts from, as bash reads it."""
    there = shlex.quote(posixpath.join(workspace, cwd or ""))
    made = f"{{ mkdir -p -- {there} && cd -- {there}; }}"
    failed = f"{{ printf '{NO_CWD} %s\\n' {there} >&4; exit 125; }}"
    go = f"cd -- {there} 2>/dev/null || {made} || {failed}"
    lines = [_export(name, value) for name, value in variables.items()]
    names = " ".join(name for name in variables if name != "LANG")  # unsetting that one is slow
    return "\n".join([f"_hx_names='{names}'", "umask 022", *lines, go, ""])


def _export(name: str, value: str) -> str:
    word = shlex.quote(value)
    # Loading a locale is a tenth of a shell's start: not again when the sandbox came with it.
    unless = f"[[ ${{LANG-}} = {word} ]] || " if name == "LANG" else ""
    return f"{unless}export {name}={word}"


def digest_of(image: str) -> str:
    """The digest of an image of the store; of a root file system directory a digest over names,
    kinds, modes, sizes and times.

    Contents are not read, since an image holds gigabytes; a file that changes without changing its
    size or its time of modification goes unseen.

    Raises: TaskFault when it is neither, or the root of this machine.
    """
    root = Path(image).expanduser()
    _refuse_machine_root(root)
    if not root.is_dir():
        from hermes_rl.sandboxes.images import stored_image

        return stored_image(image)[0].digest
    state = hashlib.sha256()
    for folder, names, files in os.walk(root):
        names.sort()
        for name in sorted([*names, *files]):
            path = os.path.join(folder, name)
            found = os.lstat(path)
            link = os.readlink(path) if stat.S_ISLNK(found.st_mode) else ""
            moment = 0 if stat.S_ISDIR(found.st_mode) else found.st_mtime_ns
            size = found.st_size if stat.S_ISREG(found.st_mode) else 0
            line = (os.path.relpath(path, root), found.st_mode, size, moment, link)
            state.update(repr(line).encode("utf-8", "surrogateescape"))
    return "listing-sha256:" + state.hexdigest()
