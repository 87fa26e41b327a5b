"""A transport for URLs from requests. It connects to public internet addresses only.

1. The resolved addresses are checked, so it does not matter how the host is written (decimal, octal, hexadecimal, IPv6). Every
   address of a host must be public.
2. The connection is made to a checked address. The name is not resolved again, which prevents DNS rebinding. The Host header,
   SNI and the certificate check still use the name.
3. All connections are made here, so redirects are checked too. Proxies from the environment are not used, because they would
   resolve names themselves.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any, TypeAlias

import anyio
import httpcore
import httpx

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves a host and port to addresses. Raises ``OSError`` if there are none."""

_KEEPALIVE_EXPIRY = 4.0
_MAX_ADDRESSES = 8

# Registered as public, but not part of the internet: used inside clouds (Azure) or reserved.
_NOT_PUBLIC_V4 = tuple(map(ip_network, ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24")))
_GLOBAL_UNICAST = ip_network("2000::/3")
# IETF protocol assignments (with Teredo), documentation, 6to4, segment routing.
_NOT_PUBLIC_V6 = tuple(map(ip_network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
_NAT64 = ip_network("64:ff9b::/96")


class AddressRefused(httpx.ConnectError):
    """The URL may lead to an address that is not public. The message contains only the host."""


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether ``address`` is public. For an IPv4 address in IPv6 (mapped, NAT64), the IPv4 address decides."""
    if isinstance(address, IPv4Address):
        return address.is_global and not address.is_multicast and not any(address in net for net in _NOT_PUBLIC_V4)
    if address.ipv4_mapped is not None:
        return is_public(address.ipv4_mapped)
    if address in _NAT64:
        return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
    if _is_isatap(address) or address.scope_id is not None:
        return False
    return address in _GLOBAL_UNICAST and address.is_global and not any(address in net for net in _NOT_PUBLIC_V6)


def _is_isatap(address: IPv6Address) -> bool:
    """Return whether the interface id denotes a tunnel to an IPv4 address (RFC 5214)."""
    return (int(address) >> 32) & 0xFDFFFFFF == 0x00005EFE


def fault_of(url: str, *, allow_private: bool) -> str | None:
    """Return what is wrong with a URL before its host is resolved, or None."""
    try:
        parsed = httpx.URL(url)
        host, port = parsed.host, parsed.port
    except (httpx.InvalidURL, ValueError):
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


async def resolve(host: str, port: int) -> list[str]:
    """Resolve ``host`` with the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


async def checked_addresses(host: str, port: int, *, allow_private: bool, resolve: Resolve = resolve) -> list[str]:
    """Return the addresses of ``host`` that may be connected to.

    Raises ``AddressRefused`` if one is not public and ``httpx.ConnectError`` if there is none.
    """
    try:
        found = await resolve(host, port)
    except (OSError, UnicodeError) as error:  # an invalid name raises UnicodeError
        raise httpx.ConnectError(f"The host '{host}' cannot be resolved") from error
    addresses = [ip_address(address) for address in found]
    if not addresses:
        raise httpx.ConnectError(f"The host '{host}' cannot be resolved")
    if not allow_private and not all(map(is_public, addresses)):
        raise AddressRefused(f"The host '{host}' is not at a public address")
    return [str(address) for address in addresses[:_MAX_ADDRESSES]]


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Opens sockets to checked addresses, trying one after another."""

    def __init__(self, *, allow_private: bool, resolve: Resolve) -> None:
        self._allow_private = allow_private
        self._resolve = resolve
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 (httpcore's signature)
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            with anyio.fail_after(timeout):
                addresses = await checked_addresses(host, port, allow_private=self._allow_private, resolve=self._resolve)
                share = None if timeout is None else timeout / len(addresses)
                for address in addresses[:-1]:
                    try:
                        return await self._inner.connect_tcp(address, port, share, local_address, socket_options)
                    except (httpcore.ConnectError, httpcore.ConnectTimeout):
                        continue
                return await self._inner.connect_tcp(addresses[-1], port, None, local_address, socket_options)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(f"Connecting to {host}:{port} timed out") from error

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(seconds)


class GuardedTransport(httpx.AsyncBaseTransport):
    """A transport for URLs chosen by callers. Connections are pooled by host and never shared between hosts.

    ``allow_private`` permits every address. ``ssl_context`` defaults to the system's. ``connections`` is the maximum number of
    open connections. Raises ``AddressRefused`` and the errors of httpx's own transport.
    """

    def __init__(
        self,
        *,
        allow_private: bool = False,
        resolve: Resolve = resolve,
        ssl_context: ssl.SSLContext | None = None,
        connections: int = 100,
    ) -> None:
        self._allow_private = allow_private
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context or system_tls(),
            max_connections=connections,
            keepalive_expiry=_KEEPALIVE_EXPIRY,
            network_backend=CheckedNetwork(allow_private=allow_private, resolve=resolve),
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        fault = fault_of(str(request.url), allow_private=self._allow_private)
        if fault is not None:
            raise AddressRefused(f"The URL of '{request.url.host}' is refused: {fault}")
        assert isinstance(request.stream, httpx.AsyncByteStream)
        url = request.url
        core = httpcore.Request(
            request.method,
            httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        try:
            response = await self._pool.handle_async_request(core)
        except _FAULTS as error:
            raise _as_httpx(error) from error
        return httpx.Response(response.status, headers=response.headers, stream=_GuardedBody(response))

    async def aclose(self) -> None:
        await self._pool.aclose()


class _GuardedBody(httpx.AsyncByteStream):
    def __init__(self, response: httpcore.Response) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for data in self._response.aiter_stream():
                yield data
        except _FAULTS as error:
            raise _as_httpx(error) from error

    async def aclose(self) -> None:
        await self._response.aclose()


_FAULTS = (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError)


def _as_httpx(error: Exception) -> httpx.TransportError:
    """Convert an httpcore error to the httpx error of the same name."""
    kind: type[httpx.TransportError] = getattr(httpx, type(error).__name__)
    return kind(str(error))


@cache
def system_tls() -> ssl.SSLContext:
    """Return the system's TLS context. It is loaded once, because reading all authorities takes milliseconds."""
    return ssl.create_default_context()
