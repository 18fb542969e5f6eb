"""The contract of an environment: tasks, tools, a conversation partner, rewards (DESIGN 5.13)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar

from pydantic import Field, model_validator

from hermes_rl.config import NetworkSetting
from hermes_rl.config_agent import LimitsSection
from hermes_rl.config_endpoint import Positive, Section
from hermes_rl.errors import UserError
from hermes_rl.messages import Message
from hermes_rl.rl.context import RolloutContext
from hermes_rl.rl.policy_calls import PolicyCalls
from hermes_rl.rl.rewards import Rewards
from hermes_rl.rl.view import Rollout
from hermes_rl.tasks import Task, parse_row
from hermes_rl.tools import Tool

if TYPE_CHECKING:
    from hermes_rl.store import Run

Finite = Annotated[float, Field(allow_inf_nan=False)]
Uses = Literal["judge", "user"]
Metrics = dict[str, float]


class EnvConfig(Section):
    """The configuration of an environment. Subclasses add keys; unknown ones are refused.

    All of it is identity. The keys below are defaults for those of the run (`sandbox.image`,
    `agent.toolsets`, ...).
    """

    image: str | None = None
    """Root of the sandbox; None is the default."""
    network: NetworkSetting = False
    sandboxed: bool = True
    """False starts no sandbox, for rollouts that need neither commands nor files. There are no
    toolsets then, and no `ctx.sandbox` and `ctx.grading`."""
    toolsets: tuple[str, ...] | None = None
    """Toolsets beside the environment's own tools; () is none. None is `terminal` and `file`, and
    none without a sandbox."""
    system_prompt: str | None = None
    """None is the preset's."""
    group_size: Positive = 4
    """Rollouts of one task that are compared with each other; 1 in `evaluate`."""
    limits: LimitsSection | None = None
    reward_range: tuple[Finite, Finite] = (0.0, 1.0)
    """Least and greatest total of a rollout; any other total is a fault of the environment."""

    @model_validator(mode="after")
    def _refuse_range(self) -> Self:
        if self.reward_range[0] >= self.reward_range[1]:
            raise ValueError("reward_range takes two numbers, the smaller one first")
        return self


C = TypeVar("C", bound=EnvConfig)


class Environment(ABC, Generic[C]):
    """Base class. Subclasses define `name`, `tasks`, `compute_reward` and what else they need.

    One object per process serves all its rollouts at once: what belongs to one rollout goes into
    `ctx.state`, what `setup` makes is shared and only read.
    """

    name: ClassVar[str]
    Config: ClassVar[type[EnvConfig]] = EnvConfig
    endless: bool = False
    """`tasks` never ends: a run then needs `--limit`. If that depends on the configuration,
    set it in `__init__`."""
    splits: ClassVar[tuple[str, ...]] = ("train", "eval")
    """The splits that `tasks` knows."""
    uses: tuple[Uses, ...] = ()
    """Models that it calls beside the policy: `judge`, `user`. The run must name them. If that
    depends on the configuration, set it in `__init__`."""
    can_use: tuple[Uses, ...] = ()
    """Models that it calls if the run names them, and does without otherwise."""

    def __init__(self, config: C) -> None:
        self.config = config

    async def setup(self) -> None:
        """Run once per process, before every other method but `tasks`."""

    @abstractmethod
    def tasks(self, split: str, seed: int) -> Iterable[Task]:
        """Return the task stream: always the same tasks in the same order for the same arguments.

        May be endless. Only the driver reads it, lazily; a resumed run reads it again from the
        beginning and skips what is done. `make_task` makes a task.
        """

    def tools(self, task: Task) -> Sequence[Tool]:
        """Return the environment's own tools, beside `Config.toolsets`.

        Handlers find `ctx.state` of the rollout in `ToolContext.env`.
        """
        return ()

    async def start(self, task: Task, ctx: RolloutContext) -> None:
        """Prepare a rollout before its first call: fill `ctx.state`, with `ctx.rng`.

        `ctx.sandbox` has the task's files, and its setup has run.
        """

    async def play(self, task: Task, policy: PolicyCalls, ctx: RolloutContext) -> None:
        """Run the episode in place of the agent: `policy.complete` calls the model.

        For environments with a loop of their own. Tools, `reply`, checkpoints and the limits of
        the agent's time do not apply; `max_turns` and `max_tokens` do.

        Raises: LimitReached of `policy.complete`, after which `compute_reward` is called.
        """
        raise NotImplementedError

    async def reply(
        self, task: Task, trajectory: Rollout, ctx: RolloutContext
    ) -> Message | str | None:
        """Return the user's reply to an answer; None ends the rollout."""
        return None

    @abstractmethod
    async def compute_reward(
        self, task: Task, trajectory: Rollout, ctx: RolloutContext
    ) -> float | Rewards:
        """Return the reward of a finished rollout.

        As a plain `def` it runs in a process of its own, without `ctx.grading`, `ctx.judge` and
        `ctx.user`, and can be killed at its time limit.

        The agent's processes are dead; `ctx.grading` works on what they left.

        Raises: CannotJudge for a fault of the verifier. The method is called again twice, with the
            same `ctx.state` and `ctx.rng`; then the attempt is not a member of its group. Any other
            exception is such a fault too, without further calls.
        """

    async def score_group(
        self, task: Task, members: Sequence[Rollout], ctx: RolloutContext
    ) -> Sequence[float | Rewards] | None:
        """Return the rewards of a whole group, in the order of `members`.

        None keeps those of `compute_reward`.
        """
        return None

    async def close(self) -> None:
        """Give back what `setup` took: once per process, after its last rollout.

        Also called after errors, interrupts, and a `setup` that failed. It may take 30 s; what it
        raises is logged.
        """

    async def evaluate(self, run: Run) -> Metrics:
        """Return metrics of a finished run over the split `eval`, empty by default.

        metrics.json has them beside those of `hermes_rl.evals.summary`.
        """
        return {}


def make_task(prompt: str | Sequence[Mapping[str, Any]], **columns: Any) -> Task:
    """Make a task from the columns of a dataset row (DESIGN 5.1).

        make_task("What is 2 + 3?", id="add-1", answer=5, oracle='["5"]')

    Args:
        prompt: text, or OpenAI messages that end with the user's.
        columns: `id`, `files`, `setup`, `verify`, `oracle`, `toolsets`, ...; other columns go to
            `task.metadata`.

    Raises: UserError for a column that does not fit.
    """
    row = parse_row({"prompt": prompt, **columns}, 0, "make_task")
    if row.task is None:
        raise UserError(f"make_task: {row.error}")
    return row.task
