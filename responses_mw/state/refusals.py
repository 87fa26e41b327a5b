"""Explain why a Redis server refuses a command, and what the operator can do about it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_NAME = re.compile(r"'([A-Za-z|_.-]{1,40})' command|command '([A-Za-z|_.-]{1,40})'")
# Patterns of error replies, reasons and remedies. The first matching row applies.
_ROWS: tuple[tuple[str, str, str], ...] = (
    (r"permissions? to access .*channel", "its ACL user may not use the channels", "add &rmw:*"),
    (r"permissions? to access .*key", "its ACL user may not use the keys", "add ~rmw:*"),
    (r"permissions? to run|can't run this command", "its ACL user lacks the permission", "add {permission}"),
    (r"(?i)unknown (redis )?command", "the server does not know it", "do not rename or disable it"),
    (r"NOREPLICAS", "it has fewer replicas than min-replicas-to-write", "connect replicas, or lower the setting"),
    (r"MISCONF", "it cannot write to its disk", "see the log of Redis"),
    (r"READONLY", "it is a read-only replica", "connect to the primary"),
)
_PERMISSIONS = {
    **dict.fromkeys(("EVAL", "EVALSHA"), "+@scripting"),
    **dict.fromkeys(("SSUBSCRIBE", "SPUBLISH"), "+@pubsub"),
    "INFO": "+info",
    "TIME": "+time",
}
_SHOWN = 3  # maximum number of commands in a sentence


class Refusal(NamedTuple):
    """A command that Redis refuses. `remedy` is an imperative for the operator, or "" if there is none."""

    command: str
    reason: str
    remedy: str


def parsed(error: str, command: str = "", permission: str = "") -> list[Refusal]:
    """Return the refusal that an error reply reports. The list is empty if the reply is not a known refusal.

    `command` is the refused command, unless the reply names another one. `permission` is the permission in an ACL that
    includes the command. By default, it is derived from the command.
    """
    row = next((row for row in _ROWS if re.search(row[0], error)), None)
    if row is None:
        return []
    named = _NAME.search(error)
    name = (named[1] or named[2]).upper() if named else command
    _, reason, remedy = row
    permission = permission or _PERMISSIONS.get(name, "+@read and +@write")
    return [Refusal(name or "a command", reason, remedy.format(permission=permission))]


def sentences(refusals: Iterable[Refusal]) -> str:
    """Return a sentence for each reason. A sentence contains at most `_SHOWN` names of commands."""
    groups: dict[tuple[str, str], list[str]] = {}
    for command, *why in refusals:
        groups.setdefault((why[0], why[1]), []).append(command)
    return " ".join(
        f"Redis refuses {_listed(commands)}: {reason}{f' ({remedy})' if remedy else ''}."
        for (reason, remedy), commands in groups.items()
    )


def _listed(commands: list[str]) -> str:
    commands = list(dict.fromkeys(commands))
    more = len(commands) - _SHOWN
    return ", ".join(commands[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
