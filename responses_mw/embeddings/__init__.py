"""Embeddings: texts to vectors, with built-in static vectors (`static`) or a server's `/v1/embeddings` (`server`).

The modules `static`, `server` and `vector` need numpy, an optional dependency.
"""

from .base import BUILTIN, Embedder, NoEmbedding

__all__ = ["BUILTIN", "Embedder", "NoEmbedding"]
