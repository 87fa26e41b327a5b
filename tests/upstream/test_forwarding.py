"""Forwarding of passed-through requests to one upstream."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from responses_mw.errors import BadRequest
from responses_mw.tasks import in_background
from responses_mw.upstream.discovery import Address
from responses_mw.upstream.endpoint import Endpoint
from responses_mw.upstream.forwarding import BodyStream, Forwarder, PassedRequest
from responses_mw.upstream.opening import _update
from responses_mw.upstream.pool import Pool
from responses_mw.upstream.transports.base import UpstreamTransport
from tests.support.configured import make_settings

NAMED = Address("https://10.0.0.7:8443/base", "vllm.example:8443", "vllm.example")


class Recording(UpstreamTransport):
    """Records requests and retired addresses, and answers with an empty body."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []
        self.retired: list[tuple[str, str]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return httpx.Response(200)

    def retire(self, url: str, server_name: str = "") -> None:
        self.retired.append((url, server_name))


def passed(path: bytes = b"/v1/%78", query: bytes = b"") -> PassedRequest:
    return PassedRequest("GET", path, query, [(b"accept", b"*/*")], b"", has_api_key=False)


def forwarder(transport: Recording, address: Address = NAMED) -> Forwarder:
    pool = Pool()
    pool.update([address])
    return Forwarder(transport, pool, make_settings(upstream__url="http://unused").upstream)


async def test_a_request_to_a_resolved_address_keeps_its_host_and_server_name() -> None:
    transport = Recording()
    _, lease = await forwarder(transport).send(passed(query=b"a=%62"))
    lease.release()
    [request] = transport.requests
    assert (request.url.host, request.url.port, request.headers["host"]) == ("10.0.0.7", 8443, "vllm.example:8443")
    assert request.extensions["sni_hostname"] == "vllm.example"
    assert request.extensions["target"] == b"/base/v1/%78?a=%62"


@pytest.mark.parametrize("path", [b"*", b"http://evil.example/", "/v1/ü".encode()])
async def test_a_target_that_is_not_a_path_is_refused(path: bytes) -> None:
    transport = Recording()
    with pytest.raises(BadRequest):
        await forwarder(transport, Address("http://10.0.0.7", "10.0.0.7", "")).send(passed(path))
    assert not transport.requests


def test_removing_an_address_closes_its_connections_for_passed_requests() -> None:
    calling, passing, pool = Recording(), Recording(), Pool()
    pool.update([NAMED])
    _update(pool, [calling, passing], [])
    assert calling.retired == passing.retired == [(NAMED.url, NAMED.server_name)]


class Upload(BodyStream):
    """A body whose first part has already arrived when it is first read."""

    def __aiter__(self) -> Upload:
        return self

    async def __anext__(self) -> bytes:
        self.is_begun = True
        return b"part"


class Closing(Recording):
    """Closes the connection after the first part of a body, if there is one."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if isinstance(request.stream, Upload):
            await anext(request.stream)
        raise httpx.WriteError("closed")


@pytest.mark.parametrize("body", [b"whole", Upload()], ids=["whole", "upload"])
async def test_a_closed_connection_counts_as_a_failure_only_if_the_body_was_in_memory(body: bytes | Upload) -> None:
    async def probe(_: Endpoint) -> bool:
        return False

    pool = Pool()
    pool.update([NAMED])
    async with in_background(pool.watch(probe)):
        await asyncio.sleep(0)  # so that `watch` begins
        request = PassedRequest("POST", b"/v1/x", b"", [], body, has_api_key=False)
        with pytest.raises(httpx.WriteError):
            await Forwarder(Closing(), pool, make_settings(upstream__url="http://unused").upstream).send(request)
        assert [endpoint.is_ejected for endpoint in pool.endpoints] == [isinstance(body, bytes)]
        assert pool.endpoints[0].in_flight == 0
