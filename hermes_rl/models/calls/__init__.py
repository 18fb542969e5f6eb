"""One model call over as many requests as it takes: routes, retries, recovery."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.models.calls.caller import Checkable, Clock, ModelCaller, Renewable
    from hermes_rl.models.calls.recovery import (
        Account,
        Failure,
        FallBack,
        GiveUp,
        KeyPool,
        Recovery,
        Resend,
        RetryPolicy,
        Route,
        Strategy,
        SwitchAccount,
        Wait,
    )
else:
    __getattr__, __dir__ = attach(__name__)
