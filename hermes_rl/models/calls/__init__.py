"""One model call over as many requests as it takes: routes, retries, recovery."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.models.calls.attempts import Clock
    from hermes_rl.models.calls.recovery import (
        Again,
        Failure,
        FallBack,
        GiveUp,
        Recovery,
        RetryPolicy,
        Rotate,
        Wait,
    )
    from hermes_rl.models.calls.retry import ModelCaller, Renewable
    from hermes_rl.models.calls.route import Account, KeyPool, Route, Strategy
else:
    __getattr__, __dir__ = attach(__name__)
