"""Download a file that a request names by its URL, only from public addresses unless private ones are allowed."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import NamedTuple
from urllib.parse import unquote

import httpcore2
import httpx2

from ..network import system_tls
from .guarded_transport import FAULTS, GuardedNetwork, describe, fault_of

MAX_REDIRECTS = 5
_TIMEOUT = 30.0
_TIMEOUTS = {"connect": 5.0, "read": 10.0, "write": 5.0, "pool": 5.0}
_HEADERS = [(b"accept", b"*/*"), (b"accept-encoding", b"identity"), (b"user-agent", b"responses-mw")]
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class FetchFailed(Exception):
    """The file cannot be downloaded. The message is a clause for the user, and does not quote the URL."""


class FetchedFile(NamedTuple):
    """The bytes of a file, and the last part of its path."""

    data: bytes
    name: str


async def fetch(url: str, max_bytes: int, *, allow_private: bool) -> FetchedFile:
    """Download a file of up to `max_bytes`. Each address is checked, also those of redirects. Raises `FetchFailed`."""
    network = GuardedNetwork(allow_private=allow_private)
    try:
        async with (
            asyncio.timeout(_TIMEOUT),
            httpcore2.AsyncConnectionPool(ssl_context=system_tls(), network_backend=network) as pool,
        ):
            for _ in range(MAX_REDIRECTS + 1):
                if fault := fault_of(url, allow_private=allow_private):
                    raise FetchFailed(fault)
                found = await _get(pool, httpx2.URL(url), max_bytes)
                if isinstance(found, bytes):
                    return FetchedFile(found, unquote(httpx2.URL(url).path.rpartition("/")[2]))
                url = found
    except TimeoutError:
        raise FetchFailed("its server did not answer in time") from None
    except FAULTS as error:
        raise FetchFailed(describe(error)) from None
    raise FetchFailed(f"it has more than {MAX_REDIRECTS} redirects")


async def _get(pool: httpcore2.AsyncConnectionPool, url: httpx2.URL, max_bytes: int) -> bytes | str:
    """Return the bytes at `url`, or the URL that it redirects to."""
    target = httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
    async with pool.stream("GET", target, headers=_HEADERS, extensions={"timeout": _TIMEOUTS}) as response:
        headers = httpx2.Headers(response.headers)
        if response.status in _REDIRECTS and "location" in headers:
            return _joined(url, headers["location"])
        if response.status != 200:
            raise FetchFailed(f"its server answered with HTTP status {response.status}")
        if headers.get("content-encoding", "identity") != "identity":
            raise FetchFailed("its server sent a compressed answer, which was not requested")
        data = bytearray()
        async with aclosing(response.aiter_stream()) as chunks:
            async for chunk in chunks:
                data += chunk
                if len(data) > max_bytes:
                    raise FetchFailed(f"it is larger than {max_bytes} bytes")
        return bytes(data)


def _joined(url: httpx2.URL, location: str) -> str:
    try:
        return str(url.join(location))
    except httpx2.InvalidURL:
        raise FetchFailed("its server redirects to a malformed URL") from None
