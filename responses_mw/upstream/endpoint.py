"""One address of an upstream, its health, and the requests that are in flight there."""

from __future__ import annotations

import logging
import time
from typing import Any

import httpx

from ..backoff import Backoff
from ..network import host_and_port
from ..protocol.dialects import Dialect
from ..settings.upstreams import DEFAULT
from ..telemetry.endpoints import EndpointMeter
from . import affinity
from .discovery import Address

logger = logging.getLogger(__name__)

FIRST_EJECTION, MAX_EJECTION = 1.0, 30.0
"""Seconds for which an endpoint is ejected after a failure. They double with each failed probe, up to the maximum."""


class Endpoint:
    """An address of an upstream. Requests are sent to it unless it is ejected and others are not.

    A failure ejects the endpoint for a time: no connection, a connection that breaks off, or a status that says that the server
    is unavailable. After this time, a probe decides (see `Pool`). The first success readmits the endpoint.
    """

    def __init__(self, address: Address, dialect: Dialect | None = None, upstream: str = DEFAULT) -> None:
        """`dialect` is the configured dialect, or None if it is to be detected. `upstream` is the name of the upstream."""
        self.address = address
        self.location = host_and_port(address.url)
        self.meter = EndpointMeter(upstream, self.name)
        self.host = address.host.encode("latin-1")
        self.base_url = httpx.URL(address.url)
        self.base_path = self.base_url.raw_path.rstrip(b"/")
        self.host_names = frozenset({self.base_url.host, httpx.URL(f"//{address.host}").host})
        """The names by which the server may refer to itself."""
        self.extensions = {"sni_hostname": address.server_name} if address.server_name else {}
        """Extensions of the requests to the endpoint."""
        self._urls: dict[str, httpx.URL] = {}  # by path, because parsing a URL costs as much as sending a request
        self.hash = affinity.hashed(address.url)
        self.dialect = dialect
        self.models: dict[str, dict[str, Any]] | None = None
        """The models that the endpoint listed last, by name, or None if it has not listed any."""
        self.in_flight = self.connect_timeouts = 0
        self.is_ejected = False
        self.readmitted_from = 0.0
        """Monotonic time from which a probe may readmit the ejected endpoint."""
        self._ejection = Backoff(FIRST_EJECTION, MAX_EJECTION)

    def __repr__(self) -> str:
        return f"<Endpoint {self.address.url}>"

    @property
    def name(self) -> str:
        """Host and port, for logs and metrics."""
        host, port = self.location
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def fail(self, reason: str) -> None:
        """Eject the endpoint because of a failure, or for longer if it is ejected already."""
        now = time.monotonic()
        if self.is_ejected and now < self.readmitted_from:
            return  # a request from before the ejection says nothing new
        pause = self._ejection.next()
        self.readmitted_from = now + pause
        if not self.is_ejected:
            self.is_ejected = True
            self.meter.eject()
            logger.warning("the endpoint %s failed and gets no requests if others can: %s", self.address.url, reason)

    def succeed(self) -> None:
        """Record that the endpoint answered."""
        if self.is_ejected:
            self.is_ejected = False
            self._ejection.reset()
            self.meter.readmit()
            logger.info("the endpoint %s answers again", self.address.url)

    def url_of(self, path: str) -> httpx.URL:
        """Return the URL of `path`, which is one of the few paths that this server uses."""
        return self._urls.get(path) or self._urls.setdefault(path, httpx.URL(self.address.url + path))

    def serves(self, model: str | None) -> bool:
        """Return whether the endpoint may serve `model`. Without a list of its models, it may serve any."""
        return model is None or self.models is None or model in self.models
