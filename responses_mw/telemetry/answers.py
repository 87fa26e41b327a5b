"""Report unknown members and finish reasons of the upstream's answers. Each one is logged once for each model."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ..redaction import redacted
from .context import log_facts
from .instruments import OTHER
from .metrics import DROPPED_MEMBERS, UPSTREAM_MEMBERS

logger = logging.getLogger(__name__)

MAX_REPORTED = 1000
"""Maximum number of pairs of a model and a name that are logged. Clients and upstreams choose these names."""
_MAX_NAME = 128  # maximum length of the name of a model in logs


_REPORTED: set[tuple[str, str, str]] = set()


def report_dropped(model: str, members: Iterable[str]) -> None:
    """Count and log dropped `members` of an answer's messages. `model` is the upstream's name for the model."""
    for member in sorted(members):
        DROPPED_MEMBERS.add(1, {"member": member if member in UPSTREAM_MEMBERS else OTHER})
        _warn("the upstream's answer has a member that responses do not have; it is dropped", "member", model, member)


def report_finish_reason(model: str, finish_reason: str) -> None:
    """Log a finish reason whose meaning is unknown."""
    _warn("the upstream's answer has an unknown finish reason; it counts as complete", "finish_reason", model, finish_reason)


def _warn(subject: str, kind: str, model: str, name: str) -> None:
    model = model[:_MAX_NAME]
    if (kind, model, name) not in _REPORTED and len(_REPORTED) < MAX_REPORTED:
        _REPORTED.add((kind, model, name))
        log_facts(logger, subject, {"model": model, kind: redacted(name)}, level=logging.WARNING)
