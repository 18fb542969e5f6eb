"""The parent's side of `isolated`: one child process, started when it is first needed."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from hermes_rl.errors import VerifierFault
from hermes_rl.scorers.answers import Score
from hermes_rl.scorers.isolated import CPU_S

WALL_S = 600.0
"""Real time of one request: a function may wait, but not for ever."""
_TRIES = 2
"""A child that dies without using up its time is started again so often in all."""


class ScorerProcess:
    """Runs scorers that may take any time or crash.

    Args:
        cpu_s: CPU time of one request in seconds.
    """

    def __init__(self, cpu_s: float = CPU_S) -> None:
        self._cpu_s = cpu_s
        self._child: asyncio.subprocess.Process | None = None
        self._one = asyncio.Lock()

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
        reply = b""
        async with self._one:
            for _ in range(_TRIES):
                try:
                    async with asyncio.timeout(WALL_S):
                        reply = await self._ask(line)
                except TimeoutError:
                    await self.aclose()
                    raise VerifierFault(f"{kind}: no score within {WALL_S:g} s") from None
                except asyncio.CancelledError:
                    await self.aclose()  # its reply would be taken for the next one's
                    raise
                if reply:
                    break
                code = await self._ended()
                if code == -27:  # SIGPROF
                    return Score(0.0, f"{kind} took more than {self._cpu_s:g} s of CPU time")
        if not reply:
            return Score(0.0, f"{kind} ended its process, exit code {code}")
        result = json.loads(reply)
        if "fault" in result:
            raise VerifierFault(f"scorer {kind}: {result['fault']}")
        return Score(**result)

    async def _ask(self, line: bytes) -> bytes:
        """One reply; empty when the child ended instead."""
        if self._child is None:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                "from hermes_rl.scorers.isolated import main; main()",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # What this process can import, its child can.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(line)
            await self._child.stdin.drain()
            return await self._child.stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            return b""

    async def _ended(self) -> int:
        assert self._child is not None
        child, self._child = self._child, None
        return await child.wait()

    async def aclose(self) -> None:
        """End the child."""
        if self._child is not None:
            if self._child.returncode is None:
                self._child.kill()
            await asyncio.shield(self._ended())
