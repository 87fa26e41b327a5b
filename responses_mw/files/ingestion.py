"""Prepare a file for a vector store: read its bytes, extract its text, split the text into chunks, and embed the chunks.

Slow steps run in a thread or in the parser process, so they do not block the event loop. A computing thread holds the
interpreter's lock for 5 ms at a time, so it sleeps briefly after each chunk: while a PDF of 300 pages is ingested in 3 s, the
event loop is delayed by 13 ms (p99) instead of 30 ms.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from ..embeddings import Embedder, NoEmbedding
from ..errors import APIError, Cause, NotFound, Unavailable, cause_of
from ..state.blocks import StoredBlock
from ..state.store_file_records import OtherSpace, StoreFile
from .chunk_embedding import BATCH, ChunkEmbedding
from .chunks import Chunk, Chunking, split
from .extraction import MAX_DOCUMENT_BYTES, Code, ExtractionFailed, Extractor
from .library import FileLibrary

if TYPE_CHECKING:
    from .words import Words

MAX_CHUNKS = 50_000
"""Maximum number of chunks of a file."""
_REST = 0.0005  # seconds that a thread sleeps after each chunk, to release the interpreter's lock


class IngestionFailed(Exception):
    """The file cannot be added to the store, and a retry would not help. The message is a sentence for the user."""

    def __init__(self, code: Code, message: str, cause: Cause) -> None:
        super().__init__(message)
        self.code = code
        self.cause = cause


def failure_of(error: Exception) -> IngestionFailed | None:
    """Return why a file cannot be ingested, or None if a retry may succeed."""
    if isinstance(error, IngestionFailed):
        return error
    if isinstance(error, ExtractionFailed):
        return IngestionFailed(error.code, str(error), "server" if error.code == "server_error" else "client")
    if isinstance(error, OtherSpace):
        message = "The vector store was made with another embedding model. Add the file to a new store, or rebuild this one."
        return IngestionFailed("server_error", message, "server")
    if isinstance(error, NoEmbedding) and not error.is_temporary:
        message = f"The text could not be embedded: {error}. A smaller chunking_strategy may help."
        return IngestionFailed("server_error", message, "server")
    if isinstance(error, APIError) and not isinstance(error, Unavailable):
        return IngestionFailed("server_error", error.message, cause_of(error))
    return None


class Ingestion:
    """Prepares files for vector stores."""

    def __init__(self, library: FileLibrary, extractor: Extractor, embedder: Embedder | None) -> None:
        """`embedder` is None if numpy is not installed."""
        self._library = library
        self._extractor = extractor
        self._embedder = embedder
        self._embedding = ChunkEmbedding(embedder) if embedder is not None else None

    async def ingest(self, file: StoreFile, owner: str) -> StoredBlock:
        """Return the chunks of a file.

        Raises an error that `failure_of` explains, or `Unavailable` or `NoEmbedding` if a retry may succeed.
        """
        if self._embedder is None or self._embedding is None:
            raise IngestionFailed(
                "server_error", "Vector stores need numpy: install responses-mw with the extra 'files'.", "server"
            )
        text = await self._extractor.extract(await self._read(file.id, owner), file.filename, owner)
        chunks, words, vectors = await self._chunks(self._embedding, text, Chunking(**file.chunking))
        return await asyncio.to_thread(_block, self._embedder.space, chunks, words, vectors)

    async def _read(self, file_id: str, owner: str) -> bytes:
        file = await self._library.records.get(file_id, owner)
        if file.size > MAX_DOCUMENT_BYTES:
            raise IngestionFailed("invalid_file", f"The file is larger than {MAX_DOCUMENT_BYTES} bytes.", "client")
        try:
            data = [chunk async for chunk in await self._library.read(file, owner)]
        except NotFound:
            raise IngestionFailed("server_error", "The content of the file is lost.", "server") from None
        return b"".join(data)

    async def _chunks(
        self, embedding: ChunkEmbedding, text: str, chunking: Chunking
    ) -> tuple[list[Chunk], list[Words], list[bytes]]:
        """Split a text, count its words and embed it, in batches of chunks, so that no single step takes long."""
        from ..embeddings.static import count_tokens

        chunks, vectors = list[Chunk](), list[bytes]()
        words: list[Words] = []  # numpy is not imported here
        remaining = split(text, count_tokens, chunking)
        while len(chunks) <= MAX_CHUNKS:
            some, counted = await asyncio.to_thread(_next, remaining)
            if not some:
                break
            chunks += some
            words.append(counted)
            vectors += [vector.astype("<f2").tobytes() for vector in await embedding.embed([one.text for one in some])]
            if len(vectors[-1]) != len(vectors[0]):
                raise NoEmbedding("the embeddings server has changed the size of its vectors", is_temporary=True)
        else:
            message = f"The file has more than {MAX_CHUNKS} chunks. Use a chunking_strategy with larger chunks."
            raise IngestionFailed("invalid_file", message, "client")
        return chunks, words, vectors


def _block(space: str, chunks: Sequence[Chunk], words: Sequence[Words], vectors: Sequence[bytes]) -> StoredBlock:
    from .words import encode_words, merge_words

    texts, starts = [one.text for one in chunks], [one.start for one in chunks]
    return StoredBlock(space, len(vectors[0]) // 2, texts, starts, b"".join(vectors), encode_words(merge_words(words)))


def _next(chunks: Iterator[Chunk]) -> tuple[list[Chunk], Words]:
    """Return the next batch of chunks, which is empty at the end, and their words."""
    from .words import count_words

    some = list[Chunk]()
    for chunk in islice(chunks, BATCH):
        some.append(chunk)
        time.sleep(_REST)
    return some, count_words([chunk.text for chunk in some])
