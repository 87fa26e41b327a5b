"""The errors of stored state. Those under APIError are sent to clients.

APIError
├── Missing              404  no such response, conversation or item for this owner (expired, deleted or another's)
│   └── Deleted          404  the response was deleted during its run
├── NotChainable         400  the response exists but cannot be continued: it is running, failed or cancelled
├── OverBound            413  a response, history or conversation exceeds a maximum
├── OverQuota            429  the owner may not store more
└── StateUnavailable     503  Redis is unreachable, slow, full, read-only or loading; see `reason`
    ├── StateFull        503  Redis has no memory left
    ├── NewerRecord      503  a newer release wrote the record; a replica of that release can serve it
    └── Damaged          500  a key has the wrong type, or a value that this server did not write

Errors that may prevent a finished response from being stored have `unstored`, the reason that the metric reports.

Fenced                   (internal) another worker owns this response: write nothing more
EmbeddedFailed           (at startup) the embedded server cannot run
"""

from __future__ import annotations

from ..errors import APIError, BadRequest, NotFound, StartupError, TooLarge, Unavailable


class Missing(NotFound):
    """There is no such object for this owner.

    This is the answer for an id in a path. For an id in a body, the caller must raise a 400 instead.
    """

    def __init__(self, kind: str, object_id: str) -> None:
        """`kind` is the noun that begins the message: `Response`, `Conversation` or `Item`."""
        super().__init__(f"{kind} with id '{object_id}' not found.")
        self.object_id = object_id


class Deleted(Missing):
    """The response was deleted during its run."""


class NotChainable(BadRequest):
    """The response's status does not permit continuing it."""

    def __init__(self, response_id: str, response_status: str) -> None:
        super().__init__(
            f"Response with id '{response_id}' has status '{response_status}' and cannot be continued.",
            param="previous_response_id",
        )
        self.response_id = response_id
        self.response_status = response_status


class OverBound(TooLarge):
    """The object exceeds a maximum in the settings. Nothing was written."""

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
        # Otherwise the official clients would retry at once, which does not help.
        super().__init__(message, headers={"x-should-retry": "false"})


class StateUnavailable(Unavailable):
    """Redis cannot serve this now.

    A write may have happened, but never in part. It can be repeated, because every script is idempotent.
    """

    default_code = "state_unavailable"
    unstored = "redis_unavailable"

    def __init__(self, reason: str, *, passing: bool = False) -> None:
        """`passing`: the cause may be temporary (a restart, a failover), so a commit should be retried."""
        super().__init__(f"The state store is unavailable: {reason}.")
        self.reason = reason
        self.passing = passing


class StateFull(StateUnavailable):
    """Redis has no memory left, or only a reserve for responses in progress and deletes."""

    unstored = "redis_full"

    def __init__(self, reason: str = "its memory is full") -> None:
        super().__init__(reason)


class NewerRecord(StateUnavailable):
    """A newer release wrote this record in a version that this one does not know."""

    def __init__(self) -> None:
        super().__init__("a newer release wrote this record")


class Damaged(StateUnavailable):
    """A key has the wrong type, or a value that this server did not write. No other object is affected."""

    status = 500
    default_code = "state_damaged"
    unstored = "damaged"

    def __init__(self, kind: str) -> None:
        """`kind`: what the key holds, such as `event log`."""
        super().__init__(f"the stored {kind} is damaged")
        self.headers.clear()  # the damage is permanent: no Retry-After


class Fenced(Exception):
    """Another worker has taken over the response, or its record is gone."""


class EmbeddedFailed(StartupError):
    """The embedded server cannot run; the message says why."""


def check_answer(answer: bytes, kind: str, object_id: str) -> None:
    """Raise the error for a script's `answer` about an object, if it is one that several scripts share."""
    if answer == b"missing":
        raise Missing(kind, object_id)
    if answer == b"newer":
        raise NewerRecord
    if answer == b"bound":
        raise OverBound("The conversation would exceed its maximum size or number of items.")
