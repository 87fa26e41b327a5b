"""The upstream's refusal of the operator's key is reported, and a replica with a wrong key does not become ready."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from benchmarks.processes import free_port
from responses_mw import create_app
from responses_mw.asgi import admin
from responses_mw.cli import main
from tests.auth.servers import Knowing
from tests.support.configured import make_settings
from tests.support.metrics import sample_value
from tests.support.servers import lifespan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.auth.servers import Listing
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve

REFUSED = "The upstream refuses upstream.api_key."
QUESTION = {"model": "tiny", "input": "hi"}
LISTINGS: list[Listing] = ["guarded", "public", "absent", "forbidden"]


class Server:
    """A server with an admin port."""

    def __init__(self, ours: httpx.AsyncClient, admin: httpx.AsyncClient) -> None:
        self.ours, self._admin = ours, admin

    async def create(self, **headers: str) -> int:
        return (await self.ours.post("/v1/responses", json=QUESTION, headers=headers)).status_code

    async def ready(self, query: str = "") -> tuple[int, str]:
        answer = await self._admin.get(f"/readyz{query}")
        return answer.status_code, answer.json()["checks"]["upstream"]

    async def until_up(self, value: int) -> None:
        async with asyncio.timeout(60):
            while sample_value("responses_mw_upstream_up", {"upstream": "default"}) != value:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(url: str, **settings: Any) -> AsyncIterator[Server]:
    port = free_port()
    app = create_app(make_settings(upstream__url=url, server__admin_port=port, **settings))
    async with (
        lifespan(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", timeout=60) as ours,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as port_client,
    ):
        async with asyncio.timeout(60):
            while not port_client.is_closed:
                try:
                    await port_client.get("/livez")
                    break
                except httpx.ConnectError:  # the port is not open yet
                    await asyncio.sleep(0.01)
        yield Server(ours, port_client)


def refusals(caplog: pytest.LogCaptureFixture) -> list[int]:
    """Return the levels of the records about the key."""
    return [one.levelno for one in caplog.records if "refuses upstream.api_key" in one.getMessage()]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "INTERVAL", 0.05)


@pytest.mark.parametrize("listing", LISTINGS)
async def test_a_wrong_key_is_not_ready_until_the_upstream_accepts_it(
    listing: Listing, serve: Serve, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    upstream = Knowing(listing)
    async with serving(serve(upstream), redis__url=redis_url, upstream__api_key="new") as server:
        assert await server.ready() == (503, REFUSED)
        await server.until_up(0)
        assert refusals(caplog) == [logging.WARNING]
        upstream.keys.add("new")
        assert await server.ready() == (200, "ok")
        await server.until_up(1)
        assert upstream.requests == []


async def test_a_refused_credential_in_configured_headers_is_reported(
    serve: Serve, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"authorization": "Bearer new"}
    caplog.set_level(logging.INFO, "responses_mw.upstream")
    async with serving(serve(upstream := Knowing()), redis__url=redis_url, upstream__headers=headers) as server:
        assert await server.ready() == (503, "The upstream refuses upstream.headers.")
        upstream.keys.add("new")
        assert await server.ready() == (200, "ok")
    named = [one.getMessage() for one in caplog.records if one.name == "responses_mw.upstream.operator_key"]
    assert [text for text in named if "upstream.headers" not in text] == []
    assert len(named) == 2


@pytest.mark.parametrize("listing", LISTINGS)
async def test_a_key_that_is_refused_later_leaves_replicas_ready_but_is_visible(
    listing: Listing, serve: Serve, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    upstream = Knowing(listing)
    async with serving(serve(upstream), redis__url=redis_url, upstream__api_key="good") as server:
        assert await server.ready() == (200, "ok")
        upstream.keys.clear()
        assert await server.create() == 502
        await server.until_up(0)
        assert refusals(caplog) == [logging.WARNING]
        assert await server.ready() == (200, REFUSED)
        assert (await server.ready("?require=upstream"))[0] == 503
        upstream.keys.add("good")
        assert await server.create() == 200
        await server.until_up(1)


async def test_an_accepted_key_is_checked_only_by_listing_models(serve: Serve, redis_url: str) -> None:
    upstream = Knowing("public")
    async with serving(serve(upstream), redis__url=redis_url, upstream__api_key="good") as server:
        for _ in range(5):
            assert await server.ready() == (200, "ok")
        assert [one.path for one in upstream.visits].count("/v1/chat/completions") == 1


@pytest.mark.parametrize("listing", ["guarded", "public"])
async def test_a_wrong_key_of_a_caller_does_not_affect_readiness(
    listing: Listing, serve: Serve, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    upstream = Knowing(listing)
    async with serving(serve(upstream), redis__url=redis_url) as server:
        for _ in range(3):
            assert await server.create(authorization="Bearer wrong") == 401
        assert await server.ready() == (200, "ok")
        await server.until_up(1)
        assert await server.create(authorization="Bearer good") == 200
    assert [one for one in caplog.records if one.levelno >= logging.WARNING and one.name.startswith("responses_mw.up")] == []


@pytest.mark.parametrize(
    "refusal",
    [
        (403, {"message": "Project `p` does not have access to model `x`", "code": "model_not_found"}),
        (401, {"message": "key not allowed to access model", "type": "key_model_access_denied", "param": "model"}),
    ],
)
async def test_a_model_that_the_operators_key_may_not_use_is_an_error_of_the_client(
    refusal: tuple[int, dict[str, str]], serve: Serve, upstream: ScriptedUpstream, redis_url: str
) -> None:
    status, members = refusal
    async with serving(serve(upstream), redis__url=redis_url, upstream__api_key="good") as server:
        upstream.whole({"error": members}, status)
        answer = await server.ours.post("/v1/responses", json=QUESTION)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert await server.ready() == (200, "ok")


async def test_an_upstream_that_is_down_at_the_start_does_not_make_replicas_unready(redis_url: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with serving(url, redis__url=redis_url, upstream__api_key="good") as server:
        assert (await server.ready())[0] == 200


@pytest.mark.parametrize("listing", LISTINGS)
def test_the_check_reports_a_wrong_key(listing: Listing, serve: Serve, redis_url: str, capsys: Any) -> None:
    flags = [f"--upstream={serve(Knowing(listing))}", f"--redis={redis_url}", "--port=0", "--check"]
    with pytest.raises(SystemExit) as end:
        main(["serve", *flags, "--upstream.api-key=wrong"])
    assert end.value.code == 1
    assert "upstream:" in (said := capsys.readouterr().err)
    assert REFUSED in said or "--upstream.api-key" in said
