"""A worker to be killed: leases sandboxes, says so, and waits.

python worker.py STATE_DIR COUNT bubblewrap|none
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from hermes_rl.sandboxes import Bubblewrap, SandboxSpec, Subprocess


async def main() -> None:
    kind = {"bubblewrap": Bubblewrap, "none": Subprocess}[sys.argv[3]]
    backend = kind(state_dir=Path(sys.argv[1]))
    count = int(sys.argv[2])
    print("starting", flush=True)
    boxes = await asyncio.gather(
        *(backend.lease(SandboxSpec(lease=f"doomed-{number}")) for number in range(count))
    )
    for sandbox in boxes:
        await sandbox.run("mkdir d; echo x >d/f; chmod 000 d; setsid sleep 5000 & :", timeout_s=30)
    print("ready", flush=True)
    await asyncio.gather(*(sandbox.run("sleep 5000", timeout_s=6000) for sandbox in boxes))


if __name__ == "__main__":
    asyncio.run(main())
