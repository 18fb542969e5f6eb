"""What happens around the agent in one rollout: a task alone, or an environment's episode.

`rollout` asks an `Episode` for tools, for what comes before the first call, for a user's replies
and for the reward. `TaskEpisode` is a plain task: no tools, nobody replies, its verifier judges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hermes_rl.agent.parts import AgentResult
from hermes_rl.events import Event, Graded
from hermes_rl.messages import Message
from hermes_rl.models.limits.budget import Budget
from hermes_rl.ports import Recorder, WorkItem
from hermes_rl.sandboxes.base import Sandbox
from hermes_rl.tasks import Task
from hermes_rl.tools.base import Tool
from hermes_rl.verify import verify
from hermes_rl.wiring import Workshop


@dataclass
class Tape:
    """Records events and keeps them for the fold."""

    recorder: Recorder
    events: list[Event] = field(default_factory=list)

    def record(self, event: Event) -> None:
        """Journal first, keep second: what the row says is in the journal."""
        self.recorder.record(event)
        self.events.append(event)


@dataclass(frozen=True)
class Stage:
    """One attempt, before it begins."""

    workshop: Workshop
    item: WorkItem
    task: Task
    tape: Tape
    budget: Budget | None = None
    """What the attempt may spend, on all models together."""


class Episode(Protocol):
    """One rollout's surroundings. Made for one attempt and used by it alone."""

    @property
    def env_name(self) -> str | None:
        """For the row."""
        ...

    @property
    def replies(self) -> bool:
        """Somebody may reply to an answer."""
        ...

    @property
    def sandboxed(self) -> bool:
        """The rollout has a sandbox."""
        ...

    def tools(self) -> Mapping[str, Tool]:
        """Tools beside those of the toolsets, by name. Raises: TaskFault."""
        ...

    def tool_state(self) -> dict[str, Any]:
        """What tools find as `ToolContext.env`."""
        ...

    async def start(self, sandbox: Sandbox | None) -> None:
        """After the task's setup, before the first call. Raises: HermesError."""
        ...

    async def reply(self, messages: Sequence[Message]) -> Message | None:
        """What the user says to an answer; None ends the rollout. Raises: HermesError."""
        ...

    async def grade(self, sandbox: Sandbox | None, result: AgentResult) -> Graded:
        """The reward; may end the agent's session. Raises: VerifierFault and other HermesErrors."""
        ...


MakeEpisode = Callable[[Stage], Episode]
"""Makes an attempt's episode. Raises: HermesError."""


@dataclass(frozen=True)
class TaskEpisode:
    """A task of a dataset."""

    task: Task
    env_name: str | None = None
    replies: bool = False
    sandboxed: bool = True

    def tools(self) -> Mapping[str, Tool]:
        """See `Episode`."""
        return {}

    def tool_state(self) -> dict[str, Any]:
        """See `Episode`."""
        return {}

    async def start(self, sandbox: Sandbox | None) -> None:
        """See `Episode`."""

    async def reply(self, messages: Sequence[Message]) -> Message | None:
        """See `Episode`."""
        return None

    async def grade(self, sandbox: Sandbox | None, result: AgentResult) -> Graded:
        """See `Episode`."""
        assert sandbox is not None
        return await verify(sandbox, self.task.verify)


def task_episode(stage: Stage) -> Episode:
    """The episode of a plain task."""
    return TaskEpisode(stage.task)
