"""A cache of answers in Redis, for requests that repeat a question in the same or in other words."""

from .cache import Cache
from .embeddings import Embeddings, NoEmbedding, explain
from .entry import Uncacheable
from .policy import Hit, Miss, Policy
from .store import Entries

__all__ = ["Cache", "Embeddings", "Entries", "Hit", "Miss", "NoEmbedding", "Policy", "Uncacheable", "explain"]
