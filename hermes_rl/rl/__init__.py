"""RL environments: tasks, tools, conversation partners and rewards (DESIGN 5.13).

    from hermes_rl.rl import EnvConfig, Environment, make_task

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.errors import CannotJudge, ToolError
    from hermes_rl.events import RewardPart
    from hermes_rl.judging import (
        NO_COMMITMENT,
        Judge,
        ModelHandle,
        Verdict,
        judge_prompt,
        parse_verdict,
    )
    from hermes_rl.messages import AssistantMessage, Message, UserMessage
    from hermes_rl.rl import faults
    from hermes_rl.rl.advantages import EPSILON, dr_grpo, grpo, mean, rloo, std
    from hermes_rl.rl.atropos.delivery import rescale
    from hermes_rl.rl.atropos.packing import Packable, fill_group, form_batch
    from hermes_rl.rl.atropos.queue import ApiLimits, NewGroup, TrajectoryQueue
    from hermes_rl.rl.atropos.server import ApiOptions, run_api
    from hermes_rl.rl.atropos.serving import ServeOptions, serve_groups
    from hermes_rl.rl.context import Grading, RolloutContext, ScriptResult
    from hermes_rl.rl.cpu import Pool
    from hermes_rl.rl.environment import EnvConfig, Environment, make_task
    from hermes_rl.rl.episodes import Host, open_host
    from hermes_rl.rl.evaluation import SUMMARY_METRICS, write_evaluation
    from hermes_rl.rl.feed import Row, RowFeed, make_rows
    from hermes_rl.rl.groups import (
        INTERRUPTED,
        SCORED_AT_ONCE,
        Gathered,
        Member,
        MembersOf,
        Scoring,
        due_groups,
        gather,
        group_report,
        make_group,
    )
    from hermes_rl.rl.live import (
        LiveGroup,
        LiveMember,
        LiveOptions,
        Policy,
        RolloutsStopped,
        RolloutStream,
        SyncGroup,
        make_live_group,
        rollouts,
    )
    from hermes_rl.rl.loading import (
        Opened,
        env_rows,
        hashed,
        known_environments,
        load_environment,
        settle_env,
    )
    from hermes_rl.rl.openenv import parse_action
    from hermes_rl.rl.openenv_server import open_openenv_server
    from hermes_rl.rl.rewards import Rewards, check_rewards, part
    from hermes_rl.rl.scoring import (
        Grader,
        ReadyGroup,
        StoredRollout,
        TaskLookup,
        open_grader,
        scores_groups,
        without_policy,
    )
    from hermes_rl.rl.selection import Curriculum, Difficulty, Selection, solve_rate
    from hermes_rl.rl.staleness import STALENESS, Staleness, compare_delivered, mask_segment
    from hermes_rl.rl.template import write_environment
    from hermes_rl.rl.trial import arun_trial, first_tasks, rewards_of, run_trial
    from hermes_rl.rl.trl_environments import TrlEnvironments
    from hermes_rl.rl.view import Rollout, ToolUse
    from hermes_rl.tasks import Task, Verify
    from hermes_rl.tools import Tool, ToolContext, ToolResult, tool
else:
    __getattr__, __dir__ = attach(__name__)
