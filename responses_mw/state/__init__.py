"""State in Redis: stored responses and conversations.

All keys, commands and scripts are here, and nothing else imports redis.
"""

from responses_mw.state.client import Client, connect
from responses_mw.state.embedded import embedded
from responses_mw.state.errors import (
    Deleted,
    EmbeddedFailed,
    Fenced,
    Missing,
    NewerRecord,
    NotChainable,
    OverBound,
    StateUnavailable,
)
from responses_mw.state.health import Health
from responses_mw.state.jobs import Jobs
from responses_mw.state.store import State
from responses_mw.state.values import Batch, Bounds, Chain, Conversation, Item, Job, Page, Stored, Taken

__all__ = [
    "Batch",
    "Bounds",
    "Chain",
    "Client",
    "Conversation",
    "Deleted",
    "EmbeddedFailed",
    "Fenced",
    "Health",
    "Item",
    "Job",
    "Jobs",
    "Missing",
    "NewerRecord",
    "NotChainable",
    "OverBound",
    "Page",
    "State",
    "StateUnavailable",
    "Stored",
    "Taken",
    "connect",
    "embedded",
]
