"""A cache in Redis that answers repeated questions, even if they are worded differently."""

from .cache import Cache
from .embeddings import Embeddings, NoEmbedding, explain
from .entry import Uncacheable
from .policy import Hit, Miss, Policy
from .store import Entries

__all__ = ["Cache", "Embeddings", "Entries", "Hit", "Miss", "NoEmbedding", "Policy", "Uncacheable", "explain"]
