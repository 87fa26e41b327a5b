"""The errors of stored state. Those under APIError are answers to requests.

APIError
├── Missing              404  no such response, conversation or item for this owner (expired, deleted or foreign)
│   └── Deleted          404  the response was deleted during its run
├── NotChainable         400  the response exists but cannot be continued: it is running, failed or cancelled
├── OverBound            413  a response, chain or conversation exceeds its bound
├── OverQuota            429  the owner may not store more
└── StateUnavailable     503  Redis is away, slow, full, read-only or loading; see ``reason``
    ├── StateFull        503  Redis has no memory left
    ├── NewerRecord      503  a newer release wrote the record; a replica of that release can serve it
    └── Damaged          500  a key has the wrong type, or a value that this server has not written

Errors that may keep a finished response from being stored name the reason in the metric: ``unstored``.

Fenced                   (internal) another worker owns this response: write nothing more
EmbeddedFailed           (at start) the embedded server cannot run
"""

from __future__ import annotations

from ..errors import APIError, BadRequest, NotFound, StartupError, TooLarge, Unavailable

__all__ = [
    "Damaged",
    "Deleted",
    "EmbeddedFailed",
    "Fenced",
    "Missing",
    "NewerRecord",
    "NotChainable",
    "OverBound",
    "OverQuota",
    "StateFull",
    "StateUnavailable",
]


class Missing(NotFound):
    """No such object for this owner. For an id in a path it is the answer; for an id in a body it must become a 400."""

    def __init__(self, kind: str, object_id: str) -> None:
        """``kind`` is the noun that begins the message: ``Response``, ``Conversation`` or ``Item``."""
        super().__init__(f"{kind} with id '{object_id}' not found.")
        self.object_id = object_id


class Deleted(Missing):
    """The response was deleted during its run."""


class NotChainable(BadRequest):
    """The response has a status in which it cannot be continued."""

    def __init__(self, response_id: str, response_status: str) -> None:
        super().__init__(
            f"Response with id '{response_id}' has status '{response_status}' and cannot be continued.",
            param="previous_response_id",
        )
        self.response_id = response_id
        self.response_status = response_status


class OverBound(TooLarge):
    """More than the settings allow to be stored: nothing was written."""

    unstored = "size"


class OverQuota(APIError):
    """The owner has stored as much as it may: nothing was written."""

    status = 429
    type = "insufficient_quota"
    default_code = "storage_quota_exceeded"
    unstored = "quota"

    def __init__(self, maximum: int) -> None:
        message = (
            f"You have reached your quota of {maximum} bytes of stored responses and conversations. Delete some, wait until "
            "they expire, or set 'store' to false."
        )
        # The official clients would ask again at once, which does not help.
        super().__init__(message, headers={"x-should-retry": "false"})


class StateUnavailable(Unavailable):
    """Redis cannot serve this now. Nothing is half-written, but the write may have happened: every script is idempotent."""

    default_code = "state_unavailable"
    unstored = "redis_unavailable"

    def __init__(self, reason: str, *, passing: bool = False) -> None:
        """``passing``: it may be over in a moment (a restart, a failover), so a commit should be retried."""
        super().__init__(f"The state store is unavailable: {reason}.")
        self.reason = reason
        self.passing = passing


class StateFull(StateUnavailable):
    """Redis has no memory left, or keeps the rest for what is stored already."""

    unstored = "redis_full"

    def __init__(self, reason: str = "its memory is full") -> None:
        super().__init__(reason)


class NewerRecord(StateUnavailable):
    """A newer release wrote this record in a version that this one does not know."""

    def __init__(self) -> None:
        super().__init__("a newer release wrote this record")


class Damaged(StateUnavailable):
    """A key has the wrong type, or a value that this server has not written. It concerns this object alone."""

    status = 500
    default_code = "state_damaged"
    unstored = "damaged"

    def __init__(self, kind: str) -> None:
        """``kind``: what the key holds, such as ``event log``."""
        super().__init__(f"the stored {kind} is damaged")
        self.headers.clear()  # it will not pass: no Retry-After


class Fenced(Exception):
    """Another worker has taken over the response, or its record is gone."""


class EmbeddedFailed(StartupError):
    """The embedded server cannot run; the message says why."""
