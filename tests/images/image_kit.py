"""Images and task folders for tests, made from programs of this machine without a network."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow

PROGRAMS = """
base64 bash cat chmod cp env false find grep gzip head id ln ls mkdir mv printf rm sed seq sh sleep
sort stat tail tar test touch tr true uniq wc
"""
HARBOR = """
schema_version = "1.1"
[metadata]
difficulty = "easy"
category = "files"
tags = ["a", "b"]
[agent]
timeout_sec = 60.0
[verifier]
timeout_sec = 30.0
"""


def root_file_system(folder: Path) -> Path:
    """Make a root file system with the programs that tests need, with a merged /usr."""
    for name in ("usr/bin", "usr/lib", "usr/lib64", "etc", "root", "tmp", "usr/local/bin", "var"):
        (folder / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (folder / name).symlink_to(f"usr/{name}")
    for name in PROGRAMS.split():
        if found := shutil.which(name):
            copy_program(Path(found).resolve(), folder / "usr/bin" / name, folder)
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (folder / "etc/group").write_text("root:x:0:\n")
    return folder


def copy_program(program: Path, target: Path, folder: Path) -> None:
    """Copy a program into a root file system, and its libraries."""
    shutil.copy(program, target)
    copy_libraries([program], folder)


def copy_libraries(programs: Iterable[Path], folder: Path) -> None:
    """Copy the libraries of programs, or of other libraries, into a root file system."""
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True).stdout
    for library in {path for path in listed.split() if path[0] == "/" and path[-1] != ":"}:
        usual = library.startswith(("/usr/", "/lib"))
        name = library.removeprefix("/usr") if usual else f"/lib/{Path(library).name}"
        target = folder / f"usr{name}"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(library).resolve(), target)


def archive(folder: Path, target: Path) -> Path:
    """Make a tar archive of a folder."""
    with tarfile.open(target, "w") as tar:
        tar.add(folder, arcname=".", filter=_of_root)
    return target


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    return member


def layer(files: Mapping[str, str | None]) -> bytes:
    """Make the archive of a layer from path -> text, None for a folder, `-> target` for a link."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path, text in files.items():
            member = tarfile.TarInfo(path)
            member.mode = 0o755
            if text is None:
                member.type = tarfile.DIRTYPE
            elif text.startswith("-> "):
                member.type, member.linkname = tarfile.SYMTYPE, text.removeprefix("-> ")
            else:
                member.size = len(text)
            tar.addfile(member, io.BytesIO((text or "").encode()))
    return out.getvalue()


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def layout(folder: Path, layers: list[bytes], kind: str = "", **settings: Any) -> Path:
    """Make an OCI layout from uncompressed layers.

    Args:
        kind: compression in the layout: `gzip`, `zstd` or none.
        settings: the image's `config`.
    """
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes) -> dict[str, Any]:
        digest = sha256(data)
        (blobs / digest.removeprefix("sha256:")).write_bytes(data)
        return {"digest": digest, "size": len(data)}

    packed = {
        "": lambda data: data,
        "gzip": gzip.compress,
        "zstd": lambda data: pyarrow.compress(data, codec="zstd", asbytes=True),
    }[kind]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [sha256(data) for data in layers]},
    }
    manifest = {
        "schemaVersion": 2,
        "config": put(json.dumps(config).encode()),
        "layers": [put(packed(data)) for data in layers],
    }
    index = {"schemaVersion": 2, "manifests": [put(json.dumps(manifest).encode())]}
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


def harbor_task(folder: Path, files: Mapping[str, str], *, toml: str = HARBOR) -> Path:
    """Make a harbor task folder. Args: files: in addition to those of every task."""
    contents = {
        "task.toml": toml,
        "instruction.md": "Write hello to hello.txt.\n",
        "environment/Dockerfile": "FROM base\nWORKDIR /app\n",
        "tests/test.sh": "#!/bin/bash\ngrep -qx hello hello.txt\n",
        **files,
    }
    for name, text in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
