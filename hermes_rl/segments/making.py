"""The rows of table `segments`, from a rollout's branches."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.events import TokensAdded, unpack_logprobs
from hermes_rl.models.tokens.graph import Stretch
from hermes_rl.record import Segment, Trajectory
from hermes_rl.segments.branches import Branch, Branches
from hermes_rl.segments.calls import CallFacts, Happened, version_number
from hermes_rl.segments.trainable import Exclusion, common, exclusion, sound

_CUT = "length"
"""Finish reason of an answer that was cut at its output limit."""
_WORST = ("retokenized", "bridged", "engine")


def rows_of(branches: Branches, told: Happened, row: Trajectory) -> list[Segment]:
    """One row per branch, in order."""
    maker = _Maker(branches, told, row)
    return [maker.row(branch) for branch in branches.branches]


@dataclass
class _Columns:
    """What a row holds per token, and per call."""

    ids: list[int] = field(default_factory=list)
    loss: list[bool] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    """Nodes with sampled tokens here."""
    starts: list[int] = field(default_factory=list)
    """Where these begin."""
    unsound: bool = False
    """A logprob is none."""

    def extend(self, ids: list[int], turn: int, version: int, *, sampled: bool, loss: bool) -> None:
        """Add a stretch, but for its logprobs."""
        number = len(ids)
        self.ids += ids
        self.loss += [loss] * number
        self.sampled += [sampled] * number
        self.turns += [turn] * number
        self.versions += [version] * number


@dataclass
class _Maker:
    branches: Branches
    told: Happened
    row_: Trajectory

    def row(self, branch: Branch) -> Segment:
        columns = self._columns(branch)
        path = [self._call(n) for n in columns.calls]
        own = [self._call(n) for n in branch.nodes]
        excluded = exclusion(self.row_.status == "ok", [call for call, _ in own], path)
        if excluded is None and columns.unsound:
            excluded = "bad_logprobs"
        return Segment(
            **self._whose(branch),
            **_tokens(columns),
            **_sampling([added for _, added in own]),
            **_origin(own, path),
            finish_reasons=[call.finish_reason or "" for call, _ in path],
            truncated=self._truncated(branch),
            reward=self.row_.reward,
            trainable=excluded is None,
            exclude_reason=excluded,
            call_ids=[call.call_id for call, _ in path],
            call_starts=columns.starts,
        )

    def _call(self, node: int) -> tuple[CallFacts, TokensAdded]:
        added = self.branches.graph.nodes[node].added
        return self.told.calls[added.call_id], added

    def _whose(self, branch: Branch) -> dict[str, Any]:
        row = self.row_
        return {
            "trajectory_id": row.trajectory_id,
            "unit_id": row.unit_id,
            "run_id": row.run_id,
            "task_id": row.task_id,
            "group_id": row.group_id,
            "member": row.member,
            "env_name": row.env_name,
            "agent_name": branch.agent,
            "branch_index": branch.number,
            "n_branches": len(self.branches.branches),
            "branch_kind": branch.kind,
            "parent_branch": branch.parent,
            "fork_reason": branch.reason,
        }

    def _columns(self, branch: Branch) -> _Columns:
        own, turn, columns = set(branch.nodes), 0, _Columns()
        for stretch in self.branches.graph.stretches(branch.nodes[-1]):
            call, added = self._call(stretch.node)
            ids = _ids(stretch.data)
            if not stretch.sampled:
                columns.extend(ids, turn, -1, sampled=False, loss=False)
                columns.logprobs += [None] * len(ids)
                continue
            turn = call.turn
            version = version_number(call.policy_version)
            columns.calls.append(stretch.node)
            columns.starts.append(len(columns.ids))
            loss = stretch.node in own and call.aside != "aborted"
            columns.extend(ids, turn, version, sampled=True, loss=loss)
            _add_logprobs(columns, stretch, added)
        return columns

    def _truncated(self, branch: Branch) -> bool:
        last = self._call(branch.nodes[-1])[0]
        calls = self.told.calls.values()
        final = max((c for c in calls if c.aside is None), key=lambda c: c.ended, default=None)
        return last.finish_reason == _CUT or (self.row_.truncated and last is final)


def _add_logprobs(columns: _Columns, stretch: Stretch, added: TokensAdded) -> None:
    number = len(stretch.data) // 4
    if added.logprobs is None:
        columns.logprobs += [None] * number
        return
    values = sound(unpack_logprobs(added.logprobs[: 4 * number]))
    columns.unsound = columns.unsound or None in values
    columns.logprobs += values


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


def _sampling(own: list[TokensAdded]) -> dict[str, Any]:
    top_k = common(added.top_k for added in own)
    return {
        "temperature": common(added.temperature for added in own),
        "top_p": common(added.top_p for added in own),
        "top_k": None if top_k is None else int(top_k),
        "min_p": common(added.min_p for added in own),
    }


def _origin(
    own: list[tuple[CallFacts, TokensAdded]], path: list[tuple[CallFacts, TokensAdded]]
) -> dict[str, Any]:
    kinds = {added.logprobs_kind for _, added in path}
    sources = {added.source for _, added in path}
    versions = [c.policy_version for c, _ in own if c.policy_version is not None]
    numbered = all(version_number(v) >= 0 for v in versions)
    key = version_number if numbered else versions.index
    last, added = own[-1]
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


__all__ = ["Exclusion", "rows_of"]
