"""Providers, keys, prices, routes, and probes of endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.models.providers.listing import list_models, read_windows
    from hermes_rl.models.providers.preflight import (
        check_endpoints,
        embedded_clients,
        exact_clients,
        find_plan,
        wanted_token_ids,
    )
    from hermes_rl.models.providers.prices import (
        DATE,
        ModelPrice,
        PriceTable,
        Rates,
        price_table,
        read_list_prices,
        read_price,
    )
    from hermes_rl.models.providers.probe import (
        MAX_TOKENS,
        Capabilities,
        EndpointReport,
        Probe,
        ProbeCall,
    )
    from hermes_rl.models.providers.routing import (
        Keys,
        ModelSource,
        Routes,
        Target,
        calls_endpoint,
        collect_keys,
        draw_model,
        find_keys,
        place_targets,
        resolve_env_targets,
        resolve_targets,
        resolve_targets_by_model,
    )
    from hermes_rl.models.providers.table import (
        DEFAULT_MODE,
        DEFAULT_PROVIDER,
        Place,
        find_quirks,
        known_providers,
        resolve,
        shipped,
    )
else:
    __getattr__, __dir__ = attach(__name__)
