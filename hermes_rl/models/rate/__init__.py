"""Rates and budgets of model calls: one limiter and one ledger for all workers of a run.

The package answers three questions:

- When may a request be sent? `limiter` has the queue, and observes the endpoint; `adaptive`
  decides.
- May a call be paid for? `budgets` reserves its worst case; `ledger` keeps the accounts.
- What is each worker's share? The driver's `coordinator` answers the reports of `share`.

`headers` reads the limits that providers report. `adaptive`, `headers` and `ledger` are pure:
callers pass the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.models.rate.adaptive import (
        AdaptiveConcurrency,
        AdaptiveRate,
        Bucket,
        Buckets,
        Estimate,
        Events,
        History,
        Pace,
        Rates,
        UsageEstimator,
        rate_signal,
    )
    from hermes_rl.models.rate.budgets import (
        NANO,
        NO_UNIT,
        OUTPUT_MAX,
        RUN_TOKENS,
        RUN_USD,
        UNIT_TOKENS,
        UNIT_USD,
        Budget,
        Lease,
        LeaseGrant,
        LeaseReport,
        Reservation,
        Spend,
        UnitSpending,
        model_budget,
        model_of,
    )
    from hermes_rl.models.rate.coordinator import (
        Coordinator,
        JointLimits,
        LaneSummary,
        Orders,
        SlotShares,
        Summary,
        WorkerShare,
    )
    from hermes_rl.models.rate.headers import KINDS, Quota, read_quotas, seconds_until_reset
    from hermes_rl.models.rate.ledger import CALLS, Costs, Ledger, units_allowed_to_spend
    from hermes_rl.models.rate.limiter import (
        Announced,
        Cooldown,
        Cooldowns,
        LaneGrant,
        LaneReport,
        Limiter,
        Slot,
        Traffic,
        Unanswered,
    )
    from hermes_rl.models.rate.share import (
        Grant,
        Report,
        Share,
        decode_grant,
        decode_report,
        encode,
    )
else:
    __getattr__, __dir__ = attach(__name__)
