"""An embeddings server that needs no model: ``python -m benchmarks.embeddings --port N``.

A vector contains the hashed counts of a text's words and letter sequences (feature hashing). Texts with similar letters have
similar vectors, whatever they mean, which is the hardest case for a cache.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import hashlib
import re

import numpy as np
import orjson
import uvicorn
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

DIMENSIONS = 384
_RUNS = (3, 4)


def features(text: str) -> list[str]:
    words = re.findall(r"\w+", text.lower())
    padded = f" {' '.join(words)} "
    return words + [padded[at : at + size] for size in _RUNS for at in range(len(padded) - size + 1)]


def embed(text: str, dimensions: int = DIMENSIONS) -> list[float]:
    """Return the unit vector of ``text``."""
    vector = np.zeros(dimensions)
    for feature in features(text):
        digest = int.from_bytes(hashlib.blake2b(feature.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
        vector[digest % dimensions] += 1 if digest >> 63 else -1
    vector[0] += not vector.any()
    numbers: list[float] = (vector / np.linalg.norm(vector)).round(6).tolist()
    return numbers


async def app(scope: Scope, receive: Receive, send: Send, *, delay: float = 0.0) -> None:
    """Answer ``POST /v1/embeddings`` for one text or a list of texts, after ``delay`` seconds."""
    if scope["type"] != "http":
        return
    asked = orjson.loads(await Request(scope, receive).body() or b"{}")
    texts = asked.get("input", [])
    texts = [texts] if isinstance(texts, str) else texts
    dimensions = asked.get("dimensions") or DIMENSIONS
    rows = [{"object": "embedding", "index": n, "embedding": embed(text, dimensions)} for n, text in enumerate(texts)]
    await asyncio.sleep(delay)
    usage = {"prompt_tokens": 0, "total_tokens": 0}
    body = orjson.dumps({"object": "list", "data": rows, "model": asked.get("model"), "usage": usage})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embeddings", description="An embeddings server.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that a model would take per request")
    options = parser.parse_args()
    application = functools.partial(app, delay=options.delay)
    uvicorn.run(application, port=options.port, interface="asgi3", log_level="warning", access_log=False, lifespan="off")


if __name__ == "__main__":
    main()
