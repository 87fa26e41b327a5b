"""What an owner uses, counted for all replicas together.

    rmw:{l<owner>}:rate         string: until when (ms) its requests have been paid for
    rmw:{l<owner>}:streams      zset: its open streams, by the time (ms) until which each counts
    rmw:{l<owner>}:background   zset: the same of its background responses

Times are the server's. What is under way counts for a while and is renewed: that of a replica that is lost ends by itself.
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
    """Whether a request ``passes``; how many ``remaining`` ones may at once; in how many seconds all may again (``reset``), and
    the next one (``retry_after``)."""

    passes: bool
    remaining: int
    reset: float
    retry_after: float


class Usage:
    """Raises StateUnavailable."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def request(self, owner: str, per_minute: int) -> Rate:
        """Counts a request, if it may pass."""
        passes, remaining, reset, wait = await self._client.script(_RATE, [_key(owner, "rate")], [per_minute])
        return Rate(passes == 1, remaining, reset / 1000, wait / 1000)

    async def enter(self, kind: Kind, owner: str, name: str, *, most: int, seconds: float) -> bool:
        """Counts what has that ``name`` for so many seconds; False if ``most`` are counted already."""
        entered: int = await self._client.script(_ENTER, [_key(owner, kind)], [name, most, int(seconds * 1000)])
        return entered == 1

    async def renew(self, kind: Kind, names: Mapping[str, Sequence[str]], seconds: float) -> None:
        """Has those names of each owner count for so many seconds from now."""
        ms = int(seconds * 1000)
        calls: list[tuple[list[str], list[str | bytes | int]]] = []
        for owner, some in names.items():
            calls.append(([_key(owner, kind)], [ms, *some]))
        await self._client.scripts(_RENEW, calls)

    async def leave(self, kind: Kind, owner: str, name: str) -> None:
        """Counts it no more."""
        await self._client.script(_LEAVE, [_key(owner, kind)], [name])


def _key(owner: str, what: str) -> str:
    return f"rmw:{{l{owner}}}:{what}"
