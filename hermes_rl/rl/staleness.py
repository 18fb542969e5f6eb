"""What becomes of rollouts that are older than the trainer's weights: a table, `staleness.toml`."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from hermes_rl.errors import UserError
from hermes_rl.input_errors import check_fields

if TYPE_CHECKING:
    from hermes_rl.record import Segment
    from hermes_rl.store import Run

Event = Literal["start", "update", "deliver"]
StalePolicy = Literal["none", "pace", "withhold", "cancel", "mask"]
STALENESS: Mapping[str, Mapping[Event, str]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
"""Policy -> event -> what happens to a group that is too old."""
_FRESH: Mapping[Event, str] = STALENESS["none"]


@dataclass(frozen=True)
class Staleness:
    """A limit of the age of rollouts.

    The lag of a group is the version of the policy now (`Policy.version`) minus the least version
    that sampled one of its tokens; while it is in progress, minus the version at its start. It
    includes the time in queues. Where a version is unknown, there is no lag.
    """

    policy: StalePolicy = "pace"
    """`pace`: no new group starts while the oldest one in progress lags by `max_lag` (by 1 for 0);
    everything is delivered. `withhold`: complete groups that lag more are rejected. `cancel`: also
    before: their rollouts are interrupted, and their other members do not start. `mask`: they are
    delivered without the loss of the tokens that lag more. `none`: no limit."""
    max_lag: int = 1
    """Versions."""

    def __post_init__(self) -> None:
        check_fields(self, "staleness")
        if self.max_lag < 0:
            raise UserError("staleness: max_lag must be at least 0")

    def decide(self, event: Event, now: int | None, oldest: int | None) -> str:
        """Return what happens to a group.

        Args:
            now: version of the policy.
            oldest: of the group; None if unknown. For `start`, that of the oldest group in
                progress.
        """
        if now is None or oldest is None:
            return _FRESH[event]
        most = max(0, self.max_lag - 1) if event == "start" else self.max_lag
        return STALENESS[self.policy][event] if now - oldest > most else _FRESH[event]

    def why(self, now: int | None, oldest: int | None) -> str:
        """Return the reason that is stored for a refused group."""
        return f"stale: version {oldest} at version {now}, max_lag {self.max_lag}"


def mask_segment(segment: Segment, least: int) -> Segment:
    """Return a segment without the loss of tokens whose known version is below `least`."""
    pairs = zip(segment.loss_mask, segment.version_ids, strict=True)
    mask = [trained and not 0 <= version < least for trained, version in pairs]
    trainable = segment.trainable and any(mask)
    return msgspec.structs.replace(segment, loss_mask=mask, trainable=trainable)


def compare_delivered(run: Run) -> dict[str, dict[str, Any]]:
    """Compare the rollouts of groups that were kept with those of rejected ones.

    Returns: `kept` and `rejected`, each with the number of `rollouts`, the `turns` and
        `output_tokens` (mean, and the quantiles 0.1, 0.5 and 0.9), and the counts of `endings`. A
        policy that drops the long ones shows here.
    """
    events = run.arrow("deliveries", ["group_id", "event"]).to_pylist()
    fate = {row["group_id"]: row["event"] for row in events}
    names = ["group_id", "turns", "usage", "end_reason"]
    kept: dict[str, list[dict[str, Any]]] = {"kept": [], "rejected": []}
    for row in run.arrow("trajectories", names).to_pylist():
        kept["rejected" if fate.get(row["group_id"]) == "rejected" else "kept"].append(row)
    return {name: _summary(rows) for name, rows in kept.items()}


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "rollouts": len(rows),
        "turns": _numbers([row["turns"] for row in rows]),
        "output_tokens": _numbers([row["usage"]["output_tokens"] or 0 for row in rows]),
        "endings": dict(Counter(row["end_reason"] for row in rows)),
    }


def _numbers(values: Sequence[int]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    at = {f"q{int(100 * q)}": ordered[int(q * (len(ordered) - 1))] for q in (0.1, 0.5, 0.9)}
    return {"mean": sum(ordered) / len(ordered), **at}
