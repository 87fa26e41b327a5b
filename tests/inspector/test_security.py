"""Every path of the inspector withstands attacks."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from typing import TYPE_CHECKING

import pytest
from starlette.routing import Route

from responses_mw.inspector import app, forms, live
from responses_mw.inspector.app import Inspector
from responses_mw.inspector.inspector_context import InspectorContext
from responses_mw.inspector.security import COOKIE, HEADERS, Guard
from responses_mw.state import State, connect
from tests.inspector.conftest import TOKEN, until
from tests.support.configured import make_settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.inspector.conftest import Inspect, Inspected

pytestmark = pytest.mark.usefixtures("nobody_else", "no_pause")

OPEN = {("GET", "/ui/login"), ("POST", "/ui/login"), ("GET", "/ui/static/style.css")}
FOREIGN = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"},
    {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
]


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "FAILED_LOGIN_PAUSE", 0.0)


@pytest.fixture
def paths(unused_state: State) -> list[tuple[str, str]]:
    """The method and path of each route of the inspector, with values for the parameters of the path."""
    settings = make_settings(ui__mode="content", ui__actions=True)
    inspector = Inspector(InspectorContext(unused_state, settings), settings.server, {})
    found = [
        (method, re.sub(r"\{[^}]*\}", "x", route.path))
        for route in inspector.routes
        if isinstance(route, Route)
        for method in sorted(route.methods or ())
    ]
    assert len(found) > 20
    return [*found, ("GET", "/ui/static/style.css")]


@pytest.fixture
async def unused_state(redis_url: str) -> AsyncIterator[State]:
    """A state for an inspector that answers no request."""
    state = State(connect(redis_url))
    yield state
    await state.aclose()


def requests(inspected: Inspected, paths: list[tuple[str, str]], **headers: str) -> Iterator[tuple[str, str, int, str]]:
    """Send a request to each path. Yield its method, its path, and the status and location of the answer."""
    for method, path in paths:
        with inspected.admin.stream(method, path, headers=headers) as answer:
            yield method, path, answer.status_code, answer.headers.get("location", "")
            for name, value in HEADERS.items():
                assert answer.headers[name] == value, (method, path)


async def test_every_path_needs_the_token(inspect: Inspect, paths: list[tuple[str, str]]) -> None:
    inspected = inspect(ui__token=TOKEN, ui__actions=True)
    expired = f"1.{'0' * 32}.{'0' * 64}"
    foreign = Guard("another token of the inspector").new_session()
    attempts = [{}, {"cookie": f"{COOKIE}={expired}"}, {"cookie": f"{COOKIE}={foreign}"}, {"authorization": "Bearer x"}]
    own = {"origin": inspected.url, "sec-fetch-site": "same-origin"}
    for headers in attempts:
        for method, path, status, location in requests(inspected, paths, **headers, **own):
            if (method, path) not in OPEN and (method, path) != ("HEAD", "/ui/login"):
                assert status == 401 or (status, location.partition("?")[0]) == (303, "/ui/login"), (method, path, status)


@pytest.mark.parametrize("headers", FOREIGN, ids=lambda headers: "-".join(headers.values()))
async def test_every_path_refuses_pages_of_other_origins(
    inspect: Inspect, paths: list[tuple[str, str]], headers: dict[str, str]
) -> None:
    inspected = inspect(ui__actions=True)
    for method, path, status, _ in requests(inspected, paths, **headers):
        assert status == 403, (method, path)


async def test_every_change_needs_proof_of_its_origin(inspect: Inspect, paths: list[tuple[str, str]]) -> None:
    """A form on another page may use GET like a link, and old browsers send the cookie without a header about the origin."""
    inspected = inspect(ui__actions=True)
    changing = [(method, path) for method, path in paths if method not in ("GET", "HEAD")]
    form = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    for headers in (form, {"cookie": f"{COOKIE}=x"}):
        for method, path, status, _ in requests(inspected, changing, **headers):
            assert status == 403, (method, path)


async def test_every_path_refuses_a_rebound_host_name(inspect: Inspect, paths: list[tuple[str, str]]) -> None:
    inspected = inspect(ui__actions=True)
    for method, path in paths:
        assert inspected.admin.request(method, path, headers={"host": "evil.example"}).status_code == 421, path


async def test_a_host_header_gives_no_access_to_another_path(inspect: Inspect) -> None:
    inspected = inspect(ui__token=TOKEN, server__admin_host="0.0.0.0")
    login = ("x/ui/login?", "x/ui/login#", "x/ui/static/style.css?", "x\\ui\\login", "[::1]/ui/login?", "x@/ui/login?")
    for host in login:
        answer = await _raw(inspected, f"GET /admin/api/replicas HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 4"), (host, answer[:200])
        assert b'"data"' not in answer


SPELLINGS = (
    "/ui/static/../responses",
    "/ui/static/..%2f..%2fapp.py",
    "/ui/static/%2e%2e/app.py",
    "//ui/responses",
    "/ui//responses",
    "/ui/login/../responses",
    "/ui/login%3F/../responses",
    "/ui/login;x",
    "/UI/responses",
    "/admin/api/../api/replicas",
)


async def test_other_spellings_of_paths_give_no_access(inspect: Inspect) -> None:
    inspected = inspect(ui__token=TOKEN)
    for path in SPELLINGS:
        answer = await _raw(inspected, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        status = int(answer.split(b" ", 2)[1])
        is_refused = status in (400, 401, 404) or (status == 303 and b"location: /ui/login" in answer)
        assert is_refused, (path, answer[:300])


async def test_requests_without_the_token_do_not_fill_the_log(inspect: Inspect, caplog: pytest.LogCaptureFixture) -> None:
    inspected = inspect(ui__token=TOKEN)
    own = {"origin": inspected.url, "sec-fetch-site": "same-origin"}
    with caplog.at_level(logging.INFO, "responses_mw"):
        for _ in range(20):
            inspected.admin.get("/ui", headers={"origin": "https://evil.example"})
        for _ in range(2):
            inspected.admin.post("/ui/login", data={"token": "wrong"}, headers=own)
    assert [record.message for record in caplog.records if record.name.startswith("responses_mw.inspector")] == [
        "a page of another origin tried to use the inspector",
        "a login to the inspector failed",
    ]


async def test_a_form_that_arrives_slowly_or_is_too_long_is_refused(inspect: Inspect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "TIMEOUT", 0.05)
    inspected = inspect(ui__token=TOKEN)
    head = "POST /ui/login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {}\r\n\r\n"
    assert b" 408 " in (await _raw(inspected, head.format(1000) + "token=")).split(b"\r\n")[0]
    assert b" 400 " in (await _raw(inspected, head.format(100_000) + "x" * 20_000)).split(b"\r\n")[0]


async def test_the_number_of_live_views_is_limited(inspect: Inspect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_OPEN", 1)
    inspected = inspect()
    ends = ".".join(["0-0"] * 4)
    path = f"/ui/responses/live?after={ends}"
    with inspected.admin.stream("GET", path) as first:
        frames = first.iter_raw()
        assert next(frames) == live.RETRY
        assert inspected.admin.get(path).status_code == 503

    def answers() -> bool:
        with inspected.admin.stream("GET", path) as again:
            return again.status_code == 200

    await asyncio.to_thread(until, answers)


async def test_a_live_view_ends_after_its_maximum_duration(inspect: Inspect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SECONDS", 0.0)
    inspected = inspect()
    answer = await asyncio.to_thread(inspected.admin.get, f"/ui/responses/live?after={'.'.join(['0-0'] * 4)}")
    assert answer.content == live.RETRY


async def _raw(inspected: Inspected, text: str) -> bytes:
    """Send raw bytes to the admin port, and return the answer up to the end of the connection."""

    def talk() -> bytes:
        with socket.create_connection((inspected.admin.base_url.host, inspected.admin.base_url.port), timeout=60) as connection:
            connection.sendall(text.encode("latin-1"))
            answer = b""
            while b"\r\n\r\n" not in answer or "Connection: close" in text:
                if not (data := connection.recv(65536)):
                    break
                answer += data
            return answer

    return await asyncio.to_thread(talk)
