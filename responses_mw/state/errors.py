"""Errors raised by the state layer. Subclasses of `APIError` are sent to clients.

APIError
├── Missing              404  the owner has no such response, conversation or item
│   └── Deleted          404  the response was deleted while it was running
├── OverBound            413  a response, history or conversation exceeds a maximum
├── OverQuota            429  the object would exceed the owner's storage quota
└── StateUnavailable     503  Redis is unreachable, slow, full, read-only or loading (see `reason`)
    ├── StateFull        503  Redis is out of memory or nearly so
    ├── NewerRecord      503  a newer release wrote the record; a replica of that release can serve it
    └── Damaged          500  a key has the wrong type, or a value that this server did not write

Fenced                   internal: another worker has taken over the response

Errors that can prevent a finished response from being stored have an attribute `unstored`. It is the label `reason` of the
metric `responses_mw_responses_unstored_total`.
"""

from __future__ import annotations

from enum import Enum

from ..errors import APIError, NotFound, TooLarge, Unavailable


class Missing(NotFound):
    """The owner has no object with this id.

    The caller must convert this error to a 400 if the id of a response or an item comes from a request body.
    """

    def __init__(self, kind: str, object_id: str) -> None:
        super().__init__(f"{kind} with id '{object_id}' not found.")
        self.object_id = object_id


class Deleted(Missing):
    """The response was deleted before its run ended."""


class OverBound(TooLarge):
    """The object exceeds a configured maximum. Nothing was written."""

    unstored = "size"


class OverQuota(APIError):
    """The object would exceed the owner's quota of stored bytes. Nothing was written."""

    status = 429
    type = "insufficient_quota"
    cause = "client"
    default_code = "storage_quota_exceeded"
    unstored = "quota"

    def __init__(self, maximum: int) -> None:
        message = (
            f"You have reached your quota of {maximum} bytes of stored responses, conversations, files and vector stores. "
            "Delete some, wait until they expire, or set 'store' to false."
        )
        # Without this header, the official clients would retry immediately, which does not help.
        super().__init__(message, headers={"x-should-retry": "false"})


class StateUnavailable(Unavailable):
    """Redis cannot execute the operation now. A write was executed completely or not at all, and may safely be repeated.

    If `passing` is true, the cause may be temporary, and a write should be retried.
    """

    default_code = "state_unavailable"
    unstored = "redis_unavailable"

    def __init__(self, reason: str, *, passing: bool = False) -> None:
        super().__init__(f"The state store is unavailable: {reason}.")
        self.reason = reason
        self.passing = passing


class StateFull(StateUnavailable):
    """Redis is out of memory, or its remaining memory is reserved for responses in progress and for deletions."""

    unstored = "redis_full"

    def __init__(self, reason: str = "its memory is full") -> None:
        super().__init__(reason)


class NewerRecord(StateUnavailable):
    def __init__(self) -> None:
        super().__init__("a newer release wrote this record")


class Damaged(StateUnavailable):
    """The value of one key cannot be used. No other object is affected."""

    status = 500
    default_code = "state_damaged"
    unstored = "damaged"

    def __init__(self, kind: str) -> None:
        super().__init__(f"the stored {kind} is damaged")
        self.headers.clear()  # no Retry-After, because the damage is permanent


class Fenced(Exception):
    """Another worker has taken over the response, or the response's record or log is missing. Stop writing to the response."""


class Reply(bytes, Enum):
    """A reply of a script, as Redis sends it."""

    BOUND = b"bound"
    """The object would be too large."""
    CURSOR = b"cursor"
    """The item that the request names is not in the list."""
    DELETED = b"deleted"
    EXPIRED = b"expired"
    FILE = b"file"
    """The file does not exist."""
    FENCED = b"fenced"
    """Another worker has taken over."""
    MISSING = b"missing"
    NEWER = b"newer"
    """A newer release wrote the record."""
    RELEASED = b"released"
    RENEWED = b"renewed"
    REROOT = b"reroot"
    """The turn needs a new segment."""
    SPACE = b"space"
    """The vectors are not comparable with those of the store."""


def check_answer(answer: bytes, kind: str, object_id: str) -> None:
    """Raise Missing, NewerRecord or OverBound if a script's verdict is `missing`, `newer` or `bound`."""
    if answer == Reply.MISSING:
        raise Missing(kind, object_id)
    if answer == Reply.NEWER:
        raise NewerRecord
    if answer == Reply.BOUND:
        raise OverBound("The conversation would exceed its maximum size or number of items.")
