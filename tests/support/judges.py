"""A scripted judge: a chat server that reads the questions as data, and approves pairs that a test has chosen."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from responses_mw.cache.judge import SAME_ANSWER, SAME_QUESTION
from responses_mw.protocol.dialects import VLLM, Dialect
from tests.support.scripted import Answer, Asked, ScriptedUpstream, Signal, json_answer

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send


def texts_of(body: dict[str, Any]) -> dict[str, str]:
    """Return the texts that a request asks about, as a judge that separates instructions from data reads them."""
    system, user = body["messages"]
    assert (system["role"], user["role"]) == ("system", "user")
    assert system["content"] in (SAME_QUESTION, SAME_ANSWER)
    texts: dict[str, str] = orjson.loads(user["content"])
    names = ["first", "answer", "second"] if system["content"] == SAME_QUESTION else ["question", "first", "second"]
    assert list(texts) == names
    return texts


def says(word: str, *, tokens: int = 100) -> dict[str, Any]:
    """Return the chat completion that says `word`."""
    return {"choices": [{"message": {"content": word}, "finish_reason": "length"}], "usage": {"total_tokens": tokens}}


@dataclass
class ScriptedJudge:
    """A server with one chat model, which can also be called as a `Post`. `same` decides about two texts."""

    same: Callable[[str, str], bool] = lambda one, other: False
    same_answer: Callable[[str, str], bool] = lambda one, other: True
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    callers: list[Any] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    go: asyncio.Event | None = None
    """If set, the judge answers only when this event is set."""
    answer: dict[str, Any] | None = None
    """If set, the judge always sends this."""
    error: Exception | None = None

    async def post(self, path: str, body: dict[str, Any], caller: Any) -> Any:
        self.callers.append(caller)
        self.bodies.append(body)
        texts = texts_of(body)
        self.asked[texts["first"], texts["second"]] += 1
        if self.go is not None:
            await self.go.wait()
        if self.error is not None:
            raise self.error
        is_same = self.same_answer if "question" in texts else self.same
        return self.answer or says("yes" if is_same(texts["first"], texts["second"]) else "no")

    async def dialect(self, caller: Any) -> Dialect:
        return VLLM

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        headers = dict(scope["headers"])
        if scope["path"] == "/v1/models":
            answer: Any = {"data": [{"id": "judge", "owned_by": "vllm"}]}
        else:
            assert scope["path"] == "/v1/chat/completions"
            answer = await self.post(scope["path"], orjson.loads(body), headers)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": orjson.dumps(answer)})


class JudgingUpstream(ScriptedUpstream):
    """A scripted upstream whose model is also the judge. `judged` has the requests to the judge, which `verdicts` answer."""

    def __init__(self) -> None:
        super().__init__()
        self.judged: list[Asked] = []
        self.verdicts: deque[Answer] = deque()

    def judge(self, word: str, *, before: Signal | None = None) -> Answer:
        """Queue a verdict. If there is none, the judge answers "no"."""
        verdict = json_answer(says(word))
        verdict.before = before
        self.verdicts.append(verdict)
        return verdict

    def answer(self, asked: Asked) -> Answer:
        system = (
            asked.json["messages"][0]["content"] if asked.path.endswith("/chat/completions") and asked.body != b"{}" else ""
        )
        if system not in (SAME_QUESTION, SAME_ANSWER):
            return super().answer(asked)
        texts_of(asked.json)
        self.judged.append(asked)
        return self.verdicts.popleft() if self.verdicts else json_answer(says("no"))
