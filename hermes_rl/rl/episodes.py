"""An environment's part in one rollout: the `Episode` that `rollout` calls."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hermes_rl.agent import AgentParts, AgentResult, Caller, Control
from hermes_rl.config_endpoint import EnvSection, ModelPlace
from hermes_rl.definitions import sampling_of, sent_seed
from hermes_rl.errors import (
    CannotJudge,
    HermesError,
    NoVerdict,
    TaskFault,
    UserError,
    VerifierFault,
)
from hermes_rl.events import CallStarted, Graded
from hermes_rl.judging import Judge, ModelHandle
from hermes_rl.messages import Message, UserMessage, conversation_from_openai, to_openai
from hermes_rl.models import Sampling
from hermes_rl.rl import faults
from hermes_rl.rl.blocking import Blocked, limit_steps
from hermes_rl.rl.context import Grading, RolloutContext
from hermes_rl.rl.cpu import Pool, RanTooLong
from hermes_rl.rl.environment import Environment
from hermes_rl.rl.loading import AnyEnvironment, Opened, open_environment, tools_of
from hermes_rl.rl.policy_calls import LimitReached, PolicyCalls
from hermes_rl.rl.rewards import Rewards, check_rewards
from hermes_rl.rl.view import Rollout
from hermes_rl.rollout import Episode, Stage
from hermes_rl.sandboxes import Sandbox
from hermes_rl.tools import Tool, ToolContext, ToolResult
from hermes_rl.verify import BOXES

T = TypeVar("T")

_log = logging.getLogger(__name__)

CLOSE_S = 30.0
"""Limit of an environment's `close`."""


@dataclass(frozen=True)
class Host:
    """An environment in one process: set up, with its CPU pool; makes episodes."""

    opened: Opened
    pool: Pool

    @property
    def env(self) -> AnyEnvironment:
        """The environment."""
        return self.opened.env

    def episode(self, stage: Stage) -> EnvEpisode:
        """Make the episode of one attempt (`hermes_rl.rollout.MakeEpisode`)."""
        return EnvEpisode(self, stage)

    def context(self, stage: Stage) -> RolloutContext:
        """Make a context without sandbox and grading; judge and user record to the stage's log."""
        section, item = self.opened.section, stage.item
        judge = user = None
        if (place := section.judge) is not None:
            judge = Judge(place.name, "judge", *_calls("judge", place, stage))
        if (place := section.user) is not None:
            user = ModelHandle(place.name, "user", *_calls("user", place, stage))
        return RolloutContext(
            seed=item.seed,
            split=section.split,
            position=int(stage.task.metadata.get("position", item.row_index)),
            member=item.repeat,
            _judge=judge,
            _user=user,
            _cpu=self.pool.run,
        )


def _calls(
    purpose: str, place: ModelPlace, stage: Stage
) -> tuple[Caller, Sampling, Callable[[], int]]:
    """Return what a model handle of one rollout calls with, and the rollout's current turn."""
    sampling = sampling_of(place, sent_seed(stage.context.config, stage.item.seed))

    def turn() -> int:
        for event in reversed(stage.log.events):
            if isinstance(event, CallStarted) and event.purpose == "agent":
                return event.turn
        return 0

    caller = stage.context.other_caller(purpose, stage.log, place.name, stage.budget)
    return caller, sampling, turn


OpensHost = Callable[[EnvSection], AbstractAsyncContextManager[Host]]
"""`open_host`, or a function that shares an open host."""


@asynccontextmanager
async def open_host(section: EnvSection) -> AsyncIterator[Host]:
    """Load an environment and set it up for the rollouts of this process.

    Raises: UserError when its code cannot be loaded, or `setup` fails.
    """
    opened = await asyncio.to_thread(open_environment, section)
    env = opened.env
    try:
        with faults.user_code(env.name, env.setup, UserError):
            await env.setup()
        async with Pool(section.cpu_workers, opened.loaded.modules) as pool:
            yield Host(opened, pool)
    finally:
        await _close(env)


async def _close(env: AnyEnvironment) -> None:
    """Call the environment's `close`. The rollouts are over: what it raises is only logged."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await env.close()
    except TimeoutError:
        what = f"ran for more than {CLOSE_S:g} s"
        _log.warning("%s", faults.describe_misuse(env.name, env.close, what))
    except Exception as error:  # a boundary: user code
        _log.warning("%s", faults.describe_error(env.name, env.close, error))


class EnvEpisode(Episode):
    """The episode of one attempt at an environment's task."""

    def __init__(self, host: Host, stage: Stage) -> None:
        super().__init__(stage)
        self.ctx = host.context(stage)
        self._host, self._env, self._task, self._log = host, host.env, stage.task, stage.log
        self.env_name = host.env.name
        self.sandboxed = host.env.config.sandboxed
        # `reply` is not called if the environment does not override it.
        self.replies = type(host.env).reply is not Environment.reply

    def tools(self) -> Mapping[str, Tool]:
        """Return the environment's tools, with handlers whose bugs are faults of the task."""
        try:
            env_tools = tools_of(self._env, self._task)
        except UserError as error:
            raise TaskFault(str(error)) from error
        # If there is no sandbox, tools of the environment cannot need one, whatever their default.
        return {
            name: replace(
                t,
                handler=_guarded(self._env, t),
                needs_sandbox=t.needs_sandbox and bool(self.sandboxed),
            )
            for name, t in env_tools.items()
        }

    def tool_state(self) -> dict[str, Any]:
        """Return `ctx.state`."""
        return self.ctx.state

    async def start(self, sandbox: Sandbox | None) -> None:
        """Call the environment's `start`."""
        self.ctx._sandbox = sandbox
        try:
            await call_method(self._env, self._env.start, TaskFault, self._task, self.ctx)
        finally:
            self.ctx._sandbox = None

    async def run(
        self, parts: AgentParts, prompt: Sequence[Message], control: Control
    ) -> AgentResult:
        """Run the agent, or call the environment's `play`."""
        env = self._env
        if type(env).play is Environment.play:
            return await super().run(parts, prompt, control)
        policy = PolicyCalls(parts)
        with control.scope(), suppress(LimitReached):
            try:
                playing = call_method(env, env.play, TaskFault, self._task, policy, self.ctx)
                await policy.run(playing)
            finally:
                await policy.close()
        return policy.result()

    async def reply(self, messages: Sequence[Message]) -> Message | None:
        """Call the environment's `reply`."""
        env = self._env
        so_far = Rollout.of_events(self._log.events)
        reply = await call_method(env, env.reply, TaskFault, self._task, so_far, self.ctx)
        if isinstance(reply, str):
            reply = UserMessage(content=reply)
        if reply is None:
            return None
        if isinstance(reply, UserMessage):
            (sent,) = conversation_from_openai([to_openai(reply)])  # without lone surrogates
            return sent
        what = f"returned {type(reply).__name__}; return a text, a UserMessage or None"
        raise TaskFault(faults.describe_misuse(env.name, env.reply, what))

    async def grade(self, sandbox: Sandbox | None, result: AgentResult) -> Graded:
        """Call the environment's `compute_reward`."""
        rollout = Rollout.of_events(
            self._log.events,
            final_response=result.final_response,
            end_reason=result.end_reason,
            metrics=result.metrics,
        )
        return await self.judge(sandbox, rollout)

    async def judge(self, sandbox: Sandbox | None, rollout: Rollout) -> Graded:
        """Compute the reward of a rollout over the workspace in a sandbox.

        After `CannotJudge` the environment grades again with the same workspace and state, as often
        as a verifier gets sandboxes. After `NoVerdict` it does not: all attempts are used.

        Raises: VerifierFault and other HermesErrors.
        """
        began, saved = time.monotonic(), _copy(self.ctx.state)
        for _ in range(BOXES - 1):
            try:
                return await self._judge_once(sandbox, rollout, began)
            except CannotJudge as fault:
                if isinstance(fault, NoVerdict) or saved is None:
                    raise
                self.ctx.state.clear()
                self.ctx.state.update(copy.deepcopy(saved))
        return await self._judge_once(sandbox, rollout, began)

    async def _judge_once(self, sandbox: Sandbox | None, rollout: Rollout, began: float) -> Graded:
        env = self._env
        self.ctx._grading = None if sandbox is None else Grading(sandbox)
        # A series of its own, however much was drawn before: a regrade starts from it too.
        self.ctx._rng = random.Random(f"{self.ctx.seed} graded")
        method = env.compute_reward
        value = await call_reward(self._host, method, self.ctx, self._task, rollout)
        rewards = check_reward(env, method, value, rollout.turns)
        return Graded(
            reward=rewards.total,
            rewards=rewards.parts,
            metrics=dict(rewards.metrics),
            seconds=time.monotonic() - began,
        )


def _copy(state: dict[str, Any]) -> dict[str, Any] | None:
    """Copy a state; None for one that cannot be copied."""
    try:
        return copy.deepcopy(state)
    except Exception:  # a boundary: user objects may raise anything
        return None


def check_reward(
    env: AnyEnvironment, method: Callable[..., Any], value: object, turns: int
) -> Rewards:
    """Check a reward that a method returned. Raises: VerifierFault that names the method."""
    try:
        return check_rewards(value, env.config.reward_range, turns)
    except VerifierFault as fault:
        raise VerifierFault(faults.describe_misuse(env.name, method, str(fault))) from None


async def call_method(
    env: AnyEnvironment,
    method: Callable[..., Awaitable[T]],
    fault: type[HermesError],
    *args: Any,
) -> T:
    """Call a method of the environment.

    Raises: `fault` for its bugs, with their place, a UserError included; other HermesErrors and
        cancellation unchanged.
    """
    with faults.user_code(env.name, method, fault, described=(UserError,)):
        return await method(*args)


async def call_reward(
    host: Host, method: Callable[..., Any], ctx: RolloutContext, *args: Any
) -> Any:
    """Call `compute_reward` or `score_group` with a time limit (`env.reward_seconds`).

    A plain function runs in a process, which is killed at the limit. An `async def` that blocks the
    event loop is interrupted where that is possible (`blocking`).

    Args:
        args: its arguments before `ctx`.

    Raises: NoVerdict when the limit is exceeded: a further call might take as long. Others as
        `call_method`.
    """
    env, limit_s = host.env, host.opened.section.reward_seconds
    try:
        if not inspect.iscoroutinefunction(inspect.unwrap(method)):
            with faults.user_code(env.name, method, VerifierFault, described=(UserError,)):
                return await _call_in_process(host, method.__name__, ctx, args)
        async with asyncio.timeout(limit_s):
            made = call_method(env, method, VerifierFault, *args, ctx)
            return await limit_steps(made, limit_s)
    except (TimeoutError, RanTooLong, Blocked):
        what = f"ran for more than {limit_s:g} s (env.reward_seconds)"
        raise NoVerdict(faults.describe_misuse(env.name, method, what)) from None


async def _call_in_process(
    host: Host, name: str, ctx: RolloutContext, args: tuple[Any, ...]
) -> Any:
    section = host.opened.section
    opened = section.model_dump_json(exclude_unset=True)
    plain = replace(ctx, _sandbox=None, _grading=None, _judge=None, _user=None, _cpu=None)
    value, state = await host.pool.run(
        run_reward, opened, name, args, plain,
        timeout_s=section.reward_seconds, prepare=(env_of_process, opened),
    )  # fmt: skip
    ctx.state.clear()
    ctx.state.update(state)
    return value


_of_process: dict[str, AnyEnvironment] = {}


def env_of_process(section: str) -> None:
    """Set an environment up for the rewards of a process of `Pool`, once.

    Args:
        section: `EnvSection` as JSON.
    """
    if section not in _of_process:
        env = open_environment(EnvSection.model_validate_json(section)).env
        asyncio.run(env.setup())
        _of_process[section] = env


def run_reward(
    section: str, name: str, args: tuple[Any, ...], ctx: RolloutContext
) -> tuple[Any, dict[str, Any]]:
    """Call a method of that environment; returns its value and the state."""
    return getattr(_of_process[section], name)(*args, ctx), ctx.state


def _guarded(
    env: AnyEnvironment, tool: Tool
) -> Callable[[ToolContext, dict[str, Any]], Awaitable[ToolResult]]:
    """Wrap a tool's handler so that its bugs are faults of the task, not of the model."""

    async def handler(ctx: ToolContext, arguments: dict[str, Any]) -> ToolResult:
        with faults.user_code(env.name, tool.handler, TaskFault):
            result = await tool.handler(ctx, arguments)
        if isinstance(result, str):
            return ToolResult(text=result)
        if not isinstance(result, ToolResult):
            what = f"returned {type(result).__name__}; return ToolResult(text=...)"
            raise TaskFault(faults.describe_misuse(env.name, tool.handler, what))
        return result

    return handler
