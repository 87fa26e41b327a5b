"""The upstreams of a deployment, and which of them serves a model.

1. A model's name is looked up in the aliases, then in the models that the settings list, then in the lists of the upstreams
   themselves, in the order of the settings. A name that is in none of them may be served by the first upstream whose models are
   unknown. Otherwise, it is an error that lists the known names.
2. The upstream that serves a request is the only one that gets the caller's credential. Requests without a model, such as one
   for a stored response, are checked at the first upstream.
3. With one upstream and no aliases, every request goes there, and the upstream itself says which models it knows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..auth import ALLOWED_MODELS
from ..errors import BadRequest, NotFound, UpstreamError
from .backends.base import Backend
from .caller import Caller
from .client import Upstream
from .endpoint import Endpoint

_LOOK_INTERVAL = 1.0
"""Minimum seconds between requests for the lists of models that are caused by unknown models."""
_MAX_NAMES = 64
"""Maximum number of models that an error message lists."""


@dataclass(frozen=True, slots=True)
class Route:
    """The upstream and model to which the turns of a run are sent."""

    upstream: Upstream
    backend: Backend
    model: str
    """The upstream's name for the model."""
    public_model: str
    """The name that clients use for the model."""

    @property
    def api(self) -> str:
        """The API of the upstream: `chat` or `responses`."""
        return self.upstream.settings.api

    @property
    def overload_timeout(self) -> float:
        """Maximum wait for an unavailable upstream in seconds. 0 also disables continuations."""
        return self.upstream.settings.overload_timeout

    @property
    def has_other_endpoints(self) -> bool:
        """Whether there are several endpoints and one is available, so that an interrupted turn need not wait."""
        pool = self.upstream.pool
        return len(pool.endpoints) > 1 and pool.is_available

    @property
    def can_take_over(self) -> bool:
        """Whether runs can continue from another worker's output."""
        return self.backend.can_take_over and self.overload_timeout > 0


class Destination(NamedTuple):
    """Where a request that passes through unchanged is sent."""

    upstream: Upstream
    model: str | None = None
    """The upstream's name for the model, or None if the request's body was not read or has no model."""
    session: str = ""
    """Key of the session that the request belongs to, or "" if it is not known."""


class Upstreams:
    """All upstreams, each with its backend. The first one is the default."""

    def __init__(self, backends: Mapping[Upstream, Backend]) -> None:
        self._backends = dict(backends)
        self.all: Sequence[Upstream] = tuple(backends)
        self.default = self.all[0]
        self._is_only = len(self.all) == 1 and not self.default.settings.aliases
        self._aliases = {
            public: (upstream, name) for upstream in self.all for public, name in upstream.settings.aliases.items()
        }
        self._looked_at = 0.0

    # -- models ------------------------------------------------------------------------------------------------------------

    async def route(self, model: str | None, caller: Caller) -> Route:
        """Return the route for `model`, or for the only model if it is None.

        Raises `NotFound` if no upstream serves the model, `BadRequest` if it is None and there are several models, and the
        errors of `Upstream.model`.
        """
        if self._is_only:
            name = await self.default.model(model, caller)
            return Route(self.default, self._backends[self.default], name, name)
        if model is None:
            model = await self._only_model()
        upstream, name = await self.find(model, (caller.scope or {}).get(ALLOWED_MODELS))
        return Route(upstream, self._backends[upstream], name, model)

    async def find(self, model: str, allowed: Container[str] | None = None) -> tuple[Upstream, str]:
        """Return the upstream that serves `model`, and the upstream's name for it.

        Raises `NotFound` if no upstream serves the model. If `allowed` is given, the error lists only those models.
        """
        if self._is_only:
            return self.default, model
        if (found := self._known(model)) is None:
            await self._look()
            found = self._known(model) or self._guessed(model)
        if found is None:
            raise NotFound(
                f"The model '{model[:256]}' does not exist. The models are: {self._listed_names(allowed)}.",
                param="model",
                code="model_not_found",
            )
        return found

    def fallbacks(self, route: Route) -> Iterator[Route]:
        """Yield the routes to use if the upstream of `route` is unavailable, in the order of the settings."""
        for upstream, model in route.upstream.fallbacks:
            known = self._known(route.public_model, [upstream])
            name = model or (known[1] if known is not None else route.model)
            public = model or route.public_model
            yield Route(upstream, self._backends[upstream], name, public)

    def _known(self, model: str, upstreams: Sequence[Upstream] | None = None) -> tuple[Upstream, str] | None:
        """Return the upstream that is known to serve `model`, and the upstream's name for it."""
        asked = self.all if upstreams is None else upstreams
        alias = self._aliases.get(model)
        if alias is not None and alias[0] in asked:
            return alias
        return next(((upstream, model) for upstream in asked if upstream.lists(model)), None)

    def _guessed(self, model: str) -> tuple[Upstream, str] | None:
        return next(((upstream, model) for upstream in self.all if not upstream.has_list), None)

    async def _look(self) -> None:
        """Ask the upstreams for their models, at most once in `_LOOK_INTERVAL` seconds."""
        if time.monotonic() - self._looked_at >= _LOOK_INTERVAL:
            self._looked_at = time.monotonic()
            await asyncio.gather(*(upstream.list_models() for upstream in self.all))

    async def _only_model(self) -> str:
        await self._look()
        names = self.public_names()
        if len(names) == 1:
            return names[0]
        message = f"Missing required parameter: 'model'. The models are: {self._listed_names()}."
        raise BadRequest(message, param="model", code="missing_required_parameter")

    @property
    def lists_models(self) -> bool:
        """Whether the models come from several upstreams or endpoints, or are renamed, so that this server must list them."""
        return not self._is_only or len(self.default.pool.endpoints) > 1

    def public_names(self) -> list[str]:
        """Return the names of the known models, as clients use them."""
        return [card["id"] for card in self._known_cards()]

    async def cards(self, caller: Caller) -> list[dict[str, Any]]:
        """Return the models as `GET /v1/models` lists them, under the names that clients use.

        Raises the errors of `Upstream.models` if the only upstream cannot be asked.
        """
        if not self.lists_models:
            return await self.default.models(caller)
        await self._look()
        return self._known_cards()

    def _known_cards(self) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for upstream in self.all:
            known = upstream.known_models
            names = {name: public for public, name in upstream.settings.aliases.items()}
            for name in dict.fromkeys([*known, *names]):
                card = known.get(name) or {"object": "model", "created": 0, "owned_by": upstream.name}
                public = names.get(name, name)
                found.setdefault(public, {**card, "id": public})
        return list(found.values())

    def _listed_names(self, allowed: Container[str] | None = None) -> str:
        names = [name for name in self.public_names() if allowed is None or name in allowed]
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        return ", ".join(names[:_MAX_NAMES]) + more

    # -- addresses ---------------------------------------------------------------------------------------------------------

    def base_paths(self, answering: Endpoint, upstream: Upstream) -> dict[str, bytes | None]:
        """Map the host of each endpoint to its base path if it belongs to `upstream`, else to None.

        `answering` is an endpoint of `upstream`, which may have been removed from its pool.
        """
        endpoints = [endpoint for one in self.all for endpoint in one.pool.endpoints]
        hosts: dict[str, bytes | None] = {name: None for endpoint in endpoints for name in endpoint.host_names}
        for endpoint in (*upstream.pool.endpoints, answering):
            hosts |= dict.fromkeys(endpoint.host_names, endpoint.base_path)
        return hosts

    # -- callers -----------------------------------------------------------------------------------------------------------

    def of(self, caller: Caller) -> Upstream:
        """Return the upstream that serves the model of the caller's request, or the default if the model is not known."""
        if self._is_only or caller.model is None:
            return self.default
        found = self._known(caller.model) or self._guessed(caller.model)
        return self.default if found is None else found[0]

    async def verify(self, caller: Caller) -> None:
        """Check the caller as `Upstream.verify` does, at the upstream that serves the model of its request."""
        await self.of(caller).verify(caller)

    async def probe(self, caller: Caller) -> None:
        """Raise `UpstreamError` if neither the upstream of the caller's request nor one of its fallbacks is available."""
        upstream = self.of(caller)
        try:
            await upstream.probe(caller)
        except UpstreamError:
            for fallback, _ in upstream.fallbacks:
                with suppress(UpstreamError):
                    await fallback.probe(caller.at_another_upstream())
                    return
            raise

    @property
    def is_available(self) -> bool:
        """Whether at least one endpoint of any upstream is not ejected."""
        return any(upstream.pool.is_available for upstream in self.all)
