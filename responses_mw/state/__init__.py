"""Store responses, conversations, background jobs, quotas and usage in Redis.

No other package imports redis.
"""

from .client import Client
from .connection import connect, embedded, server_group, without_credentials
from .errors import (
    Damaged,
    Deleted,
    Fenced,
    Missing,
    NewerRecord,
    OverBound,
    OverQuota,
    StateFull,
    StateUnavailable,
)
from .jobs import Jobs
from .store import State
from .values import Batch, Chain, Conversation, Item, Job, Page, StateOptions, Stored, Taken

__all__ = [
    "Batch",
    "Chain",
    "Client",
    "Conversation",
    "Damaged",
    "Deleted",
    "Fenced",
    "Item",
    "Job",
    "Jobs",
    "Missing",
    "NewerRecord",
    "OverBound",
    "OverQuota",
    "Page",
    "State",
    "StateFull",
    "StateOptions",
    "StateUnavailable",
    "Stored",
    "Taken",
    "connect",
    "embedded",
    "server_group",
    "without_credentials",
]
