"""Store responses, conversations, background jobs, quotas and usage in Redis.

No other package imports redis.
"""

from .client import Client
from .connection import connect, without_credentials
from .embedded import open_embedded, server_group
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
from .models import Batch, Chain, Conversation, Job, JobVerdict, Page, StateOptions, Stored, Taken, TakeReason
from .store import State

__all__ = [
    "Batch",
    "Chain",
    "Client",
    "Conversation",
    "Damaged",
    "Deleted",
    "Fenced",
    "Job",
    "JobVerdict",
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
    "TakeReason",
    "Taken",
    "connect",
    "open_embedded",
    "server_group",
    "without_credentials",
]
