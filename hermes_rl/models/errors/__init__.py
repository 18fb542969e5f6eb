"""How model calls fail: from status, headers and body to a typed error with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.models.errors.body import read_error_facts
    from hermes_rl.models.errors.classify import (
        classify_exception,
        classify_in_answer,
        classify_response,
        retry_after,
        table,
    )
else:
    __getattr__, __dir__ = attach(__name__)
