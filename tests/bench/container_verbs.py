"""Containers of a real engine: our sandboxes beside the engine's own commands. Prints seconds.

    python container_verbs.py (docker | podman) STARTS COMMANDS

Wall time: the work is the engine's, in other processes.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "sandboxes"))
from engines import IMAGE, engine

from hermes_rl.sandboxes import Containers, Engine, GradingSpec, SandboxSpec


async def measure_sandboxes(
    used: Engine, folder: Path, starts: int, commands: int
) -> dict[str, list[float]]:
    """Start and stop, a builtin in one session, a grading."""
    found: dict[str, list[float]] = {"start": [], "builtin": [], "grade": []}
    backend = Containers(used.name, socket_path=used.path, state_dir=folder / "state")
    try:
        async with await backend.lease(SandboxSpec("warm", IMAGE)):  # looks at the image, once
            pass
        for _ in range(starts):
            began = time.perf_counter()
            async with await backend.lease(SandboxSpec("bench", IMAGE)) as sandbox:
                found["start"].append(time.perf_counter() - began)
                began = time.perf_counter()
                await sandbox.grade(GradingSpec("true"))
                found["grade"].append(time.perf_counter() - began)
        async with await backend.lease(SandboxSpec("bench", IMAGE)) as sandbox:
            for _ in range(commands):
                began = time.perf_counter()
                await sandbox.run("echo step-1", timeout_s=30)
                found["builtin"].append(time.perf_counter() - began)
    finally:
        await backend.aclose()
    return found


def timed(line: Sequence[str]) -> float:
    """Run a command."""
    began = time.perf_counter()
    subprocess.run(line, check=True, capture_output=True)
    return time.perf_counter() - began


def measure_engine(used: Engine, starts: int, commands: int) -> dict[str, list[float]]:
    """The engine's own command line: `run --rm`, and `exec` in a running container."""
    where = {"docker": ["docker", "-H"], "podman": ["podman", "--remote", "--url"]}[used.name]
    program = [*where, f"unix://{used.path}"]
    once = [*program, "run", "--rm", "--network", "none", IMAGE, "true"]
    found = {"run": [timed(once) for _ in range(starts)]}
    name = "bench-exec"
    held = ["run", "--detach", "--rm", "--network", "none", "--name", name, IMAGE, "sleep", "600"]
    timed([*program, *held])
    found["exec"] = [timed([*program, "exec", name, "true"]) for _ in range(commands)]
    timed([*program, "rm", "--force", name])
    return found


def main() -> None:
    """See the module."""
    name, starts, commands = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with tempfile.TemporaryDirectory(prefix="hermes-rl-bench-") as made:
        folder = Path(made)
        folder.chmod(0o711)
        with engine(name, folder) as used:
            found = asyncio.run(measure_sandboxes(used, folder, starts, commands))
            print(json.dumps({**found, **measure_engine(used, starts, max(2, commands // 10))}))


if __name__ == "__main__":
    main()
