"""The answers that the exact engine generates at present: aborts, pauses and new weights.

Control routes, in the words of vLLM and of SGLang:

    POST /abort_requests, /abort_request        cut all answers off: they end with what they have
    POST /pause, /pause_generation              {"mode": "abort" | "keep" | "in_place" | "close"}
    POST /resume, /continue_generation
    POST /update_weight_version                 {"weight_version": "8"}

`keep` and `in_place` freeze the answers, which continue at `resume` with the weights of then;
`close` resets their connections. While it is paused, new requests wait, or are refused with 503.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

PauseMode = Literal["abort", "keep", "in_place", "close"]
A = TypeVar("A")

CONTROLS = (
    *("/abort_requests", "/abort_request", "/pause", "/pause_generation"),
    *("/resume", "/continue_generation", "/update_weight_version"),
)


@dataclass(eq=False)
class Generation(Generic[A]):
    """One answer. Its tokens come at equal intervals."""

    what: A
    tokens: int
    seconds: float
    """Duration without pauses."""
    spans: list[tuple[str | None, int]] = field(default_factory=list)
    """Versions of the weights, each with the number of tokens at its end."""
    done_s: float = 0.0
    since: float | None = None
    """When it was started or continued; None while it is frozen."""
    timer: asyncio.TimerHandle | None = None

    def progress(self, now: float) -> int:
        """Return the number of its tokens so far."""
        done = self.done_s + (0.0 if self.since is None else now - self.since)
        return self.tokens if done >= self.seconds else int(self.tokens * done / self.seconds)

    def mark(self, version: str | None, tokens: int) -> None:
        """Note that the tokens since the last mark are of this version."""
        last = self.spans[-1][1] if self.spans else 0
        if tokens > last:
            self.spans.append((version, tokens))


class Running(Generic[A]):
    """The answers in progress.

    Args:
        version: of the weights.
        end: called with an answer, its number of tokens, and how it ended.
    """

    def __init__(
        self,
        version: str | None,
        end: Callable[[Generation[A], int, Literal["complete", "abort", "close"]], None],
    ) -> None:
        self.version, self.paused, self._end = version, False, end
        self._active: dict[Generation[A], None] = {}

    @property
    def tokens(self) -> list[int]:
        """The tokens so far of each answer in progress."""
        now = asyncio.get_running_loop().time()
        return [generation.progress(now) for generation in self._active]

    def start(self, generation: Generation[A]) -> None:
        """Generate an answer; in a pause, after it."""
        self._active[generation] = None
        if not self.paused:
            self._continue(generation)

    def control(self, path: str, form: dict[str, Any]) -> None:
        """Obey a control route."""
        if path.startswith("/abort"):
            self._cut("abort")
        elif path.startswith("/pause"):
            self.pause(form.get("mode", "abort"))
        elif path == "/update_weight_version":
            self.set_version(str(form["weight_version"]))
        else:
            self.resume()

    def abort_all(self) -> None:
        """Cut all answers off."""
        self._cut("abort")

    def pause(self, mode: PauseMode = "abort") -> None:
        """Generate nothing until `resume`."""
        self.paused, now = True, asyncio.get_running_loop().time()
        if mode in ("abort", "close"):
            self._cut("close" if mode == "close" else "abort")
        for generation in self._active:
            if generation.since is not None:
                generation.done_s += now - generation.since
                generation.since = None
            self._stop(generation)

    def resume(self) -> None:
        """Continue."""
        self.paused = False
        for generation in [*self._active]:
            self._continue(generation)

    def set_version(self, version: str) -> None:
        """Answer with other weights from now on, also in the middle of answers."""
        now = asyncio.get_running_loop().time()
        for generation in self._active:
            generation.mark(self.version, generation.progress(now))
        self.version = version

    def close(self) -> None:
        """Forget everything."""
        for generation in self._active:
            self._stop(generation)
        self._active.clear()

    def _continue(self, generation: Generation[A]) -> None:
        if generation.since is not None:
            return
        loop = asyncio.get_running_loop()
        generation.since, left = loop.time(), generation.seconds - generation.done_s
        if left <= 0:
            self._finish(generation, generation.tokens, "complete")
        else:
            generation.timer = loop.call_later(
                left, self._finish, generation, generation.tokens, "complete"
            )

    def _cut(self, how: Literal["abort", "close"]) -> None:
        now = asyncio.get_running_loop().time()
        for generation in [*self._active]:
            self._finish(generation, generation.progress(now), how)

    def _finish(
        self, generation: Generation[A], tokens: int, how: Literal["complete", "abort", "close"]
    ) -> None:
        self._stop(generation)
        del self._active[generation]
        generation.mark(self.version, tokens)
        self._end(generation, tokens, how)

    def _stop(self, generation: Generation[A]) -> None:
        if generation.timer is not None:
            generation.timer.cancel()
            generation.timer = None
