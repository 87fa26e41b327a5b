"""A real Prometheus runs every query of the dashboards and alerts of two releases, one of them under load.

It needs Helm (downloaded from npm's registry), prometheus and promtool (apt install prometheus, or set `$PROMETHEUS` to their
directory). The test fails if a panel stays empty, if a legend names a missing label, or if an alert cannot be evaluated.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from benchmarks.processes import free_port
from responses_mw.demo.upstream import demo_upstream
from tests.helm.rendering import render
from tests.helm.test_observation import WATCHED
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from tests.support.servers import Serve

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

FILES = ROOT / "helm" / "responses-mw" / "files"
SECONDS = 20
MOST_JOBS = 5
PATIENCE = 180.0
OF_TOOLS = ("gen_ai_execute_tool_duration", "gen_ai_client_operation_duration")
"""Metrics of tools and embeddings, which the servers here do not have."""
LIMITS = httpx.Limits(keepalive_expiry=1)  # well before the server closes idle connections
Asking = Callable[..., Awaitable[Any]]


def program(name: str) -> str:
    """Return the path of a program of Prometheus."""
    return shutil.which(name, path=os.environ.get("PROMETHEUS") or None) or pytest.skip(f"there is no {name} here")


@contextmanager
def started(log: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process with its output in `log`."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(PATIENCE)
            print(log.read_text(errors="replace")[-3000:])


async def until_ready(client: httpx.AsyncClient, url: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(httpx.TransportError):
                if (await client.get(url)).is_success:
                    return
            await asyncio.sleep(0.2)


def population(*, broken: bool) -> ASGIApp:
    """An MCP server whose only tool answers or fails."""
    server = MCPServer("cities", log_level="CRITICAL")

    @server.tool(structured_output=False)
    def get_population(city: str) -> str:
        if broken:
            raise ToolError(f"{city} is not known")
        return json.dumps({"city": city, "population": 567131})

    return server.streamable_http_app(stateless_http=True, host="127.0.0.1")


async def embed(request: Request) -> JSONResponse:
    texts = (await request.json())["input"]
    data = [{"index": index, "embedding": [1.0, 0.0]} for index in range(len(texts) if isinstance(texts, list) else 1)]
    return JSONResponse({"data": data, "usage": {"prompt_tokens": 1}})


def offered(serve: Serve) -> list[str]:
    """Start MCP servers and an embeddings server, and yield the options for a server that uses them."""
    urls = {"cities": serve(population(broken=False)), "broken": serve(population(broken=True))}
    servers = {label: {"url": f"{url}/mcp", "require_approval": "never"} for label, url in urls.items()}
    embeddings = serve(Starlette(routes=[Route("/v1/embeddings", embed, methods=["POST"])]))
    cache = ["--cache.embedding-model=small", f"--cache.embedding-url={embeddings}"]
    return [f"--tools.mcp-servers={json.dumps(servers)}", *cache]


async def exercise(client: httpx.AsyncClient, url: str) -> None:
    """Send streams, too many background responses, tool calls, a repeated request and one for an unknown model."""
    command = [sys.executable, str(ROOT / "deploy" / "load.py"), f"--url={url}", f"--seconds={SECONDS}"]
    load = await asyncio.create_subprocess_exec(*command, "--streams=10", "--background=3", stdout=subprocess.DEVNULL)
    while load.returncode is None:
        question = {"model": "demo", "input": "What is the population of Lisbon?"}
        for label in ("cities", "broken"):
            await client.post(f"{url}/v1/responses", json=question | {"tools": [{"type": "mcp", "server_label": label}]})
        await client.post(f"{url}/v1/responses", json={"model": "demo", "input": "Hello!", "cache": "semantic"})
        for model in ("demo", "no-such-model"):
            await client.post(f"{url}/v1/responses", json={"model": model, "input": "Hello!", "cache": "exact"})
        job = {"model": "demo", "input": "Tell me a story.", "background": True}
        await asyncio.gather(*(client.post(f"{url}/v1/responses", json=job) for _ in range(3 * MOST_JOBS)))
        with suppress(TimeoutError):
            await asyncio.wait_for(load.wait(), 1)
    assert load.returncode == 0, "the load failed"


def panels(dashboard: dict[str, Any]) -> Iterator[tuple[str, str, set[str]]]:
    """Return the panel, the query and the labels of the legend of each query."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"].replace("$instance", ".*").replace("$__rate_interval", "15s")
            yield panel["title"], query, set(re.findall(r"{{\s*(\w+)\s*}}", target.get("legendFormat", "")))


async def faults_of_panels(prometheus: Asking, dashboard: dict[str, Any]) -> list[str]:
    found = []
    for title, query, legend in panels(dashboard):
        if any(metric in query for metric in OF_TOOLS):
            continue
        answer = await prometheus("query", query=query)
        series: list[dict[str, Any]] = answer.get("data", {}).get("result", [])
        labels = {label for one in series for label in one["metric"]}
        numbers = [one["value"][1] for one in series if one["value"][1] != "NaN"]
        if not numbers or not legend <= labels:
            found.append(f"{title}: {answer.get('error') or 'empty, or without ' + str(legend - labels)}: {query}")
    return found


async def faults_of_alerts(prometheus: Asking) -> list[str]:
    rules = [rule for group in (await prometheus("rules"))["data"]["groups"] for rule in group["rules"]]
    assert rules
    return [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] != "ok"]


async def pending(prometheus: Asking, alert: str) -> set[str]:
    """Return the releases for which an alert is pending or fires."""
    alerts = (await prometheus("alerts"))["data"]["alerts"]
    return {one["labels"]["release"] for one in alerts if one["labels"]["alertname"] == alert}


def monitored(release: str, folder: Path) -> dict[str, Any]:
    """Write the alerts of a release as Prometheus reads them, and return its dashboard."""
    rendered = render(WATCHED, release=release)
    (folder / f"{release}-rules.yaml").write_text(yaml.safe_dump(rendered.kind("PrometheusRule")[0]["spec"]))
    [found] = [one for one in rendered.kind("ConfigMap") if one["metadata"]["name"].endswith("-dashboard")]
    [text] = found["data"].values()
    return json.loads(text)  # type: ignore[no-any-return]


def scraped(release: str, admin: int) -> dict[str, Any]:
    """Return the configuration of a target with the labels that the Prometheus operator sets."""
    service = f"{release}-responses-mw-admin"
    targets = {"targets": [f"127.0.0.1:{admin}"], "labels": {"namespace": "llm", "service": service}}
    return {"job_name": service, "static_configs": [targets]}


def test_prometheus_accepts_the_alerts(tmp_path: Path) -> None:
    monitored("one", tmp_path)
    files = [FILES / "alerts.yaml", tmp_path / "one-rules.yaml"]
    subprocess.run([program("promtool"), "check", "rules", *map(str, files)], check=True)


async def test_panels_of_two_releases_have_data_and_each_alert_concerns_its_own_release(tmp_path: Path, serve: Serve) -> None:
    server = program("prometheus")
    admin = {release: free_port() for release in ("one", "other")}
    dashboards = {release: monitored(release, tmp_path) for release in admin}
    port, own = free_port(), free_port()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [f"{tmp_path}/*-rules.yaml"],
        "scrape_configs": [scraped(*one) for one in admin.items()],
    }
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
    async with AsyncExitStack() as stack:
        upstream = stack.enter_context(demo_upstream(0.02))
        ours = [sys.executable, "-m", "responses_mw", "serve", f"--upstream={upstream}", "--server.drain-timeout=1"]
        busy = [
            *ours,
            *offered(serve),
            f"--limits.background={MOST_JOBS}",
            f"--port={port}",
            f"--server.admin-port={admin['one']}",
        ]
        stack.enter_context(started(tmp_path / "one.log", *busy))
        idle = stack.enter_context(ExitStack())
        idle.enter_context(started(tmp_path / "other.log", *ours, "--port=0", f"--server.admin-port={admin['other']}"))
        options = [f"--config.file={tmp_path}/prometheus.yaml", f"--storage.tsdb.path={tmp_path}/data"]
        listen = f"--web.listen-address=127.0.0.1:{own}"
        stack.enter_context(started(tmp_path / "prometheus.log", server, *options, listen))
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60, limits=LIMITS, trust_env=False))
        for place in [*[f"{one}/readyz" for one in admin.values()], f"{own}/-/ready"]:
            await until_ready(client, f"http://127.0.0.1:{place}")

        async def prometheus(path: str, **params: str) -> Any:
            return (await client.get(f"http://127.0.0.1:{own}/api/v1/{path}", params=params)).json()

        await exercise(client, f"http://127.0.0.1:{port}")
        faults = await faults_of_panels(prometheus, dashboards["one"]) + await faults_of_alerts(prometheus)
        assert not faults, "\n".join(faults)
        for release, dashboard in dashboards.items():
            for title, query, _ in panels(dashboard):
                seen = {one["metric"].get("instance") for one in (await prometheus("query", query=query))["data"]["result"]}
                assert seen <= {None, f"127.0.0.1:{admin[release]}"}, f"{title}: {query}"
        up = [query for title, query, _ in panels(dashboards["other"]) if title == "Replicas up"]
        assert [(await prometheus("query", query=query))["data"]["result"][0]["value"][1] for query in up] == ["1"]
        idle.close()
        async with asyncio.timeout(PATIENCE):
            while not (down := await pending(prometheus, "ResponsesReplicaDown")):
                await asyncio.sleep(0.2)
        assert down == {"other"}
