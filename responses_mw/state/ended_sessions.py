"""Remember the sessions of the inspector that a logout has ended, so that no replica accepts their cookies."""

from __future__ import annotations

from .client import Client
from .schema import ended_session_key, milliseconds


class EndedSessions:
    """The ended sessions by their ids, until they would have expired. Methods raise StateUnavailable if Redis fails."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def add(self, session_id: str, seconds: float) -> None:
        """End a session that would expire in this number of seconds."""
        await self._client.command("SET", ended_session_key(session_id), "1", "PX", max(1, milliseconds(seconds)))

    async def has(self, session_id: str) -> bool:
        return await self._client.command("GET", ended_session_key(session_id)) is not None
