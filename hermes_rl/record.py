"""The row of one attempt: the columns of DESIGN 5.4, in their order.

`hermes_rl.store.schema` declares the same in Arrow, and a test holds the two together. JSON columns
are
JSON text here.
"""

from __future__ import annotations

import msgspec

from hermes_rl.events import RewardPart
from hermes_rl.usage import UsageTotal


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    pass


class MessageInfo(_Part, frozen=True, kw_only=True):
    """What `messages` does not say about one message."""

    role: str
    turn: int
    context: int
    synthetic: bool
    tool_name: str | None
    tool_ok: bool | None
    chars: int
    raw_content: str | None
    raw_arguments: list[str] | None
    reasoning_details: str | None


class Call(_Part, frozen=True, kw_only=True):
    """One model call."""

    call_id: str
    turn: int
    purpose: str
    agent: str
    model: str
    finish_reason: str | None
    input_tokens: int | None
    cache_read_tokens: int | None
    cache_write_tokens: int | None
    output_tokens: int | None
    reasoning_tokens: int | None
    cost_usd: float | None
    latency_s: float | None
    retries: int
    request_id: str | None
    outcome: str
    error: str | None
    started_at: int
    """Unix time, microseconds."""
    policy_version: str | None
    usage_raw: str | None


class ToolStat(_Part, frozen=True, kw_only=True):
    """One tool's use over a rollout."""

    tool: str
    calls: int
    ok: int
    errors: int
    seconds: float


class Timing(_Part, frozen=True, kw_only=True):
    """Where the time went, in seconds; waiting is limiter and retry sleeps."""

    queued_s: float
    sandbox_s: float
    model_s: float
    tool_s: float
    waiting_s: float
    verify_s: float
    total_s: float


class Context(_Part, frozen=True, kw_only=True):
    """What one context saw."""

    start: int
    kept: list[int]
    summary_index: int | None
    reason: str


class Image(_Part, frozen=True, kw_only=True):
    """An image that messages refer to, in order."""

    bytes: bytes | None
    path: str | None


class SandboxRecord(_Part, frozen=True, kw_only=True):
    """The sandbox that was given; `limits` is JSON text of the limits in force."""

    backend: str
    image: str | None
    digest: str | None
    limits: str


class Trajectory(_Part, frozen=True, kw_only=True):
    """One row: the columns of DESIGN 5.4, in order."""

    task_id: str
    repeat: int
    status: str
    """ok (trajectories), failed or cancelled (failures)."""
    reward: float | None
    end_reason: str
    truncated: bool
    turns: int
    task_prompt: str
    """The task's last user text. Not `prompt`: SFT trainers would take that for theirs."""
    final_response: str | None
    messages: list[str]
    message_info: list[MessageInfo]
    tools: str
    usage: UsageTotal
    cost_usd: float | None
    unpriced_calls: int
    rewards: list[RewardPart]
    metrics: dict[str, float]
    calls: list[Call]
    tool_call_count: int
    tool_stats: list[ToolStat]
    timing: Timing
    error: str | None
    owner: str
    cause: str | None
    contexts: list[Context]
    image_data: list[Image]
    """Not named `images`, for the same reason."""
    model: str
    served_models: list[str]
    api_mode: str
    endpoint: str
    toolsets: list[str]
    sampling: str
    seed: int
    sandbox: SandboxRecord | None
    started_at: int
    """Unix time, microseconds."""
    finished_at: int
    split: str | None
    env_name: str | None
    metadata: str
    trajectory_id: str
    unit_id: str
    group_id: str
    member: int
    attempt: int
    run_id: str
    task_hash: str
    config_hash: str
    row_index: int
    root_trajectory_id: str
    parent_trajectory_id: str | None
    parent_call_id: str | None
    prompt_sha256: str | None

    @property
    def table(self) -> str:
        """The table that this row belongs to."""
        return "trajectories" if self.status == "ok" else "failures"
