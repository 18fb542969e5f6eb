"""The sampler as a process of its own, as a trainer sees it."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAM = Path(__file__).with_name("sampler.py")


@dataclass(frozen=True)
class Sampler:
    """A running sampler."""

    base_url: str
    process: subprocess.Popen[bytes]

    def load(self, weights: Path, version: int) -> None:
        """Let it load weights from a file. On return, all new requests are sampled from them."""
        body = json.dumps({"path": str(weights.absolute()), "version": version}).encode()
        request = urllib.request.Request(
            self.base_url.removesuffix("/v1") + "/weights",
            body,
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            answer.read()


@contextmanager
def start_sampler(weights: Path, *, version: int = 0, log: Path | None = None) -> Iterator[Sampler]:
    """Start a sampler; it ends with this block, and when this process dies."""
    command = [sys.executable, str(PROGRAM), "--weights", str(weights), "--version", str(version)]
    command += ["--log", str(log)] if log else []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the sampler ended at once; its message is above")
        try:
            yield Sampler(json.loads(line)["base_url"], process)
        finally:
            process.stdin.close()
            process.wait(timeout=60)
