"""The embedded models: small models that run on any machine, for trying the product.

async with local_server("local") as server:
    endpoint = await server.endpoint()  # .base_url, .api_key, .model of a Chat Completions endpoint
"""

from __future__ import annotations

from hermes_rl.models.local.catalogue import LOCAL_MODELS, Weights, find_weights
from hermes_rl.models.local.client import Endpoint, LocalServer, local_server
from hermes_rl.models.local.sources import WeightsUnavailable
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
