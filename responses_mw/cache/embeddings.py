"""Embeddings of an OpenAI-compatible ``/v1/embeddings`` (OpenAI reference, "Create embeddings").

The endpoint is the upstream's own, which is asked with the caller's credential (or the operator's key for it), or that of
another server, which never sees the caller's. Whatever goes wrong is a ``NoEmbedding``: the cache is a help, not a need.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import httpx
import orjson

from ..config import Settings

if TYPE_CHECKING:
    from .vectors import Vector

_PATH = "/v1/embeddings"
VERSION = 1
_LARGEST = 4 * 1024 * 1024
"""Bytes of an answer: some fifty times those of the vectors that there are."""


class NoEmbedding(Exception):
    """The text has no embedding, for the reason that the message tells; it holds nothing of the text."""


class Embeddings:
    """Makes vectors of texts. ``transport`` reaches the server, whose URL without ``/v1`` is ``base``; called without httpx's
    client, as the upstream is. Needs numpy: raises ``ModuleNotFoundError`` without it."""

    def __init__(self, transport: httpx.AsyncBaseTransport, base: str, settings: Settings) -> None:
        from . import vectors

        assert settings.cache_embedding_model is not None
        self._vector_of = vectors.vector_of
        self._transport = transport
        self._foreign = settings.cache_embedding_url is not None
        self._url = httpx.URL((settings.cache_embedding_url or base) + _PATH)
        self._timeout = settings.cache_embedding_timeout
        self._dimensions = settings.cache_embedding_dimensions
        self._asked: dict[str, Any] = {"model": settings.cache_embedding_model}
        if self._dimensions is not None:
            self._asked["dimensions"] = self._dimensions
        self._headers = {b"host": self._url.netloc, b"content-type": b"application/json", b"accept-encoding": b"identity"}
        key = settings.cache_embedding_key or (None if self._foreign else settings.upstream_api_key)
        if key:
            self._headers[b"authorization"] = b"Bearer " + key.get_secret_value().encode("latin-1")
        where = settings.cache_embedding_url or ""  # another server may mean another model by the same name
        space = f"{VERSION}\0{where}\0{settings.cache_embedding_model}\0{self._dimensions}\0{settings.cache_namespace}"
        self.space = hashlib.sha256(space.encode()).hexdigest()[:16]
        """What vectors must have in common to be compared."""

    async def embed(
        self, text: str, headers: Mapping[str, str] | None = None, scope: MutableMapping[str, Any] | None = None
    ) -> Vector:
        """The vector of ``text``. ``headers`` and ``scope`` are the caller's, for the upstream. Raises ``NoEmbedding``."""
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._transport.handle_async_request(self._request(text, headers or {}, scope))
                try:
                    body = await _read_whole(response)
                finally:
                    await response.aclose()
        except (httpx.HTTPError, TimeoutError, OSError) as error:
            raise NoEmbedding(f"the server of embeddings did not answer: {type(error).__name__}") from error
        if response.status_code != 200:
            raise NoEmbedding(f"the server of embeddings answered {response.status_code}")
        return self._read(body)

    def _request(self, text: str, headers: Mapping[str, str], scope: MutableMapping[str, Any] | None) -> httpx.Request:
        content = orjson.dumps({**self._asked, "input": text})
        sent = {**self._headers, b"content-length": b"%d" % len(content)}
        extensions: dict[str, Any] = {"timeout": {"connect": self._timeout}}
        if not self._foreign:
            for name, value in headers.items():
                sent.setdefault(name.encode(), value.encode("latin-1"))
            if scope is not None:
                extensions["asgi_scope"] = scope
        fields = list(sent.items())
        return httpx.Request("POST", self._url, headers=fields, stream=httpx.ByteStream(content), extensions=extensions)

    def _read(self, body: bytes) -> Vector:
        try:
            vector = self._vector_of(orjson.loads(body)["data"][0]["embedding"])
        except (ValueError, LookupError, TypeError):
            raise NoEmbedding("the server of embeddings sent none") from None
        if self._dimensions is not None and len(vector) != self._dimensions:
            raise NoEmbedding("the server of embeddings sent a vector of another size")
        return vector


async def _read_whole(response: httpx.Response) -> bytes:
    body = bytearray()
    assert isinstance(response.stream, httpx.AsyncByteStream)
    async for chunk in response.stream if "content-encoding" not in response.headers else response.aiter_bytes():
        body += chunk
        if len(body) > _LARGEST:
            raise NoEmbedding("the server of embeddings sent too much")
    return bytes(body)
