"""A real Prometheus evaluates the chart's alerts for one release per fault, and for one whose clients make every mistake.

It needs what `test_dashboard.py` needs, and takes about six minutes. The rules are those of the chart, with their own
durations. Each fault must fire its alerts within five minutes, and no others. A thousand mistakes of clients must not even make
an alert pending.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import orjson
import pytest
import yaml

from benchmarks.processes import free_port
from responses_mw.ids import RunIds
from tests.e2e.test_dashboard import LIMITS, monitored, program, scraped, started, until_ready
from tests.support.scripted import HELLO, TINY, Answer, Signal, completion, error, frame, json_answer, play, read_body
from tests.support.scripted import SSE as SSE_HEADERS
from tests.support.valkey import Server

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from tests.support.servers import Serve

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

WITHIN = 300.0
"""Seconds in which the alerts of a fault must fire."""
MISTAKES = 1000
PAUSE = 0.5
SECRET = "a secret that all the replicas of the deployment have"
QUESTION = {"model": "tiny", "input": "hi"}
FAILING = {"ResponsesErrorRate", "ResponsesFailing", "ResponsesUpstreamFailing"}


class Upstream:
    """An upstream whose answers end as the model of the request says: `500`, `cut`, `hang`, a 4xx, or normally."""

    def __init__(self, key: str = "") -> None:
        self.key = key
        self.never = Signal()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = await read_body(receive)
        is_known = not self.key or (b"authorization", f"Bearer {self.key}".encode()) in scope["headers"]
        answer = self._answer(scope["path"], body) if is_known else json_answer(error("Unauthorized", 401), 401)
        await play(answer, receive, send)

    def _answer(self, path: str, body: bytes) -> Answer:
        if path == "/v1/models":
            return json_answer({"object": "list", "data": [TINY]})
        asked = orjson.loads(body or b"{}")
        model = asked.get("model", "400")
        if model.isdigit():
            return json_answer(error(f"The model `{model}` does not exist.", int(model)), int(model))
        if asked.get("stream"):
            chunks = HELLO if model == "tiny" else HELLO[:2]
            return Answer([*map(frame, chunks), *[self.never] * (model == "hang")], headers=SSE_HEADERS)
        return json_answer(completion({"role": "assistant", "content": "Hello"}))


@dataclass
class Release:
    """A server and its fault."""

    name: str
    expected: set[str]
    """The alerts that must fire."""
    work: Callable[[Release, httpx.AsyncClient], Awaitable[None]]
    """Sends one round of requests."""
    flags: list[str] = field(default_factory=list)
    begin: Callable[[], None] = lambda: None
    """Causes the fault when the server is ready."""
    limit: int = 0
    """Maximum number of open files, or 0."""
    allowed: set[str] = field(default_factory=set)
    """Other alerts that may fire."""
    port: int = field(default_factory=free_port)
    admin: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/responses"

    @property
    def command(self) -> list[str]:
        own = [sys.executable, "-m", "responses_mw", "serve", f"--port={self.port}", f"--server.admin-port={self.admin}"]
        common = ["--server.drain-timeout=1", "--upstream.overload-timeout=0", f"--auth.secret-keys={SECRET}"]
        whole = [*own, *common, *self.flags]
        return ["sh", "-c", f'ulimit -n {self.limit}; exec "$@"', "sh", *whole] if self.limit else whole


def asking(**body: Any) -> Callable[[Release, httpx.AsyncClient], Awaitable[None]]:
    async def ask(release: Release, client: httpx.AsyncClient) -> None:
        await client.post(release.url, json={**QUESTION, **body})

    return ask


async def mistakes(release: Release, client: httpx.AsyncClient) -> None:
    """Make each mistake once."""
    url, own = release.url, {"authorization": "Bearer wrong"}
    foreign = {"type": "mcp", "server_label": "mine", "server_url": "http://127.0.0.1:1/mcp"}
    bodies: list[dict[str, Any]] = [{"model": status} for status in ("400", "401", "404", "413", "422")]
    bodies += [{"model": "404", "stream": True}, {"temperature": "hot"}, {"tools": [foreign]}, {"input": None}]
    bodies += [{"previous_response_id": RunIds().response}]
    for body in bodies:
        await client.post(url, json={**QUESTION, **body})
    for status in ("402", "429"):
        await client.post(url, json={**QUESTION, "model": status}, headers=own)
    await client.post(url, content=b"{not json")
    await client.get(f"{url}/{RunIds().response}")
    await client.put(url)
    await client.post(url.replace("/responses", "/chat/completions"), json={"model": "404", "messages": []})
    with suppress(httpx.ReadTimeout):
        await client.post(url, json={**QUESTION, "model": "tiny"}, timeout=httpx.Timeout(60, read=0.001))


class Held:
    """Connections of clients whose streams never end, as many as the server accepts and more."""

    def __init__(self) -> None:
        self._connections: list[socket.socket] = []

    async def hold(self, release: Release, client: httpx.AsyncClient) -> None:
        body = orjson.dumps({**QUESTION, "model": "hang", "stream": True, "store": False})
        head = b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        while len(self._connections) < release.limit // 2:
            connection = socket.create_connection(("127.0.0.1", release.port))
            self._connections.append(connection)
            with suppress(ConnectionError):
                connection.sendall(head % len(body) + body)
            await asyncio.sleep(0)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def children(pid: int) -> dict[int, str]:
    """Return the names of a process's children by their ids."""
    found = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()
    return {int(child): Path(f"/proc/{child}/comm").read_text().strip() for child in found}


async def kill_store(release: Release, client: httpx.AsyncClient) -> None:
    """Kill the embedded server, which is started again each time, and send a request."""
    assert release.process is not None
    for pid, name in children(release.process.pid).items():
        if name == "valkey-server":
            os.kill(pid, signal.SIGKILL)
    await asking()(release, client)


class OneFile:
    """A file that is added to a vector store once. With `redis`, it seems to have waited for an hour."""

    def __init__(self, redis: Server | None = None) -> None:
        self._redis = redis
        self._is_added = False

    async def add(self, release: Release, client: httpx.AsyncClient) -> None:
        if not self._is_added:
            url = release.url.removesuffix("/responses")
            upload = await client.post(f"{url}/files", data={"purpose": "user_data"}, files={"file": ("a.txt", b"Hello")})
            created = await client.post(f"{url}/vector_stores", json={"file_ids": [upload.raise_for_status().json()["id"]]})
            self._is_added = created.is_success
        elif self._redis is not None:
            with self._redis.client() as redis:
                for job in redis.zrange("rmw:{qf1}:since", 0, -1):
                    redis.zadd("rmw:{qf1}:since", {job: 1000 * (time.time() - 3600)}, xx=True)


class Nothing:
    """A server that knows no path."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(receive)
        await play(json_answer(error("Not found", 404), 404), receive, send)


class LostWorker:
    """A second server for the jobs of a release. It is killed when it has one, and is not monitored."""

    def __init__(self, release: Release) -> None:
        self.release = release

    async def lose(self, release: Release, client: httpx.AsyncClient) -> None:
        assert self.release.process is not None
        if self.release.process.poll() is not None:
            return
        await asking(background=True, model="hang")(release, client)
        metrics = (await client.get(f"http://127.0.0.1:{self.release.admin}/metrics")).text
        if re.search(r"^responses_mw_jobs_running [1-9]", metrics, re.MULTILINE):
            self.release.process.kill()


def releases(serve: Serve, redis: dict[str, Server], held: Held, worker: LostWorker) -> list[Release]:
    working, guarded = (f"--upstream={serve(Upstream(key), lifespan='off')}" for key in ("", "good"))
    urls = {name: f"--redis={server.url}" for name, server in redis.items()}

    def deny() -> None:
        with redis["denied"].client() as client:
            client.execute_command("ACL", "SETUSER", "default", "-@write")

    def fill() -> None:
        with redis["full"].client() as client:
            client.config_set("maxmemory", client.info("memory")["used_memory"])

    def embeddings(url: str) -> list[str]:
        return ["--files.embedding-model=e", f"--files.embedding-url={url}"]

    kept = {"ResponsesUnstored", "ResponsesStateErrors"}
    patient = ["--upstream.timeout=3000"]
    job = asking(background=True)
    return [
        Release("mistakes", set(), mistakes, [working, "--tools.allow-private-urls"]),
        Release("upstream-500", FAILING, asking(model="500"), [working]),
        Release("cut-streams", FAILING - {"ResponsesErrorRate"}, asking(model="cut", stream=True), [working]),
        Release("wrong-key", FAILING | {"ResponsesUpstreamDown"}, asking(), [guarded, "--upstream.api-key=wrong"]),
        Release(
            "upstream-away",
            FAILING - {"ResponsesUpstreamFailing"} | {"ResponsesUpstreamDown"},
            asking(),
            [f"--upstream=http://127.0.0.1:{free_port()}"],
        ),
        Release("redis-away", kept, asking(), [working, urls["away"]], redis["away"].kill),
        Release("redis-full", {"ResponsesUnstored"}, asking(), [working, urls["full"]], fill, allowed=kept),
        Release("redis-denied", kept, asking(), [working, urls["denied"]], deny),
        Release("full-queue", {"ResponsesQueueOld"}, job, [working, urls["queue"], "--jobs.concurrency=0"]),
        Release("no-descriptors", {"ResponsesReplicaDescriptors"}, held.hold, [working, *patient], limit=250),
        Release(
            "file-waits",
            {"ResponsesIngestionRetried"},
            OneFile().add,
            [working, *embeddings(f"http://127.0.0.1:{free_port()}")],
        ),
        Release(
            "file-fails", {"ResponsesIngestionFailed"}, OneFile().add, [working, *embeddings(serve(Nothing(), lifespan="off"))]
        ),
        Release(
            "file-queued",
            {"ResponsesIngestionQueueOld"},
            OneFile(redis["files"]).add,
            [working, urls["files"], "--files.ingestion-concurrency=0"],
        ),
        Release("lost-worker", {"ResponsesLeasesLost"}, worker.lose, worker.release.flags),
        Release("dead-embedded", {"ResponsesStateErrors"}, kill_store, [working], allowed=kept),
    ]


async def keep_asking(release: Release, client: httpx.AsyncClient, until: float) -> int:
    """Send requests until the time `until`, and return the number of rounds."""
    rounds = 0
    while time.monotonic() < until:
        with suppress(httpx.TransportError, OSError):
            await release.work(release, client)
        rounds += 1
        await asyncio.sleep(PAUSE)
    return rounds


def states(alerts: list[dict[str, Any]], release: Release, *wanted: str) -> set[str]:
    """Return the alerts of a release that are in one of the `wanted` states."""
    return {one["labels"]["alertname"] for one in alerts if one["labels"]["release"] == release.name and one["state"] in wanted}


async def test_each_fault_fires_its_alerts_and_errors_of_clients_fire_none(tmp_path: Path, serve: Serve) -> None:
    names = ("away", "full", "denied", "queue", "files", "worker")
    redis = {name: Server(tmp_path / name, "--maxmemory-policy", "noeviction") for name in names}
    hanging = f"--upstream={serve(Upstream(), lifespan='off')}"
    flags = [hanging, f"--redis={redis['worker'].url}", "--jobs.lease=2"]
    worker = LostWorker(Release("worker", set(), asking(), flags))
    own = free_port()
    async with AsyncExitStack() as stack:
        for server in redis.values():
            server.start()
            stack.callback(server.kill)
        held = Held()
        stack.callback(held.close)
        watched = releases(serve, redis, held, worker)
        for release in watched:
            monitored(release.name, tmp_path)
        for release in [*watched, worker.release]:
            release.process = stack.enter_context(started(tmp_path / f"{release.name}.log", *release.command))
        config = {
            "global": {"scrape_interval": "5s", "evaluation_interval": "5s"},
            "rule_files": [f"{tmp_path}/*-rules.yaml"],
            "scrape_configs": [scraped(release.name, release.admin) for release in watched],
        }
        (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
        options = [f"--config.file={tmp_path}/prometheus.yaml", f"--storage.tsdb.path={tmp_path}/data"]
        listen = f"--web.listen-address=127.0.0.1:{own}"
        stack.enter_context(started(tmp_path / "prometheus.log", program("prometheus"), *options, listen))
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60, limits=LIMITS, trust_env=False))
        for place in [*[f"{release.admin}/livez" for release in [*watched, worker.release]], f"{own}/-/ready"]:
            await until_ready(client, f"http://127.0.0.1:{place}")
        await asyncio.sleep(15)  # two scrapes without a fault
        for release in watched:
            release.begin()
        until = time.monotonic() + WITHIN
        tasks = [asyncio.create_task(keep_asking(release, client, until)) for release in watched]
        rounds = await asyncio.gather(*tasks)
        alerts = (await client.get(f"http://127.0.0.1:{own}/api/v1/alerts")).json()["data"]["alerts"]
        assert rounds[0] * 17 >= MISTAKES, "too few mistakes were made"
        firing = {release.name: states(alerts, release, "firing") - release.allowed for release in watched}
        assert firing == {release.name: release.expected - release.allowed for release in watched}
        assert states(alerts, watched[0], "pending", "firing") == set()
        missing = {release.name: release.expected - states(alerts, release, "firing") for release in watched}
        assert not any(missing.values()), missing
        log = (tmp_path / "mistakes.log").read_text()
        assert [line for line in log.splitlines() if " ERROR " in line or " WARNING responses_mw.runs" in line] == []
