"""Claims of approvals of tool calls: one approval runs a tool once, even if several requests send it at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from .client import Client
from .models import StateOptions


class Approvals:
    """The approvals that responses have claimed, in Redis, for as long as responses are stored."""

    def __init__(self, client: Client, options: StateOptions) -> None:
        self._client = client
        self._ttl = options.ttl_seconds

    async def claim(self, owner: str, approvals: Sequence[str], response_id: str) -> str | None:
        """Claim `approvals`, the ids of approval requests, for a response. Return one that another response has claimed.

        If all are free, return None. Otherwise, nothing is claimed. A response may repeat its claim.
        """
        keys = [_key(owner, approval) for approval in approvals]
        await self._client.pipeline([("SET", key, response_id, "NX", "EX", self._ttl) for key in keys])
        holders = await self._client.pipeline([("GET", key) for key in keys])
        held = [holder == response_id.encode() for holder in holders]
        if all(held):
            return None
        if ours := [("DEL", key) for key, is_ours in zip(keys, held, strict=True) if is_ours]:
            await self._client.pipeline(ours)
        return approvals[held.index(False)]


def _key(owner: str, approval: str) -> str:
    name = sha256(f"{owner}\0{approval}".encode()).hexdigest()[:32]
    return f"rmw:{{a{name}}}:approval"
