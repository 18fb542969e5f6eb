"""The rows of one attempt: the columns of `trajectories`, `failures`, `subagents` and `segments`.

These structs are the only declaration of the columns. `hermes_rl.store.schema` derives the Arrow
schemas from their fields, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from hermes_rl.events import RewardPart
from hermes_rl.usage import Int64, UsageTotal

Float32 = Annotated[float, msgspec.Meta(extra={"arrow": "float32"})]
Json = Annotated[str, msgspec.Meta(extra={"arrow": "json"})]
"""JSON text; its column has the Arrow type `arrow.json`."""
Timestamp = Annotated[int, msgspec.Meta(extra={"arrow": "timestamp"})]
"""Microseconds since 1970, UTC."""
_Bytes = bytes  # within `Image` the name means its field


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    pass


class MessageInfo(_Part, frozen=True, kw_only=True):
    """Further facts about one message."""

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
    input_tokens: Int64 | None
    cache_read_tokens: Int64 | None
    cache_write_tokens: Int64 | None
    output_tokens: Int64 | None
    reasoning_tokens: Int64 | None
    cost_usd: float | None
    latency_s: float | None
    retries: int
    request_id: str | None
    outcome: str
    error: str | None
    started_at: Timestamp
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
    """Time by phase in seconds; `waiting_s` is spent in the limiter and before retries."""

    queued_s: float
    sandbox_s: float
    model_s: float
    tool_s: float
    waiting_s: float
    verify_s: float
    total_s: float


class Context(_Part, frozen=True, kw_only=True):
    """The messages of one context."""

    start: int
    kept: list[int]
    summary_index: int | None
    reason: str


class Image(_Part, frozen=True, kw_only=True):
    """An image that messages refer to, in order."""

    bytes: _Bytes | None
    path: str | None


class SandboxRecord(_Part, frozen=True, kw_only=True):
    """The sandbox that was used; `limits` holds the limits in force."""

    backend: str
    image: str | None
    digest: str | None
    limits: Json


class Segment(_Part, frozen=True, kw_only=True):
    """One branch of a rollout's tokens, as the model saw and sampled them.

    Lists have one entry per token, but for `finish_reasons`, `call_ids` and `call_starts`: one per
    call with sampled tokens here.
    """

    trajectory_id: str
    unit_id: str
    run_id: str
    task_id: str
    group_id: str
    member: int
    env_name: str | None
    agent_name: str
    branch_index: int
    """0 is where the main agent began."""
    n_branches: int
    """Of this rollout."""
    branch_kind: str
    """main, compaction, subagent, retry or fork."""
    parent_branch: int | None
    """The branch that it shares its beginning with."""
    fork_reason: str | None
    """A `ForkReason`; None for the first."""
    input_ids: list[int]
    loss_mask: list[bool]
    """Tokens to train in this row. A sampled token in several branches is trained in one of
    them."""
    sampled_mask: list[bool]
    """Tokens that the model sampled in this rollout."""
    logprobs: list[Float32 | None]
    """None where the token was not sampled, or (in rows that are not trainable) not known."""
    logprobs_kind: str
    """A `LogprobsKind`; unknown when calls differ."""
    turn_ids: list[int]
    """The turn of the call that sampled the token, or that came before it; 0 before the first."""
    version_ids: list[int]
    """The policy's version when the token was sampled, where it is a whole number; else -1."""
    prompt_len: int
    """Position of the first sampled token."""
    n_sampled: int
    temperature: float | None
    """This and the next three as sent with the trained calls; None when the server chose, or they
    differ."""
    top_p: float | None
    top_k: int | None
    min_p: float | None
    finish_reasons: list[str]
    """Empty text where the server gave none."""
    truncated: bool
    """Its last answer was cut, or the rollout was, here."""
    reward: float | None
    """At the time of the commit."""
    policy_version_min: str | None
    policy_version_max: str | None
    token_source: str
    """The worst of its calls': engine, bridged, retokenized."""
    tokenizer_hash: str | None
    template_hash: str | None
    model: str
    trainable: bool
    exclude_reason: str | None
    """Why it is not trainable: an `Exclusion`."""
    call_ids: list[str]
    """The calls whose answers are in this row, in order: `calls.call_id` of the trajectory."""
    call_starts: list[int]
    """The start of each of these answers, which ends at the next one, or at the next token that was
    not sampled."""


class Trajectory(_Part, frozen=True, kw_only=True):
    """One attempt."""

    task_id: str
    repeat: int
    status: str
    """ok (trajectories), failed or cancelled (failures)."""
    reward: float | None
    end_reason: str
    truncated: bool
    turns: int
    task_prompt: str
    """The last user text of the task. Not named `prompt`, which has a meaning for SFT trainers."""
    final_response: str | None
    messages: list[Json]
    message_info: list[MessageInfo]
    tools: Json
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
    sampling: Json
    seed: Int64
    sandbox: SandboxRecord | None
    started_at: Timestamp
    finished_at: Timestamp
    split: str | None
    env_name: str | None
    metadata: Json
    trajectory_id: str
    unit_id: str
    group_id: str
    member: int
    attempt: int
    run_id: str
    task_hash: str
    config_hash: str
    row_index: Int64
    root_trajectory_id: str
    parent_trajectory_id: str | None
    parent_call_id: str | None
    prompt_sha256: str | None

    @property
    def table(self) -> str:
        """The table that this row belongs to."""
        return "trajectories" if self.status == "ok" else "failures"


def replacements(row: Mapping[str, Any]) -> frozenset[int]:
    """Indices of the messages of a row that replaced earlier ones when a context was compressed:
    digests and summaries.

    Args:
        row: of `trajectories`, with the columns `contexts` and `message_info`.
    """
    starts = [context["start"] for context in row["contexts"] or ()]
    return frozenset(
        index
        for index, info in enumerate(row["message_info"])
        if info["synthetic"]
        and 0 < (info.get("context") or 0) < len(starts)
        and index < starts[info["context"]]
    )
