"""What is asked of a search provider, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit


class SearchFailed(Exception):
    """The search gave no answer. The message is for the model, and so for the caller: no URL, no key, no query."""


@dataclass(frozen=True, slots=True)
class Place:
    """Roughly where the user is; ``country`` is the ISO code of two letters, in capitals."""

    country: str | None = None
    region: str | None = None
    city: str | None = None
    timezone: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A result. Without ``url`` it is a text of the provider's own, which cannot be cited."""

    title: str
    url: str
    text: str


@dataclass(frozen=True, slots=True)
class Query:
    """One search.

    ``count``: how many results are wanted. ``allowed``, ``blocked``: domains, each with those beneath it. ``thorough``: long
    excerpts are worth a slower, or dearer, search.
    """

    text: str
    count: int = 10
    allowed: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    place: Place = Place()
    thorough: bool = False

    def admits(self, url: str) -> bool:
        """Whether the filters let a result with this address through."""
        if not self.allowed and not self.blocked:
            return True
        try:
            host = plain_host(urlsplit(url).hostname or "")
        except ValueError:
            return False
        return (not self.allowed or _beneath(host, self.allowed)) and not _beneath(host, self.blocked)


class Provider(Protocol):
    async def search(self, query: Query) -> list[Found]:
        """What is found, best first; filters that the provider does not know are left to the caller.

        Raises ``SearchFailed``.
        """


def plain_host(name: str) -> str:
    """A domain as it stands in URLs: in ASCII and small letters. Raises ``ValueError`` for what is no domain."""
    return name.encode("idna").decode().lower() if not name.isascii() else name.lower()


def _beneath(host: str, domains: tuple[str, ...]) -> bool:
    return any(host == domain or host.endswith(f".{domain}") for domain in domains)
