"""Runs one named check in a process of its own: as another user, with the standard library only.

python launcher.py FILE CHECK STATE_DIR BINARY
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path

from hermes_rl.sandboxes.bubblewrap import Bubblewrap


async def main() -> None:
    file, name, state, binary = sys.argv[1:5]
    found = importlib.util.spec_from_file_location("checks", file)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    check = next(check for check in module.CHECKS if check.__name__ == name)
    backend = Bubblewrap(state_dir=Path(state), binary=binary)
    try:
        await check(backend)
    finally:
        await backend.aclose()


if __name__ == "__main__":
    asyncio.run(main())
