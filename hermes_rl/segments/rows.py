"""The rows of table `segments`, from a rollout's branches, and whether each may be trained on."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hermes_rl.events import LogprobsKind, TokensAdded, unpack_logprobs
from hermes_rl.models.tokens import LOWEST, Stretch
from hermes_rl.record import Segment, Trajectory
from hermes_rl.segments.branches import Branch, Branches, CallFacts, Happened, version_number

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
"""Why a segment is not trainable: its attempt failed; its answer was thrown away, given up by the
engine, or a summary for a new context; ids come from a text that was tokenised again; its calls
went to several models, or were tokenised in several ways; logprobs are absent, or none (over 0, not
finite); nobody knows what they are of; a grammar cut what they are of; they are the model's own,
and sampling was not plainly from that (temperature 1, and neither filters nor penalties)."""

NOISE = 1e-4
"""A logprob may be above 0 by this much: float32 sums over a large vocabulary are no more exact."""


def sound(values: Sequence[float]) -> list[float | None]:
    """Logprobs as they are stored; None for what is none. vLLM writes `LOWEST`, and SGLang the
    lowest float, in the place of minus infinity."""
    if all(LOWEST < v <= 0.0 for v in values):
        return list(values)
    return [min(v, 0.0) if LOWEST < v <= NOISE else None for v in values]


def exclusion(
    ok: bool, calls: Sequence[CallFacts], path: Sequence[tuple[CallFacts, TokensAdded]]
) -> Exclusion | None:
    """Why a branch is not trainable; None when it is.

    Args:
        ok: the rollout has a row in `trajectories`.
        calls: those of the branch itself.
        path: all calls with answers on its path, and what they added.
    """
    if not ok:
        return "failed"
    aside = next((call.aside for call in calls if call.aside is not None), None)
    if aside is not None:
        return aside
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
        return None if plainly_sampled(added) else "raw_logprobs"
    return _OF_KIND[added.logprobs_kind]


def plainly_sampled(added: TokensAdded) -> bool:
    """Whether the model's own distribution was sampled from. All of it must have been sent: servers
    fill in what a model's files recommend, or what they are used to (llama.cpp: min-p 0.05)."""
    return (
        added.temperature == 1.0
        and added.top_p == 1.0
        and added.top_k in (-1, 0)
        and added.min_p == 0
        and not added.shaped_by
    )


def common(values: Iterable[float | None]) -> float | None:
    """The one value that all have; None when they differ."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


_COPIED = (
    "trajectory_id", "unit_id", "run_id", "task_id", "group_id", "member", "env_name",
)  # fmt: skip
"""Columns that a segment has from its rollout."""
_CUT = "length"
"""Finish reason of an answer that was cut at its output limit."""
_WORST = ("retokenized", "bridged", "engine")


def rows_of(branches: Branches, happened: Happened, row: Trajectory) -> list[Segment]:
    """One row per branch, in order."""
    maker = _Maker(branches, happened, row)
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
    happened: Happened
    row_: Trajectory

    def row(self, branch: Branch) -> Segment:
        columns = self._columns(branch)
        path = [self._call(n) for n in columns.calls]
        sampled = [self._call(n) for n in branch.nodes]
        excluded = exclusion(self.row_.status == "ok", [call for call, _ in sampled], path)
        if excluded is None and columns.unsound:
            excluded = "bad_logprobs"
        return Segment(
            **self._whose(branch),
            **_tokens(columns),
            **_sampling([added for _, added in sampled]),
            **_origin(sampled, path),
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
        return self.happened.calls[added.call_id], added

    def _whose(self, branch: Branch) -> dict[str, Any]:
        return {
            **{name: getattr(self.row_, name) for name in _COPIED},
            "agent_name": branch.agent,
            "branch_index": branch.number,
            "n_branches": len(self.branches.branches),
            "branch_kind": branch.kind,
            "parent_branch": branch.parent,
            "fork_reason": branch.reason,
        }

    def _columns(self, branch: Branch) -> _Columns:
        sampled, turn, columns = set(branch.nodes), 0, _Columns()
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
            loss = stretch.node in sampled and call.aside != "aborted"
            columns.extend(ids, turn, version, sampled=True, loss=loss)
            _add_logprobs(columns, stretch, added)
        return columns

    def _truncated(self, branch: Branch) -> bool:
        last = self._call(branch.nodes[-1])[0]
        calls = self.happened.calls.values()
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


def _sampling(sampled: list[TokensAdded]) -> dict[str, Any]:
    top_k = common(added.top_k for added in sampled)
    return {
        "temperature": common(added.temperature for added in sampled),
        "top_p": common(added.top_p for added in sampled),
        "top_k": None if top_k is None else int(top_k),
        "min_p": common(added.min_p for added in sampled),
    }


def _origin(
    sampled: list[tuple[CallFacts, TokensAdded]], path: list[tuple[CallFacts, TokensAdded]]
) -> dict[str, Any]:
    kinds = {added.logprobs_kind for _, added in path}
    sources = {added.source for _, added in path}
    versions = [c.policy_version for c, _ in sampled if c.policy_version is not None]
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
