"""DNS rebinding: requests for host names that are not the server's are refused."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from benchmarks.processes import free_port
from responses_mw import ResponsesMiddleware, create_app
from responses_mw.asgi.web_pages import Hosts
from responses_mw.errors import BadRequest, Misdirected
from responses_mw.server.admin import open_admin
from responses_mw.settings.groups import ServerSettings
from tests.support.configured import make_settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve

LOOPBACK = ["127.0.0.1", "127.0.0.2", "::1", "localhost"]
ADDRESSES = [b"127.0.0.1", b"127.0.0.1:8080", b"[::1]:8080", b"[::1]", b"10.1.2.3:9090", b"[fe80::1]"]
LOCAL = [b"localhost", b"LOCALHOST:8080", b"localhost.", b"a.localhost:1", *ADDRESSES]
FOREIGN = [
    b"evil.example",
    b"evil.example:8080",
    b"localhost.evil.example",
    b"127.0.0.1.evil.example",
    b"1.2.3",
    b"vllm",
    b"[",
    b"x@y",
]


def accepts(hosts: Hosts, value: bytes) -> bool:
    try:
        hosts.check([(b"host", value)])
    except Misdirected:
        return False
    return True


@pytest.mark.parametrize("listens_on", LOOPBACK)
def test_on_a_loopback_address_only_its_names_and_addresses_are_accepted(listens_on: str) -> None:
    hosts = Hosts((), listens_on)
    assert [value for value in LOCAL if not accepts(hosts, value)] == []
    assert [value for value in FOREIGN if accepts(hosts, value)] == [b"["]  # an invalid address is no name
    hosts.check([])  # a browser always sends a Host


@pytest.mark.parametrize("listens_on", ["", "0.0.0.0", "::", "10.0.0.1", "model.example"])
def test_on_other_addresses_all_names_are_accepted_unless_some_are_listed(listens_on: str) -> None:
    assert all(accepts(Hosts((), listens_on), value) for value in LOCAL + FOREIGN)
    hosts = Hosts(["API.example", "*.corp.example"], listens_on)
    for value in (*ADDRESSES, b"api.example:80", b"Api.Example.", b"a.corp.example", b"a.b.corp.example"):
        assert accepts(hosts, value)
    for value in (b"corp.example", b"a.api.example", b"xcorp.example", b"evil.example"):
        assert not accepts(hosts, value)


def test_the_names_that_are_listed_are_added_on_a_loopback_address() -> None:
    hosts = Hosts(["api.example"], "127.0.0.1")
    assert accepts(hosts, b"api.example")
    assert accepts(hosts, b"localhost")
    assert not accepts(hosts, b"evil.example")
    assert accepts(Hosts(["*"], "127.0.0.1"), b"evil.example")


def test_the_address_that_the_server_listens_on_may_be_a_name() -> None:
    assert accepts(Hosts(["api.example"], "Model.Example"), b"model.example:8080")


def test_more_than_one_host_is_refused() -> None:
    with pytest.raises(BadRequest):
        Hosts((), "127.0.0.1").check([(b"host", b"localhost"), (b"host", b"evil.example")])


async def test_a_rebound_name_is_refused_everywhere(serve: Serve, upstream: ScriptedUpstream, redis_url: str) -> None:
    settings = make_settings(upstream__url=serve(upstream), upstream__dialect="vllm", redis__url=redis_url)
    url = serve(create_app(settings, "127.0.0.1"))
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        for path in ("/v1/responses/resp_x", "/v1/models", "/openapi.json", "/health"):
            refused = await http.get(path, headers={"host": "evil.example"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (421, "misdirected_request")
            assert "server.allowed_hosts" in refused.json()["error"]["message"]
        assert upstream.visits == []
        assert (await http.get("/v1/models", headers={"host": "localhost"})).status_code == 200


async def test_a_mounted_middleware_accepts_the_listed_names(serve: Serve, upstream: ScriptedUpstream, redis_url: str) -> None:
    app = ResponsesMiddleware(upstream, make_settings(server__allowed_hosts=["api.example"], redis__url=redis_url))
    async with httpx.AsyncClient(base_url=serve(app), trust_env=False, timeout=60) as http:
        for host, status in {"api.example": 404, "127.0.0.1": 404, "evil.example": 421}.items():
            assert (await http.get("/v1/responses/resp_x", headers={"host": host})).status_code == status


@asynccontextmanager
async def admin_port(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    port = free_port()
    async with (
        open_admin(ServerSettings(admin_port=port, **settings), {}, None),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http,
    ):
        yield http


async def test_the_admin_port_refuses_a_rebound_name() -> None:
    async with admin_port() as http:
        for host, status in {"evil.example": 421, "localhost": 200, "10.1.2.3:9090": 200}.items():
            assert (await http.get("/livez", headers={"host": host})).status_code == status


async def test_the_admin_port_of_a_pod_accepts_all_names() -> None:
    async with admin_port(admin_host="0.0.0.0") as http:
        assert (await http.get("/livez", headers={"host": "responses-mw"})).status_code == 200
