"""A guard for URLs that a request names: they may lead to the public internet only.

1. It is the address that is checked, not the name: however an address is written (decimal, octal, in hexadecimal, as IPv6), it
   is looked at as the resolver gives it. Each of a host's addresses must be public.
2. The connection is made to an address that was checked; the name is not resolved again, so that it cannot turn to another one
   in between ("DNS rebinding"). Only the socket is opened differently: Host, SNI and the certificate's name stay the host's.
3. Every connection is made here, so that those of redirects are checked like the first. Proxies of the environment are not
   used: they would resolve by themselves.
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
"""The addresses of a host, for a port; raises ``OSError`` where there are none."""

_KEPT_IDLE = 4.0
_MOST_ADDRESSES = 8

# Public by their registration, and yet not of the internet: clouds answer machines of their own here (Azure), or nobody should.
_NOT_PUBLIC_V4 = tuple(map(ip_network, ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24")))
_GLOBAL_UNICAST = ip_network("2000::/3")
# IETF protocol assignments (with Teredo), documentation, 6to4, segment routing: nothing that is served today.
_NOT_PUBLIC_V6 = tuple(map(ip_network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
_NAT64 = ip_network("64:ff9b::/96")


class AddressRefused(httpx.ConnectError):
    """The URL leads, or may lead, to what is not public. The message names the host only."""


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether ``address`` is one of the public internet. Of one that wraps an IPv4 address (mapped, NAT64) the inner counts."""
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
    """An interface id that tunnels to an IPv4 address (RFC 5214)."""
    return (int(address) >> 32) & 0xFDFFFFFF == 0x00005EFE


def fault_of(url: str, *, allow_private: bool) -> str | None:
    """What is wrong with a URL by itself, before its host is resolved; None if nothing is."""
    try:
        parsed = httpx.URL(url)
        host, port = parsed.host, parsed.port
    except (httpx.InvalidURL, ValueError):
        return "it is not a URL"
    if parsed.scheme not in ("http", "https") or not host:
        return "it must begin with http:// or https:// and name a host"
    if parsed.userinfo:
        return "it must not carry credentials: send them as headers or authorization"
    if port is not None and not 0 < port <= 65_535:
        return "it has no such port"
    try:
        address = ip_address(host)
    except ValueError:
        return None
    return None if allow_private or is_public(address) else "its host is not a public address"


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of ``host`` as the system resolves it."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


async def checked_addresses(host: str, port: int, *, allow_private: bool, resolve: Resolve = resolve) -> list[str]:
    """The addresses that a connection to ``host`` may be made to, as literals.

    Raises ``AddressRefused`` if one is not public, ``httpx.ConnectError`` if there is none.
    """
    try:
        found = await resolve(host, port)
    except (OSError, UnicodeError) as error:  # a name that cannot be one is a UnicodeError
        raise httpx.ConnectError(f"The host '{host}' cannot be resolved") from error
    addresses = [ip_address(address) for address in found]
    if not addresses:
        raise httpx.ConnectError(f"The host '{host}' cannot be resolved")
    if not allow_private and not all(map(is_public, addresses)):
        raise AddressRefused(f"The host '{host}' is not at a public address")
    return [str(address) for address in addresses[:_MOST_ADDRESSES]]


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Opens the sockets: to addresses that were checked, one after the other until one takes the connection."""

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
            raise httpcore.ConnectTimeout(f"No connection to {host}:{port} in time") from error

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(seconds)


class GuardedTransport(httpx.AsyncBaseTransport):
    """httpx's way to the network, for URLs that a stranger chose. Connections are pooled by host, never shared between hosts.

    ``allow_private`` lets it reach every address; ``resolve`` is the resolver, ``ssl_context`` what is trusted, if not the
    system's own; ``connections`` is the most at a time. Raises ``AddressRefused``, and what httpx's own transport raises.
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
            ssl_context=ssl_context or _system_tls(),
            max_connections=connections,
            keepalive_expiry=_KEPT_IDLE,
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
        return httpx.Response(response.status, headers=response.headers, stream=_Body(response))

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Body(httpx.AsyncByteStream):
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
    """httpcore names its errors as httpx does."""
    kind: type[httpx.TransportError] = getattr(httpx, type(error).__name__)
    return kind(str(error))


@cache
def _system_tls() -> ssl.SSLContext:
    """Made once: it reads all the authorities, which takes milliseconds."""
    return ssl.create_default_context()
