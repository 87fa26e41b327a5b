"""An upstream that always has an answer, and knows its callers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import orjson

from tests.support.scripted import ScriptedUpstream, completion, finish, text, usage

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

Messages = list[dict[str, Any]]


class Echo(ScriptedUpstream):
    """Answers what was not scripted with the last message's text and an exclamation mark.

    With ``keys``, whoever has none of them is told 401 on every path.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[str] = set()
        self.visited: list[str] = []
        """The credentials that asked for the models."""

    @property
    def messages(self) -> Messages:
        """What the last chat request held."""
        messages: Messages = self.requests[-1].json["messages"]
        return messages

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1").removeprefix("Bearer ")
        if scope["path"].endswith("/v1/models"):
            self.visited.append(key)
        if self.keys and key not in self.keys:
            await _refuse(send)
            return
        if scope["path"].endswith("/v1/chat/completions") and not self._answers:
            body = await _body(receive)
            if body != b"{}":
                self._answer(orjson.loads(body))
            receive = _again(body, receive)
        await super()._http(scope, receive, send)

    def _answer(self, chat: dict[str, Any]) -> None:
        said = f"{last_text(chat['messages'])}!"
        if chat.get("stream"):
            self.stream(text(said), finish(), usage())
        else:
            self.whole(completion({"content": said}))


def last_text(messages: Messages) -> str:
    content = messages[-1].get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def said(messages: Messages) -> list[str]:
    """The texts of chat messages, in order."""
    return [last_text([message]) for message in messages]


def text_of(item: Any) -> str:
    """The text of an item of the official client's, which has one part."""
    return str(item.content[0].text)


async def _refuse(send: Send) -> None:
    body = json.dumps({"error": "Unauthorized"}).encode()
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})


async def _body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += bytes(message.get("body", b""))
        if not message.get("more_body"):
            return body


def _again(body: bytes, receive: Receive) -> Receive:
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again
