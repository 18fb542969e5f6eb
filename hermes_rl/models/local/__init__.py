"""The embedded models: small models that run on any machine, for trying the product.

async with local_server("local") as server:
    endpoint = await server.endpoint()  # .base_url, .api_key, .model of a Chat Completions endpoint
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.models.local.app import Generation, Writer, read_call
    from hermes_rl.models.local.catalogue import (
        LOCAL_MODELS,
        SYSTEM_PROMPT,
        Part,
        Weights,
        find_weights,
        read_catalogue,
    )
    from hermes_rl.models.local.client import Endpoint, LocalServer, local_server
    from hermes_rl.models.local.gguf import read_metadata, read_tokenizer
    from hermes_rl.models.local.requests import (
        PREFILL,
        BadChatRequest,
        Step,
        plan_step,
        read_request,
        simplify,
    )
    from hermes_rl.models.local.sources import ANSWER_S, WeightsUnavailable
    from hermes_rl.models.local.weights import (
        cache_folder,
        check_gguf,
        ensure_weights,
        fetch_weights,
    )
else:
    __getattr__, __dir__ = attach(__name__)
