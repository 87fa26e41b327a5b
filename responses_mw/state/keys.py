"""The names of keys, and the ids from which they are derived.

    rmw:{<tag>}:r:<random>        hash: the record of response resp_<tag><random>
    rmw:{<tag>}:s:<segment>       list: turns, append-only
    rmw:{<tag>}:s:<segment>:refs  zset: which objects need how many of the segment's turns
    rmw:{<tag>}:s:<segment>:bytes string: the size of these turns' JSON, if owners have a quota
    rmw:{<tag>}:x:<random>        string: tombstone of a deleted response, or of a write that was undone
    rmw:{<tag>}:e:<random>        stream: the event log of a background response
    rmw:{<tag>}:z:<random>        stream: the same, compressed, once the response has ended
    rmw:{<tag>}:k:<random>        string: the encrypted credential that it runs with, until it has ended
    rmw:{<tag>}:ev:<random>       channel: something was written to that log
    rmw:{<tag>}:c                 hash: conversation conv_<tag>
    rmw:{<tag>}:c:items           hash: its items by id
    rmw:{<tag>}:c:order           zset: its items' ids in order

The tag in braces is the hash tag of Redis Cluster: all keys of a conversation are in one slot. The queue of background
responses is in other slots; the number after the q is the version of its format.

    rmw:{q1p<n>}:ready            zset: waiting jobs of partition n, by their turn
    rmw:{q1p<n>}:since            zset: waiting jobs, by the time (ms) since which they wait; for metrics only
    rmw:{q1p<n>}:leases           zset: leased jobs, by the time (ms) when the lease expires
    rmw:{q1p<n>}:jobs             hash: the owner of every job
    rmw:{q1p<n>}:owners           zset: the turn of each owner's last job
    rmw:{q1p<n>}:turns:<owner>    zset: waiting jobs of an owner, by their turn
    rmw:{q1p<n>}:clock            string: the turn of the last job that was claimed
    rmw:{q1p<n>}:ev               channel: a job is ready
    rmw:{w<worker>}:stop          channel: a job of that worker was cancelled

    rmw:{i<hash>}:key             hash: the request and response of an idempotency key (idempotency.py)
    rmw:{usage}:<day>             hash: what each owner used on a day (ledger.py)
    rmw:{l<owner>}:...            rates and counts of an owner (limits.py)
    rmw:{b<owner>}:...            the account of what an owner has stored (quota.py)
    rmw:{keys}:check              set: values by which replicas check that their secret keys agree
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..ids import RANDOM_LENGTH, TAG_LENGTH

__all__ = [
    "KEY_CHECK",
    "Address",
    "Partition",
    "conversation_key",
    "conversation_tag",
    "item_address",
    "kind_of",
    "response_address",
    "stop_channel",
]

KEY_CHECK = "rmw:{keys}:check"

# Only these characters may reach a key's name: a brace would change the slot.
_TAG = rf"([a-z0-9]{{{TAG_LENGTH}}})"
_RANDOM = rf"([a-z0-9]{{{RANDOM_LENGTH}}})"
_RESPONSE_ID = re.compile(f"resp_{_TAG}{_RANDOM}")
_CONVERSATION_ID = re.compile(f"conv_{_TAG}")
_ITEM_ID = re.compile(f"[a-z]+_{_TAG}{_RANDOM}[0-9]{{1,6}}")


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a response: the ``tag`` of its slot and the ``random`` part of its id."""

    tag: str
    random: str

    @property
    def record(self) -> str:
        return f"rmw:{{{self.tag}}}:r:{self.random}"

    @property
    def tombstone(self) -> str:
        return f"rmw:{{{self.tag}}}:x:{self.random}"

    @property
    def log(self) -> str:
        return f"rmw:{{{self.tag}}}:e:{self.random}"

    @property
    def compressed_log(self) -> str:
        return f"rmw:{{{self.tag}}}:z:{self.random}"

    @property
    def credential(self) -> str:
        return f"rmw:{{{self.tag}}}:k:{self.random}"

    @property
    def events(self) -> str:
        return f"rmw:{{{self.tag}}}:ev:{self.random}"

    def segment(self, name: str) -> str:
        return f"rmw:{{{self.tag}}}:s:{name}"


@dataclass(frozen=True, slots=True)
class Partition:
    """One part of the queue."""

    number: int

    @property
    def ready(self) -> str:
        return f"rmw:{{q1p{self.number}}}:ready"

    @property
    def events(self) -> str:
        return f"rmw:{{q1p{self.number}}}:ev"


_KINDS = (
    (re.compile(r"rmw:\{[a-z0-9]+\}:r:"), "response"),
    (re.compile(r"rmw:\{[a-z0-9]+\}:s:"), "history"),
    (re.compile(r"rmw:\{[a-z0-9]+\}:[ez]:"), "event log"),
    (re.compile(r"rmw:\{[a-z0-9]+\}:c\b"), "conversation"),
    (re.compile(r"rmw:\{q\d+p\d+\}:"), "queue partition"),
    (re.compile(r"rmw:\{[lb][^}]+\}:(rate|streams|background|expires|sizes)$"), "account of an owner"),
)


def kind_of(key: str) -> str:
    """Return what is stored under a key, for logs and messages."""
    return next((kind for pattern, kind in _KINDS if pattern.match(key)), "value")


def response_address(response_id: str) -> Address | None:
    """Return the address in ``resp_<tag><random>``; None for anything that is not such an id."""
    match = _RESPONSE_ID.fullmatch(response_id)
    return Address(*match.groups()) if match else None


def item_address(item_id: str) -> Address | None:
    """Return the address of the response that made item ``<prefix>_<tag><random><n>``; None if it is not such an id."""
    match = _ITEM_ID.fullmatch(item_id)
    return Address(*match.groups()) if match else None


def conversation_tag(conversation_id: str) -> str | None:
    """Return the tag in ``conv_<tag>``; None for anything that is not such an id."""
    match = _CONVERSATION_ID.fullmatch(conversation_id)
    return match[1] if match else None


def conversation_key(tag: str) -> str:
    return f"rmw:{{{tag}}}:c"


def stop_channel(worker: str) -> str:
    return f"rmw:{{w{worker}}}:stop"
