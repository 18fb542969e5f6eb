"""What an agent may not change of an image: the programs that a verifier relies on, and the
libraries that its shell is started from, wherever the loader looks for them (ld.so(8)): in its
folders and those for kinds of processors below them, in folders that the image's variables name,
and where its cache points.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import shlex
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Protocol

OPAQUE_XATTR = "user.overlay.opaque"
"""Marks a folder of an overlay that hides what is below it."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where programs are looked for, unless an image's variables say otherwise."""
_ESSENTIAL = {"bin": ("bash",), "etc": ("ld.so.preload", "ld-musl-*.path")}
"""Folder, also below /usr -> what a shell is started from."""
LIBRARY_FOLDERS = ("lib", "lib64", "usr/lib", "usr/lib64")
_MUSL_FOLDER = "usr/local/lib"
"""musl looks there too, before /usr/lib."""
LIBRARIES = (
    *("ld-*.so*", "libc.so.*", "libc-*.so", "libc.musl*", "libtinfo*.so.*", "libncurses*.so.*"),
    *("libreadline.so.*", "libdl.so.*", "libdl-*.so", "libpthread*.so*", "libintl.so.*"),
)
"""What the bash of some distribution is linked with. Those that an image has may not change."""
_MULTIARCH = "*-linux-gnu*"
_LOADED = (
    *(_MULTIARCH, "glibc-hwcaps", "x86-64-v*", "power[0-9]*", "z1[0-9]", "tls", "haswell"),
    *("xeon_phi", "avx512_1", "x86_64", "aarch64", "atomics"),
)
"""Folders in a folder of libraries in which the loader looks too."""
_CONVERTERS = "gconv"
"""A folder of libraries that a shell may load for its locale."""
_CACHE = "etc/ld.so.cache"
_CACHE_BYTES = 8 << 20


@cache
def graded_programs() -> tuple[str, ...]:
    """Programs that tests rely on."""
    return tuple(Path(__file__).with_name("graded_programs.txt").read_text().split())


class Replaced(Exception):
    """A folder of an image is not the image's any more; the message is its path."""


class Changes(Protocol):
    """What an agent changed of an image."""

    def names(self, folder: str, *, opaque_too: bool) -> Mapping[str, bool]:
        """Changed entries of a folder -> whether it was removed.

        Args:
            folder: a path without a leading slash.
            opaque_too: a folder in place of another, all of which it hides, counts as replaced.

        Raises: Replaced when it, or a folder above it, is one no more, or another.
        """
        ...

    def read(self, path: str, limit: int) -> bytes:
        """A changed file. Raises: Replaced when it is none, or has more than `limit` bytes."""
        ...


class Upper:
    """The upper layer of an overlay. The agent wrote it: no link in it is followed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self, folder: str, *, opaque_too: bool) -> Mapping[str, bool]:
        """See `Changes`."""
        with self._open(folder, opaque_too) as fd:
            if fd is None:
                return {}
            return {name: _is_whiteout(os.lstat(name, dir_fd=fd)) for name in os.listdir(fd)}

    def read(self, path: str, limit: int) -> bytes:
        """See `Changes`."""
        folder, name = posixpath.split(path)
        with self._open(folder, False) as fd:
            try:
                file = os.open(name, _READ, dir_fd=fd)
            except OSError:
                raise Replaced(f"/{path}") from None
        with open(file, "rb") as opened:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
                raise Replaced(f"/{path}")
            return opened.read(limit)

    @contextlib.contextmanager
    def _open(self, folder: str, opaque_too: bool) -> Iterator[int | None]:
        """A folder of the layer; None for one that is not in it. Raises: Replaced."""
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in folder.split("/"):
                try:
                    below = os.open(part, _READ | os.O_DIRECTORY, dir_fd=fd)
                except FileNotFoundError:
                    yield None
                    return
                except OSError:  # a link, or the mark of a removed folder
                    raise Replaced(f"/{folder}") from None
                os.close(fd)
                fd = below
                if opaque_too and is_opaque(fd):
                    raise Replaced(f"/{folder}")
            yield fd
        finally:
            os.close(fd)


_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class Relied:
    """What an image has that verifiers rely on. Folders are named as they are without links."""

    programs: Sequence[str]
    libraries: Sequence[str]
    path: Sequence[str]
    """Folders of programs."""
    library_path: Sequence[str]
    """Folders of libraries that the image's variables name."""


def library_path(env: Mapping[str, str]) -> list[str]:
    """Absolute folders of libraries that an image's variables name."""
    folders = re.split("[:;]", env.get("LD_LIBRARY_PATH", ""))
    return [folder for folder in folders if folder.startswith("/")]


def listing_script(env: Mapping[str, str]) -> str:
    """A script that lists, in a sandbox over an image, what verifiers rely on of it.

    Args:
        env: the image's variables.
    """
    libraries = (f"{f}{b}/{p}" for f in LIBRARY_FOLDERS for b in ("", "/*") for p in LIBRARIES)
    return (
        "shopt -s nullglob; set +f\n"
        f"IFS=: read -ra folders <<<{shlex.quote(env.get('PATH', PATH))}\n"
        f"for p in {' '.join(graded_programs())}; do\n"
        'for d in "${folders[@]}"; do [[ -e $d/$p ]] && echo "p $p" && break; done\n'
        "done\n"
        f'for f in /{" /".join(libraries)}; do echo "l ${{f##*/}}"; done\n'
        'show() { if cd -P -- "$2" 2>/dev/null; then echo "$1 $PWD"; else echo "$1 $2"; fi }\n'
        'for d in "${folders[@]}"; do [[ $d = /* ]] && show d "$d"; done\n'
        f'for d in {shlex.join(library_path(env))}; do show e "$d"; done\n'
        "true"
    )


def read_listing(text: str) -> Relied:
    """What `listing_script` printed."""
    lines = [line.partition(" ")[::2] for line in text.splitlines()]
    found = [sorted({value.strip("/") for key, value in lines if key == k}) for k in "plde"]
    return Relied(*found)


def relied_on(lower: Sequence[Path], env: Mapping[str, str], path: str) -> Relied:
    """What verifiers rely on of an image.

    Args:
        lower: its folders on this machine, lowest first.
        env: its variables.
        path: the verifier's PATH.
    """
    folders = [_without_links(lower, f) for f in path.split(":") if f.startswith("/")]
    below = [*LIBRARY_FOLDERS, *(f"{folder}/*" for folder in LIBRARY_FOLDERS)]
    libraries = {
        found.name
        for layer in lower
        for folder in below
        for pattern in LIBRARIES
        for found in layer.glob(f"{folder}/{pattern}")
    }
    return Relied(
        [p for p in graded_programs() if any(_holds(lower, f"{f}/{p}") for f in folders)],
        sorted(libraries),
        folders,
        [_without_links(lower, folder) for folder in library_path(env)],
    )


_PARTS = 200
"""Of one name, with those of links on its way."""


def _without_links(lower: Sequence[Path], folder: str) -> str:
    """A folder of an image as it is named without the image's links, relative to its root."""
    parts, done = folder.split("/"), list[str]()
    for _ in range(_PARTS):
        if not parts:
            break
        part = parts.pop(0)
        if part == "..":
            del done[-1:]
        elif part not in ("", "."):
            where = "/".join([*done, part])
            top = next((p for f in reversed(lower) if os.path.lexists(p := f / where)), None)
            if top is None or not top.is_symlink():
                done.append(part)
                continue
            target = os.readlink(top)
            parts = [*target.split("/"), *parts]
            done = [] if target.startswith("/") else done
    return "/".join([*done, *parts])


def replaced(relied: Relied, changes: Changes, places: Iterable[str]) -> str | None:
    """What an agent changed of an image so that no verifier can be believed: the shell, its
    libraries, a program that tests rely on, or a folder on the way to them or to a place; None for
    nothing.

    An agent may install a program that the image lacks, but not put its own in the place of one
    that the image has.

    Args:
        relied: what tests rely on and the image has.
        changes: what the agent did to the image.
        places: absolute paths at which grading mounts folders.
    """
    try:
        for folder in relied.path:
            _check(changes, folder, relied.programs, opaque_too=False, removed_too=False)
        for name, files in _ESSENTIAL.items():
            for folder in (name, f"usr/{name}"):
                _check(changes, folder, files)
        _check_libraries(relied, changes)
        for place in places:
            parts = place.strip("/").split("/")
            for depth in range(1, len(parts) + 1):
                changes.names("/".join(parts[:depth]), opaque_too=False)
    except Replaced as found:
        return str(found)
    return None


def _check_libraries(relied: Relied, changes: Changes) -> None:
    musl = any("musl" in name for name in relied.libraries)
    for folder in (*LIBRARY_FOLDERS, *([_MUSL_FOLDER] if musl else ())):
        _check(changes, folder, relied.libraries)
        _check_converters(changes, folder)
    for folder in relied.library_path:
        _check(changes, folder, relied.libraries, opaque_too=False)
    if changes.names("etc", opaque_too=True).get(posixpath.basename(_CACHE)) is False:
        _check_cache(changes.read(_CACHE, _CACHE_BYTES), relied.libraries)


def _check(
    changes: Changes,
    folder: str,
    files: Sequence[str],
    *,
    opaque_too: bool = True,
    removed_too: bool = True,
) -> None:
    """Raises: Replaced for a folder of which one of the files is changed."""
    for name, removed in changes.names(folder, opaque_too=opaque_too).items():
        if any(fnmatch(name, pattern) for pattern in files) and (removed_too or not removed):
            raise Replaced(f"/{folder}/{name}")
        if "lib" in folder and not removed and any(fnmatch(name, p) for p in _LOADED):
            _check(changes, f"{folder}/{name}", files, opaque_too=opaque_too)


def _check_converters(changes: Changes, folder: str) -> None:
    """Raises: Replaced for other converters of character sets below a folder of libraries."""
    for name, removed in changes.names(folder, opaque_too=True).items():
        below = f"{folder}/{name}"
        if name == _CONVERTERS and (removed or changes.names(below, opaque_too=True)):
            raise Replaced(f"/{below}")
        if not removed and fnmatch(name, _MULTIARCH):
            _check_converters(changes, below)


_OLD, _NEW = b"ld.so-1.7.0", b"glibc-ld.so.cache1.1"
_OLD_HEAD, _OLD_ENTRY = 16, 12
_NEW_HEAD, _NEW_ENTRY = 48, struct.Struct("=iIIIQ")
_COUNT = struct.Struct("=I")


def _check_cache(data: bytes, libraries: Iterable[str]) -> None:
    """Read the loader's cache as the loader does (glibc: sysdeps/generic/dl-cache.h).

    Raises: Replaced for one that finds a library elsewhere than in its folder, or cannot be read.
    """
    held = {_numbers_equal(name.encode()) for name in libraries}
    try:
        if data.startswith(_OLD):
            (count,) = _COUNT.unpack_from(data, 12)
            data = data[-(-(_OLD_HEAD + _OLD_ENTRY * count) // 8) * 8 :]
        if not data.startswith(_NEW):
            raise Replaced(f"/{_CACHE}")
        (count,) = _COUNT.unpack_from(data, len(_NEW))
        for number in range(count):
            _, *places, _, _ = _NEW_ENTRY.unpack_from(data, _NEW_HEAD + number * _NEW_ENTRY.size)
            name, path = (data[place : data.index(0, place)] for place in places)
            if _numbers_equal(name) in held and not _is_loaded(path.decode("latin-1"), name):
                raise Replaced(f"/{_CACHE}")
    except (ValueError, struct.error):
        raise Replaced(f"/{_CACHE}") from None


def _numbers_equal(name: bytes) -> bytes:
    """The loader takes `libc.so.06` for `libc.so.6`."""
    return re.sub(rb"\d{1,9}", lambda digits: b"%d" % int(digits[0]), name)


def _is_loaded(path: str, name: bytes) -> bool:
    """Whether a library is where `_check` looks at it."""
    folder, _, file = path.strip("/").rpartition("/")
    home = next((f for f in LIBRARY_FOLDERS if f"{folder}/".startswith(f"{f}/")), None)
    if home is None or file != name.decode("latin-1"):
        return False
    parts = [part for part in folder[len(home) :].split("/") if part]
    return all(any(fnmatch(part, pattern) for pattern in _LOADED) for part in parts)


def _holds(lower: Sequence[Path], path: str) -> bool:
    return any(os.path.lexists(folder / path) for folder in lower)


def _is_whiteout(found: os.stat_result) -> bool:
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


def is_opaque(folder: int | str) -> bool:
    """Whether a folder of an overlay, open or by its path, hides what is below it."""
    with contextlib.suppress(OSError):
        return os.getxattr(folder, OPAQUE_XATTR) == b"y"
    return False
