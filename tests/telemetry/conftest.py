"""An OTLP receiver, and `responses-mw` processes that export to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks.processes import free_port
from tests.support.configured import REDIS_TIMEOUT, flag
from tests.support.servers import Ours

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from tests.support.forkserver import ForkServer
    from tests.support.servers import Serve

    Start = Callable[..., "Command"]

SECRET = "a secret that all the replicas of the deployment have"


@dataclass(frozen=True)
class Span:
    """A span as received. Ids are hexadecimal."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    links: list[str]
    failed: bool
    attributes: dict[str, Any]
    service: str
    scope: tuple[str, str, str]
    """Name and version of the instrumentation, and the URL of its schema."""
    events: list[tuple[str, dict[str, Any]]]

    @property
    def context(self) -> str:
        """A `traceparent` without its flags."""
        return f"00-{self.trace_id}-{self.span_id}-"


@dataclass
class Collector:
    """An OTLP receiver (HTTP, protobuf)."""

    spans: list[Span] = field(default_factory=list)
    metrics: set[str] = field(default_factory=set)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if scope["path"] == "/v1/traces":
            self._take_spans(ExportTraceServiceRequest.FromString(body))
        else:
            request = ExportMetricsServiceRequest.FromString(body)
            self.metrics.update(
                one.name for of in request.resource_metrics for scoped in of.scope_metrics for one in scoped.metrics
            )
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/x-protobuf")]})
        await send({"type": "http.response.body", "body": b""})

    def _take_spans(self, request: ExportTraceServiceRequest) -> None:
        for of in request.resource_spans:
            service = {one.key: one.value.string_value for one in of.resource.attributes}["service.name"]
            for scoped in of.scope_spans:
                scope = (scoped.scope.name, scoped.scope.version, scoped.schema_url)
                self.spans += [_span(span, service, scope) for span in scoped.spans]

    async def until(self, *names: str, **attributes: Any) -> list[Span]:
        """Wait for a span of each of these names, and return all spans."""
        async with asyncio.timeout(60):
            while not set(names) <= {span.name for span in self.spans}:
                await asyncio.sleep(0.02)
        return self.spans

    def one(self, name: str) -> Span:
        [span] = [span for span in self.spans if span.name == name]
        return span

    def all(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


def _span(span: Any, service: str, scope: tuple[str, str, str]) -> Span:
    return Span(
        name=span.name,
        kind=span.kind,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        links=[f"{link.trace_id.hex()}/{link.span_id.hex()}" for link in span.links],
        failed=span.status.code == 2,
        attributes={one.key: _value(one.value) for one in span.attributes},
        service=service,
        scope=scope,
        events=[(event.name, {one.key: _value(one.value) for one in event.attributes}) for event in span.events],
    )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)


class Command:
    """A process that runs `responses-mw serve` or `worker`."""

    def __init__(
        self, fork_server: ForkServer, command: str, settings: dict[str, Any], environment: dict[str, str], log: Path
    ) -> None:
        flags = [f"{flag(name)}={value}" for name, value in settings.items()]
        self._log = log
        self.process = fork_server.start(command, *flags, stderr=log, env=environment)
        self.ours = Ours(f"http://127.0.0.1:{settings.get('port', 0)}")
        self.admin = Ours(f"http://127.0.0.1:{settings['server__admin_port']}")

    async def is_ready(self, path: str = "/readyz") -> Command:
        """Wait until the process is ready or, with `/livez`, alive."""
        async with asyncio.timeout(60):
            while True:
                assert self.process.poll() is None, self.log
                with suppress(httpx.TransportError):  # not listening yet
                    answer = await self.admin.http.get("/readyz")
                    is_listening = answer.json()["checks"].get("server", "ok") == "ok"  # a worker does not listen
                    if is_listening and (path == "/livez" or answer.status_code == 200):
                        return self
                await asyncio.sleep(0.05)

    @property
    def log(self) -> str:
        """The process's standard error so far."""
        return self._log.read_text()

    async def logged(self, text: str) -> str:
        """Wait until the log contains `text`, and return the log."""
        async with asyncio.timeout(60):
            while text not in self.log:
                await asyncio.sleep(0.02)
        return self.log

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture
def upstream_url(serve: Serve, upstream: Any) -> str:
    return serve(upstream)


@pytest.fixture
def environment(serve: Serve, collector: Collector) -> dict[str, str]:
    """Variables for frequent export to the collector."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": serve(collector),
        "OTEL_BSP_SCHEDULE_DELAY": "50",
        "OTEL_METRIC_EXPORT_INTERVAL": "200",
    }


@pytest.fixture
async def start(
    fork_server: ForkServer, upstream_url: str, redis_url: str, environment: dict[str, str], tmp_path: Path
) -> AsyncIterator[Start]:
    """Start `serve` or `worker` with settings and additional environment variables."""
    async with AsyncExitStack() as stack:

        def start(command: str, variables: dict[str, str] | None = None, **settings: Any) -> Command:
            ports = {"server__admin_port": free_port()} | ({"port": free_port()} if command == "serve" else {})
            common = {
                "upstream__url": upstream_url,
                "redis__url": redis_url,
                "auth__secret_keys": SECRET,
                "server__log_format": "json",
                "redis__timeout": REDIS_TIMEOUT,
                **ports,
            }
            log = tmp_path / f"{command}-{time.monotonic_ns()}.log"
            started = Command(fork_server, command, {**common, **settings}, {**environment, **(variables or {})}, log)
            stack.callback(started.end)
            stack.push_async_callback(started.ours.aclose)
            stack.push_async_callback(started.admin.aclose)
            return started

        yield start
