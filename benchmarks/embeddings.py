"""An embeddings server that needs no model: `python -m benchmarks.embeddings --port N`.

A vector contains the hashed counts of a text's words and letter sequences (feature hashing). Texts with similar letters have
similar vectors regardless of their meaning, which is the hardest case for a cache.
"""

from __future__ import annotations

import argparse
import hashlib
import re

import numpy as np
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

DIMENSIONS = 384
_RUNS = (3, 4)


def features(text: str) -> list[str]:
    words = re.findall(r"\w+", text.lower())
    padded = f" {' '.join(words)} "
    return words + [padded[at : at + size] for size in _RUNS for at in range(len(padded) - size + 1)]


def embed(text: str) -> list[float]:
    """Return the unit vector of `text`."""
    vector = np.zeros(DIMENSIONS)
    for feature in features(text):
        digest = int.from_bytes(hashlib.blake2b(feature.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
        vector[digest % DIMENSIONS] += 1 if digest >> 63 else -1
    vector[0] += not vector.any()
    numbers: list[float] = (vector / np.linalg.norm(vector)).round(6).tolist()
    return numbers


async def embeddings(request: Request) -> Response:
    """Answer `POST /v1/embeddings` for one text."""
    asked = orjson.loads(await request.body())
    row = {"object": "embedding", "index": 0, "embedding": embed(asked["input"])}
    usage = {"prompt_tokens": 0, "total_tokens": 0}
    answer = {"object": "list", "data": [row], "model": asked["model"], "usage": usage}
    return Response(orjson.dumps(answer), media_type="application/json")


async def models(request: Request) -> Response:
    return Response(b"{}", media_type="application/json")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embeddings", description="An embeddings server.")
    parser.add_argument("--port", type=int, required=True)
    app = Starlette(routes=[Route("/v1/models", models), Route("/v1/embeddings", embeddings, methods=["POST"])])
    uvicorn.run(app, port=parser.parse_args().port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
