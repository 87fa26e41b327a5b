"""Schedule checks of vector stores: of stores that expire or were deleted, of blocks without a record, and of waiting files.

A check is scheduled before the change that it completes or cleans up after. If a process dies in between, another one runs it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import NamedTuple

from ..ids import RANDOM_LENGTH
from .blocks import Blocks
from .client import Client
from .due import OWNER, due_checks
from .store_keys import name_of

_DUE = "rmw:{stores}:due"
_NAME = f"[a-z0-9]{{{RANDOM_LENGTH}}}"
_CHECK = re.compile(rf"{OWNER}:{_NAME}:(?:{_NAME}:(?:[a-z0-9]+:|:{_NAME})|::)")  # see `Due.member`
WRITING_SECONDS = 3600
"""Maximum seconds between writing a block and naming it in a record."""
CHANGE_SECONDS = 60
"""Maximum seconds between scheduling the check of a block and the change after which no record names the block."""
WAITING_SECONDS = 300
"""Seconds after which a file that still waits is queued again, in case its job was lost."""


class Due(NamedTuple):
    """A scheduled check: of a block or a generation of a file, or of the whole store if `file_id` is "".

    block        block to erase unless the record of the file names it
    generation   generation to queue again if the file still waits for it
    """

    owner: str
    store_id: str
    file_id: str = ""
    block: str = ""
    generation: str = ""

    @property
    def member(self) -> str:
        file = name_of(self.file_id, "file-") if self.file_id else ""
        return ":".join((self.owner, name_of(self.store_id, "vs_"), file, self.block, self.generation))

    @classmethod
    def of(cls, member: str) -> Due:
        owner, store, file, block, generation = member.split(":")
        return cls(owner, f"vs_{store}", f"file-{file}" if file else "", block, generation)


class Erasures:
    """The scheduled checks of all owners. Every coroutine raises StateUnavailable if Redis fails."""

    def __init__(self, client: Client, blocks: Blocks) -> None:
        self._client = client
        self._blocks = blocks

    async def schedule(self, checks: Sequence[Due], at: int | None) -> None:
        """Schedule the checks for the time `at` in Unix seconds. If it is None, remove them from the schedule."""
        if not checks:
            return
        members = [one.member for one in checks]
        if at is None:
            await self._client.command("ZREM", _DUE, *members)
        else:
            await self._client.command("ZADD", _DUE, *(word for member in members for word in (at, member)))

    async def due(self, maximum: int) -> list[Due]:
        """Return up to `maximum` due checks. They stay scheduled until `schedule` changes or removes them."""
        return [Due.of(match[0]) for match in await due_checks(self._client, _DUE, _CHECK, maximum)]

    async def schedule_new_block(self, store_id: str, owner: str, file_id: str, block: str) -> None:
        await self.schedule([Due(owner, store_id, file_id, block)], int(time.time()) + WRITING_SECONDS)

    async def schedule_blocks(self, store_id: str, owner: str, blocks: Sequence[tuple[str, str]]) -> None:
        """Schedule checks of blocks that are about to lose their records. `blocks` are pairs of file id and block name."""
        await self.schedule(
            [Due(owner, store_id, file_id, name) for file_id, name in blocks], int(time.time()) + CHANGE_SECONDS
        )

    async def keep_block(self, store_id: str, owner: str, file_id: str, block: str, generation: str) -> None:
        """Remove the checks of a block that is now named by a record, and of the generation that produced it."""
        await self.schedule([Due(owner, store_id, file_id, block), Due(owner, store_id, file_id, generation=generation)], None)

    async def erase_blocks(self, store_id: str, owner: str, blocks: Sequence[tuple[str, str]]) -> None:
        """Erase blocks that no record names, and remove their checks. `blocks` are pairs of file id and block name."""
        await self._blocks.erase(store_id, blocks)
        await self.schedule([Due(owner, store_id, file_id, name) for file_id, name in blocks], None)
