"""A sample answer of SearXNG, and a scripted search provider."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import anyio
import anyio.lowlevel
from starlette.types import Receive, Scope, Send

from tests.support.scripted import Signal

SEARXNG = {
    "query": "capital of france",
    "number_of_results": 0,
    "results": [
        {
            "url": "https://en.wikipedia.org/wiki/Paris",
            "title": "Paris - Wikipedia",
            "content": "Paris is the capital and largest city of France.",
            "publishedDate": None,
            "thumbnail": "",
            "engine": "startpage",
            "template": "default.html",
            "parsed_url": ["https", "en.wikipedia.org", "/wiki/Paris", "", "", ""],
            "img_src": "",
            "priority": "",
            "engines": ["startpage", "brave"],
            "positions": [1, 1],
            "score": 4.0,
            "category": "general",
        },
        {
            "url": "https://www.britannica.com/place/Paris",
            "title": "Paris | Definition, Map, Population",
            "content": "Paris, city and capital of France, situated in the north-central part of the country.",
            "engine": "brave",
            "parsed_url": ["https", "www.britannica.com", "/place/Paris", "", "", ""],
            "engines": ["brave"],
            "positions": [2],
            "score": 0.5,
            "category": "general",
        },
    ],
    "answers": [],
    "corrections": [],
    "infoboxes": [],
    "suggestions": ["capital of france before paris"],
    "unresponsive_engines": [["duckduckgo", "CAPTCHA"]],
}


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    parameters: dict[str, str]
    """The query string."""
    json: Any = None
    """The body, if it is JSON."""


@dataclass
class SearchServer:
    """A server that answers every request with `status` and `answer`, as soon as `before` is set.

    An `answer` that is not bytes is sent as JSON.
    """

    answer: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    before: Signal | None = None
    asked: list[Asked] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        self.asked.append(await _read(scope, receive))
        async with anyio.create_task_group() as group:
            group.start_soon(_leave, receive, group.cancel_scope)
            await self._answer(send)
            group.cancel_scope.cancel()

    async def _answer(self, send: Send) -> None:
        if self.before is not None:
            await self.before.wait(None)
        body = self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode()
        headers = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _leave(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        await anyio.lowlevel.checkpoint()
    scope.cancel()


async def _read(scope: Scope, receive: Receive) -> Asked:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    query = {name: values[0] for name, values in parse_qs(scope["query_string"].decode()).items()}
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    return Asked(scope["method"], scope["path"], headers, query, json.loads(body) if body else None)
