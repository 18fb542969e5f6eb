"""One plain request whose whole answer is wanted, for probes. Runs never use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hermes_rl.errors import ConnectionLost
from hermes_rl.models.endpoint import Endpoint
from hermes_rl.models.errors.classify import classify
from hermes_rl.models.transports.base import connection_fault
from hermes_rl.text import encode_json, scrub

if TYPE_CHECKING:
    from aiohttp import StreamReader

_MAX_BYTES = 4 << 20


async def ask_raw(endpoint: Endpoint, path: str, body: dict[str, Any]) -> bytes:
    """POST a body and return the answer's. Raises: ModelError."""
    import aiohttp

    headers = {"content-type": "application/json", **endpoint.headers}
    if endpoint.api_key:
        headers["authorization"] = f"Bearer {endpoint.api_key}"
    try:
        async with (
            aiohttp.ClientSession(headers={"User-Agent": "hermes-rl"}) as session,
            session.post(
                endpoint.url(path),
                data=encode_json(body),
                headers=headers,
                ssl=endpoint.tls() or True,
                proxy=endpoint.proxy,
                allow_redirects=False,
            ) as response,
        ):
            answer = await whole(response.content, _MAX_BYTES)
    except aiohttp.ClientConnectorError as error:
        raise ConnectionLost(f"{endpoint.host}: {connection_fault(error)}") from None
    except (aiohttp.ClientError, OSError) as error:
        said = scrub(str(error) or type(error).__name__, endpoint.secrets)
        raise ConnectionLost(f"{endpoint.host}: {said}") from None
    if response.status != 200:
        low = {name.lower(): value for name, value in response.headers.items()}
        raise classify(response.status, low, answer, secrets=endpoint.secrets)
    return answer


async def whole(stream: StreamReader, most: int) -> bytes:
    """A body to its end, or its first bytes where it is longer than `most`."""
    body = bytearray()
    async for piece in stream.iter_any():
        body += piece
        if len(body) >= most:
            break
    return bytes(body[:most])
