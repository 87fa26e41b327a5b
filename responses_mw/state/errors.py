"""Errors raised by the state layer. Subclasses of `APIError` are sent to clients.

APIError
├── Missing              404  the owner has no such response, conversation or item
│   └── Deleted          404  the response was deleted while it was running
├── NotChainable         400  the response exists but cannot be continued: it is running, failed or cancelled
├── OverBound            413  a response, history or conversation exceeds a maximum
├── OverQuota            429  the owner's storage quota is used up
└── StateUnavailable     503  Redis is unreachable, slow, full, read-only or loading (see `reason`)
    ├── StateFull        503  Redis has no memory left
    ├── NewerRecord      503  a newer release wrote the record; a replica of that release can serve it
    └── Damaged          500  a key has the wrong type, or a value that this server did not write

Errors that can prevent a finished response from being stored have an attribute `unstored`: the reason reported in the metric.

Fenced                   (internal) another worker has taken over the response, so this worker must stop writing
EmbeddedFailed           (at startup) the embedded server cannot run
"""

from __future__ import annotations

from ..errors import APIError, BadRequest, NotFound, StartupError, TooLarge, Unavailable


class Missing(NotFound):
    """The owner has no object with this id.

    Status 404 is correct for an id in a path. For an id in a request body, the caller must raise an error with status 400.
    """

    def __init__(self, kind: str, object_id: str) -> None:
        """`kind` is the first word of the message: `Response`, `Conversation` or `Item`."""
        super().__init__(f"{kind} with id '{object_id}' not found.")
        self.object_id = object_id


class Deleted(Missing):
    """The response was deleted while it was running."""


class NotChainable(BadRequest):
    """The response cannot be continued because of its status."""

    def __init__(self, response_id: str, response_status: str) -> None:
        super().__init__(
            f"Response with id '{response_id}' has status '{response_status}' and cannot be continued.",
            param="previous_response_id",
        )
        self.response_id = response_id
        self.response_status = response_status


class OverBound(TooLarge):
    """The object exceeds a configured maximum. Nothing was written."""

    unstored = "size"


class OverQuota(APIError):
    """The owner's quota of stored bytes is used up. Nothing was written."""

    status = 429
    type = "insufficient_quota"
    default_code = "storage_quota_exceeded"
    unstored = "quota"

    def __init__(self, maximum: int) -> None:
        message = (
            f"You have reached your quota of {maximum} bytes of stored responses and conversations. Delete some, wait until "
            "they expire, or set 'store' to false."
        )
        # Without this header, the official clients would retry at once, which does not help.
        super().__init__(message, headers={"x-should-retry": "false"})


class StateUnavailable(Unavailable):
    """Redis cannot execute the operation now.

    A write may have been executed, but never partially. It can be repeated because every script is idempotent.
    """

    default_code = "state_unavailable"
    unstored = "redis_unavailable"

    def __init__(self, reason: str, *, passing: bool = False) -> None:
        """`reason` completes the message. `passing` means that the cause may be temporary, so a write should be retried."""
        super().__init__(f"The state store is unavailable: {reason}.")
        self.reason = reason
        self.passing = passing


class StateFull(StateUnavailable):
    """Redis is out of memory, or its remaining memory is reserved for responses in progress and for deletions."""

    unstored = "redis_full"

    def __init__(self, reason: str = "its memory is full") -> None:
        super().__init__(reason)


class NewerRecord(StateUnavailable):
    """A newer release wrote this record in a version that this release does not support."""

    def __init__(self) -> None:
        super().__init__("a newer release wrote this record")


class Damaged(StateUnavailable):
    """A key has the wrong type, or a value that this server did not write. No other object is affected."""

    status = 500
    default_code = "state_damaged"
    unstored = "damaged"

    def __init__(self, kind: str) -> None:
        """`kind` names what the key stores, such as `event log`."""
        super().__init__(f"the stored {kind} is damaged")
        self.headers.clear()  # no Retry-After, because the damage is permanent


class Fenced(Exception):
    """Another worker has taken over the response, or the response's record no longer exists."""


class EmbeddedFailed(StartupError):
    """The embedded server cannot run. The message gives the reason."""


def check_answer(answer: bytes, kind: str, object_id: str) -> None:
    """Raise the error for a script's verdict `missing`, `newer` or `bound`. Ignore other verdicts.

    `kind` and `object_id` describe the missing object. Raises Missing, NewerRecord or OverBound.
    """
    if answer == b"missing":
        raise Missing(kind, object_id)
    if answer == b"newer":
        raise NewerRecord
    if answer == b"bound":
        raise OverBound("The conversation would exceed its maximum size or number of items.")
