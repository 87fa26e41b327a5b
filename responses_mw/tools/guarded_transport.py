"""An HTTP transport for MCP servers. It connects only to public internet addresses, unless private addresses are allowed.

All addresses of a host must be public, however the host is written. The connection is made to a checked address. The name is
not resolved again, which prevents DNS rebinding. Redirects are checked too. Proxies from the environment are ignored, because
a proxy resolves the names itself.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any

import anyio
import httpcore2
import httpx2
import orjson

from ..network import failure_reason, system_tls
from ..protocol.json_limits import count_values

HTTP_FAULT = -32050
"""The code of the JSON-RPC errors that are created by the transport. Their `data` is the HTTP status."""
SESSION_HEADER = "mcp-session-id"
UNREACHABLE = 502

_KEEPALIVE_EXPIRY = 4.0
_MAX_ADDRESSES = 8
_MAX_CONNECTIONS = 100
MAX_VALUES = 250_000
"""Maximum number of JSON values in a response or stream, as in a result with 1 MiB of numbers.

The SDK may block the event loop for 10 microseconds per value.
"""
MAX_STREAMS = 100
"""Maximum number of GET requests of a session, in addition to one per second.

The SDK opens a stream again when the server closes it, even immediately. A server may also let its clients poll for results.
"""
_LINE_END = re.compile(rb"[\r\n]")
# An attacker's name servers can delay lookups for many seconds. Lookups of operators' hosts must not wait for these threads.
_RESOLVERS = ThreadPoolExecutor(32, thread_name_prefix="resolver")

# Addresses that are registered as public but are not on the internet, because they are used inside clouds (Azure) or reserved.
_NOT_PUBLIC_V4 = tuple(map(ip_network, ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24")))
_GLOBAL_UNICAST = ip_network("2000::/3")
# IETF protocol assignments (with Teredo), documentation, 6to4, segment routing.
_NOT_PUBLIC_V6 = tuple(map(ip_network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
_NAT64 = ip_network("64:ff9b::/96")


class AddressRefused(Exception):
    """The URL is not permitted, or its host has an address that is not public. The message quotes only the host of the URL."""


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether `address` is public. In IPv4-mapped and NAT64 addresses, the embedded IPv4 address must be public."""
    if isinstance(address, IPv4Address):
        return address.is_global and not address.is_multicast and not any(address in net for net in _NOT_PUBLIC_V4)
    if address.ipv4_mapped is not None:
        return is_public(address.ipv4_mapped)
    if address in _NAT64:
        return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
    is_isatap = (int(address) >> 32) & 0xFDFFFFFF == 0x00005EFE  # the interface id of a tunnel to an IPv4 address (RFC 5214)
    if is_isatap or address.scope_id is not None:
        return False
    return address in _GLOBAL_UNICAST and address.is_global and not any(address in net for net in _NOT_PUBLIC_V6)


def fault_of(url: str, *, allow_private: bool) -> str | None:
    """Check `url` without resolving its host. Return a clause that describes the fault, or None if `url` is permitted."""
    try:
        parsed = httpx2.URL(url)
        host, port = parsed.host, parsed.port
    except (httpx2.InvalidURL, ValueError):
        return "it is not a URL"
    if parsed.scheme not in ("http", "https") or not host:
        return "it must begin with http:// or https:// and name a host"
    if parsed.userinfo:
        return "it must not contain credentials: send them as headers or authorization"
    if port is not None and not 0 < port <= 65_535:
        return "its port must be between 1 and 65535"
    try:
        address = ip_address(host)
    except ValueError:
        return None
    return None if allow_private or is_public(address) else "its host is not a public address"


async def resolve(host: str, port: int, *, trusted: bool) -> list[str]:
    """Return the addresses of `host`, without duplicates. A host that is not `trusted` is resolved in separate threads.

    Raises `OSError` if the name cannot be resolved, or `UnicodeError` if the name is invalid.
    """
    loop = asyncio.get_running_loop()
    if trusted:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    else:
        found = await loop.run_in_executor(_RESOLVERS, partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM))
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


async def checked_addresses(host: str, port: int, *, allow_private: bool) -> list[str]:
    """Resolve `host`, and return up to `_MAX_ADDRESSES` of its addresses.

    Raises `AddressRefused` if any address is not public, unless `allow_private` is true. Raises `OSError` or `UnicodeError` if
    `host` cannot be resolved.
    """
    addresses = [ip_address(address) for address in await resolve(host, port, trusted=allow_private)]
    if not addresses:
        raise socket.gaierror(socket.EAI_NONAME, "the host has no address")
    if not allow_private and not all(map(is_public, addresses)):
        raise AddressRefused(f"The host '{host}' is not at a public address")
    return [str(address) for address in addresses[:_MAX_ADDRESSES]]


# -- the transport -----------------------------------------------------------------------------------------------------------


class GuardedTransport(httpx2.AsyncBaseTransport):
    """The HTTP transport of one MCP session. It connects only to permitted addresses, and records the status of responses.

    If an HTTP request fails, the SDK closes the whole session, which also aborts all other calls. The transport therefore
    converts errors to responses with a JSON-RPC error. If the connection is lost, the response body ends early. Responses must
    not be compressed, because a small compressed body can expand to any size. Cookies are ignored. The SDK follows redirects
    only within the origin.
    """

    def __init__(self, max_bytes: int, *, allow_private: bool) -> None:
        """`max_bytes` is the maximum size of a response or, in an event stream, of a line."""
        self.status: int | None = None
        """The response status of the last POST: 502 if the POST failed, None if there was none."""
        self.address_refused = False
        self.session_id: str | None = None  # assigned by the server
        self._allow_private, self._max_bytes = allow_private, max_bytes
        self._began = time.monotonic()
        self._streams = 0
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=system_tls(),
            max_connections=_MAX_CONNECTIONS,
            keepalive_expiry=_KEEPALIVE_EXPIRY,
            network_backend=GuardedNetwork(allow_private=allow_private),
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            self._streams += 1
            if self._streams > MAX_STREAMS + time.monotonic() - self._began:
                return _fault(UNREACHABLE, "it closed too many streams")
        try:
            received = await self._send(request)
        except FAULTS as error:
            self.address_refused = isinstance(error, AddressRefused)
            response = _fault(UNREACHABLE, describe(error))
        else:
            response = httpx2.Response(received.status, headers=received.headers, stream=_Body(received, self._max_bytes))
        if request.method == "POST":
            self.status = response.status_code
            self.session_id = response.headers.get(SESSION_HEADER, self.session_id)
        if fault := await _fault_in(response, request.method):
            await response.aclose()
            return fault
        return response

    async def _send(self, request: httpx2.Request) -> httpcore2.Response:
        url = request.url
        if fault := fault_of(str(url), allow_private=self._allow_private):
            raise AddressRefused(f"The URL of '{url.host}' is refused: {fault}")
        outgoing = httpcore2.Request(
            request.method,
            httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=request.headers.raw,
            content=await request.aread(),
            extensions={"timeout": request.extensions["timeout"]},
        )
        return await self._pool.handle_async_request(outgoing)

    async def aclose(self) -> None:
        await self._pool.aclose()


class GuardedNetwork(httpcore2.AnyIOBackend):
    """Connects to the first of a host's checked addresses that can be reached."""

    def __init__(self, *, allow_private: bool) -> None:
        self._allow_private = allow_private

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 (httpcore's signature)
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            with anyio.fail_after(timeout):
                *others, last = await checked_addresses(host, port, allow_private=self._allow_private)
                share = None if timeout is None else timeout / (len(others) + 1)
                for address in others:
                    with suppress(httpcore2.ConnectError, httpcore2.ConnectTimeout):
                        return await super().connect_tcp(address, port, share, local_address, socket_options)
                return await super().connect_tcp(last, port, None, local_address, socket_options)
        except TimeoutError as error:
            raise httpcore2.ConnectTimeout(f"Connecting to {host}:{port} timed out") from error


class _Body(httpx2.AsyncByteStream):
    """A response body. If the connection is lost or a limit is exceeded, it ends early, and the SDK finds it malformed.

    The SDK gets only data whose JSON values have been counted: whole lines of an event stream, otherwise the whole body.
    """

    def __init__(self, response: httpcore2.Response, max_bytes: int) -> None:
        self._response = response
        content_type = httpx2.Headers(response.headers).get("content-type", "").lower()
        self._is_stream = content_type.startswith("text/event-stream") and 200 <= response.status < 300
        self._max_bytes = max_bytes
        self._values_left = MAX_VALUES

    async def __aiter__(self) -> AsyncIterator[bytes]:
        held = bytearray()
        with suppress(*FAULTS):
            async for data in self._response.aiter_stream():
                held += data
                end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1 if self._is_stream else 0
                if end:
                    lines, held = held[: len(held) - len(data) + end], held[len(held) - len(data) + end :]
                    if not self._admits(bytes(lines)):
                        return
                    yield bytes(lines)
                if len(held) > self._max_bytes:
                    return
            if self._admits(bytes(held)):
                yield bytes(held)

    def _admits(self, data: bytes) -> bool:
        """Return whether the body has at most `MAX_VALUES` JSON values up to the end of `data`, the next part of the body."""
        self._values_left -= sum(map(count_values, _LINE_END.split(data)))  # no JSON string contains a line break
        return self._values_left >= 0

    async def aclose(self) -> None:
        await self._response.aclose()


_UNREACHED = (httpcore2.ConnectError, OSError, UnicodeError)  # the resolver raises OSError and UnicodeError
FAULTS = (AddressRefused, *_UNREACHED, httpcore2.TimeoutException, httpcore2.NetworkError, httpcore2.ProtocolError)


def describe(error: Exception) -> str:
    """Describe the error. The URL is omitted, because it may contain credentials."""
    if isinstance(error, AddressRefused):
        return "its URL does not lead to a public address"
    if isinstance(error, httpcore2.TimeoutException):
        return "it did not answer in time"
    if not isinstance(error, _UNREACHED):
        return "the connection was lost"
    why = failure_reason(error)
    return f"it cannot be reached: {why}" if why else "it cannot be reached"


async def _fault_in(response: httpx2.Response, method: str) -> httpx2.Response | None:
    """Return an error response to pass to the SDK instead of `response`, or None if the SDK can process `response`."""
    status = response.status_code
    if response.headers.get("content-encoding", "identity") != "identity":
        return _fault(UNREACHABLE, "it sent a compressed answer, which was not requested")
    if method != "POST" or status < 400:
        return None
    if status in (401, 403):
        return _fault(status, "it refused the credentials")
    with suppress(orjson.JSONDecodeError):
        message = orjson.loads(await response.aread())
        if isinstance(message, dict) and "jsonrpc" in message:
            return None
    return _fault(status, f"it answered with HTTP status {status}")


def _fault(status: int, message: str) -> httpx2.Response:
    body = {"jsonrpc": "2.0", "id": None, "error": {"code": HTTP_FAULT, "message": message, "data": status}}
    return httpx2.Response(status, headers={"content-type": "application/json"}, content=orjson.dumps(body))
