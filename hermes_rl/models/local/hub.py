"""Weights from their home on the Hugging Face hub, resumed where an earlier download stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from hermes_rl.models.local.fetching import Fetch, SourceFailed, require_disk, size_of

if TYPE_CHECKING:
    import aiohttp

ANSWER_S = 3.0
"""The hub counts as absent if it has not begun to answer within this time."""
_IDLE_S = 30.0
_TRIES = 4
_CHUNK = 1 << 20


async def from_hub(fetch: Fetch) -> Path:
    """Downloads the file and returns its partial path, whole but not yet checked.

    Raises:
        SourceFailed: the hub has no such file, does not answer, or stops in the middle.
    """
    weights = fetch.weights
    if weights.hub is None or fetch.env.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise SourceFailed("the hub was not asked")
    base = fetch.env.get("HF_ENDPOINT") or "https://huggingface.co"
    url = f"{base.rstrip('/')}/{weights.hub}"
    partial = fetch.hub_partial
    require_disk(fetch.folder, weights.bytes - size_of(partial))
    failure = SourceFailed("the hub broke off again and again")
    for _ in range(_TRIES):
        before = size_of(partial)
        try:
            await _resume(fetch, url)
        except SourceFailed as error:
            failure = error
            if size_of(partial) <= before:
                break  # nothing came: no use in asking again at once
        if size_of(partial) == weights.bytes:
            return partial
    raise failure


async def _resume(fetch: Fetch, url: str) -> None:
    """Asks for the bytes that are missing and appends what comes."""
    import aiohttp

    partial, total = fetch.hub_partial, fetch.weights.bytes
    have = size_of(partial)
    if have >= total:
        partial.unlink()
        have = 0
    try:
        async with _answer(url, have) as response:
            have = _starting_point(response, have, total)
            with await asyncio.to_thread(_open_at, partial, have) as out:
                async for chunk in response.content.iter_chunked(_CHUNK):
                    await asyncio.to_thread(out.write, chunk)
                    have += len(chunk)
                    fetch.report(have, "downloading from the hub")
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        reason = str(error) or type(error).__name__
        raise SourceFailed(f"the hub did not answer ({reason})") from error


@asynccontextmanager
async def _answer(url: str, start: int) -> AsyncIterator[aiohttp.ClientResponse]:
    """The response, whose head must come within `ANSWER_S`; its body may take its time."""
    import aiohttp

    headers = {"Range": f"bytes={start}-", "Accept-Encoding": "identity"}
    timeout = aiohttp.ClientTimeout(total=None, sock_read=_IDLE_S)
    async with aiohttp.ClientSession(
        timeout=timeout, trust_env=True, auto_decompress=False
    ) as session:
        async with asyncio.timeout(ANSWER_S):
            response = await session.get(url, headers=headers)
        async with response:
            yield response


def _starting_point(response: aiohttp.ClientResponse, asked: int, total: int) -> int:
    """Where in the file the body begins.

    Raises:
        SourceFailed: the response is no body of this file.
    """
    if response.status not in (200, 206):
        raise SourceFailed(f"the hub answered {response.status}")
    start = asked if response.status == 206 else 0
    length = response.content_length
    if length is not None and start + length != total:
        raise SourceFailed("the hub has another file under this name")
    return start


def _open_at(path: Path, offset: int) -> IO[bytes]:
    """The file, cut at `offset` and ready to append."""
    out = path.open("r+b" if path.exists() else "wb")
    out.seek(offset)
    out.truncate()
    return out
