"""Read due checks from a sorted set, whose members are checks and whose scores are their times in Unix seconds."""

from __future__ import annotations

import re
import time

from .client import Client

DAMAGED_SECONDS = 24 * 3600
"""Seconds until a check is repeated after it found a damaged record, or if this release does not understand it."""
OWNER = "[a-z0-9]{1,64}"


async def due_checks(client: Client, key: str, form: re.Pattern[str], maximum: int) -> list[re.Match[str]]:
    """Return the matches of `form` for up to `maximum` due members. Postpone members that do not match."""
    now = int(time.time())
    members = await client.command("ZRANGEBYSCORE", key, "-inf", now, "LIMIT", 0, maximum)
    matches = {member: form.fullmatch(member.decode(errors="replace")) for member in members}
    if unknown := [member for member, match in matches.items() if match is None]:
        client.damage(key, f"it has {unknown[0]!r}")
        await client.command("ZADD", key, "XX", *(word for member in unknown for word in (now + DAMAGED_SECONDS, member)))
    return [match for match in matches.values() if match is not None]
