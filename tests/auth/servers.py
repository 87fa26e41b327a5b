"""An upstream that knows its callers, and a server that stands for all that a request may have an effect on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from tests.support.scripted import (
    HELLO,
    TINY,
    Answer,
    Asked,
    ScriptedUpstream,
    Signal,
    _body,
    _play,
    call,
    completion,
    error,
    finish,
    frame,
)
from tests.support.scripted import JSON as JSON_HEADERS
from tests.support.scripted import SSE as SSE_HEADERS

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

Listing = Literal["guarded", "public", "absent", "forbidden"]
"""What the upstream does with its list of models: shows it to callers it knows, to everybody, to nobody as there is none, or to
nobody as keys are for chats only."""


class Knowing(ScriptedUpstream):
    """Chats with callers who have one of its ``keys``, looking at the credential first; calls the first tool it is offered."""

    def __init__(self, listing: Listing = "guarded") -> None:
        super().__init__()
        self.keys = {"good"}
        self.listing = listing
        self.checks_body_first = False
        self.before_refusal: Signal | None = None
        """Whoever is not known waits for this, where it is set."""
        self.refusal = 401
        """What he is told, where his request is whole."""

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        asked = Asked(scope["method"], scope["path"], headers, await _body(receive), None)
        is_chat = asked.path.endswith("/v1/chat/completions")
        (self.requests if is_chat and asked.body != b"{}" else self.visits).append(asked)
        is_known = headers.get("authorization", "").removeprefix("Bearer ") in self.keys
        if is_chat:
            answer = self._chat(asked, is_known=is_known)
            if not is_known and self.before_refusal is not None:
                await self.before_refusal.wait()
        else:
            answer = self._page(asked.path, is_known=is_known)
        await _play(answer, receive, send)

    def _page(self, path: str, *, is_known: bool) -> Answer:
        if not path.endswith("/v1/models") or self.listing == "absent":
            return _json({"detail": "Not Found"}, 404)
        if self.listing == "forbidden":
            return _json(error("This key may only chat.", 403), 403)
        if self.listing == "guarded" and not is_known:
            return _json(error("Unauthorized", 401), 401)
        return _json({"object": "list", "data": [TINY]})

    def _chat(self, asked: Asked, *, is_known: bool) -> Answer:
        body = asked.json
        if self.checks_body_first and "messages" not in body:
            return _json(error("There are no messages.", 400), 400)
        if not is_known:
            status = self.refusal if "messages" in body else 401
            return _json(error("Unauthorized", status), status)
        if "messages" not in body:
            return _json(error("There are no messages.", 400), 400)
        if body.get("tools") and body["messages"][-1]["role"] != "tool":
            name = body["tools"][0]["function"]["name"]
            return Answer(
                [frame(call('{"query": "x", "code": "1"}', name=name, call_id="call_1")), frame(finish("tool_calls"))]
            )
        if body.get("stream"):
            return Answer([*map(frame, HELLO)], headers=SSE_HEADERS)
        return _json(completion({"content": "Hello"}))


class Effects:
    """An MCP server, a sandbox, a search provider and a server of embeddings, of which only the visitors matter."""

    def __init__(self) -> None:
        self.visited: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        await _body(receive)
        self.visited.append(scope["path"])
        await _play(_json({"error": "no"}, 500), receive, send)


def settings_of(effects: str) -> dict[str, Any]:
    """Settings by which every effect is possible; ``effects`` is the URL of their server."""
    return {
        "tools__mcp_servers": {"tools": {"url": f"{effects}/mcp", "require_approval": "never"}},
        "tools__allow_private_urls": True,
        "tools__sandbox_url": f"{effects}/sandbox",
        "tools__sandbox_token": "t" * 32,
        "search__provider": "searxng",
        "search__url": f"{effects}/search",
        "cache__embedding_model": "m",
        "cache__embedding_url": f"{effects}/embeddings",
        "auth__secret_keys": ["s" * 40],
        "jobs__concurrency": 0,
        "upstream__status_grace": 5,
    }


def _json(body: Any, status: int = 200) -> Answer:
    return Answer([json.dumps(body).encode()], status, JSON_HEADERS)
