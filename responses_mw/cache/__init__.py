"""Cached answers in Redis, for requests that ask the same question again, in the same words or in others."""

from .cache import Cache
from .embeddings import Embeddings, NoEmbedding
from .explain import explain
from .key import Key
from .policy import Policy, policy_of
from .record import mark
from .result import Hit, Miss, Uncacheable
from .store import Entries

__all__ = [
    "Cache",
    "Embeddings",
    "Entries",
    "Hit",
    "Key",
    "Miss",
    "NoEmbedding",
    "Policy",
    "Uncacheable",
    "explain",
    "mark",
    "policy_of",
]
