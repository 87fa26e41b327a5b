"""Idempotency keys, which Redis reserves for one request each."""

from __future__ import annotations

from enum import Enum
from hashlib import sha256

from ..ids import random_part
from ..lua import load
from .client import Args, Client

_RESERVE, _UPDATE = load("state", "idempotency_reserve", "idempotency_update")

LEASE = 30.0
"""Seconds that a key is reserved. The reservation must be renewed in this time. It expires if the replica is lost."""
_KEPT = 24 * 60 * 60
"""Number of seconds that a key is stored after its response was created."""


class Reservation(Enum):
    """The result of `IdempotencyKey.reserve`."""

    RESERVED = b"reserved"
    """The caller must run the request."""
    RUNNING = b"running"
    """Another request with the key is running."""
    DONE = b"done"
    """Another request with the key has created its response."""
    DIFFERENT = b"different"
    """The key belongs to a request with a different body."""


class IdempotencyKey:
    """An owner's idempotency key, as one request sees it. Raises `StateUnavailable` if Redis fails."""

    def __init__(self, client: Client, owner: str, key: str, request: bytes) -> None:
        """`request` is the body of the request as JSON with sorted members. It must be equal in all requests with the key."""
        self._client = client
        name = sha256(f"{owner}\0{key}".encode()).hexdigest()[:32]
        self._name = f"rmw:{{i{name}}}:key"
        self._request_hash = sha256(request).hexdigest()
        self._token = random_part()

    async def reserve(self) -> tuple[Reservation, str | None]:
        """Reserve the key for `LEASE` seconds, unless another request has reserved the key. Repeating the call is safe.

        Return the id of the other request's response, too. The id is None if it is not known.
        """
        args: Args = [self._request_hash, self._token, int(LEASE * 1000)]
        result, *rest = await self._client.script(_RESERVE, [self._name], args)
        return Reservation(result), rest[0].decode() if rest and rest[0] is not None else None

    async def renew(self, response_id: str = "") -> bool:
        """Renew the reservation, and record the id of the response if it is given. Return false if it has expired."""
        return await self._update(LEASE, response_id)

    async def complete(self, response_id: str) -> None:
        """Record that the response is complete, and keep the key for a day."""
        await self._update(_KEPT, response_id, done="1")

    async def release(self) -> None:
        """Delete the key if this request has reserved it."""
        await self._update(0)

    async def _update(self, seconds: float, response_id: str = "", *, done: str = "") -> bool:
        """Keep the key for at least `seconds`, or delete it if `seconds` is 0. Return false if the reservation has expired."""
        args: Args = [self._token, int(seconds * 1000), response_id, done]
        return bool(await self._client.script(_UPDATE, [self._name], args))
