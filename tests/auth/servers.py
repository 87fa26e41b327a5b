"""An upstream that checks credentials, and a single server in place of all services that a request can affect."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from tests.support.scripted import (
    HELLO,
    TINY,
    Answer,
    Asked,
    ScriptedUpstream,
    Signal,
    call,
    completion,
    error,
    finish,
    frame,
    json_answer,
    play,
    read_body,
)
from tests.support.scripted import SSE as SSE_HEADERS

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

Listing = Literal["guarded", "public", "absent", "forbidden"]
"""What the upstream does with its list of models: shows it to callers it knows, to everybody, to nobody as there is none, or to
nobody as keys are for chats only."""


class Knowing(ScriptedUpstream):
    """An upstream that accepts only its `keys`, checks the credential first and calls the first tool of a request."""

    def __init__(self, listing: Listing = "guarded") -> None:
        super().__init__()
        self.keys = {"good"}
        self.listing = listing
        self.checks_body_first = False
        self.before_refusal: Signal | None = None
        """Whoever is not known waits for this, where it is set."""
        self.refusal = 401
        """What he is told, where his request is whole."""

    def answer(self, asked: Asked) -> Answer:
        is_chat = asked.path.endswith("/v1/chat/completions")
        (self.requests if is_chat and asked.body != b"{}" else self.visits).append(asked)
        is_known = asked.headers.get("authorization", "").removeprefix("Bearer ") in self.keys
        if not is_chat:
            return self._listing(asked.path, is_known=is_known)
        answer = self._chat(asked, is_known=is_known)
        return answer if is_known else replace(answer, before=self.before_refusal)

    def _listing(self, path: str, *, is_known: bool) -> Answer:
        if not path.endswith("/v1/models") or self.listing == "absent":
            return json_answer({"detail": "Not Found"}, 404)
        if self.listing == "forbidden":
            return json_answer(error("This key may only chat.", 403), 403)
        if self.listing == "guarded" and not is_known:
            return json_answer(error("Unauthorized", 401), 401)
        return json_answer({"object": "list", "data": [TINY]})

    def _chat(self, asked: Asked, *, is_known: bool) -> Answer:
        body = asked.json
        if self.checks_body_first and "messages" not in body:
            return json_answer(error("There are no messages.", 400), 400)
        if not is_known:
            status = self.refusal if "messages" in body else 401
            return json_answer(error("Unauthorized", status), status)
        if "messages" not in body:
            return json_answer(error("There are no messages.", 400), 400)
        if body.get("tools") and body["messages"][-1]["role"] != "tool":
            name = body["tools"][0]["function"]["name"]
            return Answer(
                [frame(call('{"query": "x", "code": "1"}', name=name, call_id="call_1")), frame(finish("tool_calls"))]
            )
        if body.get("stream"):
            return Answer([*map(frame, HELLO)], headers=SSE_HEADERS)
        return json_answer(completion({"content": "Hello"}))


class Effects:
    """An MCP server, a sandbox, a search provider and an embedding server in one, which records the requested paths."""

    def __init__(self) -> None:
        self.visited: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        await read_body(receive)
        self.visited.append(scope["path"])
        await play(json_answer({"error": "no"}, 500), receive, send)


def settings_of(effects: str) -> dict[str, Any]:
    """Return settings that enable every side effect. `effects` is the URL of the server of effects."""
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
