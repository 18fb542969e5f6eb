"""Atropos' ScoredData: one group per line, as its `process` mode writes and its server takes.

Masks hold the id of a token that is trained on and -100 otherwise; log-probabilities are 1.0 where
no token was sampled. A rollout with several branches becomes several sequences with one score.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hermes_rl.export.source import Format, Row, Source
from hermes_rl.export.tokens import TokenItem


def _rows(source: Source) -> Iterator[Row]:
    """One line per group, written when its last member was read."""
    for group in source.groups():
        items = [item for rollout in group for item in rollout]
        source.losses.lose("branches", len(items) - len(group))
        yield _scored(items)


def _scored(items: list[TokenItem]) -> Row:
    logprobs = [item.logprobs(1.0) for item in items]
    advantages = [_per_token_advantage(item) for item in items]
    return {
        "tokens": [item.ids for item in items],
        "masks": [item.labels for item in items],
        "scores": [item.reward for item in items],
        "advantages": None if None in advantages else advantages,
        "ref_logprobs": None,
        "messages": [item.row["messages"] for item in items],
        "generation_params": _sampling(items[0]),
        "inference_logprobs": None if None in logprobs else logprobs,
        "overrides": [_versions(item) for item in items],
        "group_overrides": {"group_size": len(items)},
        "images": None,
    }


def _per_token_advantage(item: TokenItem) -> list[float] | None:
    """Repeat the advantage of a sequence for each of its tokens."""
    return None if item.advantage is None else [item.advantage] * len(item.ids)


def _versions(item: TokenItem) -> dict[str, Any]:
    """Return the versions of a sequence's weights, which trainers that do not know them ignore."""
    names = ("policy_version_min", "policy_version_max")
    return {name: item.segment[name] for name in names}


def _sampling(item: TokenItem) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "min_p")
    return {name: item.segment[name] for name in names if item.segment[name] is not None}


GROUPS = Format(
    name="atropos",
    about="Atropos 0.4.0 ScoredData, one group per line",
    suffix=".jsonl",
    unit="tokens",
    rows=_rows,
    rl=True,
    supports=frozenset({"rewards", "images"}),
)
