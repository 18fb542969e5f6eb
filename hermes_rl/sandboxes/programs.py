"""Programs that fetch and build images: none outlives its caller, and any thread may end them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from hermes_rl.errors import HermesError
from hermes_rl.sandboxes import processes


class BuildFailed(HermesError):
    """An image could not be built or pulled.

    Args:
        log: what the program printed.
    """

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class Programs:
    """The programs that a store runs, which another thread may end."""

    def __init__(self) -> None:
        self.stopped = False
        self._lock = threading.Lock()
        self._pipes: set[int] = set()

    def stop(self) -> None:
        """End those that run, and start no others."""
        with self._lock:
            self.stopped = True
            while self._pipes:
                os.close(self._pipes.pop())

    def run(self, command: Sequence[str], failure: str, timeout_s: float = 3600.0) -> str:
        """Run a program; returns what it printed. Raises: BuildFailed."""
        guarded = [sys.executable, "-I", "-S", processes.__file__, *command]
        with (
            self._guard() as (pipe, end),
            subprocess.Popen(
                guarded,
                stdin=pipe,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process,
        ):
            late = False
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except BaseException as error:  # also Ctrl-C: its programs end with it
                end()
                output, _ = process.communicate()
                late = isinstance(error, subprocess.TimeoutExpired)
                if not late:
                    raise
        printed = output.decode("utf-8", "replace")
        if late:
            raise BuildFailed(f"{failure}: it took over {timeout_s:g} s", printed)
        if process.returncode != 0:
            last = next((line for line in reversed(printed.splitlines()) if line.strip()), "")
            why = "interrupted" if self.stopped else last.strip()[:300]
            raise BuildFailed(f"{failure}: {why}", printed)
        return printed

    @contextlib.contextmanager
    def _guard(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """A pipe's end for a guard to read (see `processes.main`), and what closes the other end:
        the guard then ends its program, as it does when this process ends."""
        read_end, held = os.pipe()
        with self._lock:
            self._pipes.add(held)
        if self.stopped:
            self.stop()

        def close() -> None:
            with self._lock:
                if held in self._pipes:
                    self._pipes.remove(held)
                    os.close(held)

        try:
            yield read_end, close
        finally:
            os.close(read_end)
            close()
