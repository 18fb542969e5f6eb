"""Model clients: a dialect translates, a transport sends. `hermes_rl.wiring` joins the parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.models.base import (
        CacheTime,
        Completion,
        Conversation,
        ModelClient,
        ModelRequest,
        Sampling,
        TokenCapture,
        has_unparsed_call,
    )
    from hermes_rl.models.client import DIALECTS, connect, dialect_for
    from hermes_rl.models.endpoint import EMBEDDED, Endpoint, Timeouts
    from hermes_rl.models.key_command import (
        MIN_INTERVAL_S,
        KeyCommand,
        KeyNotRenewed,
        KeyRenewed,
        RenewableKey,
        read_key_expiry,
    )
    from hermes_rl.models.played import NoopClient, OracleClient, no_cost
else:
    __getattr__, __dir__ = attach(__name__)
