"""The progress of a run: totals of its receipts, endpoints that do not answer, and its display as a
live line, plain lines, JSON events or nothing."""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import os
import select
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from textwrap import fill
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from batch_runner.report import Report
from hermes_rl.config_endpoint import EndpointSection
from hermes_rl.models import EMBEDDED
from hermes_rl.models.rate import Coordinator, LaneSummary, Summary
from hermes_rl.ports import Receipt
from hermes_rl.store import Disposition
from hermes_rl.text import many
from hermes_rl.usage import UsageTotal, add_totals, cost_text

if TYPE_CHECKING:
    from batch_runner.images import ImageCounts

RATE_WINDOW_S = 60.0
"""Rates are taken over the last minute."""

LIVE_EVERY_S = 0.5
NOTEBOOK_EVERY_S = 1.0
PLAIN_EVERY_S = 10.0
JSON_EVERY_S = 2.0

KEPT_LINES = 10_000
"""Lines of output that wait for their reader."""

CHECK_EVERY_S = 0.5
_VERBS = ("answers ", "does not answer")
FAILING_S = 2.0
"""Time without an answer after a failure until it is reported."""
QUIET_S = 3.0
"""Time without any response of an endpoint that never answered until it is reported."""
STALLED_S = 60.0
"""The same for an endpoint that has answered, and for the embedded model, whose first answer can
take a minute on a slow CPU."""
REWRITE_S = 5.0
"""Minimum interval between writes of the file that `status` reads."""

_NOTHING = UsageTotal(input_tokens=0, output_tokens=0, total_tokens=0)


@dataclass
class Tally:
    """Totals of this start of the run."""

    attempts: int = 0
    done: int = 0
    graded: int = 0
    solved: int = 0
    """Reward 1 or more."""
    failed: int = 0
    """Attempts that failed, retried or not."""
    given_up: int = 0
    given_up_error: str | None = None
    """The error of the last unit that was given up."""
    usage: UsageTotal = _NOTHING
    cost_usd: float | None = None
    unpriced_calls: int = 0
    requests: int = 0
    throttled: int = 0
    """Requests that were refused with 429."""


@dataclass(frozen=True)
class Rates:
    """Speed over the last minute."""

    units_per_s: float
    output_tokens_per_s: float


class Sink:
    """Adds up receipts; its size is constant.

    Args:
        progress: shows the end of each attempt.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self.tally = Tally()
        self.started = time.monotonic()
        self._progress = progress or Progress()
        self._recent: deque[tuple[float, int, int]] = deque()
        """(time, units ended, output tokens), one entry a second at most."""

    def receive(self, receipt: Receipt, disposition: Disposition) -> None:
        """Count one attempt's end."""
        tally = self.tally
        tally.attempts += 1
        tally.usage = add_totals((tally.usage, receipt.usage))
        tally.unpriced_calls += receipt.unpriced_calls
        if receipt.cost_usd is not None:
            tally.cost_usd = (tally.cost_usd or 0.0) + receipt.cost_usd
        if receipt.status == "ok":
            tally.done += 1
            if receipt.reward is not None:
                tally.graded += 1
                tally.solved += receipt.reward >= 1.0
        else:
            tally.failed += receipt.status != "cancelled"
            if disposition == "given_up":
                tally.given_up += 1
                tally.given_up_error = receipt.error
        self._note(int(disposition != "open"), receipt.usage.output_tokens or 0)
        self._progress.attempt(receipt, disposition)

    def rates(self) -> Rates:
        """Speed over the last minute, or since the start when that is less."""
        now = time.monotonic()
        self._forget(now)
        span = max(1.0, min(RATE_WINDOW_S, now - self.started))
        units = sum(ended for _, ended, _ in self._recent)
        tokens = sum(count for _, _, count in self._recent)
        return Rates(units / span, tokens / span)

    def _note(self, ended: int, tokens: int) -> None:
        now = time.monotonic()
        self._forget(now)
        if self._recent and now - self._recent[-1][0] < 1.0:
            at, earlier, count = self._recent.pop()
            self._recent.append((at, earlier + ended, count + tokens))
        else:
            self._recent.append((now, ended, tokens))

    def _forget(self, now: float) -> None:
        while self._recent and now - self._recent[0][0] > RATE_WINDOW_S:
            self._recent.popleft()


@dataclass(frozen=True)
class Trouble:
    """An endpoint that does not answer."""

    endpoint: str
    """Host and port."""
    message: str
    """`answers 500 'injected'`; empty for silence."""
    waiting: int
    """Calls without an answer."""
    gives_up_at: float | None
    """Unix time at which calls are given up; None where that depends on the calls."""

    @property
    def line(self) -> str:
        """`127.0.0.1:8105 answers 500 'injected'; 20 calls waiting; gives up in 29 min`."""
        text = self.message or "does not answer"
        if self.endpoint not in text:
            text = f"{self.endpoint}{'' if text.startswith(_VERBS) else ':'} {text}"
        parts = [text, f"{many(self.waiting, 'call')} waiting"]
        if self.gives_up_at is not None:
            left = max(0.0, self.gives_up_at - time.time())
            parts.append(f"gives up in {f'{left:.0f} s' if left < 100 else f'{left / 60:.0f} min'}")
        return "; ".join(parts)


def troubles(summary: Summary, where: EndpointSection, now: float) -> tuple[Trouble, ...]:
    """Find the endpoints that do not answer.

    Args:
        where: how long calls are retried.
        now: Unix time.
    """
    return tuple(found for lane in summary.lanes if (found := _trouble(lane, where, now)))


def _trouble(lane: LaneSummary, where: EndpointSection, now: float) -> Trouble | None:
    calls = lane.unanswered
    if calls is None:
        return None
    quiet, computed_here = not calls.message, lane.endpoint.startswith(EMBEDDED)
    normal_s = FAILING_S
    if quiet:
        normal_s = QUIET_S if calls.never and not computed_here else STALLED_S
    if calls.since_s < normal_s:
        return None
    patience_s = None if quiet else where.outage_seconds
    if calls.never and not calls.alive and not (quiet and computed_here):
        patience_s = where.first_answer_seconds
    return Trouble(
        endpoint=lane.endpoint,
        message=calls.message,
        waiting=calls.waiting,
        gives_up_at=None if patience_s is None else now - calls.since_s + patience_s,
    )


class TroubleMonitor:
    """Monitors endpoints for calls without answers.

    Args:
        changed: called when trouble starts, ends or changes.
        store: stores the current trouble for `status`.
    """

    def __init__(
        self,
        where: EndpointSection,
        changed: Callable[[], None],
        store: Callable[[tuple[Trouble, ...]], Awaitable[None]],
    ) -> None:
        self.troubles: tuple[Trouble, ...] = ()
        self.answered = False
        """Whether any call was answered in this start."""
        self._where, self._changed, self._store = where, changed, store
        self._stored_at = 0.0

    async def run(self, coordinator: Coordinator) -> None:
        """Monitor until cancelled, then clear the trouble."""
        try:
            while True:
                await asyncio.sleep(CHECK_EVERY_S)
                await self.update(coordinator)
        finally:
            self.troubles = ()

    async def update(self, coordinator: Coordinator) -> None:
        """Update the trouble, and report and store changes."""
        summary = coordinator.summary()
        self.answered = self.answered or any(lane.clean for lane in summary.lanes)
        before = self.troubles
        self.troubles = troubles(summary, self._where, time.time())
        changed = _trouble_keys(before) != _trouble_keys(self.troubles)
        if changed:
            self._changed()
        if changed or (self.troubles and time.monotonic() - self._stored_at > REWRITE_S):
            self._stored_at = time.monotonic()
            await self._store(self.troubles)


def _trouble_keys(found: tuple[Trouble, ...]) -> list[tuple[str, str]]:
    return [(trouble.endpoint, trouble.message) for trouble in found]


@dataclass(frozen=True)
class View:
    """The state of a run at one moment."""

    units: int
    """Of the dataset; an estimate until it was read completely."""
    complete: bool
    """The dataset was read completely."""
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
    """One line for each endpoint that does not answer."""
    images: ImageCounts | None = None
    """Image builds that units wait for; None for a run without builds."""
    name: str = ""
    """Of the run, beside others."""
    others: tuple[View, ...] = ()
    """Runs at the same time."""

    def lines(self) -> list[str]:
        """The progress line of each run, and lines for image builds and unanswered calls below
        it."""
        begin = f"{self.name}: " if self.name else ""
        lines = [begin + self.line(), *self.waiting_lines()]
        return [*lines, *(line for other in self.others for line in other.lines())]

    def waiting_lines(self) -> list[str]:
        """Lines for image builds and unanswered calls."""
        images = self.images.line if self.images is not None else ""
        return [*([images] if images else []), *self.trouble]

    def line(self) -> str:
        """`14/20 units  11 solved  0 failed  4 running | 24/min  0:15 left | ...`"""
        units = f"{self.ended:,}/{'' if self.complete else '~'}{self.units:,} units"
        attempts = f" ({many(self.tally.failed, 'attempt')})" if self.tally.failed else ""
        failed = f"{self.given_up:,} failed{attempts}"
        counts = [units, self._verdict(), failed, f"{self.running:,} running"]
        speed = [f"{self.rates.units_per_s * 60:.0f}/min"]
        speed += [f"{left} left"] if (left := self._left()) else []
        cost = cost_text(self.tally.cost_usd, self.tally.unpriced_calls)
        usage = [f"{self.rates.output_tokens_per_s:.0f} tok/s", cost, f"429: {self._throttled()} %"]
        return " | ".join("  ".join(part) for part in (counts, speed, usage))

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
            **({"images": self.images.as_dict()} if self.images is not None else {}),
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
    """Shows the progress of a run. The base class shows nothing."""

    every_s = 3600.0
    """How often `tick` wants to be called, in seconds."""

    def note(self, text: str) -> None:
        """Show one line to people."""

    def note_for_all(self, text: str) -> None:
        """Show one line, once for all runs of a command."""
        self.note(text)

    def attempt(self, receipt: Receipt, disposition: Disposition) -> None:
        """Show the end of an attempt."""

    def tick(self, view: View) -> None:
        """Show the current state."""

    def close(self, view: View) -> None:
        """Show the last state."""
        self.tick(view)


Silent = Progress


class _Output:
    """Writes lines without waiting for their reader, so that none can hold up or end a run.

    What a full pipe does not take is kept; of more than `KEPT_LINES`, the oldest are left out and
    counted. When the reader has gone away, lines are discarded.

    Args:
        left_out: the line for a number of lines that were left out.
    """

    def __init__(self, stream: TextIO, left_out: Callable[[int], str]) -> None:
        self._stream, self._left_out_line = stream, left_out
        self._lines: deque[str] = deque()
        self._left_out = 0
        self._begun = b""
        """The rest of a line that was written in part."""
        self._fd: int | None = None
        with suppress(io.UnsupportedOperation):  # memory
            # Streams of other types, such as those of a notebook, do not write to a descriptor.
            self._fd = stream.fileno() if isinstance(stream, io.TextIOWrapper) else None

    def write(self, line: str, *, wait: bool = False) -> None:
        """Write a line, now or later.

        Args:
            wait: for the reader to take all lines, or to go away.
        """
        if self._fd is None:
            print(line, file=self._stream, flush=True)
            return
        self._lines.append(line)
        if len(self._lines) > KEPT_LINES:
            self._lines.popleft()
            self._left_out += 1
        try:
            self._stream.flush()
            while self._next():
                if not self._ready(wait):
                    return
                # Not more: a pipe that is ready takes this much at once.
                written = os.write(self._fd, self._begun[: select.PIPE_BUF])
                self._begun = self._begun[written:]
        except BrokenPipeError:
            self._lines.clear()

    def _ready(self, wait: bool) -> bool:
        """Whether the descriptor takes bytes, or its reader has gone away."""
        poll = select.poll()
        poll.register(self._fd or 0, select.POLLOUT)
        return bool(poll.poll(None if wait else 0))

    def _next(self) -> bytes:
        """What to write next; nothing when all lines are written."""
        if not self._begun and self._lines:
            count, self._left_out = self._left_out, 0
            line = self._left_out_line(count) if count else self._lines.popleft()
            encoding, errors = self._stream.encoding, self._stream.errors or "strict"
            self._begun = f"{line}\n".encode(encoding, errors)
        return self._begun


class PlainLines(Progress):
    """Plain lines for logs: at most one every ten seconds, and one at the end."""

    every_s = PLAIN_EVERY_S

    def __init__(self, stream: TextIO | None = None) -> None:
        self._output = _Output(stream or sys.stderr, "{:,} lines were left out".format)
        self._last = ""

    def note(self, text: str) -> None:
        self._output.write(text)

    def tick(self, view: View) -> None:
        text = "\n".join(view.lines())
        if text != self._last:
            self.note(text)
        self._last = text


def wrapped(line: str, width: int) -> str:
    """Wrap a progress line between its parts for a narrow terminal."""
    lines: list[str] = []
    for part in line.split(" | "):
        if lines and len(lines[-1]) + len(part) + 3 <= width:
            lines[-1] += f" | {part}"
        else:
            lines.append(part)
    return "\n".join(lines)


class LiveLine(Progress):
    """One line on a terminal that is updated in place."""

    every_s = LIVE_EVERY_S

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True)
        self._run_worker = Live(console=self._console, auto_refresh=False, redirect_stdout=False)
        self._started = False

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def tick(self, view: View) -> None:
        from rich.text import Text

        if not self._started:
            self._started = True
            self._run_worker.start()
        width = self._console.width
        lines = (
            wrapped(line, width) if " | " in line else fill(line, width) for line in view.lines()
        )
        text = Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
        self._run_worker.update(text, refresh=True)

    def close(self, view: View) -> None:
        self.tick(view)
        self._run_worker.stop()


class NotebookLine(Progress):
    """The progress below a notebook's cell, updated in place. It needs IPython only, no widgets."""

    every_s = NOTEBOOK_EVERY_S

    def __init__(self) -> None:
        self._handle = importlib.import_module("IPython.display").DisplayHandle()
        self._shown = False

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def tick(self, view: View) -> None:
        text = "\n".join(view.lines())
        every = (view, *view.others)
        ended, units = (sum(getattr(one, name) for one in every) for name in ("ended", "units"))
        bar = f'<progress value="{ended}" max="{max(1, units)}" style="width:24em"></progress>'
        lines = f'<pre style="margin:0;white-space:pre-wrap">{escape(text)}</pre>'
        show = self._handle.update if self._shown else self._handle.display
        self._shown = True
        show({"text/plain": text, "text/html": bar + lines}, raw=True)


class JsonEvents(Progress):
    """One JSON object a line on stdout, for programs. They need not read it during the run."""

    every_s = JSON_EVERY_S

    def __init__(self, stream: TextIO | None = None) -> None:
        self._output = _Output(stream or sys.stdout, lambda n: _event("left_out", lines=n))

    def note(self, text: str) -> None:
        self.event("note", text=text)

    def attempt(self, receipt: Receipt, disposition: Disposition) -> None:
        self.event("attempt", unit=disposition, **msgspec.to_builtins(receipt))

    def tick(self, view: View) -> None:
        self.event("progress", **view.as_dict())

    def report(self, report: Report) -> None:
        """Print the report, and wait for the reader of all lines."""
        self._output.write(_event("report", **report.as_dict()), wait=True)

    def event(self, name: str, **values: Any) -> None:
        """Print one event."""
        self._output.write(_event(name, **values))


def _event(name: str, **values: Any) -> str:
    return json.dumps({"event": name, "at": round(time.time(), 3), **values})


def default_progress() -> Progress:
    """A live line on a terminal or below a notebook's cell, else plain lines on stderr.

    Call it on the thread of the cell, whose output the display belongs to.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if hasattr(shell, "kernel"):
        return NotebookLine()
    return LiveLine() if sys.stderr.isatty() else PlainLines()
