"""Read records of responses and conversations, and count files, of any owner. Only the operator's tools use this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .client import Client
from .errors import Missing
from .files import files_of
from .schema import conversation_key, conversation_tag, response_address
from .store_keys import StoreKeys, index_of_stores

_FIELDS = ("owner", "status", "temporary", "next_seq", "attempts", "retries", "continuations", "worker", "logged")


@dataclass(frozen=True, slots=True)
class Record:
    """The record of a response.

    is_temporary   whether the response has `store: false`, and is kept only for a short time
    seconds_left   time to live
    events         number of events in the log of a background response
    worker         name of the worker that last claimed the job, while the job has not ended
    """

    owner: str
    status: str
    is_temporary: bool
    seconds_left: int
    events: int = 0
    attempts: int = 0
    retries: int = 0
    continuations: int = 0
    worker: str = ""
    log_bytes: int = 0


async def read_record(client: Client, response_id: str) -> Record | None:
    """Return the record of a response, or None if there is none. Raises StateUnavailable if Redis fails."""
    try:
        key = response_address(response_id).record
    except Missing:
        return None
    values, ttl = await client.pipeline([("HMGET", key, *_FIELDS), ("PTTL", key)])
    owner, status, temporary, events, attempts, retries, continuations, worker, logged = (
        (value or b"").decode(errors="replace") for value in values
    )
    if not owner:
        return None
    return Record(
        owner,
        status,
        bool(temporary),
        seconds_left=max(0, ttl) // 1000,
        events=_number(events),
        attempts=_number(attempts),
        retries=_number(retries),
        continuations=_number(continuations),
        worker=worker,
        log_bytes=_number(logged),
    )


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    """The record of a conversation: its number of items, and its time to live."""

    owner: str
    created_at: int
    items: int
    seconds_left: int


async def read_conversation(client: Client, conversation_id: str) -> ConversationRecord | None:
    """Return the record of a conversation, or None if there is none. Raises StateUnavailable if Redis fails."""
    try:
        key = conversation_key(conversation_tag(conversation_id))
    except Missing:
        return None
    values, items, ttl = await client.pipeline(
        [("HMGET", key, "owner", "created_at"), ("ZCARD", f"{key}:order"), ("PTTL", key)]
    )
    owner, created_at = ((value or b"").decode(errors="replace") for value in values)
    return ConversationRecord(owner, _number(created_at), items, seconds_left=max(0, ttl) // 1000) if owner else None


async def count_files(client: Client, owners: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the numbers of files and vector stores of each of the owners. Raises StateUnavailable if Redis fails."""
    counts = await client.pipeline(
        [command for owner in owners for command in (("HLEN", files_of(owner)), ("ZCARD", index_of_stores(owner)))]
    )
    return dict(zip(owners, zip(counts[::2], counts[1::2], strict=True), strict=True))


async def owner_of_store(client: Client, store_id: str, owners: Sequence[str]) -> str | None:
    """Return which of the owners has a vector store, or None. Raises StateUnavailable if Redis fails."""
    try:
        keys = [StoreKeys.of(store_id, owner).record for owner in owners]
    except Missing:
        return None
    found = await client.pipeline([("EXISTS", key) for key in keys])
    return next((owner for owner, exists in zip(owners, found, strict=True) if exists), None)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
