"""An embedding server with configurable similarities."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send


@dataclass
class EmbeddingServer:
    """`/v1/embeddings` with the vectors set by a test. Other texts get vectors that are far from all others.

    The vectors of several texts are sent in reverse order, each with its index.
    """

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
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        data = [{"embedding": self._vector(text), "index": index} for index, text in enumerate(texts)]
        sent = self.answer if self.answer is not None else orjson.dumps({"data": data[::-1], "model": body["model"]})
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": sent})

    def _vector(self, text: str) -> list[float]:
        return self.vectors.get(text) or pseudo_random(text, self.dimensions)

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
