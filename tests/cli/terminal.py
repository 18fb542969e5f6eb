"""A program in a terminal of its own: keystrokes in, the screen read back."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyte
from cli_runner import COMMAND
from forks import Forked

WAIT_S = 240.0
"""After which a program hangs, on a machine that is far slower and busier than this one."""

ENTER, CTRL_C, CTRL_D, NEW_LINE = "\r", "\x03", "\x04", "\x1b\r"


class Terminal:
    """Starts `hermes-rl ARGUMENTS` in a terminal.

    Args:
        columns, lines: of the terminal.
        env: its environment.
        interpreter: in an interpreter of its own, which reads its locale.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        env: dict[str, str],
        columns: int = 100,
        lines: int = 60,
        interpreter: bool = False,
    ) -> None:
        self.screen = pyte.Screen(columns, lines)
        self.screen.write_process_input = self._answer  # to questions about the cursor
        self._stream = pyte.ByteStream(self.screen)
        self._lock = threading.Lock()
        self.raw = b""
        self._master, child = pty.openpty()
        self.resize(columns, lines)
        env = {"TERM": "xterm-256color", **env}
        self.process: subprocess.Popen[bytes] | Forked
        if interpreter:
            self.process = subprocess.Popen(
                [COMMAND, *arguments],
                cwd=cwd,
                env=env,
                stdin=child,
                stdout=child,
                stderr=child,
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )
        else:
            self.process = Forked(arguments, env, cwd, child)
        os.close(child)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _answer(self, text: str) -> None:
        os.write(self._master, text.encode())

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65_536)
            except OSError:
                return
            if not data:
                return
            with self._lock:
                self.raw += data
                self._stream.feed(data)

    @property
    def text(self) -> str:
        """The screen without empty lines."""
        with self._lock:
            return "\n".join(line.rstrip() for line in self.screen.display if line.strip())

    def resize(self, columns: int, lines: int) -> None:
        with self._lock:
            self.screen.resize(lines, columns)
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def say(self, text: str, *, until: str | None = None) -> None:
        """Type a message, wait until it is there, and send it."""
        self.type(text.replace("\n", NEW_LINE))
        self.wait_for(text.split("\n")[0][:20])
        self.type(ENTER)
        if until is not None:
            self.wait_for(until)

    def wait_for(self, text: str, *, count: int = 1) -> str:
        """Wait until the screen has a text so many times; the screen."""
        end = time.monotonic() + WAIT_S
        while (shown := self.text).count(text) < count:
            assert time.monotonic() < end, f"no {text!r} in:\n{shown}"
            time.sleep(0.05)
        return shown

    def hang_up(self) -> None:
        """Close the terminal, as a closed window does."""
        os.close(self._master)
        self._master = -1

    def wait(self) -> int:
        """The exit code of the program."""
        return self.process.wait(timeout=WAIT_S)

    def close(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        self.process.wait()
        if self._master >= 0:
            self.hang_up()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()
