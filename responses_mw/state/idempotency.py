"""Idempotency keys: for each key of an owner, the request that it belongs to and the response to that request.

    rmw:{i<hash>}:key   hash: ``request`` (its hash), ``token`` of the reservation, ``response`` (its id), ``done``

The name contains a hash of the owner and the key. While its request runs, a reservation has a lease, so a lost replica blocks
the key for at most 30 seconds. Once the response exists, the reservation is kept for a day.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from ..ids import random_part
from .scripts import script

if TYPE_CHECKING:
    from .client import Client

__all__ = ["IdempotencyKeys", "Reservation", "Reserved"]

_RESERVE, _UPDATE = script("idempotency_reserve"), script("idempotency_update")

# Seconds for which a key is kept: once its response exists, and while its request runs.
KEPT = 24 * 60 * 60
LEASE = 30.0


@dataclass(frozen=True, slots=True)
class Reserved:
    """The result of reserving a key.

    ``verdict`` is ``reserved`` (run the request), ``running`` (another request with the key is running), ``done`` (another
    request created the response) or ``different`` (the key belongs to a request with a different body).
    """

    verdict: str
    response_id: str | None = None


class Reservation:
    """One request's claim to a key. Every method raises StateUnavailable."""

    def __init__(self, client: Client, name: str, request_hash: str) -> None:
        self._client = client
        self._name = name
        self._request_hash = request_hash
        self._token = random_part()

    async def reserve(self) -> Reserved:
        """Reserve the key for ``LEASE`` seconds unless another request has it. Repeating this is safe."""
        args: list[str | bytes | int] = [self._request_hash, self._token, int(LEASE * 1000)]
        verdict, *rest = await self._client.script(_RESERVE, [self._name], args)
        response_id = rest[0].decode() if rest and rest[0] is not None else None
        return Reserved(verdict.decode(), response_id)

    async def renew(self) -> None:
        """Extend the lease."""
        await self._update(LEASE)

    async def name(self, response_id: str) -> bool:
        """Record the id of the response that is about to be created, and extend the lease. Return False if it expired."""
        return await self._update(LEASE, response_id)

    async def complete(self, response_id: str) -> None:
        """Record that the response exists, and keep the key for ``KEPT`` seconds."""
        await self._update(KEPT, response_id, done="1")

    async def release(self) -> None:
        """Release the key for other requests."""
        await self._update(0)

    async def _update(self, seconds: float, response_id: str = "", *, done: str = "") -> bool:
        args: list[str | bytes | int] = [self._token, int(seconds * 1000), response_id, done]
        return bool(await self._client.script(_UPDATE, [self._name], args))


class IdempotencyKeys:
    """The idempotency keys of all owners."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def reservation(self, owner: str, key: str, request: bytes) -> Reservation:
        """Return the claim of a request. Requests are compared by the bytes ``request``. This does not reserve the key."""
        name = sha256(f"{owner}\0{key}".encode()).hexdigest()[:32]
        return Reservation(self._client, f"rmw:{{i{name}}}:key", sha256(request).hexdigest())
