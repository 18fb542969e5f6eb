"""Runs named checks in a process of its own: as another user, with the standard library only.

    python launcher.py TELL

reads one JSON object a line, {"file", "check", "state", "binary"}, gives each check a backend of
its own, and writes a line to descriptor TELL: the traceback, or nothing when it passed. One process
for all checks of a user: a start costs more than most of them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType

from hermes_rl.sandboxes import Bubblewrap


@cache
def load(file: str) -> ModuleType:
    """The module with the checks."""
    found = importlib.util.spec_from_file_location("checks", file)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


async def run(file: str, check: str, state: str, binary: str) -> None:
    """One check."""
    backend = Bubblewrap(state_dir=Path(state), binary=binary)
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
