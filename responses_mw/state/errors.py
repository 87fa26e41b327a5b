"""What can go wrong with stored state, as one tree; each is also one of the errors that a caller can see.

APIError
├── Missing              404  no such response, conversation or item for this owner (expired, deleted, foreign: all the same)
│   └── Deleted          404  the response was deleted while its run went on
├── NotChainable         400  the response exists, but nothing can stand on it: it runs, or it failed, or was cancelled
├── OverBound            413  a response, chain or conversation beyond its setting
├── OverQuota            429  the owner may not store more
└── StateUnavailable     503  Redis is away, slow, full, read-only or loading; ``reason`` tells which
    └── NewerRecord      503  a newer release wrote this; a replica that runs that release can serve it

Fenced                   (not for callers) another worker owns this response: write nothing, say nothing
EmbeddedFailed           (at start) the embedded server cannot run
"""

from __future__ import annotations

from ..errors import APIError, BadRequest, NotFound, TooLarge, Unavailable

__all__ = [
    "Deleted",
    "EmbeddedFailed",
    "Fenced",
    "Missing",
    "NewerRecord",
    "NotChainable",
    "OverBound",
    "OverQuota",
    "StateUnavailable",
]


class Missing(NotFound):
    """No such object for this owner. As a path's answer it goes out as it is; a body's id needs a 400 made of it."""

    def __init__(self, kind: str, object_id: str) -> None:
        """``kind`` is the noun that begins the message: ``Response``, ``Conversation`` or ``Item``."""
        super().__init__(f"{kind} with id '{object_id}' not found.")
        self.object_id = object_id


class Deleted(Missing):
    """The response was deleted while its run went on."""


class NotChainable(BadRequest):
    """The response with ``response_id`` is in a ``status`` on which nothing can stand."""

    def __init__(self, response_id: str, response_status: str) -> None:
        super().__init__(
            f"Response with id '{response_id}' has status '{response_status}' and cannot be continued.",
            param="previous_response_id",
        )
        self.response_id = response_id
        self.response_status = response_status


class OverBound(TooLarge):
    """More than the settings allow to be stored: nothing was written."""


class OverQuota(APIError):
    """The owner has stored as much as it may: nothing was written."""

    status = 429
    type = "insufficient_quota"
    default_code = "storage_quota_exceeded"

    def __init__(self, most: int) -> None:
        message = (
            f"You have reached your quota of {most} bytes of stored responses and conversations. Delete some, wait until they "
            "expire, or set 'store' to false."
        )
        # The official clients would ask again at once, which does not help.
        super().__init__(message, headers={"x-should-retry": "false"})


class StateUnavailable(Unavailable):
    """Redis cannot serve this now. Nothing is half-written, but a write may have happened: every script can be repeated."""

    default_code = "state_unavailable"

    def __init__(self, reason: str, *, passing: bool = False) -> None:
        """``passing``: it may be over in a moment (a restart, a fail-over), so a commit is worth another try."""
        super().__init__(f"The state store is unavailable: {reason}.")
        self.reason = reason
        self.passing = passing


class NewerRecord(StateUnavailable):
    """A newer release wrote this record, in a form that this one does not know."""

    def __init__(self) -> None:
        super().__init__("a newer release wrote this record")


class Fenced(Exception):
    """Another holder of the response's token has taken over, or its record is gone."""


class EmbeddedFailed(RuntimeError):
    """The embedded server cannot run; the message tells why."""
