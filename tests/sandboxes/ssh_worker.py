"""A worker to be killed: leases sandboxes on a machine, says so, and waits.

python ssh_worker.py HOST COUNT      HOST: an `SshHost` as JSON
"""

from __future__ import annotations

import asyncio
import json
import sys

from hermes_rl.sandboxes import SandboxSpec, SshHost, SshHosts


async def main() -> None:
    backend = SshHosts([SshHost(**json.loads(sys.argv[1]))])
    leases = [SandboxSpec(lease=f"doomed-{number}") for number in range(int(sys.argv[2]))]
    leased = await asyncio.gather(*map(backend.lease, leases))
    for sandbox in leased:
        await sandbox.run("mkdir d; echo x >d/f; chmod 000 d; setsid sleep 5000 & :", timeout_s=30)
    print("ready", flush=True)
    await asyncio.gather(*(sandbox.run("sleep 5000", timeout_s=6000) for sandbox in leased))


if __name__ == "__main__":
    asyncio.run(main())
