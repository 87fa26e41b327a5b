"""The request or job that the current task works for.

Code that learns a fact about it calls `annotate` and need not know who reads the fact: the access line, spans and log records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

__all__ = ["RequestContext", "annotate", "current_request"]


@dataclass(slots=True)
class RequestContext:
    """Facts about one HTTP request, WebSocket message or background job.

    `route` is the template of the path. `owner` is the hash that stored objects carry too. `stores` is false where the text of
    the response must not be recorded anywhere.
    """

    route: str = ""
    request_id: str = ""
    owner: str = ""
    response_id: str = ""
    conversation: str = ""
    stores: bool = False
    cache: str = ""

    def span_attributes(self) -> dict[str, str]:
        """Return the known facts about the response, named by OpenTelemetry's conventions."""
        attributes = {
            "gen_ai.response.id": self.response_id,
            "gen_ai.conversation.id": self.conversation,
            "responses_mw.cache.result": self.cache,
        }
        return {name: value for name, value in attributes.items() if value}


_CURRENT: ContextVar[RequestContext | None] = ContextVar("responses_mw.request", default=None)


def current_request() -> RequestContext | None:
    return _CURRENT.get()


@contextmanager
def activated(request: RequestContext) -> Iterator[None]:
    """Make `request` the current one, also for tasks created inside."""
    token = _CURRENT.set(request)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def annotate(*, route: str = "", owner: str = "", cache: str = "", response: Mapping[str, Any] | None = None) -> None:
    """Add facts to the current request, if there is one.

    `cache` is the result of a lookup: `exact`, `semantic` or `miss`. `response` is the document being created or retrieved.
    """
    request = _CURRENT.get()
    if request is None:
        return
    request.route = route or request.route
    request.owner = owner or request.owner
    request.cache = cache or request.cache
    if response is not None:
        conversation = response.get("conversation")
        request.response_id = response["id"]
        request.conversation = conversation["id"] if conversation else ""
        request.stores = bool(response.get("store"))
