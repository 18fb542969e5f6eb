"""`hermes-rl doctor`: what is there, what works on this machine, and what to install."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from hermes_rl.cli.doctor_models import Asked, models
from hermes_rl.cli.finding import Finding, library
from hermes_rl.errors import ExitCode, UserError


class Subject(StrEnum):
    """What to look at."""

    ALL = "all"
    SANDBOXES = "sandboxes"
    MODELS = "models"
    TOOLS = "tools"


def _of(name: str, text: str) -> Any:
    return typer.Option(name, help=text, show_default=False)


def command(
    subject: Annotated[Subject, typer.Argument(help="what to look at")] = Subject.ALL,
    model: Annotated[str | None, _of("--model", "ask this model what it can do")] = None,
    provider: Annotated[str | None, _of("--provider", "with --model: known provider")] = None,
    base_url: Annotated[str | None, _of("--base-url", "with --model: endpoint")] = None,
    api_key_env: Annotated[
        str | None, _of("--api-key-env", "with --model: variable that holds the key")
    ] = None,
    api_mode: Annotated[str | None, _of("--api-mode", "with --model: dialect")] = None,
    config: Annotated[
        Path | None, _of("--config", "with models: your providers, and an endpoint to look at")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="findings as JSON")] = False,
) -> int:
    """What is there, what works on this machine, and what to install.

    \b
    hermes-rl doctor
    hermes-rl doctor sandboxes
    hermes-rl doctor models --provider vllm --model Qwen/Qwen3-8B
    """
    asked = Asked(model, provider, base_url, api_key_env, api_mode, config)
    alone = asked == Asked(config=config) and (config is None or subject is Subject.MODELS)
    if not alone and (model is None or subject is not Subject.MODELS):
        raise UserError("an endpoint is looked at with: hermes-rl doctor models --model NAME ...")
    looks: dict[Subject, Callable[[], list[Finding]]] = {
        Subject.SANDBOXES: sandboxes,
        Subject.MODELS: lambda: models(asked),
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


_SLOW_RAY = (
    "each process of Ray takes about 1 s of CPU longer to start, because rfc3987-syntax is "
    "installed (with Jupyter's server): an environment without it starts runs faster"
)
"""Ray imports jsonschema, and that this package, which compiles 38 grammars when it is imported."""


_NO_BYTECODE = (
    "PYTHONDONTWRITEBYTECODE is set and the packages are not compiled, so each start compiles them "
    "again, about 2 s: unset it, or run `python -m compileall -q {folder}` once"
)


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
        found.append(library("machine", name))
    if sys.dont_write_bytecode and not Path(cache_from_source(__file__)).exists():
        text = _NO_BYTECODE.format(folder=sysconfig.get_path("purelib"))
        found.append(Finding("machine", "bytecode", None, text))
    if find_spec("rfc3987_syntax") is not None:
        found.append(Finding("machine", "ray start", None, _SLOW_RAY))
    return found


def sandboxes() -> list[Finding]:
    """Whether bubblewrap starts, and which limits the machine can enforce."""
    from hermes_rl.sandboxes.probe import probe
    from hermes_rl.sandboxes.recipe import solutions

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
            Finding("sandboxes", "workspace", None, _workspace(p.no_disks)),
            Finding("sandboxes", "memory", None, _memory(p.cgroups)),
            Finding("sandboxes", "overlay", None, images),
            Finding("sandboxes", "isolation", None, f"sandboxes are kept apart by {apart}"),
        ]
    if hidden := ", ".join(solutions(Path("/"))):
        text = f"empty in sandboxes, for they hold solutions: {hidden}"
        found.append(Finding("sandboxes", "hidden", None, text))
    none = "--sandbox none shows agents all that you can read, solutions of bundled tasks too"
    found.append(Finding("sandboxes", "none", None, none))
    later = "not in this version: docker, ssh, apptainer, modal"
    return [*found, Finding("sandboxes", "others", None, later)]


def _workspace(no_disks: str) -> str:
    if not no_disks:
        return "limited by the kernel: each sandbox has a file system of its own"
    return f"counted every few seconds, so a fast writer is stopped late ({no_disks})"


def _memory(cgroups: bool) -> str:
    if cgroups:
        return "limited for each sandbox as a whole, by a control group"
    return (
        "NOT limited for a whole sandbox (no control groups here): only each process's address "
        "space is, so many processes, memfd files and sockets can fill the machine's memory"
    )


def tools() -> list[Finding]:
    """Toolsets and their tools."""
    from hermes_rl.tools.toolsets import TOOLSETS, resolve

    return [
        Finding("tools", name, None, ", ".join(resolve([name])) or "no tools") for name in TOOLSETS
    ]
