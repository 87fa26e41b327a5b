"""A cache in Redis that answers repeated questions, even if they are worded differently."""

from .cache import Cache
from .entry import Uncacheable
from .judge import Judge, create_judge
from .policy import Hit, Miss, Policy
from .store import Entries

__all__ = ["Cache", "Entries", "Hit", "Judge", "Miss", "Policy", "Uncacheable", "create_judge"]
