"""Check whether Redis lets responses-mw do all that it needs: read, write, delete, run scripts, and receive messages."""

from __future__ import annotations

import logging
from contextlib import aclosing
from typing import Any

from redis.exceptions import ResponseError

from ..ids import random_part
from ..lua import load
from ..redaction import redacted
from .client import Client
from .errors import StateFull, StateUnavailable
from .refusals import Refusal, parsed, sentences

logger = logging.getLogger(__name__)

[_SCRIPT] = load("state", "ability")
_SLOTS = 64
"""Number of slots that are tried in a cluster, so that a command is sent to each primary."""


class Ability:
    """Whether Redis lets responses-mw do all that it needs.

    A success is remembered until a round trip fails, so that later checks cost nothing.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._proven_at = -1  # the client's number of failures before the last successful test
        self._was_refused = False

    async def check(self) -> str:
        """Return and log what Redis refuses and the remedy, or return "" if it refuses nothing.

        Raises StateUnavailable if Redis does not answer.
        """
        failures = self._client.failures
        if self._proven_at == failures:
            return ""
        try:
            refusals = await self._test()
        except StateFull:  # a full Redis is a warning of its own
            return ""
        if refusals:
            self._client.log_refusals(refusals)
        else:
            self._proven_at = failures
            if self._was_refused:
                logger.info("Redis accepts all commands again")
        self._was_refused = bool(refusals)
        return sentences(refusals)

    async def _test(self) -> list[Refusal]:
        """Test each primary. Return the refusals of the first primary that refuses a command."""
        tested: set[str] = set()
        for number in range(_SLOTS):
            key = f"rmw:{{ability{number}}}:{random_part()}"
            if self._client.node_of(key) in tested:
                continue
            if refusals := await _test_slot(self._client, key):
                return refusals
            tested.add(self._client.node_of(key))
        return []


async def _test_slot(client: Client, key: str) -> list[Refusal]:
    """Run the script with EVAL and EVALSHA, and receive a message. Return what the server refuses."""
    command = "EVAL"
    try:
        refused = await client.command(command, _SCRIPT.text, 1, key)
        command = "EVALSHA"
        await client.command(command, _SCRIPT.sha, 1, key)
        command = "SSUBSCRIBE"
        if not refused:
            await client.round_trip(lambda: _hear(client, f"{key}:ev"), command, key=key)
    except StateUnavailable as error:
        if isinstance(error, StateFull) or not isinstance(error.__cause__, ResponseError):
            raise
        return _refusals(command, str(error.__cause__))
    errors = [[text.decode(errors="replace") for text in reply] for reply in refused]
    if any(error.removeprefix("-").startswith("OOM ") for _, _, error in errors):
        raise StateFull
    return [refusal for kind, name, error in errors for refusal in _refusals(name, error, f"+{kind}")]


def _refusals(command: str, error: str, permission: str = "") -> list[Refusal]:
    return parsed(error, command, permission) or [Refusal(command, repr(redacted(error)[:200]), "")]


async def _hear(client: Client, channel: str) -> None:
    """Subscribe to `channel`, publish a message there, and wait for this message."""
    redis: Any = client.redis
    async with aclosing(client.subscriber(client.node_of(channel))) as subscriber, subscriber.pubsub() as connection:
        await connection.ssubscribe(channel)
        await _wait_for(connection, "ssubscribe")
        await redis.execute_command("SPUBLISH", channel, "heard")
        await _wait_for(connection, "smessage")


async def _wait_for(connection: Any, kind: str) -> None:
    while ((await connection.get_message(timeout=None)) or {}).get("type") != kind:
        pass
