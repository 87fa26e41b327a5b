"""Why a run failed, or a request was refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import APIError, Cause, cause_of


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a run failed or a request was refused. All fields are empty if neither happened."""

    code: str = ""  # the error's code in the API, or its type if it has no code
    kind: str = ""
    """The upstream's status or, without one, the name of the error's class. Used as `error.type` (see `error_type`)."""
    upstream_status: int | None = None
    message: str = ""  # the error's message, which may quote the request
    cause: Cause | Literal[""] = ""
    remedy: str = ""  # what the operator can do about it

    @classmethod
    def of(cls, error: Exception, code: str | None = None) -> Failure:
        kind, cause = kind_of_error(error), cause_of(error)
        if not isinstance(error, APIError):
            return cls(code or APIError.type, kind, cause=cause)
        return cls(code or error.code or error.type, kind, error.upstream_status, error.message, cause, error.remedy)


NO_FAILURE = Failure()


def kind_of_error(error: Exception) -> str:
    """Return the value of `error.type`: the status that the upstream sent. Without one, return the error's class name."""
    status = error.upstream_status if isinstance(error, APIError) else None
    return str(status) if status is not None else type(error).__name__.lstrip("_")
