"""The embedded models: tiny ones that run on any machine, for trying the machinery.

async with local_server("local") as endpoint:
    ...  # an ordinary Chat Completions endpoint: endpoint.base_url, .api_key, .model
"""

from __future__ import annotations

from hermes_rl.models.local.catalogue import LOCAL_MODELS, Weights, find_weights
from hermes_rl.models.local.client import Endpoint, LocalServer, local_server
from hermes_rl.models.local.fetching import WeightsUnavailable
from hermes_rl.models.local.weights import check_gguf, ensure_weights

__all__ = [
    "LOCAL_MODELS",
    "Endpoint",
    "LocalServer",
    "Weights",
    "WeightsUnavailable",
    "check_gguf",
    "ensure_weights",
    "find_weights",
    "local_server",
]
