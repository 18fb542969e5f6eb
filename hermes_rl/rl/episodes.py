"""An environment's part in one rollout: the `Episode` that `rollout` asks."""

from __future__ import annotations

import asyncio
import copy
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hermes_rl.agent.parts import AgentResult, Caller
from hermes_rl.config_env import EnvSection, ModelPlace
from hermes_rl.definitions import sent_seed
from hermes_rl.episode import Stage, Tape
from hermes_rl.errors import (
    CannotJudge,
    HermesError,
    TaskFault,
    ToolError,
    UserError,
    VerifierFault,
)
from hermes_rl.events import CallStarted, Graded
from hermes_rl.messages import Message, UserMessage
from hermes_rl.models.base import Sampling
from hermes_rl.rl import faults
from hermes_rl.rl.context import RolloutContext
from hermes_rl.rl.cpu import Pool
from hermes_rl.rl.environment import Environment
from hermes_rl.rl.grading import Grading
from hermes_rl.rl.judging import Judge, ModelHandle
from hermes_rl.rl.loading import AnyEnvironment
from hermes_rl.rl.opening import Opened, open_environment, tools_of
from hermes_rl.rl.rewards import Rewards, settled
from hermes_rl.rl.view import Rollout
from hermes_rl.sandboxes.base import Sandbox
from hermes_rl.tools.base import Tool, ToolContext, ToolResult
from hermes_rl.verify import BOXES

T = TypeVar("T")


@dataclass(frozen=True)
class Host:
    """An environment as one process has it: set up, with its processes; makes episodes."""

    opened: Opened
    pool: Pool

    @property
    def env(self) -> AnyEnvironment:
        """The environment."""
        return self.opened.env

    def episode(self, stage: Stage) -> EnvEpisode:
        """The episode of one attempt (`hermes_rl.episode.MakeEpisode`)."""
        return EnvEpisode(self, stage)

    def context(self, stage: Stage) -> RolloutContext:
        """A context without sandbox and grading; judge and user record on the stage's tape."""
        section, item = self.opened.section, stage.item
        judge = user = None
        if section.judge is not None:
            judge = Judge(section.judge.name, "judge", *_calls("judge", section.judge, stage))
        if section.user is not None:
            user = ModelHandle(section.user.name, "user", *_calls("user", section.user, stage))
        return RolloutContext(
            seed=item.seed,
            split=section.split,
            position=int(stage.task.metadata.get("position", item.row_index)),
            member=item.repeat,
            _judge=judge,
            _user=user,
            _pool=self.pool,
        )


def _calls(
    purpose: str, place: ModelPlace, stage: Stage
) -> tuple[Caller, Sampling, Callable[[], int]]:
    """What a handle of one rollout calls with."""
    sampling = Sampling(
        temperature=place.temperature,
        top_p=place.top_p,
        max_tokens=place.max_tokens,
        reasoning=place.reasoning,
        seed=sent_seed(stage.workshop.config, stage.item.seed),
    )
    tape = stage.tape
    caller = stage.workshop.other_caller(purpose, tape, place.name, stage.budget)
    return caller, sampling, lambda: _turn(tape)


def _turn(tape: Tape) -> int:
    """The rollout's turn now, as its calls say."""
    turns = (
        e.turn for e in reversed(tape.events) if isinstance(e, CallStarted) and e.purpose == "agent"
    )
    return next(turns, 0)


OpensHost = Callable[[EnvSection], AbstractAsyncContextManager[Host]]
"""`open_host`, or what shares one that is open."""


@asynccontextmanager
async def open_host(section: EnvSection) -> AsyncIterator[Host]:
    """An environment for the rollouts of this process: loaded and set up.

    Raises: UserError when its code cannot be loaded, or `setup` fails.
    """
    opened = await asyncio.to_thread(open_environment, section)
    env = opened.env
    try:
        await env.setup()
    except HermesError:
        raise
    except Exception as error:  # a boundary: code of the user's
        raise UserError(faults.said(env.name, env.setup, error)) from error
    async with Pool(section.cpu_workers, opened.loaded.modules) as pool:
        yield Host(opened, pool)


class EnvEpisode:
    """See `hermes_rl.episode.Episode`. One attempt's."""

    def __init__(self, host: Host, stage: Stage) -> None:
        self.ctx = host.context(stage)
        self._env, self._task, self._tape = host.env, stage.task, stage.tape
        # Without a reply of its own an environment is not asked for one.
        self._replies = type(host.env).reply is not Environment.reply

    @property
    def env_name(self) -> str:
        """See `Episode`."""
        return self._env.name

    @property
    def replies(self) -> bool:
        """See `Episode`."""
        return self._replies

    @property
    def sandboxed(self) -> bool:
        """See `Episode`."""
        return self._env.config.sandboxed

    def tools(self) -> Mapping[str, Tool]:
        """See `Episode`."""
        try:
            own = tools_of(self._env, self._task)
        except UserError as error:
            raise TaskFault(str(error)) from error
        # Where there are no sandboxes, its own tools do not need one, whatever their default says.
        return {
            name: replace(
                t, handler=_guarded(self._env, t), needs_sandbox=t.needs_sandbox and self.sandboxed
            )
            for name, t in own.items()
        }

    def tool_state(self) -> dict[str, Any]:
        """See `Episode`."""
        return self.ctx.state

    async def start(self, sandbox: Sandbox | None) -> None:
        """See `Episode`."""
        self.ctx._sandbox = sandbox
        try:
            await theirs(self._env, self._env.start, TaskFault, self._task, self.ctx)
        finally:
            self.ctx._sandbox = None

    async def reply(self, messages: Sequence[Message]) -> Message | None:
        """See `Episode`."""
        env = self._env
        so_far = Rollout.of_events(self._tape.events)
        said = await theirs(env, env.reply, TaskFault, self._task, so_far, self.ctx)
        if said is None or isinstance(said, UserMessage):
            return said
        if isinstance(said, str):
            return UserMessage(content=said)
        what = f"returned {type(said).__name__}; return a text, a UserMessage or None"
        raise TaskFault(faults.wrong(env.name, env.reply, what))

    async def grade(self, sandbox: Sandbox | None, result: AgentResult) -> Graded:
        """See `Episode`."""
        rollout = Rollout.of_events(
            self._tape.events,
            final_response=result.final_response,
            end_reason=result.end_reason,
            metrics=result.metrics,
        )
        return await self.judge(sandbox, rollout)

    async def judge(self, sandbox: Sandbox | None, rollout: Rollout) -> Graded:
        """The reward of a rollout over the workspace in a sandbox.

        An environment that cannot judge is asked again on the same workspace and state, as often as
        a verifier gets boxes; what stands behind it was asked so often already (`NoVerdict`).

        Raises: VerifierFault and other HermesErrors.
        """
        began, noted = time.monotonic(), _copied(self.ctx.state)
        for _ in range(BOXES - 1):
            try:
                return await self._judged(sandbox, rollout, began)
            except CannotJudge as fault:
                if isinstance(fault, faults.NoVerdict) or noted is None:
                    raise
                self.ctx.state.clear()
                self.ctx.state.update(copy.deepcopy(noted))
        return await self._judged(sandbox, rollout, began)

    async def _judged(self, sandbox: Sandbox | None, rollout: Rollout, began: float) -> Graded:
        env = self._env
        self.ctx._grading = None if sandbox is None else Grading(sandbox)
        # A series of its own, however much was drawn before: a regrade begins here.
        self.ctx._rng = random.Random(f"{self.ctx.seed} graded")
        given = await theirs(env, env.compute_reward, VerifierFault, self._task, rollout, self.ctx)
        rewards = checked(env, env.compute_reward, given, rollout.turns)
        return Graded(
            reward=rewards.total,
            rewards=rewards.parts,
            metrics=dict(rewards.metrics),
            seconds=time.monotonic() - began,
        )


def _copied(state: dict[str, Any]) -> dict[str, Any] | None:
    """A state before it is judged; None for one that cannot be copied."""
    try:
        return copy.deepcopy(state)
    except Exception:  # a boundary: whatever an object of theirs raises when it is copied
        return None


def checked(env: AnyEnvironment, method: Callable[..., Any], given: object, turns: int) -> Rewards:
    """A reward as a method returned it. Raises: VerifierFault that names the method's place."""
    try:
        return settled(given, env.config.reward_range, turns)
    except VerifierFault as fault:
        raise VerifierFault(faults.wrong(env.name, method, str(fault))) from None


async def theirs(
    env: AnyEnvironment,
    method: Callable[..., Awaitable[T]],
    fault: type[HermesError],
    *args: Any,
) -> T:
    """Call a method of the environment's.

    Raises: `fault` for its bugs, with their place; errors of ours as they are (a bad argument to
        something of ours counts as a bug), cancellation too.
    """
    try:
        return await method(*args)
    except UserError as error:
        raise fault(faults.said(env.name, method, error)) from error
    except HermesError:
        raise
    except Exception as error:  # a boundary: code of the user's
        raise fault(faults.said(env.name, method, error)) from error


def _guarded(
    env: AnyEnvironment, own: Tool
) -> Callable[[ToolContext, dict[str, Any]], Awaitable[ToolResult]]:
    """The tool's handler, whose bugs are faults of the task and no marks for the model."""

    async def handler(ctx: ToolContext, arguments: dict[str, Any]) -> ToolResult:
        try:
            result = await own.handler(ctx, arguments)
        except (ToolError, HermesError):
            raise
        except Exception as error:  # a boundary: code of the user's
            raise TaskFault(faults.said(env.name, own.handler, error)) from error
        if isinstance(result, str):
            return ToolResult(text=result)
        if not isinstance(result, ToolResult):
            what = f"returned {type(result).__name__}; return ToolResult(text=...)"
            raise TaskFault(faults.wrong(env.name, own.handler, what))
        return result

    return handler
