"""The models that an endpoint lists, and their context windows.

Each run asks for them, so this module imports no part of exact tokens.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hermes_rl.errors import AuthError, ModelError, Outage
from hermes_rl.models.client import dialect_for
from hermes_rl.models.endpoint import Endpoint
from hermes_rl.models.errors import classify_response
from hermes_rl.text import decode_json

_LIST_S = 5.0
_WINDOW_FIELDS = ("max_model_len", "context_length", "context_window", "max_context_length")
"""Fields of a listed model: vLLM and SGLang; OpenRouter and Together; Groq; Mistral."""


async def read_windows(endpoint: Endpoint) -> dict[str, int]:
    """Return the context windows that an endpoint names, in tokens, by model; "" is any model.

    They are in its list of models. Those of llama.cpp and LM Studio say what a model was trained
    with, or nothing; what it was started with is at other addresses there.

    Raises: ModelError if nothing answers.
    """
    address = _models_address(endpoint)
    listed = await _get_rows(endpoint, address)
    root = address.removesuffix("/models").removesuffix("/v1")
    owners = [row.get("owned_by") for row in listed]
    if "llamacpp" in owners:
        for props in await _get_rows(endpoint, f"{root}/props"):
            listed = [{**(props.get("default_generation_settings") or {}), "id": ""}]
        return _windows(listed, "n_ctx")
    if "organization_owner" in owners:
        return _windows(await _get_rows(endpoint, f"{root}/api/v0/models"), "loaded_context_length")
    return _windows(listed, *_WINDOW_FIELDS)


async def _get_rows(endpoint: Endpoint, url: str) -> list[dict[str, Any]]:
    """The objects in the list `data` of a JSON page, or the page itself; empty without them."""
    from hermes_rl.models.transports import exchange

    headers = dialect_for(endpoint).headers(endpoint.api_key)
    async with asyncio.timeout(_LIST_S):
        answer = await exchange(endpoint, url, headers)
    try:
        form = decode_json(answer.body) if answer.status == 200 else None
    except ValueError:
        return []
    rows = form.get("data", [form]) if isinstance(form, dict) else []
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _windows(rows: list[dict[str, Any]], *names: str) -> dict[str, int]:
    """The smallest window of each model: OpenRouter names also that of its first provider."""
    found: dict[str, int] = {}
    for row in rows:
        top = row.get("top_provider")
        forms = (row, top if isinstance(top, dict) else {})
        sizes = [
            n for form in forms for name in names if type(n := form.get(name)) is int and n > 0
        ]
        if sizes and isinstance(row.get("id"), str):
            found[row["id"]] = min(sizes)
    return found


async def list_models(endpoint: Endpoint, *, seconds: float = _LIST_S) -> tuple[str, ...] | None:
    """Return the ids of the models that an endpoint lists (GET `/models`); None if it has no list.

    An endpoint that answers anything but a refused key counts as reachable: not all have a list.

    Raises:
        UserError: the address cannot work.
        Outage: the endpoint does not answer within `seconds`.
        AuthError: the key is refused, or the certificate is not trusted.
    """
    from hermes_rl.models.transports import exchange

    endpoint.check()
    headers = dialect_for(endpoint).headers(endpoint.api_key)
    try:
        async with asyncio.timeout(seconds):
            answer = await exchange(endpoint, _models_address(endpoint), headers)
    except AuthError:
        raise
    except TimeoutError:
        raise _unreachable(f"{endpoint.host}: no answer within {seconds:g} s") from None
    except ModelError as error:
        raise _unreachable(str(error)) from None
    if answer.status in (401, 403):
        refusal = classify_response(
            answer.status, answer.headers, answer.body, secrets=endpoint.secrets
        )
        if isinstance(refusal, AuthError):
            raise refusal  # other uses of 403 (rates, credit) are left to the run itself
    return _model_ids(answer.body) if answer.status == 200 else None


def _unreachable(reason: str) -> Outage:
    return Outage(f"{reason}. Start the server, or set another base_url")


def _models_address(endpoint: Endpoint) -> str:
    """Return the address of the list of models. In Anthropic's format `/v1` belongs to the routes,
    and an address may end with the route of its wire format."""
    base = endpoint.base_url.rstrip("/")
    for route in ("/chat/completions", "/responses", "/messages"):
        base = base.removesuffix(route)
    versioned = endpoint.api_mode != "anthropic_messages" or base.endswith("/v1")
    return base + ("/models" if versioned else "/v1/models")


def _model_ids(body: bytes) -> tuple[str, ...] | None:
    try:
        form = decode_json(body)
    except ValueError:
        return None
    data = form.get("data") if isinstance(form, dict) else None
    if not isinstance(data, list):
        return None
    return tuple(str(one["id"]) for one in data if isinstance(one, dict) and "id" in one)
