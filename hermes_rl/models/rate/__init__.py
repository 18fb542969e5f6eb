"""Rates and budgets of model calls: one limiter and one ledger for all workers of a run.

The package answers three questions:

- When may this request be sent? `limiter` keeps the queue and notes how the endpoint behaves;
  `adaptive` decides.
- May this call be paid for? `budgets` reserves its worst case; `ledger` keeps the accounts.
- Which part does each worker get? The driver's `coordinator` answers the reports of `share`.

`headers` reads what providers report of their limits. `adaptive`, `headers` and `ledger` are pure:
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
        Expectation,
        History,
        Pace,
        Rates,
        signal_of,
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
        Reservation,
        Spend,
        UnitSpending,
        model_budget,
        model_of,
    )
    from hermes_rl.models.rate.coordinator import Coordinator, LaneSummary, Summary, divide
    from hermes_rl.models.rate.headers import KINDS, Quota, read_quotas, resets_s
    from hermes_rl.models.rate.ledger import CALLS, Costs, may_spend
    from hermes_rl.models.rate.limiter import (
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
