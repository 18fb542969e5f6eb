"""Snapshots of sandboxes: what they hold, how it is saved and put back.

A snapshot is a folder: `workspace.tar` and `tmp.tar`, `root.tar` for what was changed over an
image, `state` with the shell's directory, variables, functions and options, and `snapshot.json`.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import stat
import tarfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from hermes_rl.sandboxes.files import DOWNLOAD_MAX, READ_MAX
from hermes_rl.sandboxes.grading import CHUNK, OPAQUE_HEADER, finish_entry
from hermes_rl.sandboxes.image_changes import OPAQUE_XATTR
from hermes_rl.sandboxes.shell import Everything, HeadTail, IntoFile, Shell, Sink

WORKSPACE = "workspace.tar"
TEMPORARY = "tmp.tar"
ROOT = "root.tar"
STATE = "state"
ABOUT = "snapshot.json"

Script = Callable[[str, Sink, Path | None], Awaitable[int]]
"""Runs a script of ours in a sandbox, outside the session, and returns its exit code: the script,
what takes its output, and a file that becomes its input."""


async def save(
    folder: Path, shell: Shell, run: Script, place: str, temporary: Sequence[str]
) -> None:
    """Write what only a running session has: its state, and its temporary folders.

    Args:
        place: where the sandbox is on the host, if its commands see that.
        temporary: paths of the folders.

    Raises: OSError; SandboxDied.
    """
    archive, state = folder / TEMPORARY, Everything(READ_MAX)
    if temporary:
        patterns = " ".join(f".{path}/*" for path in temporary)  # not the folders: their modes stay
        script = (
            f"cd / && shopt -s dotglob nullglob && set -- {patterns} && "
            '{ (($# == 0)) || tar -cf - "$@" 2>/dev/null; }'
        )
        if code := await run(script, IntoFile(archive, DOWNLOAD_MAX), None):
            raise OSError(f"{', '.join(temporary)} cannot be archived (tar: exit {code})")
        if not archive.stat().st_size:
            archive.unlink()
    if shell.source is not None:
        # The agent can put anything in its place, a pipe too.
        if await run(f"[[ -f {shell.source} ]] && cat -- {shell.source}", state, None):
            raise OSError("the state of the session cannot be read")
        (folder / STATE).write_bytes(state.value())
    (folder / ABOUT).write_text(json.dumps({"place": place}))


def changes_of(archive: Path) -> Path:
    """The folder beside an archive of `Sandbox.pack_left` with the changes over an image:
    a snapshot with an empty workspace."""
    return archive.with_name(f"{archive.name.partition('.')[0]}.image")


def begin_changes(archive: Path) -> Path:
    """Make such a folder, without its `root.tar`, under a name of its own. Blocks."""
    target = changes_of(archive)
    half = target.with_name(f".{target.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir()
    tarfile.open(half / WORKSPACE, "w").close()
    (half / ABOUT).write_text(json.dumps({"place": ""}))
    return half


async def restore(folder: Path, shell: Shell, run: Script, place: str) -> None:
    """Bring back what `save` wrote. Raises: OSError; SandboxDied."""
    if (archive := folder / TEMPORARY).exists():
        copied, printed = shell.inputs / "restored", HeadTail(4096)
        await asyncio.to_thread(shutil.copyfile, archive, copied)
        if await run("tar -C / -xpf -", printed, copied):
            raise OSError(f"temporary files cannot be restored: {printed.text().strip()}")
    before: Mapping[str, str] = json.loads((folder / ABOUT).read_text())
    if (saved := folder / STATE).exists():
        data = saved.read_bytes()
        if before["place"] != place:
            data = data.replace(before["place"].encode(), place.encode())
        state = shell.paths.control / "state"
        state.write_bytes(data)
        state.chmod(0o644)
        shell.start_from(state)


def unpack(archive: Path, folder: Path, uid: int | None) -> None:
    """Put an archive of `Packing.pack` into an empty folder of the host. Blocks.

    Args:
        uid: who owns what is made; None is ourselves.

    Raises: OSError, also for an archive that is damaged, or would write outside the folder.
    """
    folders: list[tuple[str, tarfile.TarInfo]] = []
    links: set[str] = set()
    try:
        with tarfile.open(archive, "r:") as packed:
            for member in packed:
                made = os.path.join(folder, _checked(member.name, links))
                if member.isdir():
                    os.mkdir(made, 0o700)
                    folders.append((made, member))
                    if member.pax_headers.get(OPAQUE_HEADER):
                        os.setxattr(made, OPAQUE_XATTR, b"y")
                    continue
                if member.islnk():
                    source = os.path.join(folder, _checked(member.linkname, links))
                    os.link(source, made, follow_symlinks=False)
                    continue
                _make(packed, member, made)
                if member.issym():
                    links.add(member.name)
                    if uid is not None:
                        os.lchown(made, uid, uid)
                else:
                    _finish(made, member, uid)
    except tarfile.TarError as error:
        raise OSError(errno.EINVAL, f"not an archive of a snapshot: {error}", archive) from error
    for made, member in reversed(folders):
        _finish(made, member, uid)


def _checked(name: str, links: set[str]) -> str:
    """A path in an archive. Raises: TarError for one that leads elsewhere."""
    parts = name.split("/")
    above = ("/".join(parts[:n]) for n in range(1, len(parts))) if links else ()
    if name.startswith("/") or ".." in parts or any(path in links for path in above):
        raise tarfile.ExtractError(f"{name!r} leads out of it")
    return name


def _make(packed: tarfile.TarFile, member: tarfile.TarInfo, made: str) -> None:
    if member.isreg():
        _write_sparse(packed, member, made)
    elif member.issym():
        os.symlink(member.linkname, made)
    elif member.isfifo():
        os.mkfifo(made)
    elif member.ischr() and (member.devmajor, member.devminor) == (0, 0):
        os.mknod(made, stat.S_IFCHR, os.makedev(0, 0))  # an overlay's mark of a removed file
    else:
        raise tarfile.ExtractError(f"{member.name!r} is of a kind that no sandbox can make")


def _write_sparse(packed: tarfile.TarFile, member: tarfile.TarInfo, made: str) -> None:
    """Write a file; what is nothing but zeros becomes a hole."""
    source = packed.extractfile(member)
    assert source is not None
    with open(made, "xb") as target:
        while data := source.read(CHUNK):
            if data.count(0) == len(data):
                target.seek(len(data), os.SEEK_CUR)
            else:
                target.write(data)
        target.truncate(member.size)


def _finish(made: str, member: tarfile.TarInfo, uid: int | None) -> None:
    moment = round(member.mtime * 1e9)
    finish_entry(made, member.mode, (moment, moment), uid)
