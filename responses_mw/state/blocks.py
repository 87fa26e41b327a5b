"""Store the chunks of a file in a vector store as a block.

A block is a list of pieces in the slot of its store: `rmw:{v<store>}:b:<file>:<block>`. The first pieces contain the vectors
and words of all chunks, which a search keeps in memory. Each of the other pieces contains the texts of a few chunks, so that
only the texts of results need to be read.

A block is written completely before the record of the file names it (`store_files.py`), so it becomes visible in one step. A
block that no record names is erased (`store_erasures.py`).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from ..errors import without_traceback
from ..ids import RANDOM_LENGTH, random_part
from ..tasks import by_size
from .chunk_index import ChunkIndex
from .client import Client
from .errors import Damaged, Missing, NewerRecord, OverBound
from .schema import compress, decompress, reading
from .store_keys import name_of

MAX_BLOCK_BYTES = 256 * 1024 * 1024
VERSION = 1
_PIECE_BYTES = 256 * 1024  # size of a piece with vectors and words
_TEXT_BYTES = 64 * 1024  # size of a piece with texts, before compression
_WRITE_BYTES = 1024 * 1024  # number of bytes that one command writes
_READ_PIECES = 32  # number of pieces that one command reads
_READ_BYTES = 8 * 1024 * 1024  # maximum size of the blocks that one round trip reads
_READ_BLOCKS = 64
_KIND = "content of a vector store"
_NAME = re.compile(f"[a-z0-9]{{{RANDOM_LENGTH}}}")


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """The chunks of a file.

    space     the vector space (`Embedder.space`), and `dimension` the size of the vectors
    texts     the text of each chunk
    starts    offset of each chunk in the text of the file, in characters
    vectors   the vectors of all chunks, one after the other, as little-endian float16
    words     the encoded words of the chunks (`files/words.py`); if empty, a search counts them
    """

    space: str
    dimension: int
    texts: Sequence[str]
    starts: Sequence[int]
    vectors: bytes
    words: bytes = b""

    @property
    def size(self) -> int:
        """The size in bytes that counts towards the owner's quota."""
        return len(self.vectors) + len(self.words) + sum(len(text.encode()) for text in self.texts)


class BlockName(NamedTuple):
    """The name of a block. `size` is `StoredBlock.size`, or 0 if it is not needed."""

    file_id: str
    block: str
    size: int = 0


class SearchedBlock(NamedTuple):
    """The part of a block that a search needs.

    first_frame   index of the first piece with texts
    frames        index of the first chunk of each piece with texts
    """

    space: str
    dimension: int
    chunks: int
    vectors: bytes
    words: bytes
    first_frame: int
    frames: Sequence[int]

    def place_of(self, chunk: int) -> tuple[int, int]:
        """Return the index of the piece that contains the text of a chunk, and the index of the text in that piece."""
        frame = bisect_right(self.frames, chunk) - 1
        return self.first_frame + frame, chunk - self.frames[frame]


class Blocks:
    """The blocks of all stores. Every coroutine raises StateUnavailable if Redis fails."""

    def __init__(self, client: Client, index: ChunkIndex) -> None:
        self._client = client
        self._index = index

    async def write(self, store_id: str, file_id: str, block_name: str, block: StoredBlock) -> int:
        """Write a block, and return the number of its pieces. Raises OverBound if it is too large."""
        if block.size > MAX_BLOCK_BYTES:
            raise OverBound(f"The text of the file and its vectors take more than {MAX_BLOCK_BYTES} bytes.")
        key = _key(store_id, file_id, block_name)
        await self._client.command("UNLINK", key)
        groups, number = _groups(_pieces(block)), 0
        while group := await by_size(_WRITE_BYTES, next, groups, None):
            await self._client.command("RPUSH", key, *group)
            number += len(group)
        return number

    async def read(self, store_id: str, file_id: str, block_name: str, pieces: int) -> StoredBlock:
        """Return a block. Raises Missing if it has been erased, because the file was ingested again or removed."""
        found = await self._read_pieces(store_id, BlockName(file_id, block_name), 0, pieces)
        return await by_size(sum(map(len, found)), _block, found)

    async def read_document(self, store_id: str, name: BlockName, pieces: int) -> tuple[list[str], list[int]]:
        """Return the texts of all chunks, and their offsets, without reading vectors. Raises the same error as `read`."""
        [head] = await self._read_pieces(store_id, name, 0, 1)
        frames = await self._read_pieces(store_id, name, _Head.of(head).first_frame, pieces)
        return await by_size(sum(map(len, frames)), _document, frames)

    async def read_searched(self, store_id: str, names: Sequence[BlockName]) -> list[SearchedBlock | Damaged | None]:
        """Return the parts of blocks that a search needs, or the error of a damaged block. An erased block is None."""
        found = list[SearchedBlock | Damaged | None]()
        for group in _by_size(names):
            commands = [("LRANGE", _key(store_id, name.file_id, name.block), 0, 0) for name in group]
            for name, reply in zip(group, await self._client.pipeline(commands, contained=True), strict=True):
                found.append(
                    await self._read_rest(store_id, name, reply) if isinstance(reply, list) and reply else reply or None
                )
        return found

    async def _read_rest(self, store_id: str, name: BlockName, pieces: list[bytes]) -> SearchedBlock | Damaged | None:
        """Read the rest of what a search needs of a block, after its first piece. Return None if the block was erased."""
        try:
            pieces += await self._read_pieces(store_id, name, 1, _Head.of(pieces[0]).first_frame)
            return await by_size(sum(map(len, pieces)), _searched, pieces)
        except Missing:
            return None
        except Damaged as error:
            return without_traceback(error)

    async def read_texts(self, store_id: str, places: Sequence[tuple[BlockName, int, int]]) -> list[str | Damaged | None]:
        """Return the texts at these places of blocks (`SearchedBlock.place_of`), or the error of a damaged text.

        A text that has been erased is None.
        """
        if not places:
            return []
        keys = [_key(store_id, name.file_id, name.block) for name, _, _ in places]
        pieces = list(dict.fromkeys((key, piece) for key, (_, piece, _) in zip(keys, places, strict=True)))
        frames = await self._client.pipeline([("LINDEX", key, piece) for key, piece in pieces], contained=True)
        texts = dict(zip(pieces, map(_contained_texts, frames), strict=True))
        return [_text_at(texts[key, piece], number) for key, (_, piece, number) in zip(keys, places, strict=True)]

    async def erase(self, store_id: str, blocks: Sequence[tuple[str, str]]) -> None:
        """Erase blocks, also from the index. `blocks` are pairs of file id and block name."""
        if blocks:
            await self._index.remove(store_id, [f"{file_id}:{name}" for file_id, name in blocks])
            await self._client.command("UNLINK", *(_key(store_id, file_id, name) for file_id, name in blocks))

    async def _read_pieces(self, store_id: str, name: BlockName, begin: int, end: int) -> list[bytes]:
        """Return the pieces of a block from `begin` to `end`. Raises Missing if the block has been erased."""
        key, found = _key(store_id, name.file_id, name.block), list[bytes]()
        while (at := begin + len(found)) < end:
            some = await self._client.command("LRANGE", key, at, min(end, at + _READ_PIECES) - 1)
            if not some:
                raise Missing("Content of file", name.file_id)
            found += some
        return found


new_block_name = random_part


def is_block_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def _key(store_id: str, file_id: str, block_name: str) -> str:
    return f"rmw:{{v{name_of(store_id, 'vs_')}}}:b:{name_of(file_id, 'file-')}:{block_name}"


def _by_size(names: Sequence[BlockName]) -> Iterator[list[BlockName]]:
    group, size = list[BlockName](), 0
    for name in names:
        # The first piece has up to 256 KiB.
        if group and (size + min(name.size, _PIECE_BYTES) > _READ_BYTES or len(group) == _READ_BLOCKS):
            yield group
            group, size = [], 0
        group.append(name)
        size += min(name.size, _PIECE_BYTES)
    if group:
        yield group


# -- encoding ------------------------------------------------------------------------------------------------------------


class _Head(NamedTuple):
    """The head of a block: a JSON object with these members and the version. It follows its 4-byte size in the first piece."""

    space: str
    dimension: int
    chunks: int
    words: int
    first_frame: int
    frames: list[int]

    @classmethod
    def of(cls, piece: bytes) -> _Head:
        with reading(_KIND):
            members: dict[str, Any] = orjson.loads(piece[4 : _end(piece)])
            if members["v"] > VERSION:
                raise NewerRecord
            head = cls(*(members[name] for name in cls._fields))
            frames, count = head.frames, head.chunks
            if (
                frames != sorted(set(frames))
                or bool(frames) != (count > 0)
                or (frames and not 0 == frames[0] <= frames[-1] < count)
            ):
                raise ValueError("the pieces with texts are not in order")
            if not 0 < head.first_frame <= _pieces_of(MAX_BLOCK_BYTES) or min(head.dimension, head.chunks, head.words) < 0:
                raise ValueError("the size of the block does not match its head")
            return head


def _end(piece: bytes) -> int:
    return 4 + int.from_bytes(piece[:4], "little")


def _pieces_of(size: int) -> int:
    return max(1, -(-size // _PIECE_BYTES))


def _groups(pieces: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Group pieces into lists that one command writes."""
    group, size = list[bytes](), 0
    for piece in pieces:
        group.append(piece)
        size += len(piece)
        if size >= _WRITE_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _pieces(block: StoredBlock) -> Iterator[bytes]:
    data, frames = block.vectors + block.words, _frames(block.texts)
    count, first_frame = len(block.texts), _pieces_of(len(data))
    members = zip(_Head._fields, (block.space, block.dimension, count, len(block.words), first_frame, frames), strict=True)
    head = orjson.dumps({"v": VERSION, **dict(members)})
    yield len(head).to_bytes(4, "little") + head + data[:_PIECE_BYTES]
    for start in range(_PIECE_BYTES, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]
    for start, end in zip(frames, [*frames[1:], count], strict=True):
        yield compress(orjson.dumps([block.texts[start:end], [*block.starts[start:end]]]))


def _frames(texts: Sequence[str]) -> list[int]:
    """Return the index of the first chunk of each piece with texts."""
    frames, size = list[int](), _TEXT_BYTES
    for number, text in enumerate(texts):
        if size >= _TEXT_BYTES:
            frames.append(number)
            size = 0
        size += len(text.encode())
    return frames


def _searched(pieces: Sequence[bytes]) -> SearchedBlock:
    """Decode the pieces that a search reads."""
    head = _Head.of(pieces[0])
    with reading(_KIND):
        data = b"".join([pieces[0][_end(pieces[0]) :], *pieces[1 : head.first_frame]])
        end = 2 * head.dimension * head.chunks
        if len(data) != end + head.words:
            raise ValueError("the number of vectors differs from the number of texts")
        return SearchedBlock(head.space, head.dimension, head.chunks, data[:end], data[end:], head.first_frame, head.frames)


def _block(pieces: Sequence[bytes]) -> StoredBlock:
    searched = _searched(pieces)
    texts, starts = _document(pieces[searched.first_frame :])
    with reading(_KIND):
        if len(texts) != searched.chunks:
            raise ValueError("the number of texts differs from the number of vectors")
    return StoredBlock(searched.space, searched.dimension, texts, starts, searched.vectors, searched.words)


def _document(frames: Sequence[bytes]) -> tuple[list[str], list[int]]:
    texts, starts = list[str](), list[int]()
    for frame in frames:
        found = _texts(frame)
        assert found is not None
        texts += found[0]
        starts += found[1]
    return texts, starts


def _contained_texts(frame: bytes | Damaged | None) -> list[str] | Damaged | None:
    """Return the texts of a piece, or the error if it is damaged."""
    if isinstance(frame, Damaged):
        return frame
    try:
        found = _texts(frame)
    except Damaged as error:
        return without_traceback(error)
    return found[0] if found is not None else None


def _text_at(texts: list[str] | Damaged | None, number: int) -> str | Damaged | None:
    if not isinstance(texts, list):
        return texts
    return texts[number] if number < len(texts) else Damaged(_KIND)


def _texts(frame: bytes | None) -> tuple[list[str], list[int]] | None:
    if frame is None:
        return None
    with reading(_KIND):
        texts, starts = orjson.loads(decompress(frame))
        if not all(isinstance(text, str) for text in texts) or not all(isinstance(start, int) for start in starts):
            raise ValueError("a text is not a string, or an offset is not a number")
        if len(texts) != len(starts):
            raise ValueError("the number of texts differs from the number of offsets")
        return texts, starts
