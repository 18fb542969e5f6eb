"""Rollouts whose model is another program: it takes requests and gives answers, step by step.

Tools, sandbox, limits and rewards are those of every rollout. OpenEnv's server and TRL's
`environment_factory` use this.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from hermes_rl.config import parse_config
from hermes_rl.errors import UserError
from hermes_rl.events import EventLog
from hermes_rl.messages import AssistantMessage, ToolCall, to_openai
from hermes_rl.models import Completion, ModelRequest, NoopClient
from hermes_rl.models.providers import Routes
from hermes_rl.record import Trajectory
from hermes_rl.rl.episodes import Host, open_host
from hermes_rl.rl.loading import Opened, env_rows, settle_env
from hermes_rl.rl.trial import item_of
from hermes_rl.rollout import run_attempt
from hermes_rl.tasks import LazyRow
from hermes_rl.wiring import RunContext, open_run_context


class _Guest(NoopClient):
    """A model whose answers come from another program."""

    endpoint = "guest"

    def __init__(self) -> None:
        self.requests: asyncio.Queue[ModelRequest] = asyncio.Queue()
        self.answers: asyncio.Queue[tuple[AssistantMessage, str]] = asyncio.Queue()

    async def complete(self, request: ModelRequest) -> Completion:
        """See `ModelClient.complete`."""
        await self.requests.put(request)
        message, reason = await self.answers.get()
        return replace(await super().complete(request), message=message, finish_reason=reason)


@dataclass(frozen=True)
class Step:
    """What the model gets next."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """Since its last answer, in OpenAI's form."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    end: Trajectory | None = None
    """The row of the rollout, if it is over."""


class GuestRollout:
    """One rollout at a time; made by `Guests.rollout`."""

    def __init__(self, guests: Guests) -> None:
        self._guests, self._guest = guests, _Guest()
        self._work: asyncio.Task[Trajectory] | None = None
        self._seen = self.steps = 0

    async def reset(self, index: int, member: int = 0) -> Step:
        """Start a rollout of the task at a position of the stream.

        Args:
            member: its number among the rollouts of the task.

        Raises: UserError.
        """
        await self.close()
        row = await asyncio.to_thread(self._guests.row, index)
        self._guest, self._seen, self.steps = _Guest(), 0, 0
        context = self._guests.context
        context = replace(context, models=Routes.to(self._guest, context.share))
        item = item_of(context, row, repeat=member)
        attempt = run_attempt(context, item, EventLog(), make=self._guests.host.episode)
        self._work = asyncio.create_task(attempt)
        return await self._next()

    async def step(
        self, content: str, calls: Sequence[ToolCall] = (), *, finish_reason: str | None = None
    ) -> Step:
        """Answer the model request. Raises: UserError."""
        if self._work is None or self._work.done():
            raise UserError("no rollout is running. Call reset first")
        self.steps += 1
        message = AssistantMessage(content=content, tool_calls=tuple(calls))
        reason = finish_reason or ("tool_calls" if calls else "stop")
        await self._guest.answers.put((message, reason))
        return await self._next()

    async def close(self) -> None:
        """Cancel the rollout."""
        if self._work is not None and not self._work.done():
            self._work.cancel()
            with suppress(asyncio.CancelledError):
                await self._work

    async def _next(self) -> Step:
        """Wait for the next model request, or the end."""
        assert self._work is not None
        requested = asyncio.create_task(self._guest.requests.get())
        await asyncio.wait((requested, self._work), return_when=asyncio.FIRST_COMPLETED)
        if requested.done():
            request = requested.result()
            messages = [to_openai(message) for message in request.conversation]
            new, self._seen = messages[self._seen :], len(messages) + 1
            return Step(new, list(request.tools))
        requested.cancel()
        return Step(end=self._work.result())


class Guests:
    """An environment that is open for such rollouts; made by `open_guests`."""

    def __init__(self, context: RunContext, host: Host, opened: Opened) -> None:
        self.context, self.host = context, host
        self._stream, self._rows = iter(env_rows(opened, None)), list[LazyRow]()
        self._reading = threading.Lock()  # a generator runs in one thread at a time

    def row(self, index: int) -> LazyRow:
        """The task at a position of the stream. Blocking; any thread. Raises: UserError."""
        with self._reading:
            while len(self._rows) <= index:
                try:
                    self._rows.append(next(self._stream))
                except StopIteration:
                    raise UserError(f"there are {len(self._rows)} tasks") from None
            return self._rows[index]

    def rollout(self) -> GuestRollout:
        """Make a place for rollouts, one after the other."""
        return GuestRollout(self)


@asynccontextmanager
async def open_guests(
    env: str, *, split: str = "train", seed: int = 0, sections: Mapping[str, Any] | None = None
) -> AsyncIterator[Guests]:
    """Set an environment up.

    Args:
        env: as `hermes-rl env` takes it.
        sections: further sections of a run's configuration, such as `{"sandbox": {...}}`.

    Raises: UserError.
    """
    data: dict[str, Any] = {"model": {"name": "noop"}, **(sections or {})}
    data["env"] = {"name": env, "split": split, "seed": seed, "mode": "live", **data.get("env", {})}
    settled, opened = settle_env(parse_config(data, env))
    assert opened is not None
    async with (
        open_run_context(settled, run_id="guests", concurrency=1024) as context,
        open_host(opened.section) as hosted,
    ):
        yield Guests(context, hosted, opened)
