"""What one finished attempt leaves: the line of a `done` file."""

from __future__ import annotations

import msgspec

from hermes_rl.events import AttemptKey
from hermes_rl.record import Trajectory


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """One token-exact training segment: the columns of table `segments` (version 0), in order."""

    trajectory_id: str
    unit_id: str
    run_id: str
    task_id: str
    group_id: str
    member: int
    env_name: str | None
    agent_name: str
    branch_index: int
    n_branches: int
    branch_kind: str
    """main, compaction, subagent, retry or fork."""
    parent_branch: int | None
    fork_reason: str | None
    input_ids: list[int]
    loss_mask: list[bool]
    sampled_mask: list[bool]
    logprobs: list[float | None]
    """None where the token was not sampled."""
    logprobs_kind: str
    """sampling, raw, constrained or unknown."""
    turn_ids: list[int]
    version_ids: list[int]
    prompt_len: int
    n_sampled: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    finish_reasons: list[str]
    truncated: bool
    reward: float | None
    """At the time of the commit."""
    policy_version_min: str | None
    policy_version_max: str | None
    token_source: str
    """engine, bridged or retokenized."""
    tokenizer_hash: str | None
    template_hash: str | None
    model: str
    trainable: bool
    exclude_reason: str | None


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """All rows of one attempt: they become durable together."""

    key: AttemptKey
    row: Trajectory
    subagents: tuple[Trajectory, ...] = ()
    segments: tuple[Segment, ...] = ()
