"""Interfaces through which tools use uploaded files and vector stores."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from ..protocol.types import Tool


class Excerpt(Protocol):
    """A part of a file that a search has found. `score` is between 0 and 1."""

    @property
    def file_id(self) -> str: ...

    @property
    def filename(self) -> str: ...

    @property
    def attributes(self) -> Mapping[str, str | float | bool]: ...

    @property
    def score(self) -> float: ...

    @property
    def text(self) -> str: ...


class StoreSearch(Protocol):
    """Searches the vector stores of this server."""

    def check(self, tool: Tool, path: str) -> None:
        """Check the search options of `tool`. Raises `BadRequest` with the path of an invalid one."""

    async def has_store(self, store_id: str, owner: str) -> bool:
        """Return whether the owner has this store. Raises `Unavailable` if Redis fails."""

    async def search(self, tool: Tool, queries: Sequence[str], owner: str, caller: Any) -> Sequence[Excerpt]:
        """Return excerpts from the stores of `tool` that match any of the `queries`, best first. Raises `APIError`."""


class StoredFile(Protocol):
    """An uploaded file. `size` is in bytes."""

    @property
    def filename(self) -> str: ...

    @property
    def size(self) -> int: ...


class FileReader(Protocol):
    """Reads uploaded files. Raises `NotFound` if a file does not exist or belongs to another owner."""

    async def find(self, file_id: str, owner: str) -> StoredFile: ...

    async def chunks(self, file_id: str, owner: str) -> AsyncIterator[bytes]:
        """Return the content of a file in chunks."""
