"""Cached answers to repeated questions, in Redis: the same question, or one that means the same."""

from .cache import Cache, Hit, Miss
from .embeddings import Embeddings
from .key import Key
from .policy import Policy, policy_of
from .record import mark
from .store import Entries, Stats

__all__ = ["Cache", "Embeddings", "Entries", "Hit", "Key", "Miss", "Policy", "Stats", "mark", "policy_of"]
