"""The tests of `serve --check` for files: where they are stored, and the servers that vector stores use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeAlias

from ..embedding_models import open_docling, open_file_embedder, open_reranker
from ..embeddings import BUILTIN, NoEmbedding
from ..errors import APIError, StartupError
from ..files.extraction import ExtractionFailed
from ..files.reranking import NoScores
from ..files.storage import ObjectStorage, StorageUnavailable
from ..settings import Settings
from ..upstream import Upstream

_Test: TypeAlias = Callable[[Upstream, Settings], Awaitable[str]]
"""Tests one of the servers. Returns what was found, or "" if it is not used."""


class Found(NamedTuple):
    """The result of a test, as a clause for the operator."""

    text: str
    is_fault: bool = False


async def check_files(upstream: Upstream, settings: Settings) -> list[Found]:
    """Test the storage of files and the servers that vector stores use, one after the other.

    `upstream` makes embeddings and reranks, unless the settings name other servers.
    """
    if not settings.serves_files:
        return []
    found = [await _try(test, upstream, settings) for test in (_storage, _embeddings, _reranking, _docling)]
    return [one for one in found if one.text]


async def _try(test: _Test, upstream: Upstream, settings: Settings) -> Found:
    try:
        return Found(await test(upstream, settings))
    except StorageUnavailable as error:
        return Found(f"{settings.files.url}: {error.reason}", is_fault=True)
    except APIError as error:
        return Found(error.message, is_fault=True)
    except (StartupError, NoEmbedding, NoScores, ExtractionFailed) as error:
        return Found(str(error), is_fault=True)


async def _storage(upstream: Upstream, settings: Settings) -> str:
    if settings.files.url is None:
        return ""
    await ObjectStorage(settings.files.url).check()
    return f"{settings.files.url}: a file was written, read and erased"


async def _embeddings(upstream: Upstream, settings: Settings) -> str:
    model = settings.files.embedding_model
    async with open_file_embedder(upstream, settings) as embedder:
        if embedder is None:
            raise StartupError("vector stores need numpy: install responses-mw with the extra 'files'")
        [vector] = await embedder.embed(["Hello"])
    return "" if model == BUILTIN else f"{model} makes vectors of {len(vector)} dimensions"


async def _reranking(upstream: Upstream, settings: Settings) -> str:
    async with open_reranker(upstream, settings) as reranker:
        if reranker is None:
            return ""
        await reranker.scores("days of leave", ["28 days of leave", "dogs"], None)
    return f"{settings.files.rerank_model or 'the model of files.rerank_url'} reranks results"


async def _docling(upstream: Upstream, settings: Settings) -> str:
    async with open_docling(settings) as docling:
        if docling is None:
            return ""
        await docling.check()
    return f"{settings.files.docling_url} recognizes text"
