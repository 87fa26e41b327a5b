"""An upstream that answers every request, and can require credentials."""

from __future__ import annotations

from typing import Any

from tests.support.scripted import (
    Answer,
    Asked,
    ScriptedUpstream,
    completion,
    finish,
    json_answer,
    stream_answer,
    text,
    usage,
)

Messages = list[dict[str, Any]]


class Echo(ScriptedUpstream):
    """Answers unscripted requests with the text of the last message and an exclamation mark.

    With `keys`, a request with another credential gets a 401 on every path.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[str] = set()
        self.visited: list[str] = []
        """The credentials that asked for the models."""

    @property
    def messages(self) -> Messages:
        """The messages of the last chat request."""
        messages: Messages = self.requests[-1].json["messages"]
        return messages

    def answer(self, asked: Asked) -> Answer:
        key = asked.headers.get("authorization", "").removeprefix("Bearer ")
        if asked.path.endswith("/v1/models"):
            self.visited.append(key)
        if self.keys and key not in self.keys:
            return json_answer({"error": "Unauthorized"}, 401)
        return super().answer(asked)

    def unscripted(self, asked: Asked) -> Answer:
        chat = asked.json
        said = f"{last_text(chat['messages'])}!"
        return (
            stream_answer(text(said), finish(), usage()) if chat.get("stream") else json_answer(completion({"content": said}))
        )


def last_text(messages: Messages) -> str:
    content = messages[-1].get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def said(messages: Messages) -> list[str]:
    """Return the texts of chat messages, in order."""
    return [last_text([message]) for message in messages]


def text_of(item: Any) -> str:
    """Return the text of an item of the official client, which has one part."""
    return str(item.content[0].text)
