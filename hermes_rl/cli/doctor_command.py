"""`hermes-rl doctor`: what is there, what works on this machine, and what to install."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hermes_rl.errors import ExitCode


class Subject(StrEnum):
    """What to look at."""

    ALL = "all"
    SANDBOXES = "sandboxes"
    MODELS = "models"
    TOOLS = "tools"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str
    name: str
    good: bool | None
    """None for a fact that is neither."""
    text: str


def command(
    subject: Annotated[Subject, typer.Argument(help="what to look at")] = Subject.ALL,
    as_json: Annotated[bool, typer.Option("--json", help="findings as JSON")] = False,
) -> int:
    """What is there, what works on this machine, and what to install.

    \b
    hermes-rl doctor
    hermes-rl doctor sandboxes
    """
    looks: dict[Subject, Callable[[], list[Finding]]] = {
        Subject.SANDBOXES: sandboxes,
        Subject.MODELS: models,
        Subject.TOOLS: tools,
    }
    findings = machine() if subject is Subject.ALL else []
    for name, look in looks.items():
        if subject in (Subject.ALL, name):
            findings += look()
    if as_json:
        print(json.dumps([asdict(f) for f in findings], ensure_ascii=False))
    else:
        _print(findings)
    return ExitCode.DONE if all(f.good is not False for f in findings) else ExitCode.GIVEN_UP


def _print(findings: list[Finding]) -> None:
    marks = {True: "ok ", False: "NO ", None: "   "}
    width = max((len(f.name) for f in findings), default=0)
    subject = ""
    for f in findings:
        if f.subject != subject:
            subject = f.subject
            print(f"{subject}")
        print(f"  {marks[f.good]} {f.name.ljust(width)}  {f.text}")


def machine() -> list[Finding]:
    """Python, cores, memory, disk, and the libraries of the base install."""
    version = platform.python_version()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    disk = shutil.disk_usage(Path.cwd())
    cores = len(os.sched_getaffinity(0))
    found = [
        Finding("machine", "python", sys.version_info >= (3, 11), f"{version} (3.11 or newer)"),
        Finding("machine", "system", None, f"{platform.system()} {platform.release()}"),
        Finding("machine", "cores", None, f"{cores}, memory {memory / 2**30:.0f} GiB"),
        Finding("machine", "disk", disk.free > 2**30, f"{disk.free / 2**30:.0f} GiB free here"),
    ]
    for name in ("ray", "pyarrow", "datasets", "aiohttp", "openai"):
        found.append(_library("machine", name))
    return found


def _library(subject: str, name: str, mend: str = "reinstall hermes-rl") -> Finding:
    try:
        return Finding(subject, name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(subject, name, False, f"not installed: {mend}")


def sandboxes() -> list[Finding]:
    """Whether bubblewrap starts, and which limits the machine can enforce."""
    from hermes_rl.sandboxes.probe import probe

    p = probe()
    found = [Finding("sandboxes", "bubblewrap", p.works, f"{p.version} {p.message}".strip())]
    if p.works:
        held = [name for name, possible in p.limits.items() if possible]
        absent = [name for name, possible in p.limits.items() if not possible]
        text = ", ".join(held) + (f"; not here: {', '.join(absent)}" if absent else "")
        images = "root file systems as images" if p.overlay else "no images: bubblewrap is too old"
        apart = "user ids and namespaces" if p.root else "namespaces alone (not root: one user id)"
        found += [
            Finding("sandboxes", "limits", None, text),
            Finding("sandboxes", "overlay", None, images),
            Finding("sandboxes", "isolation", None, f"sandboxes are kept apart by {apart}"),
        ]
    later = "not in this version: docker, ssh, apptainer, modal"
    return [*found, Finding("sandboxes", "others", None, later)]


def models() -> list[Finding]:
    """The embedded model, and which dialects there are."""
    from hermes_rl.models.local import LOCAL_MODELS, find_weights
    from hermes_rl.models.local.weights import cache_folder

    engine = _library("models", "xllamacpp", "pip install 'hermes-rl[local]' for --model local")
    found = [Finding("models", "engine", engine.good or None, engine.text)]
    for name in LOCAL_MODELS:
        weights = find_weights(name)
        path = cache_folder(os.environ) / weights.file
        size = f"{weights.bytes / 1e6:,.0f} MB"
        where = f"weights in {path}" if path.exists() else f"{size} are fetched at the first use"
        found.append(Finding("models", name, None, f"{weights.description}; {where}"))
    dialects = "chat_completions (OpenAI-compatible), over http and sdk"
    later = "not in this version: codex_responses, anthropic_messages, prices, budgets"
    return [
        *found,
        Finding("models", "dialects", None, dialects),
        Finding("models", "others", None, later),
    ]


def tools() -> list[Finding]:
    """Toolsets and their tools."""
    from hermes_rl.tools.toolsets import TOOLSETS, resolve

    return [
        Finding("tools", name, None, ", ".join(resolve([name])) or "no tools") for name in TOOLSETS
    ]
