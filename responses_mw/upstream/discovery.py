"""The addresses of an upstream's endpoints. Names in URLs such as `dns+http://vllm-headless:8000` are resolved repeatedly.

1. If a lookup fails or times out, the known addresses of its name are kept. They are removed only after two consecutive answers
   without addresses, because a cluster's DNS may briefly return such an answer during a rollout.
2. If a name has IPv4 and IPv6 addresses, only the IPv4 addresses are used. Each pod behind a dual-stack Service has an address
   of each kind, and would otherwise be two endpoints. Many servers listen on IPv4 only.
3. Every replica finds the same addresses in the same order, because a chain's endpoint depends on them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Literal, TypeAlias

import httpx

from ..settings.values import DNS_PREFIX

logger = logging.getLogger(__name__)

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a host and port. Raises `OSError` or `UnicodeError` if the lookup fails."""

INTERVAL = 5.0
"""Seconds between lookups: as in Envoy, and the TTL of CoreDNS's answers for Services."""
LOOKUP_TIMEOUT = 4.0
"""Timeout in seconds of a lookup. It is shorter than `INTERVAL`, so that a hung lookup does not delay the next ones."""
MAX_ADDRESSES = 1024

_HAS_NO_ADDRESS = {getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA", "EAI_ADDRFAMILY") if hasattr(socket, name)}


@dataclass(frozen=True, slots=True)
class Address:
    """The destination of the requests to one endpoint."""

    url: str
    """Base URL. For a resolved name, it contains the IP address: `http://10.0.0.7:8000/base`, `http://[fd00::7]:8000`."""
    host: str
    """Value of the Host header: name and port in the configured URL."""
    server_name: str
    """Name for TLS (SNI and the check of the certificate), or "" if it is the host of `url`."""


class Discovery:
    """Finds the addresses of `urls`. Whenever they change, passes them to `changed`, sorted by URL.

    `resolve` replaces the operating system's resolver. `changed` must not raise exceptions.
    """

    def __init__(
        self, urls: Sequence[str], changed: Callable[[Sequence[Address]], None], resolve: Resolve | None = None
    ) -> None:
        self._static = [_static_address(url) for url in urls if not url.startswith(DNS_PREFIX)]
        self._names = [_Name(httpx.URL(url.removeprefix(DNS_PREFIX))) for url in urls if url.startswith(DNS_PREFIX)]
        self._changed = changed
        self._resolve = resolve or SystemResolver()
        self._reported: tuple[Address, ...] | None = None

    async def refresh(self) -> None:
        """Resolve every name once, within `LOOKUP_TIMEOUT` seconds.

        Addresses that need no lookup are reported first, and those of each name as soon as its lookup ends.
        """
        if self._static or not self._names:
            self._report()
        async with asyncio.TaskGroup() as lookups:
            for name in self._names:
                lookups.create_task(self._look_up(name))

    async def run(self) -> None:
        """Refresh every `INTERVAL` seconds. Return only if there is no name to resolve."""
        while self._names:
            await asyncio.gather(self.refresh(), asyncio.sleep(INTERVAL))

    async def _look_up(self, name: _Name) -> None:
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT):
                name.update(await self._resolve(name.host, name.port))
        except TimeoutError:
            name.fail(f"no answer within {LOOKUP_TIMEOUT:g} s")
        except (OSError, UnicodeError) as error:
            if isinstance(error, socket.gaierror) and error.errno in _HAS_NO_ADDRESS:
                name.update([])
            else:
                name.fail(str(error) or type(error).__name__)
        self._report()

    def _report(self) -> None:
        """Pass the addresses to `changed` if they differ from the last ones. If URLs are equal, the first one is used."""
        resolved = sorted((address for name in self._names for address in name.addresses), key=lambda found: found.url)
        unique: dict[str, Address] = {}
        for address in [*self._static, *resolved]:
            unique.setdefault(address.url, address)
        found = tuple(sorted([*unique.values()][:MAX_ADDRESSES], key=lambda address: address.url))
        if found == self._reported:
            return
        if len(unique) > MAX_ADDRESSES:
            logger.warning("the upstream has %d addresses, only %d of them are used", len(unique), MAX_ADDRESSES)
        self._reported = found
        self._changed(found)


class _Name:
    """A URL whose host is resolved, and the addresses that were found."""

    def __init__(self, url: httpx.URL) -> None:
        self._url = url
        self.host = url.raw_host.decode()
        self.port = url.port or {"http": 80, "https": 443}[url.scheme]
        self.addresses: list[Address] = []
        self._empty_answers = 0
        self._state: Literal["resolved", "empty", "failing"] = "resolved"

    def update(self, answer: Iterable[str]) -> None:
        """Replace the addresses with those in `answer`. Ignore the first of several consecutive empty answers."""
        addresses = [self._address(ip) for ip in _usable(answer)]
        self._empty_answers = 0 if addresses else self._empty_answers + 1
        if self._empty_answers == 1 and self.addresses:
            return
        self.addresses = addresses
        if not addresses:
            self._enter("empty", "the upstream's name %s has no address", self.host)
        elif self._state != "resolved":
            self._state = "resolved"
            logger.info("the upstream's name %s is resolved again: %d addresses", self.host, len(addresses))

    def fail(self, reason: str) -> None:
        """Keep the addresses, because the lookup failed."""
        self._empty_answers = 0
        text = "the upstream's name %s cannot be resolved (%s); its %d known addresses are kept"
        self._enter("failing", text, self.host, reason, len(self.addresses))

    def _enter(self, state: Literal["empty", "failing"], text: str, *values: Any) -> None:
        if self._state != state:
            self._state = state
            logger.warning(text, *values)

    def _address(self, ip: IPv4Address | IPv6Address) -> Address:
        # A certificate never names a final dot, which marks an absolute DNS name.
        server_name = self.host.rstrip(".") if self._url.scheme == "https" else ""
        return Address(_base(self._url.copy_with(host=str(ip))), self._url.netloc.decode(), server_name)


def _static_address(url: str) -> Address:
    parsed = httpx.URL(url)
    return Address(_base(parsed), parsed.netloc.decode(), "")


def _base(url: httpx.URL) -> str:
    return str(url).rstrip("/")


def _usable(answer: Iterable[str]) -> list[IPv4Address | IPv6Address]:
    """Return the IPv4 addresses or, if there are none, the IPv6 addresses. Omit addresses that no server can have."""
    found = [address for text in answer if not (address := _parse(text)).is_unspecified and not address.is_multicast]
    kind = min((address.version for address in found), default=4)
    return list(dict.fromkeys(address for address in found if address.version == kind))


def _parse(text: str) -> IPv4Address | IPv6Address:
    address = ip_address(text)
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


class SystemResolver:
    """The operating system's resolver, in a daemon thread for each lookup.

    A lookup can take a minute if name servers do not answer, and cannot be cancelled. In an executor, it would delay other
    lookups and the end of the process. If a lookup outlasts its caller, the next lookup of the same name gets its answer.
    """

    def __init__(self, look_up: Callable[..., Any] = socket.getaddrinfo) -> None:
        self._look_up = look_up
        self._running: dict[tuple[str, int], Future[list[str]]] = {}

    async def __call__(self, host: str, port: int) -> list[str]:
        """Return the IP addresses of `host`. Raises `OSError` or `UnicodeError` if the lookup fails."""
        key = host, port
        running = self._running.get(key) or self._running.setdefault(key, self._start(host, port))
        try:
            return await asyncio.wrap_future(running)
        finally:
            if running.done():
                self._running.pop(key, None)

    def _start(self, host: str, port: int) -> Future[list[str]]:
        lookup: Future[list[str]] = Future()
        lookup.set_running_or_notify_cancel()  # so that the waiting task's timeout does not cancel it

        def run() -> None:
            try:
                # The flag leaves out IPv4 addresses if this machine has none.
                found = self._look_up(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
                lookup.set_result([str(address[0]) for *_, address in found])
            except Exception as error:  # noqa: BLE001 (the waiting task gets it)
                lookup.set_exception(error)

        try:
            threading.Thread(target=run, name="upstream-resolver", daemon=True).start()
        except RuntimeError as error:
            raise OSError("this process may not start more threads") from error
        return lookup
