"""The progress of a run: what its receipts add up to, which endpoints do not answer, and one live
line, plain lines, JSON events or nothing that show it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from batch_runner.report import Report
from hermes_rl.config_endpoint import EndpointSection
from hermes_rl.models import EMBEDDED
from hermes_rl.models.rate import Coordinator, LaneSummary, Summary
from hermes_rl.ports import Receipt
from hermes_rl.store import Disposition
from hermes_rl.usage import UsageTotal, add_totals, cost_text

if TYPE_CHECKING:
    from batch_runner.images import ImageCounts

RATE_WINDOW_S = 60.0
"""Rates are taken over the last minute."""

LIVE_EVERY_S = 0.5
PLAIN_EVERY_S = 10.0
JSON_EVERY_S = 2.0

LOOK_S = 0.5
_VERBS = ("answers ", "does not answer")
FAILING_S = 2.0
"""So long without an answer after a failure is trouble."""
QUIET_S = 3.0
"""So long without anything from an endpoint that never answered."""
STALLED_S = 60.0
"""So long without anything from an endpoint that has answered, or from the embedded model, whose
first answer can take a minute on a slow CPU."""
REWRITE_S = 5.0
"""The file that other terminals read is written again at most so often."""

_NOTHING = UsageTotal(input_tokens=0, output_tokens=0, total_tokens=0)


@dataclass
class Tally:
    """What this start of the run has seen so far."""

    attempts: int = 0
    done: int = 0
    graded: int = 0
    solved: int = 0
    """Reward 1 or more."""
    failed: int = 0
    """Attempts that failed, retried or not."""
    given_up: int = 0
    given_up_error: str | None = None
    """Why the last unit was given up."""
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
    """Where receipts end: the counters of a run's progress, of constant size.

    Args:
        progress: shows each attempt's end.
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
    """One endpoint that does not answer."""

    endpoint: str
    """Host and port."""
    said: str
    """`answers 500 'injected'`; empty for silence."""
    waiting: int
    """Calls without an answer."""
    gives_up_at: float | None
    """Unix time at which calls are given up; None where that depends on the calls."""

    @property
    def line(self) -> str:
        """`127.0.0.1:8105 answers 500 'injected'; 20 calls waiting; gives up in 29 min`."""
        text = self.said or "does not answer"
        if self.endpoint not in text:
            text = f"{self.endpoint}{'' if text.startswith(_VERBS) else ':'} {text}"
        calls = "call" if self.waiting == 1 else "calls"
        parts = [text, f"{self.waiting:,} {calls} waiting"]
        if self.gives_up_at is not None:
            left = max(0.0, self.gives_up_at - time.time())
            parts.append(f"gives up in {f'{left:.0f} s' if left < 100 else f'{left / 60:.0f} min'}")
        return "; ".join(parts)


def troubles(summary: Summary, where: EndpointSection, now: float) -> tuple[Trouble, ...]:
    """The endpoints in trouble.

    Args:
        where: says how long calls go on.
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
        said=calls.message,
        waiting=calls.waiting,
        gives_up_at=None if patience_s is None else now - calls.since_s + patience_s,
    )


class Watch:
    """Looks at a run's lanes for trouble.

    Args:
        changed: called when trouble begins, ends or becomes another.
        store: keeps the present trouble where other terminals find it.
    """

    def __init__(
        self,
        where: EndpointSection,
        changed: Callable[[], None],
        store: Callable[[tuple[Trouble, ...]], Awaitable[None]],
    ) -> None:
        self.troubles: tuple[Trouble, ...] = ()
        self.answered = False
        """Somebody was answered in this start."""
        self._where, self._changed, self._store = where, changed, store
        self._stored_at = 0.0

    async def run(self, coordinator: Coordinator) -> None:
        """Until it is cancelled; then nothing waits any more."""
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                await self.look(coordinator)
        finally:
            self.troubles = ()

    async def look(self, coordinator: Coordinator) -> None:
        """Take in how things are now."""
        summary = coordinator.summary()
        self.answered = self.answered or any(lane.clean for lane in summary.lanes)
        before = self.troubles
        self.troubles = troubles(summary, self._where, time.time())
        news = _keys(before) != _keys(self.troubles)
        if news:
            self._changed()
        if news or (self.troubles and time.monotonic() - self._stored_at > REWRITE_S):
            self._stored_at = time.monotonic()
            await self._store(self.troubles)


def _keys(found: tuple[Trouble, ...]) -> list[tuple[str, str]]:
    return [(trouble.endpoint, trouble.said) for trouble in found]


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
    images: ImageCounts | None = None
    """What units wait for; None for a run that builds no image."""

    def lines(self) -> list[str]:
        """The line, and what is wrong below it."""
        return [self.line(), *self.waits()]

    def waits(self) -> list[str]:
        """What units and calls wait for."""
        images = self.images.line if self.images is not None else ""
        return [*([images] if images else []), *self.trouble]

    def line(self) -> str:
        """`14/20 units  11 solved  0 failed  4 running | 24/min  0:15 left | ...`"""
        units = f"{self.ended:,}/{'' if self.complete else '~'}{self.units:,} units"
        attempts = f" ({self.tally.failed:,} attempts)" if self.tally.failed else ""
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
    """Shows the progress of a run. This one shows nothing; the others replace some methods."""

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
        lines = [wrapped(view.line(), width), *(fill(text, width) for text in view.waits())]
        text = Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
        self._live.update(text, refresh=True)

    def close(self, view: View) -> None:
        self.tick(view)
        self._live.stop()


class JsonEvents(Progress):
    """One JSON object a line on stdout, for programs."""

    every_s = JSON_EVERY_S

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout

    def note(self, text: str) -> None:
        self.event("note", text=text)

    def attempt(self, receipt: Receipt, disposition: Disposition) -> None:
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
