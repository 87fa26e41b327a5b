"""The records of the files of vector stores, and of the batches in which they were added."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import orjson

from .blocks import is_block_name
from .schema import reading
from .store_keys import Fields, integer, text
from .vector_stores import FileCounts

Attributes: TypeAlias = dict[str, str | float | bool]
DAMAGED_RECORD = ("server_error", "The record of the file is damaged. Add the file to the vector store again.")
DAMAGED_CHUNKS = ("server_error", "The stored chunks of the file were damaged. Add the file to the vector store again.")


class NewFile(NamedTuple):
    """A file to add to a store. `chunking` has the members of `Chunking` (`files/chunks.py`)."""

    file_id: str
    filename: str
    attributes: Attributes
    chunking: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoreFile:
    """The record of a file in a store.

    status       in_progress, completed, failed or cancelled
    chunking     as in `NewFile`
    generation   id of the last request to ingest the file
    block        name of the block with the visible chunks, or ""; `pieces` is the number of its pieces
    chunks       number of visible chunks; `size` is their size in bytes
    error        code and message of the last failure; None if there is none
    batch        id of the batch, or ""
    is_damaged   whether the record cannot be decoded; the file then has the status failed
    """

    id: str
    store_id: str
    filename: str
    status: str
    created_at: int
    attributes: Attributes
    chunking: dict[str, Any]
    generation: str
    block: str = ""
    pieces: int = 0
    chunks: int = 0
    size: int = 0
    error: tuple[str, str] | None = None
    batch: str = ""
    is_damaged: bool = False


@dataclass(frozen=True, slots=True)
class FileBatch:
    id: str
    store_id: str
    created_at: int
    counts: FileCounts
    is_cancelled: bool

    @property
    def status(self) -> str:
        if self.counts.in_progress:
            return "in_progress"
        return "cancelled" if self.is_cancelled else "completed"


class StoreFilePage(NamedTuple):
    files: list[StoreFile]
    has_more: bool


class OtherSpace(Exception):
    """The vectors of a block are not comparable with those of the store, which have this `space` and `dimension`."""

    def __init__(self, space: str, dimension: int) -> None:
        super().__init__(space, dimension)
        self.space = space
        self.dimension = dimension


def decode_file(store_id: str, file_id: str, fields: Fields) -> StoreFile:
    """Decode the record of a file. Raises Damaged if it is malformed."""
    with reading("file of a vector store"):
        file = StoreFile(
            file_id,
            store_id,
            text(fields, "filename"),
            text(fields, "status"),
            integer(fields, "created_at"),
            orjson.loads(fields["attributes"]),
            orjson.loads(fields["chunking"]),
            text(fields, "generation"),
            text(fields, "block"),
            integer(fields, "pieces"),
            integer(fields, "chunks"),
            integer(fields, "bytes"),
            (text(fields, "code"), text(fields, "message")) if "code" in fields else None,
        )
        return replace(file, batch=f"vsfb_{text(fields, 'batch')}") if fields.get("batch") else file


def damaged_file(store_id: str, file_id: str, fields: Fields) -> StoreFile:
    """Return a failed file in place of one whose record is damaged."""
    name, block = (fields.get(one, b"").decode(errors="replace") for one in ("filename", "block"))
    file = StoreFile(file_id, store_id, name, "failed", 0, {}, {}, "", error=DAMAGED_RECORD)
    return replace(file, block=block if is_block_name(block) else "", is_damaged=True)
