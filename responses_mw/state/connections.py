"""Commands over redis-py's connections, without what its client does besides: on the way to a connection and back it takes a
lock, counts for metrics of its own and tells events, which costs as much as a command itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hiredis import pack_command
from redis.exceptions import ResponseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redis.asyncio import Redis

__all__ = ["Connections"]


class Connections:
    """The connections of a client of redis-py's, which makes and closes them. Replies are as that gives them."""

    def __init__(self, redis: Redis) -> None:
        self._pool: Any = redis.connection_pool
        self._callbacks: dict[Any, Any] = dict(redis.response_callbacks)

    async def execute(self, *commands: Sequence[str | bytes | int]) -> list[Any]:
        """Sends ``commands`` at once, and returns their replies in order. Raises the first error among these once all are read.

        A connection on which anything else fails is closed by redis-py, and opened again for the next command; so is one that
        was closed while it was idle.
        """
        packed = b"".join([pack_command(tuple(words)) for words in commands])  # type: ignore[arg-type]
        connection = self._pool.get_available_connection()
        try:
            await self._pool.ensure_connection(connection)
            await connection.send_packed_command(packed)
            replies = [await self._reply(connection) for _ in commands]
        finally:
            await self._pool.release(connection)
        for place, (words, reply) in enumerate(zip(commands, replies, strict=True)):
            if isinstance(reply, ResponseError):
                raise reply
            if words[0] in self._callbacks:
                replies[place] = self._callbacks[words[0]](reply)
        return replies

    async def _reply(self, connection: Any) -> Any:
        try:
            return await connection.read_response()
        except ResponseError as error:
            return error
