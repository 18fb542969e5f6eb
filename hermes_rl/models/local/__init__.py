"""The embedded models: tiny ones that run on any machine, for trying the machinery."""

from __future__ import annotations

from hermes_rl.models.local.catalogue import find_weights, read_catalogue
from hermes_rl.models.local.weights import ensure_weights

__all__ = ["ensure_weights", "find_weights", "read_catalogue"]
