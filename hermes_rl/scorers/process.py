"""The parent's side of `isolated`: a few child processes, started when they are first needed."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hermes_rl.errors import VerifierFault
from hermes_rl.scorers.answers import Score
from hermes_rl.scorers.isolated import CPU_S

WALL_S = 600.0
"""Real time of one request: a function may wait, but not for ever."""
MOST = 4
"""Children at once: an answer that uses up its time delays others only if as many do so."""


class ScorerPool:
    """Runs scorers that may take any time or crash.

    Args:
        cpu_s: CPU time of one request in seconds.
    """

    def __init__(self, cpu_s: float = CPU_S) -> None:
        self._cpu_s = cpu_s
        self._idle: list[asyncio.subprocess.Process] = []
        self._places = asyncio.Semaphore(MOST)

    async def score(
        self,
        kind: str,
        options: Mapping[str, Any],
        answer: str,
        row: Mapping[str, Any] | None = None,
    ) -> Score:
        """Judge an answer. What takes too long or ends the process scores 0.

        Raises: VerifierFault when a function or a package of the scorer fails.
        """
        request = {
            "type": kind,
            "options": options,
            "answer": answer,
            "row": row or {},
            "cpu_s": self._cpu_s,
        }
        line = json.dumps(request).encode() + b"\n"
        async with self._places:
            idle = [self._idle.pop()] if self._idle else []
            for child in (*idle, None, None):  # what ends it twice is the answer
                reply, code = await self._ask(child or await _start(), kind, line)
                if reply:
                    break
                if code == -27:  # SIGPROF
                    return Score(0.0, f"{kind} took more than {self._cpu_s:g} s of CPU time")
        if not reply:
            return Score(0.0, f"{kind} ended its process, exit code {code}")
        result = json.loads(reply)
        if "fault" in result:
            raise VerifierFault(f"scorer {kind}: {result['fault']}")
        return Score(**result)

    async def _ask(
        self, child: asyncio.subprocess.Process, kind: str, line: bytes
    ) -> tuple[bytes, int]:
        """One reply; empty, with the exit code, when the child ended instead."""
        assert child.stdin is not None
        assert child.stdout is not None
        reply = b""
        try:
            async with asyncio.timeout(WALL_S):
                with suppress(BrokenPipeError, ConnectionResetError):
                    child.stdin.write(line)
                    await child.stdin.drain()
                    reply = await child.stdout.readline()
                if reply.endswith(b"\n"):
                    self._idle.append(child)
                    return reply, 0
                return b"", await child.wait()
        except TimeoutError:
            await _end(child)
            raise VerifierFault(f"{kind}: no score within {WALL_S:g} s") from None
        except asyncio.CancelledError:
            await asyncio.shield(_end(child))  # its reply would be taken for the next one's
            raise

    async def aclose(self) -> None:
        """End the children."""
        while self._idle:
            await asyncio.shield(_end(self._idle.pop()))


async def _start() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from hermes_rl.scorers.isolated import main; main()",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # What this process can import, its child can.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )


async def _end(child: asyncio.subprocess.Process) -> int:
    if child.returncode is None:
        child.kill()
    return await child.wait()
