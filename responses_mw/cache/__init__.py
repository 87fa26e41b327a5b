"""Cached answers in Redis, for requests that ask the same question again, in the same words or in others."""

from .cache import Cache
from .embeddings import Embeddings, NoEmbedding, explain
from .entry import Uncacheable
from .policy import Hit, Miss, Policy
from .store import Entries

__all__ = [
    "Cache",
    "Embeddings",
    "Entries",
    "Hit",
    "Miss",
    "NoEmbedding",
    "Policy",
    "Uncacheable",
    "explain",
]
