"""The admin port."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from benchmarks.processes import free_port
from responses_mw import ResponsesMiddleware, Settings, create_app
from responses_mw.asgi.admin import Admin, Finding
from responses_mw.errors import StartupError
from responses_mw.server.admin import open_admin
from responses_mw.server.draining import DrainingServer
from responses_mw.settings.groups import ServerSettings
from tests.support.configured import make_settings
from tests.support.scripted import Signal, text
from tests.support.servers import lifespan
from tests.support.valkey import Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from starlette.types import Message, Receive, Scope, Send

    from tests.support.forkserver import ForkServer
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve

SECRET = "a secret that all the replicas of the deployment have"


@pytest.fixture
def port() -> int:
    return free_port()


@asynccontextmanager
async def client(port: int) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False, trust_env=False) as client:
        yield client


async def get(admin: httpx.AsyncClient, path: str) -> httpx.Response:
    async with asyncio.timeout(60):
        while True:
            try:
                return await admin.get(path)
            except httpx.ConnectError:  # the port is not open yet
                await asyncio.sleep(0.01)


async def test_a_replica_is_ready_when_redis_upstream_and_worker_are(
    serve: Serve, upstream: ScriptedUpstream, redis_url: str, port: int
) -> None:
    settings = make_settings(
        upstream__url=serve(upstream),
        redis__url=redis_url,
        redis__timeout=20,
        auth__secret_keys=[SECRET],
        server__admin_port=port,
    )
    app = create_app(settings)
    async with client(port) as admin:
        async with lifespan(app):
            assert (await get(admin, "/livez")).text == "ok\n"
            ready = await admin.get("/readyz")
            assert (ready.status_code, ready.json()["ready"]) == (200, True)
            assert ready.json()["checks"] == {"upstream": "ok", "redis": "ok", "worker": "ok", "server": "ok"}
            families = {one.name for one in text_string_to_metric_families((await admin.get("/metrics")).text)}
            assert "http_server_request_duration_seconds" in families
            assert (await admin.get("/v1/responses")).status_code == 404
            assert (await admin.post("/metrics")).status_code == 405
            app.stop()
            stopping = await admin.get("/readyz")
            assert (stopping.status_code, stopping.json()["checks"]["redis"]) == (503, "ok")
            assert (await admin.get("/livez")).status_code == 200
        with pytest.raises(httpx.ConnectError):
            await admin.get("/livez")


async def test_a_replica_is_not_ready_before_it_listens(serve: Serve, upstream: ScriptedUpstream, port: int) -> None:
    found: list[tuple[int, str]] = []
    app = create_app(make_settings(upstream__url=serve(upstream), server__admin_port=port))

    async def check() -> None:
        async with client(port) as admin:
            answer = await get(admin, "/readyz")
        found.append((answer.status_code, answer.json()["checks"]["server"]))

    async def observed(scope: Scope, receive: Receive, send: Send) -> None:
        async def checked_send(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await check()  # the server listens after this message
            await send(message)

        await app(scope, receive, checked_send)

    async def check_and_stop() -> None:
        await check()
        server.stop()

    started: list[asyncio.Task[None]] = []
    config = uvicorn.Config(observed, port=0, log_config=None, lifespan="on")
    server = DrainingServer(config, app, 1.0, lambda: started.append(asyncio.ensure_future(check_and_stop())))
    await asyncio.to_thread(server.run)
    assert found[:2] == [(503, "It is not listening yet."), (200, "ok")]


async def test_the_readiness_check_of_a_mounted_upstream_can_read_app_state(port: int) -> None:
    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": request.app.state.models})

    inner = Starlette(routes=[Route("/v1/models", models)])
    inner.state.models = []
    inner.add_middleware(ResponsesMiddleware, settings=make_settings(server__admin_port=port))
    async with client(port) as admin, lifespan(inner):
        assert (await get(admin, "/readyz")).json()["checks"]["upstream"] == "ok"


async def test_a_replica_that_never_reached_redis_is_live_but_not_ready(port: int) -> None:
    nobody = "127.0.0.1:1"
    settings = make_settings(
        upstream__url=f"http://{nobody}", redis__url=f"redis://:password@{nobody}", server__admin_port=port, redis__timeout=0.2
    )
    async with client(port) as admin, lifespan(create_app(settings)):
        assert (await get(admin, "/livez")).status_code == 200
        ready = await admin.get("/readyz")
        assert ready.status_code == 503
        checks = ready.json()["checks"]
        assert "cannot be reached" in checks["redis"]
        assert checks["upstream"] != "ok"
        assert "password" not in ready.text


async def test_an_unavailable_redis_or_upstream_fails_readiness_only_if_required(tmp_path: Path, port: int) -> None:
    redis = Server(tmp_path)
    redis.start()
    settings = make_settings(
        upstream__url="http://127.0.0.1:1", redis__url=redis.url, server__admin_port=port, redis__timeout=0.2
    )
    try:
        async with client(port) as admin, lifespan(create_app(settings)):
            assert (await get(admin, "/readyz?require=redis")).status_code == 200
            assert (await admin.get("/readyz?require=upstream")).status_code == 503
            redis.kill()
            ready = await admin.get("/readyz")
            assert ready.status_code == 200, ready.text
            assert "cannot be reached" in ready.json()["checks"]["redis"]
            assert ready.json()["checks"]["upstream"] != "ok"
            assert (await admin.get("/readyz?require=redis")).status_code == 503
            for wrong in ("require=redsi", "requires=redis", "upstream"):
                refused = await admin.get(f"/readyz?{wrong}")
                assert (refused.status_code, "upstream, redis" in refused.text) == (400, True)
    finally:
        redis.kill()


async def test_a_redis_that_refuses_a_command_fails_readiness_until_it_has_permitted_all(
    serve: Serve, upstream: ScriptedUpstream, tmp_path: Path, port: int
) -> None:
    redis = Server(tmp_path)
    redis.start()
    settings = make_settings(upstream__url=serve(upstream), redis__url=redis.url, server__admin_port=port)
    try:
        with redis.client() as plain:
            plain.execute_command("ACL", "SETUSER", "default", "-@write")
            async with client(port) as admin, lifespan(create_app(settings)):
                ready = await get(admin, "/readyz")
                assert (ready.status_code, "add +@write" in ready.json()["checks"]["redis"]) == (503, True)
                plain.execute_command("ACL", "SETUSER", "default", "+@write")
                assert (await get(admin, "/readyz")).json()["ready"]
    finally:
        redis.kill()


async def test_a_redis_that_becomes_a_replica_fails_readiness(
    serve: Serve, upstream: ScriptedUpstream, tmp_path: Path, port: int
) -> None:
    redis = Server(tmp_path)
    redis.start()
    settings = make_settings(upstream__url=serve(upstream), redis__url=redis.url, server__admin_port=port)
    try:
        async with client(port) as admin, lifespan(create_app(settings)):
            assert (await get(admin, "/readyz")).json()["ready"]
            with redis.client() as plain:
                plain.replicaof("127.0.0.1", 1)
            ready = await admin.get("/readyz")
            assert (ready.status_code, "is a replica" in ready.json()["checks"]["redis"]) == (503, True)
    finally:
        redis.kill()


@pytest.mark.parametrize(
    ("status", "page"),
    [
        pytest.param(401, b'{"error": {"message": "no"}}', id="requires a credential"),
        pytest.param(200, b"<html>Welcome</html>", id="lists no models"),
    ],
)
async def test_an_upstream_that_answers_at_all_is_ready(redis_url: str, port: int, status: int, page: bytes) -> None:
    async def answering(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": page})

    settings = make_settings(redis__url=redis_url, jobs__concurrency=0, files__ingestion_concurrency=0, server__admin_port=port)
    app = ResponsesMiddleware(answering, settings)
    async with client(port) as admin, lifespan(app):
        ready = (await get(admin, "/readyz")).json()
        assert ready["ready"]
        assert ready["checks"] == {"upstream": "ok", "redis": "ok", "server": "ok"}


async def test_a_check_that_times_out_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hanging() -> Finding:
        await asyncio.Event().wait()
        return Finding()

    monkeypatch.setattr("responses_mw.asgi.admin.CHECK_TIMEOUT", 0.01)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(Admin({"it": hanging})), base_url="http://x") as admin:
        answer = await admin.get("/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "checks": {"it": "It did not answer in time."}, "warnings": []}


async def test_half_heads_do_not_keep_the_admin_port_from_answering(port: int) -> None:
    async with open_admin(ServerSettings(admin_port=port), {}, None), AsyncExitStack() as stack:
        readers = []
        for _ in range(150):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(b"GET /livez HT")
            readers.append(reader)
        assert await asyncio.wait_for(readers[0].read(), 60) == b"", "the first connections make room"
        async with client(port) as admin:
            assert (await get(admin, "/livez")).status_code == 200


async def test_an_admin_port_in_use_is_an_error_naming_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"the admin port 127.0.0.1:{port} cannot be opened"):
            async with open_admin(ServerSettings(admin_port=port), {}, None):
                pass


async def test_a_gunicorn_worker_starts_if_another_worker_has_the_admin_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_SOFTWARE", "gunicorn/23.0.0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with open_admin(ServerSettings(admin_port=taken.getsockname()[1]), {}, None):
            pass


@pytest.mark.timeout(90)
@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_command_reports_an_admin_port_in_use_without_a_traceback(
    fork_server: ForkServer, command: str, redis_url: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = [
            "--upstream=http://127.0.0.1:1",
            f"--redis={redis_url}",
            f"--auth.secret-keys={SECRET}",
            "--server.log-level=error",
        ]
        flags += [f"--server.admin-port={taken.getsockname()[1]}", *(["--port=0"] if command == "serve" else [])]
        done = fork_server.run(command, *flags)
    assert done.returncode in (1, 3)
    assert "cannot be opened: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr


async def test_the_admin_port_is_disabled_by_default() -> None:
    assert Settings().server.admin_port == 0


async def test_the_depth_and_age_of_the_queue_are_measured(
    serve: Serve, upstream: ScriptedUpstream, port: int, redis_url: str
) -> None:
    common: dict[str, Any] = {
        "upstream__url": serve(upstream),
        "redis__url": redis_url,
        "auth__secret_keys": [SECRET],
        "jobs__concurrency": 0,
    }
    front = create_app(make_settings(**common))
    held = Signal()
    upstream.stream(text("a"), held)
    transport = httpx.ASGITransport(front)
    async with lifespan(front), httpx.AsyncClient(transport=transport, base_url="http://x") as asking:
        created = await asking.post("/v1/responses", json={"model": "tiny", "input": "hi", "background": True})
        assert created.status_code == 200
        await asyncio.sleep(0.05)
        watching = create_app(make_settings(**common, server__admin_port=port))
        async with client(port) as admin, lifespan(watching):
            async with asyncio.timeout(60):
                while (depth := _sample(await get(admin, "/metrics"), "responses_mw_queue_depth")) == 0:
                    await asyncio.sleep(0.02)
            assert depth == 1
            assert _sample(await get(admin, "/metrics"), "responses_mw_queue_age_seconds") >= 0.05
        await asking.delete(f"/v1/responses/{created.json()['id']}")
    held.set()


def _sample(answer: httpx.Response, name: str) -> float:
    [family] = [one for one in text_string_to_metric_families(answer.text) if one.name == name]
    return float(family.samples[0].value)
