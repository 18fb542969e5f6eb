"""The embedded models: small models that run on any machine, for trying the product.

async with local_server("local") as server:
    client = StepClient(await server.endpoint())
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.models.local.chat import EmbeddedClient, StepClient
    from hermes_rl.models.local.client import LocalEndpoint, LocalServer, local_server
    from hermes_rl.models.local.gguf import read_tokenizer
    from hermes_rl.models.local.steps import PREFILL, Step, plan_step, simplify
    from hermes_rl.models.local.weights import (
        SYSTEM_PROMPT,
        Part,
        Weights,
        WeightsUnavailable,
        cache_folder,
        check_gguf,
        ensure_weights,
        fetch_weights,
        find_weights,
        read_catalogue,
    )
else:
    __getattr__, __dir__ = attach(__name__)
