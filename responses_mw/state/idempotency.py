"""Idempotency keys. Each key of an owner belongs to one request and its response."""

from __future__ import annotations

from hashlib import sha256

from ..ids import random_part
from ..lua import load
from .client import Args, Client

_RESERVE, _UPDATE = load("state", "idempotency_reserve", "idempotency_update")

KEPT = 24 * 60 * 60  # seconds that a key is stored after its response was created
LEASE = 30.0
"""Seconds that a key is reserved. The lease is renewed while the request runs, so a lost replica soon frees its keys."""


class Reservation:
    """A request's reservation of a key. Every method raises StateUnavailable."""

    def __init__(self, client: Client, owner: str, key: str, request: bytes) -> None:
        """`request` is the body of the request. Requests with the same key must have the same body."""
        self._client = client
        name = sha256(f"{owner}\0{key}".encode()).hexdigest()[:32]
        self._name = f"rmw:{{i{name}}}:key"
        self._request_hash = sha256(request).hexdigest()
        self._token = random_part()

    async def reserve(self) -> tuple[str, str | None]:
        """Reserve the key for `LEASE` seconds, unless another request has reserved the key. Repeating the call is safe.

        Return a verdict, and the id of the other request's response if the id is known. The verdict is one of:

        reserved    the caller must run the request
        running     another request with the key is running
        done        another request with the key has created its response
        different   the key belongs to a request with a different body
        """
        args: Args = [self._request_hash, self._token, int(LEASE * 1000)]
        verdict, *rest = await self._client.script(_RESERVE, [self._name], args)
        return verdict.decode(), rest[0].decode() if rest and rest[0] is not None else None

    async def renew(self) -> None:
        """Extend the lease to `LEASE` seconds from now, unless the lease has expired."""
        await self._update(LEASE)

    async def name(self, response_id: str) -> bool:
        """Record the id of the response to be created, and extend the lease. Return False if the lease has expired."""
        return await self._update(LEASE, response_id)

    async def complete(self, response_id: str) -> None:
        """Record that the response has been created. Requests with this key get its id for `KEPT` seconds."""
        await self._update(KEPT, response_id, done="1")

    async def release(self) -> None:
        """Delete the reservation, so that other requests can use the key."""
        await self._update(0)

    async def _update(self, seconds: float, response_id: str = "", *, done: str = "") -> bool:
        args: Args = [self._token, int(seconds * 1000), response_id, done]
        return bool(await self._client.script(_UPDATE, [self._name], args))
