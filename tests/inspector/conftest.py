"""Fixtures: a server with an inspector on its admin port, and clients of both."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from benchmarks.processes import free_port
from tests.inspector.browser import look  # noqa: F401 (a fixture)
from tests.support.scripted import completion
from tests.support.servers import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.servers import Ours, Start

SECRET = "a secret that all the replicas of the deployment have"
TOKEN = "a token of the inspector"
ANSWER = completion({"role": "assistant", "content": "the answer"}, counts={"prompt_tokens": 7, "completion_tokens": 5})


@dataclass
class Inspected:
    """A server, and a client of its admin port."""

    ours: Ours
    admin: httpx.Client

    @property
    def url(self) -> str:
        return str(self.admin.base_url).rstrip("/")

    def summaries(self, query: str = "") -> list[dict[str, Any]]:
        response = self.admin.get(f"/admin/api/responses{query}")
        assert response.status_code == 200, response.text
        found: list[dict[str, Any]] = response.json()["data"]
        return found

    def wait_for(self, count: int) -> list[dict[str, Any]]:
        """Wait until the index has `count` responses, and return them."""
        found: list[dict[str, Any]] = until(lambda: len(listed := self.summaries("?limit=500")) >= count and listed)
        return found


def until(found: Callable[[], Any]) -> Any:
    """Wait until `found` returns a true value, and return it."""
    deadline = time.monotonic() + PATIENCE
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


Inspect = Callable[..., Inspected]


@pytest.fixture
def inspect(start: Start) -> Iterator[Inspect]:
    """Return a function that starts a server with an inspector, by default with all content and without a token."""
    clients: list[httpx.Client] = []

    def open_inspector(**settings: Any) -> Inspected:
        port = free_port()
        defaults = {"ui__mode": "content", "auth__secret_keys": [SECRET], "server__admin_port": port}
        ours = start(**{**defaults, **settings})
        admin = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE)
        clients.append(admin)
        until(lambda: _answers(admin))
        return Inspected(ours, admin)

    yield open_inspector
    for client in clients:
        client.close()


def _answers(admin: httpx.Client) -> bool:
    try:
        return admin.get("/livez").status_code == 200
    except httpx.ConnectError:
        return False
