"""What `hermes-rl chat` writes: streamed text, tool lines, notes. Safe for any text of a model.

One thread writes at a time. Control characters are escaped, so that no text reaches the terminal as
a command.
"""

from __future__ import annotations

import json
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.text import Text

from hermes_rl.cli import render
from hermes_rl.text import visible

_OUTPUT_LINES = 5
"""Lines of a tool's result that are shown."""
_ERASE = "\r\x1b[2K"


class Screen:
    """The terminal, or a pipe. Colours follow NO_COLOR and TERM; the width is asked for each line.

    Args:
        quiet: write what happens to standard error, and no answers.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        # Without `file`, rich looks standard output up each time: prompts replace it.
        self._console = Console(highlight=False, markup=False, emoji=False, stderr=quiet)
        self._at_start = True
        self._has_status = False
        unicode = (self._console.encoding or "").lower().startswith("utf")
        self.ok, self.failed, self.dot = ("✓", "✗", "·") if unicode else ("+", "x", "-")
        self._more = "…" if unicode else "..."

    def stream(self, text: str, style: str = "") -> None:
        """Write a piece of a text as it arrives."""
        if not text or self._quiet:
            return
        self.clear_status()
        shown = Text(visible(text.replace("\r\n", "\n")), style=style)
        self._console.print(shown, end="", soft_wrap=True)
        self._at_start = text.endswith("\n")

    def end_line(self) -> None:
        """Begin a new line unless this one is empty."""
        self.clear_status()
        if not self._at_start:
            self._console.print()
            self._at_start = True

    def line(self, text: str = "", style: str = "") -> None:
        """Write whole lines; long ones are wrapped by the terminal."""
        self.end_line()
        self._console.print(Text(visible(text), style=style), soft_wrap=True)

    def clipped(self, text: str, style: str = "", end: str = "") -> None:
        """Write one line that fits the width. Args: end: is kept whole."""
        self.end_line()
        shown = visible(text.replace("\n", " ").expandtabs(4))
        line, end = Text(shown, style=style), visible(end)
        width = max(10, self._console.width - 1 - len(end))
        if line.cell_len > width:
            line.truncate(width - len(self._more))
            line.append(self._more)
        self._console.print(line + Text(end, style="dim"), soft_wrap=True)

    def tool(self, call: str, content: str, ok: bool | None, seconds: float | None) -> None:
        """Write a finished tool call with its time and the beginning of its result."""
        mark, style = (self.failed, "red") if ok is False else (self.ok, "cyan")
        self.clipped(f"{mark} {call}", style, f"  {render.seconds(seconds)}")
        lines = [line for line in _result_text(content).splitlines() if line.strip()]
        for line in lines[:_OUTPUT_LINES]:
            self.clipped(f"| {line}", "dim")
        if len(lines) > _OUTPUT_LINES:
            self.line(f"| {len(lines) - _OUTPUT_LINES:,} more lines", "dim")

    def status(self, text: str) -> None:
        """Write a line that the next output replaces; nothing where the cursor cannot move."""
        if not self._at_start or not self._console.is_terminal or self._console.is_dumb_terminal:
            return
        text = visible(" ".join(text.split()))[: self._console.width - 1]
        self._console.file.write(_ERASE + text)
        self._console.file.flush()
        self._has_status = True

    def clear_status(self) -> None:
        """Remove the line of `status`."""
        if self._has_status:
            self._console.file.write(_ERASE)
            self._has_status = False


def _result_text(content: str) -> str:
    """A tool's result for people; of a failure its reason alone."""
    try:
        value = json.loads(content)
    except ValueError:
        return content
    if isinstance(value, dict) and value.get("error") and not value.get("output"):
        return str(value["error"])
    return render.tool_output(content)


@contextmanager
def quiet_terminal() -> Iterator[None]:
    """Between prompts: what is typed is not shown, and waits for the next prompt."""
    try:
        before = termios.tcgetattr(sys.stdin)
    except (termios.error, ValueError, OSError):  # no terminal
        yield
        return
    mode: list[Any] = list(before)
    mode[0] &= ~termios.ICRNL  # Enter stays Enter for the prompt that reads it later
    mode[3] &= ~(termios.ECHO | termios.ICANON)
    try:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, mode)
        yield
    finally:
        try:
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
        except (termios.error, ValueError, OSError):  # the terminal was closed
            pass
