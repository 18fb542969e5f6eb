"""Carriers of bytes. A transport posts a body and hands back the answer, for any dialect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.models.transports.http import (
        HttpTransport,
        PlainAnswer,
        Reply,
        Transport,
        exchange,
    )
    from hermes_rl.models.transports.sdk import SdkTransport
else:
    __getattr__, __dir__ = attach(__name__)
