"""Requests, answers to them, and an embedding server with configurable similarities."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from responses_mw import Settings
from responses_mw.cache import Cache, Hit, Miss, Policy
from responses_mw.cache.entry import Key
from responses_mw.ids import RunIds
from responses_mw.protocol.request.create import CreateResponse, parse
from responses_mw.protocol.response import document
from responses_mw.protocol.response.assembler import Assembler
from responses_mw.protocol.response.builder import ResponseOptions
from responses_mw.protocol.response.events import Event
from tests.support.configured import make_settings
from tests.support.replay import check

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

ALICE, BOB = "a" * 32, "b" * 32
SECRET = "a secret of at least thirty-two characters"
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 3}}

EXACT = Policy("exact", 60, 0.95)
SEMANTIC = Policy("semantic", 60, 0.95)


def settings(**given: Any) -> Settings:
    return make_settings(**{"cache__embedding_model": "embed", "upstream__url": "http://upstream", **given})


def asked(question: str = "What is the capital of France?", **fields: Any) -> CreateResponse:
    return parse({"model": "m", "input": question, **fields})


def key(cache: Cache, question: str = "What is the capital of France?", owner: str = ALICE, **fields: Any) -> Key:
    request = asked(question, **fields)
    made = cache.key(request, request.items, owner=owner, model="m", headers={})
    assert isinstance(made, Key)
    return made


def answered(
    *texts: tuple[str, str], finish: str = "stop", usage: dict[str, Any] | None = USAGE, **fields: Any
) -> dict[str, Any]:
    """Return the response with these texts, each `content` or `reasoning`, as an upstream would have streamed it."""
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {kind: text}}]} for kind, text in texts or [("content", "Paris.")]
    ]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}], "usage": usage})
    return run(asked(**fields), chunks)[1]


def run(request: CreateResponse, chunks: list[dict[str, Any]], ids: RunIds | None = None) -> tuple[list[Event], dict[str, Any]]:
    """Return the events and the response that an assembler makes of `chunks`."""
    assembler = _assembler(request, ids or RunIds())
    events = assembler.start()
    for chunk in chunks:
        events += assembler.feed(chunk)
    return _ended(assembler, events + assembler.end_turn())


def replay(
    request: CreateResponse, items: list[dict[str, Any]], ids: RunIds | None = None
) -> tuple[list[Event], dict[str, Any]]:
    """Return the events and the response of a hit with these items."""
    assembler = _assembler(request, ids or RunIds())
    events = assembler.start()
    for item in items:
        events += assembler.add_whole(item)
    return _ended(assembler, events)


def _assembler(request: CreateResponse, ids: RunIds) -> Assembler:
    created = document.create(request, response_id=ids.response, model="m", created_at=1)
    return Assembler(created, ids, ResponseOptions(summary=request.wants_summary))


def _ended(assembler: Assembler, events: list[Event]) -> tuple[list[Event], dict[str, Any]]:
    assembler.conclude(2)
    events += assembler.terminal()
    check(events)
    return events, assembler.response


def told(hit: Hit | Miss) -> str:
    """Return the text of a hit."""
    assert isinstance(hit, Hit), hit
    return document.output_text(replay(asked(), hit.items)[1])


async def granted() -> None:
    """Accept the caller."""


async def ask(cache: Cache, one: Key, policy: Policy = EXACT, *, answer: str | None = None, **options: Any) -> str:
    """Return the cached answer of a key as `told again: ...`. On a miss, store and return `answer`."""
    found = await cache.lookup(one, policy, granted, **options)
    if isinstance(found, Hit):
        return f"told again: {told(found)}"
    async with cache.flight(found):
        if answer is not None:
            await cache.keep(found, answered(("content", answer)))
    return answer or "nothing"


@dataclass
class EmbeddingServer:
    """`/v1/embeddings` with the vectors set by a test. Other texts get vectors that are far from all others."""

    dimensions: int = 16
    vectors: dict[str, list[float]] = field(default_factory=dict)
    requests: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)
    status: int = 200
    answer: bytes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        body = orjson.loads((await receive())["body"])
        self.requests.append((headers, body))
        vector = self.vectors.get(body["input"]) or pseudo_random(body["input"], self.dimensions)
        sent = (
            self.answer
            if self.answer is not None
            else orjson.dumps({"data": [{"embedding": vector, "index": 0}], "model": body["model"]})
        )
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": sent})

    def near(self, one: str, other: str, similarity: float) -> None:
        """Set the vectors of two texts so that they have this similarity."""
        first = pseudo_random(one, self.dimensions)
        aside = pseudo_random(one + " aside", self.dimensions)
        along = sum(a * b for a, b in zip(first, aside, strict=True))
        aside = _unit([a - along * b for a, b in zip(aside, first, strict=True)])
        away = math.sqrt(1 - similarity**2)
        self.vectors |= {one: first, other: [similarity * a + away * b for a, b in zip(first, aside, strict=True)]}


def pseudo_random(text: str, dimensions: int) -> list[float]:
    digest = hashlib.shake_256(text.encode("utf-8", "surrogatepass")).digest(4 * dimensions)
    return _unit([int.from_bytes(digest[4 * n : 4 * n + 4], "big") / 2**31 - 1 for n in range(dimensions)])


def _unit(vector: list[float]) -> list[float]:
    length = math.sqrt(sum(number**2 for number in vector))
    return [number / length for number in vector]
