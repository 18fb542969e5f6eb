"""Progress for people and programs: one live line, plain lines, JSON events, or nothing."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from textwrap import fill
from typing import Any, TextIO

from batch_runner.report import Report
from batch_runner.sink import Rates, Tally
from hermes_rl.ports import Receipt
from hermes_rl.store.ledger import Disposition
from hermes_rl.usage import cost_text

LIVE_EVERY_S = 0.5
PLAIN_EVERY_S = 10.0


@dataclass(frozen=True)
class View:
    """The state of a run at one moment."""

    units: int
    """Of the dataset; an estimate until it was read to its end."""
    complete: bool
    """The dataset was read to its end."""
    ended: int
    """Done or given up, earlier starts included."""
    solved: int
    given_up: int
    running: int
    tally: Tally
    """Of this start."""
    rates: Rates
    graded: int = 0
    """Graded units of earlier starts."""
    trouble: tuple[str, ...] = ()
    """What calls wait for, one line for each endpoint that does not answer."""

    def lines(self) -> list[str]:
        """The line, and what is wrong below it."""
        return [self.line(), *self.trouble]

    def line(self) -> str:
        """`14/20 units  11 solved  0 failed  4 running | 24/min  0:15 left | ...`"""
        units = f"{self.ended:,}/{'' if self.complete else '~'}{self.units:,} units"
        attempts = f" ({self.tally.failed:,} attempts)" if self.tally.failed else ""
        failed = f"{self.given_up:,} failed{attempts}"
        counts = [units, self._verdict(), failed, f"{self.running:,} running"]
        speed = [f"{self.rates.units_per_s * 60:.0f}/min"]
        speed += [f"{left} left"] if (left := self._left()) else []
        cost = cost_text(self.tally.cost_usd, self.tally.unpriced_calls)
        books = [f"{self.rates.output_tokens_per_s:.0f} tok/s", cost, f"429: {self._throttled()} %"]
        return " | ".join("  ".join(words) for words in (counts, speed, books))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "units": self.units,
            "complete": self.complete,
            "ended": self.ended,
            "solved": self.solved,
            "given_up": self.given_up,
            "running": self.running,
            "failed_attempts": self.tally.failed,
            "units_per_min": round(self.rates.units_per_s * 60, 2),
            "output_tokens_per_s": round(self.rates.output_tokens_per_s, 2),
            "cost_usd": self.tally.cost_usd,
            "requests": self.tally.requests,
            "throttled": self.tally.throttled,
            "trouble": list(self.trouble),
        }

    def _verdict(self) -> str:
        done = self.ended > self.given_up
        if done and not (self.solved or self.graded or self.tally.graded):
            return "not graded"
        return f"{self.solved:,} solved"

    def _left(self) -> str | None:
        if self.units <= self.ended or not self.rates.units_per_s:
            return None
        return duration((self.units - self.ended) / self.rates.units_per_s)

    def _throttled(self) -> int:
        return round(100 * self.tally.throttled / max(1, self.tally.requests))


def duration(seconds: float) -> str:
    """`0:15`, `12:07`, `3:05:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress:
    """Where progress goes. This one shows nothing; the others replace some of its methods."""

    every_s = 3600.0
    """How often `tick` wants to be called, in seconds."""

    def note(self, text: str) -> None:
        """Show one line to people."""

    def attempt(self, receipt: Receipt, disposition: Disposition) -> None:
        """Take the end of an attempt."""

    def tick(self, view: View) -> None:
        """Show the state now."""

    def close(self, view: View) -> None:
        """Show the last state."""
        self.tick(view)


Silent = Progress


class PlainLines(Progress):
    """A line now and then, for logs and notebooks: at most every ten seconds, and at the end."""

    every_s = PLAIN_EVERY_S

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._last = ""

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def tick(self, view: View) -> None:
        text = "\n".join(view.lines())
        if text != self._last:
            self.note(text)
        self._last = text


def wrapped(line: str, width: int) -> str:
    """A progress line on as many lines as a narrow terminal needs, cut between its parts."""
    lines: list[str] = []
    for part in line.split(" | "):
        if lines and len(lines[-1]) + len(part) + 3 <= width:
            lines[-1] += f" | {part}"
        else:
            lines.append(part)
    return "\n".join(lines)


class LiveLine(Progress):
    """One line on a terminal that is written anew."""

    every_s = LIVE_EVERY_S

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False)
        self._started = False

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def tick(self, view: View) -> None:
        from rich.text import Text

        if not self._started:
            self._started = True
            self._live.start()
        width = self._console.width
        lines = [wrapped(view.line(), width), *(fill(text, width) for text in view.trouble)]
        text = Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
        self._live.update(text, refresh=True)

    def close(self, view: View) -> None:
        self.tick(view)
        self._live.stop()


class JsonEvents(Progress):
    """One JSON object a line on stdout, for programs."""

    every_s = 2.0

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout

    def note(self, text: str) -> None:
        self.event("note", text=text)

    def attempt(self, receipt: Receipt, disposition: Disposition) -> None:
        import msgspec

        self.event("attempt", unit=disposition, **msgspec.to_builtins(receipt))

    def tick(self, view: View) -> None:
        self.event("progress", **view.as_dict())

    def report(self, report: Report) -> None:
        """The end."""
        self.event("report", **report.as_dict())

    def event(self, name: str, **values: Any) -> None:
        """Print one event."""
        text = json.dumps({"event": name, "at": round(time.time(), 3), **values})
        print(text, file=self._stream, flush=True)


def default_progress() -> Progress:
    """A live line on a terminal, plain lines elsewhere; both on stderr."""
    return LiveLine() if sys.stderr.isatty() else PlainLines()
