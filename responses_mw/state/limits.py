"""Usage by owner, counted across replicas.

    rmw:{l<owner>}:rate         string: the time (ms) until which its requests have used up its rate
    rmw:{l<owner>}:streams      zset: its open streams, by the time (ms) when each expires
    rmw:{l<owner>}:background   zset: its background responses, likewise

Times are from the clock of Redis. Entries expire unless they are renewed, so the entries of a lost replica need no cleanup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from .scripts import script

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .client import Client

__all__ = ["Kind", "Rate", "Usage"]

Kind: TypeAlias = Literal["streams", "background"]

_RATE, _ENTER, _RENEW, _LEAVE = script("limit_rate"), script("limit_enter"), script("limit_renew"), script("limit_leave")


@dataclass(frozen=True, slots=True)
class Rate:
    """The verdict on a request.

    ``passes``: whether it is allowed. ``remaining``: how many more are allowed now. ``reset``: seconds until the whole rate is
    available again. ``retry_after``: seconds until the next request is allowed.
    """

    passes: bool
    remaining: int
    reset: float
    retry_after: float


class Usage:
    """The counters of all owners. Every method raises StateUnavailable."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def request(self, owner: str, per_minute: int) -> Rate:
        """Count a request if the rate allows it."""
        passes, remaining, reset, wait = await self._client.script(_RATE, [_key(owner, "rate")], [per_minute])
        return Rate(passes == 1, remaining, reset / 1000, wait / 1000)

    async def enter(self, kind: Kind, owner: str, name: str, *, maximum: int, seconds: float) -> bool:
        """Count ``name`` for ``seconds``; return False if the ``maximum`` is reached."""
        entered: int = await self._client.script(_ENTER, [_key(owner, kind)], [name, maximum, int(seconds * 1000)])
        return entered == 1

    async def renew(self, kind: Kind, names: Mapping[str, Sequence[str]], seconds: float) -> None:
        """Extend the named entries of each owner to ``seconds`` from now."""
        ms = int(seconds * 1000)
        calls: list[tuple[list[str], list[str | bytes | int]]] = []
        for owner, some in names.items():
            calls.append(([_key(owner, kind)], [ms, *some]))
        await self._client.scripts(_RENEW, calls, contained=True)

    async def leave(self, kind: Kind, owner: str, name: str) -> None:
        """Stop counting ``name``."""
        await self._client.script(_LEAVE, [_key(owner, kind)], [name])


def _key(owner: str, what: str) -> str:
    return f"rmw:{{l{owner}}}:{what}"
