"""A look at an endpoint before a run: is somebody there, and do they know this key? Costs no
token."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.errors import AuthError, Outage
from hermes_rl.models.endpoint import Endpoint
from hermes_rl.models.errors.classify import classify
from hermes_rl.models.providers.raw import whole
from hermes_rl.models.tokens.plan import TokenPlan
from hermes_rl.models.transports.base import connection_fault, proxy_refused, untrusted
from hermes_rl.text import decode_json, scrub

_MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class Probed:
    """What an endpoint says of itself."""

    models: tuple[str, ...] | None
    """Ids of the models that it lists; None when it keeps no list."""
    found: Mapping[str, Any] = field(default_factory=dict)
    """What asking a model found (`providers.capabilities`), where that was wanted."""
    tokens: TokenPlan | None = None
    """How the run gets token ids, where it wants them."""


async def probe(endpoint: Endpoint, *, seconds: float = 5.0) -> Probed:
    """Ask for the list of models (GET `/models`), once.

    An endpoint that answers anything but a refused key is taken to be there: not all keep a list.

    Raises:
        UserError: the address cannot work.
        Outage: nobody answers there within `seconds`.
        AuthError: the key is refused, or the certificate cannot be trusted.
    """
    import aiohttp

    endpoint.check()
    headers = {**_key_headers(endpoint), **endpoint.headers}
    try:
        async with (
            asyncio.timeout(seconds),
            aiohttp.ClientSession(headers={"User-Agent": "hermes-rl"}) as session,
            session.get(
                _list_address(endpoint),
                headers=headers,
                ssl=endpoint.tls() or True,
                proxy=endpoint.proxy,
                allow_redirects=False,
            ) as response,
        ):
            body = await whole(response.content, _MAX_BYTES)
    except aiohttp.ClientConnectorCertificateError as error:
        raise untrusted(endpoint.host, str(error.certificate_error)) from None
    except aiohttp.ClientHttpProxyError as error:
        refused = proxy_refused(endpoint.host, error.status)
        raise (
            refused if isinstance(refused, AuthError) else _nobody(endpoint, str(refused))
        ) from None
    except TimeoutError:
        raise _nobody(endpoint, f"no answer within {seconds:g} s") from None
    except aiohttp.ClientConnectorError as error:
        raise _nobody(endpoint, connection_fault(error)) from None
    except (aiohttp.ClientError, OSError) as error:
        raise _nobody(endpoint, str(error) or type(error).__name__) from None
    if response.status in (401, 403):
        low = {name.lower(): value for name, value in response.headers.items()}
        refusal = classify(response.status, low, body, secrets=endpoint.secrets)
        if isinstance(refusal, AuthError):
            raise refusal  # what else 403 is used for (rates, credit) the run itself meets
    return Probed(_listed(body) if response.status == 200 else None)


def _list_address(endpoint: Endpoint) -> str:
    """Where the list of models is. Anthropic's dialect counts `/v1` to its routes, and an address
    may end with the route of its dialect."""
    base = endpoint.base_url.rstrip("/")
    for route in ("/chat/completions", "/responses", "/messages"):
        base = base.removesuffix(route)
    apart = endpoint.api_mode == "anthropic_messages" and not base.endswith("/v1")
    return base + ("/v1/models" if apart else "/models")


def _key_headers(endpoint: Endpoint) -> dict[str, str]:
    if not endpoint.api_key:
        return {}
    bearer = {"authorization": f"Bearer {endpoint.api_key}"}
    if endpoint.api_mode != "anthropic_messages":
        return bearer
    own = {"x-api-key": endpoint.api_key, "anthropic-version": "2023-06-01"}
    return own if endpoint.host == "api.anthropic.com" else {**own, **bearer}


def _nobody(endpoint: Endpoint, reason: str) -> Outage:
    said = scrub(reason, endpoint.secrets)
    return Outage(f"{endpoint.host}: {said}. Start the server, or set another base_url")


def _listed(body: bytes) -> tuple[str, ...] | None:
    try:
        form = decode_json(body)
    except ValueError:
        return None
    data = form.get("data") if isinstance(form, dict) else None
    if not isinstance(data, list):
        return None
    return tuple(str(one["id"]) for one in data if isinstance(one, dict) and "id" in one)
