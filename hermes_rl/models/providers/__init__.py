"""Who answers: providers, keys, prices, routes and what an endpoint can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.models.providers.preflight import (
        embedded_clients,
        exact_clients,
        find_plan,
        reach_models,
        wanted_ids,
    )
    from hermes_rl.models.providers.prices import (
        DATE,
        ModelPrice,
        PriceTable,
        Rates,
        list_prices,
        price_table,
        read_price,
    )
    from hermes_rl.models.providers.probe import (
        MAX_TOKENS,
        Capabilities,
        EndpointReport,
        Probe,
        ProbeCall,
        list_models,
    )
    from hermes_rl.models.providers.routing import (
        Keys,
        Routes,
        Seen,
        Target,
        all_keys,
        asks_endpoint,
        drawn_model,
        find_keys,
        other_targets,
        place_targets,
        targets_by_model,
        targets_of,
    )
    from hermes_rl.models.providers.table import (
        DEFAULT_MODE,
        DEFAULT_PROVIDER,
        Place,
        known_providers,
        quirks_at,
        resolve,
        shipped,
    )
else:
    __getattr__, __dir__ = attach(__name__)
