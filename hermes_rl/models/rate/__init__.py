"""Rates and budgets of model calls: one limiter and one ledger for all workers of a run.

The package answers three questions:

- When may this request be sent? `limiter` keeps the queue; `adaptive` and `buckets` decide.
- May this call be paid for? `budgets` reserves its worst case; `ledger` keeps the accounts.
- Which part does each worker get? The driver's `coordinator` answers the reports of `share`.

`headers` reads what providers say of their limits, `traffic` notes how an endpoint behaves.
`adaptive`, `buckets`, `headers`, `ledger` and `traffic` are pure: callers pass the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.models.rate.adaptive import (
        AdaptiveConcurrency,
        AdaptiveRate,
        Events,
        History,
        Pace,
        signal_of,
    )
    from hermes_rl.models.rate.buckets import Bucket, Buckets, Estimate, Expectation, Rates
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
    from hermes_rl.models.rate.limiter import LaneGrant, LaneReport, Limiter, Slot
    from hermes_rl.models.rate.share import (
        Cooldown,
        Cooldowns,
        Grant,
        Report,
        Share,
        decode_grant,
        decode_report,
        encode,
    )
    from hermes_rl.models.rate.traffic import Traffic, Unanswered
else:
    __getattr__, __dir__ = attach(__name__)
