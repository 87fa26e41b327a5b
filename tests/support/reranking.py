"""A server that reranks: the score of a text is the share of the query's words that it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from responses_mw.files.words import words_of

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send


def score(query: str, text: str) -> float:
    words = {*words_of(query)}
    return len(words & {*words_of(text)}) / len(words)


def _rerank(body: dict[str, Any]) -> Any:
    rows = [
        {"index": place, "document": {"text": text}, "relevance_score": score(body["query"], text)}
        for place, text in enumerate(body["documents"])
    ]
    return {"id": "rerank-1", "results": sorted(rows, key=lambda row: -row["relevance_score"])}


def _score(body: dict[str, Any]) -> Any:
    rows = [
        {"index": place, "object": "score", "score": score(body["text_1"], text)} for place, text in enumerate(body["text_2"])
    ]
    return {"object": "list", "data": rows}


def _tei(body: dict[str, Any]) -> Any:
    rows = [{"index": place, "score": score(body["query"], text)} for place, text in enumerate(body["texts"])]
    return sorted(rows, key=lambda row: -row["score"])


PATHS: dict[str, Callable[[dict[str, Any]], Any]] = {"/v1/rerank": _rerank, "/v1/score": _score, "/rerank": _tei}


@dataclass
class RerankingServer:
    """Has the `paths`. If `answer` is set, that is its answer."""

    paths: tuple[str, ...] = ("/v1/rerank",)
    status: int = 200
    answer: Any = None
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        body = orjson.loads((await receive())["body"])
        self.requests.append((scope["path"], headers, body))
        has_path = scope["path"] in self.paths
        sent = orjson.dumps(PATHS[scope["path"]](body) if self.answer is None else self.answer)
        status = self.status if has_path else 404
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": sent if has_path else b'{"detail": "Not Found"}'})
