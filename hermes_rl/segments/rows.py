"""The rows of table `segments`: one per branch, and whether it may be trained on."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from hermes_rl.events import LogprobsKind, TokensAdded, unpack_logprobs
from hermes_rl.models.tokens import LOWEST
from hermes_rl.record import Segment, Trajectory
from hermes_rl.segments.branches import (
    Branch,
    Branches,
    CapturedCall,
    token_versions,
    version_number,
)

Exclusion = Literal[
    "failed",
    "discarded",
    "aborted",
    "summary",
    "retokenized",
    "mixed_models",
    "no_logprobs",
    "bad_logprobs",
    "unknown_logprobs",
    "constrained_logprobs",
    "raw_logprobs",
]
"""Why a segment is not trainable: its attempt failed; its answer was discarded, aborted by the
engine, or is a summary for a new context; its ids were retokenized from text; calls of several
models or tokenizers; logprobs are absent, or invalid (above 0, or not finite), of an unknown
distribution, or of one that a grammar constrained; they are raw, and sampling was not plain
(temperature 1 without filters and penalties)."""

NOISE = 1e-4
"""Logprobs up to this are taken for 0: float32 sums over a large vocabulary are not exact."""


def stored_logprobs(added: TokensAdded) -> list[float | None]:
    """Return the logprobs of an answer as they are stored; None for each invalid one.

    vLLM writes `LOWEST`, and SGLang the lowest float, for minus infinity.
    """
    if added.logprobs is None:
        return [None] * (len(added.sampled) // 4)
    values = unpack_logprobs(added.logprobs)
    if all(LOWEST < v <= 0.0 for v in values):
        return list(values)
    return [min(v, 0.0) if LOWEST < v <= NOISE else None for v in values]


def exclusion_reason(
    ok: bool, calls: Sequence[CapturedCall], path: Sequence[tuple[CapturedCall, TokensAdded]]
) -> Exclusion | None:
    """Return why a branch is not trainable; None if it is.

    Args:
        ok: the rollout has a row in `trajectories`.
        calls: the calls that the branch trains.
        path: all calls with answers on its path, and their tokens.
    """
    detached = next((call.detached for call in calls if call.detached is not None), None)
    if not ok and detached != "aborted":
        return "failed"
    if detached is not None:
        return detached
    if any(added.source == "retokenized" for _, added in path):
        return "retokenized"
    makers = {(call.model, a.tokenizer_hash) for call, a in path}
    if len(makers) > 1:
        return "mixed_models"
    found: Exclusion | None = next(filter(None, (_logprobs(added) for _, added in path)), None)
    if found is None and len({added.logprobs_kind for _, added in path}) > 1:
        return "unknown_logprobs"
    return found


_OF_KIND: dict[LogprobsKind, Exclusion] = {
    "unknown": "unknown_logprobs",
    "constrained": "constrained_logprobs",
}


def _logprobs(added: TokensAdded) -> Exclusion | None:
    if added.logprobs is None:
        return "no_logprobs"
    if added.logprobs_kind == "sampling":
        return None
    if added.logprobs_kind == "raw":
        return None if is_plain_sampling(added) else "raw_logprobs"
    return _OF_KIND[added.logprobs_kind]


def is_plain_sampling(added: TokensAdded) -> bool:
    """Whether the model's unchanged distribution was sampled.

    All parameters must have been sent: servers fill in those that a model's files recommend, or
    their own defaults (llama.cpp: min-p 0.05).
    """
    return (
        added.temperature == 1.0
        and added.top_p == 1.0
        and added.top_k in (-1, 0)
        and added.min_p == 0
        and not added.shaped_by
    )


def common_value(values: Iterable[float | None]) -> float | None:
    """Return the value that all have; None if they differ."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


_COPIED = (
    "trajectory_id", "unit_id", "run_id", "task_id", "group_id", "member", "env_name",
)  # fmt: skip
"""Columns that a segment copies from its rollout."""
_CUT = "length"
"""Finish reason of an answer that an output limit cut."""
_WORST = ("retokenized", "bridged", "engine")


@dataclass
class _Columns:
    """The columns of a row with one entry per token or per call."""

    ids: list[int] = field(default_factory=list)
    loss: list[bool] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    """Nodes with sampled tokens in this row."""
    starts: list[int] = field(default_factory=list)
    """The first sampled position of each of these nodes."""
    invalid_logprobs: bool = False

    def extend(self, ids: list[int], turn: int, *, sampled: bool, loss: bool) -> None:
        """Add tokens, but not their logprobs and versions."""
        number = len(ids)
        self.ids += ids
        self.loss += [loss] * number
        self.sampled += [sampled] * number
        self.turns += [turn] * number


def build_segments(branches: Branches, row: Trajectory) -> list[Segment]:
    """Build one row per branch, in order."""
    calls = branches.captured.calls.values()
    last = max((c for c in calls if c.detached is None), key=lambda c: c.ended, default=None)
    return [_segment(branches, branch, row, last) for branch in branches.branches]


def _segment(
    branches: Branches, branch: Branch, row: Trajectory, last: CapturedCall | None
) -> Segment:
    """Build the row of a branch. Args: last: the last call of the rollout's conversation."""
    columns = _columns(branches, branch)
    path = [branches.call(n) for n in columns.calls]
    sampled = [branches.call(n) for n in branch.nodes]
    excluded = exclusion_reason(row.status == "ok", [call for call, _ in sampled], path)
    if excluded is None and columns.invalid_logprobs:
        excluded = "bad_logprobs"
    end = sampled[-1][0]
    return Segment(
        **{name: getattr(row, name) for name in _COPIED},
        agent_name=branch.agent,
        branch_index=branch.number,
        n_branches=len(branches.branches),
        branch_kind=branch.kind,
        parent_branch=branch.parent,
        fork_reason=branch.reason,
        **_tokens(columns),
        **_sampling([added for _, added in sampled]),
        **_origin(sampled, path),
        finish_reasons=[call.finish_reason or "" for call, _ in path],
        truncated=end.finish_reason == _CUT or (row.truncated and end is last),
        reward=row.reward,
        trainable=excluded is None,
        exclude_reason=excluded,
        call_ids=[call.call_id for call, _ in path],
        call_starts=columns.starts,
    )


def _columns(branches: Branches, branch: Branch) -> _Columns:
    trained, turn, columns = set(branch.nodes), 0, _Columns()
    for stretch in branches.graph.token_runs(branch.nodes[-1]):
        call, added = branches.call(stretch.node)
        ids = _ids(stretch.data)
        if not stretch.sampled:
            columns.extend(ids, turn, sampled=False, loss=False)
            columns.logprobs += [None] * len(ids)
            columns.versions += [-1] * len(ids)
            continue
        turn = call.turn
        columns.calls.append(stretch.node)
        columns.starts.append(len(columns.ids))
        loss = stretch.node in trained and call.detached != "aborted"
        columns.extend(ids, turn, sampled=True, loss=loss)
        columns.versions += map(version_number, token_versions(call, added)[: len(ids)])
        logprobs = stored_logprobs(added)[: len(ids)]
        columns.invalid_logprobs |= added.logprobs is not None and None in logprobs
        columns.logprobs += logprobs
    return columns


def _tokens(columns: _Columns) -> dict[str, Any]:
    n_sampled = sum(columns.sampled)
    return {
        "input_ids": columns.ids,
        "loss_mask": columns.loss,
        "sampled_mask": columns.sampled,
        "logprobs": columns.logprobs,
        "turn_ids": columns.turns,
        "version_ids": columns.versions,
        "prompt_len": columns.sampled.index(True) if n_sampled else len(columns.ids),
        "n_sampled": n_sampled,
    }


def _sampling(sampled: list[TokensAdded]) -> dict[str, Any]:
    top_k = common_value(added.top_k for added in sampled)
    return {
        "temperature": common_value(added.temperature for added in sampled),
        "top_p": common_value(added.top_p for added in sampled),
        "top_k": None if top_k is None else int(top_k),
        "min_p": common_value(added.min_p for added in sampled),
    }


def _origin(
    sampled: list[tuple[CapturedCall, TokensAdded]], path: list[tuple[CapturedCall, TokensAdded]]
) -> dict[str, Any]:
    kinds = {added.logprobs_kind for _, added in path}
    sources = {added.source for _, added in path}
    found = (token_versions(call, added) for call, added in sampled)
    versions = [v for v in dict.fromkeys(chain.from_iterable(found)) if v is not None]
    numbered = all(version_number(v) >= 0 for v in versions)
    key = version_number if numbered else versions.index
    last, added = sampled[-1]
    return {
        "logprobs_kind": kinds.pop() if len(kinds) == 1 else "unknown",
        "token_source": next(source for source in _WORST if source in sources),
        "policy_version_min": min(versions, key=key, default=None),
        "policy_version_max": max(versions, key=key, default=None),
        "tokenizer_hash": added.tokenizer_hash,
        "template_hash": added.template_hash,
        "model": last.model,
    }


def _ids(data: bytes) -> list[int]:
    numbers = array("i", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
