"""What an environment's methods may use for one rollout."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

from hermes_rl.errors import UserError
from hermes_rl.rl.grading import Grading
from hermes_rl.rl.judging import Judge, ModelHandle
from hermes_rl.sandboxes.base import Sandbox

P = ParamSpec("P")
T = TypeVar("T")


class CpuPool(Protocol):
    """Runs functions in other processes (`hermes_rl.rl.cpu.Pool`)."""

    async def run(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> Any:
        """See `RolloutContext.cpu`."""
        ...


@dataclass
class RolloutContext:
    """One rollout's seed, state and helpers.

    Which helpers there are depends on the method: `sandbox` in `start`, `grading` in
    `compute_reward`, `judge` and `user` wherever the run names such a model.
    """

    seed: int
    """Of this rollout: a function of the run's seed, the task and the place in the group."""
    split: str
    position: int
    """0-based place of the task in its stream."""
    member: int = 0
    """0-based place in the group."""
    state: dict[str, Any] = field(default_factory=dict)
    """Of this rollout alone; tools find it as `ToolContext.env`. Keep it plain (JSON), so that a
    stored rollout can be graded again."""
    _sandbox: Sandbox | None = field(default=None, repr=False)
    _grading: Grading | None = field(default=None, repr=False)
    _judge: Judge | None = field(default=None, repr=False)
    _user: ModelHandle | None = field(default=None, repr=False)
    _pool: CpuPool | None = field(default=None, repr=False)
    _rng: random.Random | None = field(default=None, repr=False)

    @property
    def rng(self) -> random.Random:
        """Random numbers of this rollout: the same at every attempt and on every machine. Those of
        `compute_reward` are a series of their own, the same in a regrade."""
        if self._rng is None:
            self._rng = random.Random(self.seed)
        return self._rng

    @property
    def sandbox(self) -> Sandbox:
        """The agent's own sandbox. Raises: UserError outside `start`, and without a sandbox."""
        if self._sandbox is None:
            raise UserError(
                "ctx.sandbox is there in start() alone, and with `sandboxed`; compute_reward has "
                "ctx.grading"
            )
        return self._sandbox

    @property
    def grading(self) -> Grading:
        """The workspace that the agent left, in grading boxes. Raises: UserError outside
        `compute_reward`."""
        if self._grading is None:
            raise UserError("ctx.grading is there in compute_reward() alone, and with `sandboxed`")
        return self._grading

    @property
    def judge(self) -> Judge:
        """The model that judges. Raises: UserError when the run names none."""
        if self._judge is None:
            raise UserError("the run names no judge: set env.judge.name, and put 'judge' in `uses`")
        return self._judge

    @property
    def user(self) -> ModelHandle:
        """The model that plays the user. Raises: UserError when the run names none."""
        if self._user is None:
            raise UserError("the run names no user: set env.user.name, and put 'user' in `uses`")
        return self._user

    async def cpu(self, function: Callable[..., T], *args: Any, timeout_s: float = 120.0) -> T:
        """Call a function of a module in another process, so that the rollouts here go on.

        Args:
            function: found again by module and name; no lambda, no method, nothing local.
            args: what pickles.
            timeout_s: seconds of running; its process is ended then.

        Raises: CannotJudge when the process died or ran too long; the function's own exceptions.
        """
        if self._pool is None:
            raise UserError("ctx.cpu has no processes here")
        found: T = await self._pool.run(function, *args, timeout_s=timeout_s)
        return found
