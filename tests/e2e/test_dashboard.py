"""A real Prometheus is asked every query of the dashboard and of the alerts, while it scrapes a server under load.

It needs prometheus and promtool (apt install prometheus; or ``$PROMETHEUS``, the folder that they are in). A panel that stays
empty, a legend with a label that the answer has not, or an alert that cannot be evaluated is a failure.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.processes import free_port
from responses_mw.demo.servers import demo_upstream
from tests.support.paths import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

FILES = ROOT / "helm" / "responses-mw" / "files"
SECONDS = 20
MOST_JOBS = 5
PATIENCE = 60.0
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{alerts}]
scrape_configs: [{{job_name: responses-mw, static_configs: [{{targets: ["127.0.0.1:{admin}"]}}]}}]
"""


def program(name: str) -> str:
    """The path of a program of Prometheus."""
    return shutil.which(name, path=os.environ.get("PROMETHEUS") or None) or pytest.skip(f"there is no {name} here")


@contextmanager
def started(log: Path, *command: str) -> Iterator[None]:
    """Run a process, whose output goes to ``log``."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield
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


async def exercise(client: httpx.AsyncClient, url: str) -> None:
    """Streams, background responses and too many of them, a request that is repeated, one for a model that does not exist."""
    command = [sys.executable, str(ROOT / "deploy" / "load.py"), f"--url={url}", f"--seconds={SECONDS}"]
    load = await asyncio.create_subprocess_exec(*command, "--streams=10", "--background=3", stdout=subprocess.DEVNULL)
    while load.returncode is None:
        for model in ("demo", "no-such-model"):
            await client.post(f"{url}/v1/responses", json={"model": model, "input": "Hello!", "cache": "exact"})
        job = {"model": "demo", "input": "Tell me a story.", "background": True}
        await asyncio.gather(*(client.post(f"{url}/v1/responses", json=job) for _ in range(3 * MOST_JOBS)))
        with suppress(TimeoutError):
            await asyncio.wait_for(load.wait(), 1)
    assert load.returncode == 0, "the load failed"


def panels() -> Iterator[tuple[str, str, set[str]]]:
    """Of each query: its panel, the query, and the labels of its legend."""
    for panel in json.loads((FILES / "dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"].replace("$job", "responses-mw").replace("$instance", ".*").replace("$__rate_interval", "15s")
            yield panel["title"], query, set(re.findall(r"{{\s*(\w+)\s*}}", target.get("legendFormat", "")))


async def faults_of_panels(client: httpx.AsyncClient, prometheus: str) -> list[str]:
    found = []
    for title, query, legend in panels():
        answer = (await client.get(f"{prometheus}/api/v1/query", params={"query": query})).json()
        series: list[dict[str, Any]] = answer.get("data", {}).get("result", [])
        labels = {label for one in series for label in one["metric"]}
        numbers = [one["value"][1] for one in series if one["value"][1] != "NaN"]
        if not numbers or not legend <= labels:
            found.append(f"{title}: {answer.get('error') or 'empty, or without ' + str(legend - labels)}: {query}")
    return found


async def faults_of_alerts(client: httpx.AsyncClient, prometheus: str) -> list[str]:
    groups = (await client.get(f"{prometheus}/api/v1/rules")).json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert rules
    return [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] != "ok"]


def test_the_alerts_are_rules_of_prometheus() -> None:
    subprocess.run([program("promtool"), "check", "rules", str(FILES / "alerts.yaml")], check=True)


async def test_no_panel_stays_empty_and_every_alert_is_evaluated(tmp_path: Path) -> None:
    server = program("prometheus")
    port, admin, own = (free_port() for _ in range(3))
    url, prometheus = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{own}"
    (tmp_path / "prometheus.yaml").write_text(CONFIG.format(alerts=FILES / "alerts.yaml", admin=admin))
    with ExitStack() as stack:
        upstream = stack.enter_context(demo_upstream(0.02))
        serve = [sys.executable, "-m", "responses_mw", "serve", f"--upstream={upstream}", f"--port={port}"]
        serve += [f"--limits.background={MOST_JOBS}", "--server.drain-timeout=1", f"--server.admin-port={admin}"]
        stack.enter_context(started(tmp_path / "serve.log", *serve))
        options = [f"--config.file={tmp_path}/prometheus.yaml", f"--storage.tsdb.path={tmp_path}/data"]
        listen = f"--web.listen-address=127.0.0.1:{own}"
        stack.enter_context(started(tmp_path / "prometheus.log", server, *options, listen))
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            await until_ready(client, f"http://127.0.0.1:{admin}/readyz")
            await until_ready(client, f"{prometheus}/-/ready")
            await exercise(client, url)
            assert await faults_of_panels(client, prometheus) + await faults_of_alerts(client, prometheus) == []
