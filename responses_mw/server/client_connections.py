"""The connections of the clients: how many may be open or wait for a request, and how much unread data they may have.

A client that leaves while the server has unsent data for it is noticed here too.
"""

from __future__ import annotations

import asyncio
import logging
import select
import sys
from collections import defaultdict
from ipaddress import IPv6Address, ip_address
from typing import ClassVar

from ..descriptors import max_descriptors, report_shortage
from ..errors import APIError, RateLimited, Unavailable
from ..telemetry.context import WarningLimit
from ..telemetry.metrics import LIMITS_REFUSED

logger = logging.getLogger(__name__)

HEAD_TIMEOUT = 30.0
"""Maximum number of seconds in which the first head of a connection, and each later head once it has begun, must arrive."""
MAX_WAITING = 10_000
"""Maximum number of connections without a request, however many files the process may open."""
MAX_STREAM_BUFFER = 320 * 1024
"""Maximum number of unread bytes of a connection that `Unread` does not count.

A slow stream has no more: 64 KiB, at which uvicorn waits for the client, and one read of the upstream's connection, which has
at most 256,000 bytes.
"""
LINGER = 2
"""Seconds for which a refused connection stays open, so that the client can read the error."""
RESERVE = 64
"""Number of file descriptors that clients do not get, so that requests in progress can reach the upstream and Redis.

If none were left, libuv would close new connections without an error, a message or a call of ours.
"""
EOF_INTERVAL = 0.25
"""Seconds between two checks whether a client that does not read its data has left."""


def max_waiting() -> int:
    """Return the maximum number of connections without a request: half of the files that this process may open."""
    return min(MAX_WAITING, max_descriptors() // 2)


class Connections:
    """The open connections of a server.

    A connection *waits* while it has no request whose head is complete: it is new or idle, or sends a head. If more than
    `max_waiting` connections wait, the one that has waited longest is closed. Requests in progress are therefore never short of
    descriptors because of other clients that send nothing. An address may have `per_address` connections; 0 is unlimited.

    Connections that would leave fewer than `reserve` file descriptors are refused. A limit of few descriptors has a smaller
    reserve.
    """

    def __init__(
        self,
        max_waiting: int = MAX_WAITING,
        *,
        per_address: int = 0,
        head_timeout: float = HEAD_TIMEOUT,
        reserve: int = RESERVE,
    ) -> None:
        self.head_timeout = head_timeout
        self._max_waiting = max_waiting
        self._per_address = per_address
        limit = max_descriptors()
        self._max_descriptor = limit - min(reserve, limit // 4)
        self._waiting: dict[asyncio.Transport, None] = {}  # an ordered set
        self._open: defaultdict[str, set[asyncio.Transport]] = defaultdict(set)
        self._warnings = WarningLimit()

    def open(self, transport: asyncio.Transport) -> APIError | None:
        """Count a new connection, or return the error with which it must be refused."""
        if _descriptor(transport) >= self._max_descriptor:
            LIMITS_REFUSED.add(1, {"limit": "descriptors"})
            report_shortage("a connection of a client")
            return Unavailable("This server has no file descriptors left for more connections.", retry_after=LINGER)
        if self._per_address and (address := _address(transport)):
            if len(self._open[address] - {transport}) >= self._per_address:
                LIMITS_REFUSED.add(1, {"limit": "connections"})
                maximum = f"limits.connections_per_address ({self._per_address})"
                self._warn("refusing a connection of %s, which already has %s", address, maximum)
                return RateLimited("Your address has too many open connections.", retry_after=LINGER)
            self._open[address].add(transport)
        return None

    def close(self, transport: asyncio.Transport) -> None:
        """Stop counting a connection, if it was counted."""
        self.stop_waiting(transport)
        address = _address(transport) if self._per_address else ""
        if address in self._open:
            self._open[address].discard(transport)
            if not self._open[address]:
                del self._open[address]

    def wait(self, transport: asyncio.Transport) -> None:
        """Count a connection that begins to wait. Close the one that has waited longest if there are too many."""
        self._waiting[transport] = None
        if len(self._waiting) > self._max_waiting:
            oldest = next(iter(self._waiting))
            self.stop_waiting(oldest)
            LIMITS_REFUSED.add(1, {"limit": "waiting"})
            self._warn("closing an idle connection of %s: more than %d wait for a request", _address(oldest), self._max_waiting)
            oldest.close()

    def stop_waiting(self, transport: asyncio.Transport) -> None:
        self._waiting.pop(transport, None)

    def _warn(self, message: str, *values: object) -> None:
        logger.log(logging.WARNING if self._warnings.is_due() else logging.DEBUG, message, *values)


def _descriptor(transport: asyncio.Transport) -> int:
    """Return the transport's file descriptor. The kernel always assigns the lowest free number. If unknown, return -1."""
    bound = transport.get_extra_info("socket")
    return -1 if bound is None else bound.fileno()


def _address(transport: asyncio.Transport) -> str:
    """Return the client's IPv4 address or the /64 network of its IPv6 address. For other sockets, return ""."""
    peer = transport.get_extra_info("peername")
    if not isinstance(peer, tuple):
        return ""
    address = ip_address(peer[0].partition("%")[0])
    if not isinstance(address, IPv6Address):
        return str(address)
    mapped = address.ipv4_mapped
    return str(mapped) if mapped else f"{IPv6Address(int(address) >> 64 << 64)}/64"


class Unread:
    """The large responses and messages that clients have not read yet. Their total is limited to `maximum` bytes.

    If a new one exceeds the total, the connections that have waited longest are aborted. A single connection may exceed it.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._waiting: dict[asyncio.Transport, None] = {}  # an ordered set
        self._warnings = WarningLimit()

    def add(self, transport: asyncio.Transport) -> None:
        """Count the data that `transport` has buffered, unless it is a small amount, as for any slow stream."""
        if transport.get_write_buffer_size() > MAX_STREAM_BUFFER:
            self._waiting[transport] = None
            while len(self._waiting) > 1 and sum(one.get_write_buffer_size() for one in self._waiting) > self._maximum:
                self._abort(next(iter(self._waiting)))

    def remove(self, transport: asyncio.Transport) -> None:
        self._waiting.pop(transport, None)

    def _abort(self, transport: asyncio.Transport) -> None:
        self.remove(transport)
        LIMITS_REFUSED.add(1, {"limit": "memory"})
        level = logging.WARNING if self._warnings.is_due() else logging.DEBUG
        reason = f"the data that clients have not read exceeds limits.memory_bytes ({self._maximum})"
        client, size = transport.get_extra_info("peername"), transport.get_write_buffer_size()
        logger.log(level, "closing the connection of %s, which has not read %d bytes: %s", client, size, reason)
        transport.abort()


class CountedProtocol(asyncio.Protocol):
    """A base class of protocols that counts the connection, and what the client has not read yet.

    If the client sends an EOF before the end of a response, the connection is aborted. `transport.close()`, which uvicorn would
    call, first waits until the client has read all data. While the client does not read, its EOF may not be reported either,
    because reading may be paused, too.
    """

    unread: ClassVar = Unread(256 * 1024**2)
    open_connections: ClassVar = Connections()
    transport: asyncio.Transport
    _eof_check: asyncio.TimerHandle | None = None

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/protocols/http/httptools_impl.py#L358
    # uvicorn waits for the client to read, for any time and with any amount of data.
    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread.add(self.transport)
        self._schedule_eof_check()

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/protocols/http/httptools_impl.py#L364
    # uvicorn only resumes sending; the connection must also no longer count as unread.
    def resume_writing(self) -> None:
        super().resume_writing()
        self.unread.remove(self.transport)
        self._cancel_eof_check()

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/protocols/http/httptools_impl.py#L135
    # uvicorn does nothing, so asyncio closes the transport only after all data has been sent.
    def eof_received(self) -> None:
        if self._expects_more():
            self.transport.abort()

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/protocols/http/httptools_impl.py#L116
    # uvicorn does not know about the counters and the timer of this class.
    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_eof_check()
        self.unread.remove(self.transport)
        self.open_connections.close(self.transport)
        super().connection_lost(exc)

    def _expects_more(self) -> bool:
        """Return whether the client should still be connected, because it has not got all of its responses."""
        return True

    def _check_eof(self) -> None:
        if self._expects_more() and _has_sent_eof(self.transport):
            self.transport.abort()
        else:
            self._schedule_eof_check()

    def _schedule_eof_check(self) -> None:
        self._eof_check = asyncio.get_running_loop().call_later(EOF_INTERVAL, self._check_eof)

    def _cancel_eof_check(self) -> None:
        if self._eof_check is not None:
            self._eof_check.cancel()
            self._eof_check = None


def _has_sent_eof(transport: asyncio.Transport) -> bool:
    """Return whether the client has closed its side of the connection, even if it sent data before. Only Linux tells."""
    if sys.platform != "linux":
        return False
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))
