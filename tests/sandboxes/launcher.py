"""Runs named checks in a process of its own: as another user, with the standard library only.

    python launcher.py TELL

reads one JSON object a line (see `run`), gives each check a backend of its own, and writes a line
to descriptor TELL: the traceback, or nothing when it passed. One process for all checks of a user:
a start costs more than most of them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hermes_rl.sandboxes import Apptainer, Bubblewrap, Containers, SandboxSpec, zygote


@cache
def load(file: str) -> ModuleType:
    """The module with the checks."""
    found = importlib.util.spec_from_file_location("checks", file)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


class WithImage(Containers):
    """Leases with this image where none is named."""

    default = ""

    async def lease(self, spec: SandboxSpec) -> Any:
        return await super().lease(replace(spec, image=spec.image or self.default))


class ApptainerWithImage(Apptainer):
    """The same."""

    default = ""

    async def lease(self, spec: SandboxSpec) -> Any:
        return await super().lease(replace(spec, image=spec.image or self.default))


def backend_of(state: Path, binary: str, engine: Mapping[str, str] | None) -> Any:
    """bubblewrap, or containers of an engine: its name, socket or program, and an image."""
    if engine is None:
        return Bubblewrap(state_dir=state, binary=binary)
    made: WithImage | ApptainerWithImage
    if engine["name"] == "apptainer":
        made = ApptainerWithImage(program=engine["program"], state_dir=state)
    else:
        made = WithImage(engine["name"], socket_path=engine["socket"], state_dir=state)
    made.default = engine["image"]
    return made


async def run(
    file: str,
    check: str,
    state: str,
    binary: str,
    engine: Mapping[str, str] | None,
    launcher: str,
) -> None:
    """One check; `launcher` is what starts the sandboxes of bubblewrap (see `zygote.SWITCH`)."""
    os.environ[zygote.SWITCH] = launcher
    backend = backend_of(Path(state), binary, engine)
    try:
        await getattr(load(file), check)(backend)
    finally:
        await backend.aclose()
    left = [*Path(state).glob("boxes/*"), *Path(state).glob("owners/*")]
    assert left == [], "a closed backend leaves nothing"


def main() -> None:
    tell = int(sys.argv[1])
    os.set_inheritable(tell, False)
    for line in sys.stdin:
        said = ""
        try:
            asyncio.run(run(**json.loads(line)))
        except Exception:  # whatever the check found is its verdict
            said = traceback.format_exc()
        os.write(tell, json.dumps(said).encode() + b"\n")


if __name__ == "__main__":
    main()
