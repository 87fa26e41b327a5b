"""Cached answers to repeated questions, in Redis: the same question, or one that means the same."""

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
