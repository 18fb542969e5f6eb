"""A worker to be killed: leases sandboxes, says so, and waits.

python worker.py STATE_DIR COUNT bubblewrap|none|docker|podman [IMAGE]
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from hermes_rl.sandboxes import SandboxSpec
from hermes_rl.wiring import make_backend


async def main() -> None:
    backend = make_backend(sys.argv[3], Path(sys.argv[1]))
    count, image = int(sys.argv[2]), next(iter(sys.argv[4:]), None)
    print("starting", flush=True)
    boxes = await asyncio.gather(
        *(
            backend.lease(SandboxSpec(lease=f"doomed-{number}", image=image))
            for number in range(count)
        )
    )
    for sandbox in boxes:
        await sandbox.run("mkdir d; echo x >d/f; chmod 000 d; setsid sleep 5000 & :", timeout_s=30)
    print("ready", flush=True)
    await asyncio.gather(*(sandbox.run("sleep 5000", timeout_s=6000) for sandbox in boxes))


if __name__ == "__main__":
    asyncio.run(main())
