"""The exchange that goes on in this task: a request from its coming in to the end of its answer, or a job's run.

Whoever learns something about it says so here, and need not know who asks: the access line, the spans and the log records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

__all__ = ["Exchange", "current", "told_cache", "told_owner", "told_response", "told_route"]


@dataclass(slots=True)
class Exchange:
    """Facts of one exchange. ``stores`` tells whether its response may be written down anywhere."""

    route: str = ""
    request_id: str = ""
    owner: str = ""
    response_id: str = ""
    conversation: str = ""
    stores: bool = False
    cache: str = ""


_CURRENT: ContextVar[Exchange | None] = ContextVar("responses_mw.exchange", default=None)


def current() -> Exchange | None:
    return _CURRENT.get()


@contextmanager
def going_on(exchange: Exchange) -> Iterator[None]:
    """Makes ``exchange`` the current one, of the tasks that are begun meanwhile too."""
    token = _CURRENT.set(exchange)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def told_route(route: str) -> None:
    """The path's template, such as ``/v1/responses/{response_id}``."""
    exchange = _CURRENT.get()
    if exchange is not None:
        exchange.route = route


def told_owner(owner: str) -> None:
    """Whose the request is, by the hash that stands in the state too."""
    exchange = _CURRENT.get()
    if exchange is not None:
        exchange.owner = owner


def told_response(document: Mapping[str, Any]) -> None:
    """The response that is made, or asked for."""
    exchange = _CURRENT.get()
    if exchange is None:
        return
    conversation = document.get("conversation")
    exchange.response_id = document["id"]
    exchange.conversation = conversation["id"] if conversation else ""
    exchange.stores = bool(document.get("store"))


def told_cache(result: str) -> None:
    """What the cache said: ``exact``, ``semantic`` or ``miss``."""
    exchange = _CURRENT.get()
    if exchange is not None:
        exchange.cache = result


def response_attributes(exchange: Exchange) -> dict[str, str]:
    """By the conventions, for the span of the whole response when it ends."""
    known = {
        "gen_ai.response.id": exchange.response_id,
        "gen_ai.conversation.id": exchange.conversation,
        "responses_mw.cache.result": exchange.cache,
    }
    return {name: value for name, value in known.items() if value}
