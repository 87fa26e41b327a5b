"""A scripted upstream with a Responses API, and its answers."""

from __future__ import annotations

from collections import deque
from typing import Any

from tests.support.scripted import Answer, Asked, ScriptedUpstream


class ScriptedResponses(ScriptedUpstream):
    """A scripted server with `/v1/responses`, where each request takes the next answer."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[Answer] = deque()

    def queue(self, answer: Answer) -> Answer:
        self._lines.append(answer)
        return answer

    def answer(self, asked: Asked) -> Answer:
        if asked.path != "/v1/responses" or asked.body == b"{}":
            return super().answer(asked)
        self.requests.append(asked)
        return self._lines.popleft()


def item(text: str = "Hello", **members: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    message = {"id": "msg_theirs", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    return {**message, **members}


def response(*output: dict[str, Any], status: str = "completed", **members: Any) -> dict[str, Any]:
    usage = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
    return {
        "id": "resp_theirs",
        "object": "response",
        "created_at": 1,
        "model": "real",
        "status": status,
        "output": [*output],
        "usage": usage,
        "store": False,
        **members,
    }


def answer(text: str = "Hello") -> list[dict[str, Any]]:
    """Return the events of a whole stream, without the sequence numbers, which `responses-mw` sets anyway."""
    place = {"item_id": "msg_theirs", "output_index": 0, "content_index": 0}
    empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    begun = response(status="in_progress", usage=None)
    return [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": item(status="in_progress", content=[])},
        {"type": "response.content_part.added", **place, "part": empty},
        *({"type": "response.output_text.delta", **place, "delta": letter, "logprobs": []} for letter in text),
        {"type": "response.output_text.done", **place, "text": text, "logprobs": []},
        {"type": "response.content_part.done", **place, "part": item(text)["content"][0]},
        {"type": "response.output_item.done", "output_index": 0, "item": item(text)},
        {"type": "response.completed", "response": response(item(text), service_tier="flex")},
    ]
