"""Requests, answers to them, and an embedding server with configurable similarities."""

from __future__ import annotations

from typing import Any

from responses_mw import Settings
from responses_mw.cache import Cache, Hit, Miss, Policy
from responses_mw.cache.entry import Key
from responses_mw.ids import RunIds
from responses_mw.protocol.request.create import CreateResponse, parse
from responses_mw.protocol.response import document
from responses_mw.protocol.response.assembler import Assembler
from responses_mw.protocol.response.builder import ResponseOptions
from responses_mw.protocol.types import Event
from tests.support.configured import make_settings
from tests.support.replay import check

ALICE, BOB = "a" * 32, "b" * 32
SECRET = "a secret of at least thirty-two characters"
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 3}}

EXACT = Policy("exact", 60, 0.95)
SEMANTIC = Policy("semantic", 60, 0.95)


def settings(**given: Any) -> Settings:
    return make_settings(
        **{"cache__embedding_model": "embed", "cache__judge": "off", "upstream__url": "http://upstream", **given}
    )


def asked(question: str = "What is the capital city of France?", **fields: Any) -> CreateResponse:
    return parse({"model": "m", "input": question, **fields})


def key(cache: Cache, question: str = "What is the capital city of France?", owner: str = ALICE, **fields: Any) -> Key:
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
