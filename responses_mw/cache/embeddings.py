"""A client of an OpenAI-compatible ``/v1/embeddings`` (OpenAI reference, "Create embeddings").

The endpoint is the upstream's, called with the caller's credential or the operator's key, or that of another server, which
never sees the caller's headers. Every failure is a ``NoEmbedding``.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import httpx
import orjson

from ..bodies import BodyRefused, read_whole
from ..config import Settings

if TYPE_CHECKING:
    from .vectors import Vector

_PATH = "/v1/embeddings"
VERSION = 1
_MAX_BYTES = 4 * 1024 * 1024
"""Maximum size of an answer: some fifty times that of the largest vectors in use."""


class NoEmbedding(Exception):
    """The text could not be embedded. The message says why, and contains nothing of the text."""


class Embeddings:
    """Embeds texts. ``transport`` reaches the server, and ``base`` is the upstream's URL without ``/v1``.

    Needs numpy: raises ``ModuleNotFoundError`` without it.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, base: str, settings: Settings) -> None:
        from .vectors import unit_vector

        assert settings.cache_embedding_model is not None
        self._unit_vector = unit_vector
        self._transport = transport
        self._foreign = settings.cache_embedding_url is not None
        self._url = httpx.URL((settings.cache_embedding_url or base) + _PATH)
        self._timeout = settings.cache_embedding_timeout
        self._dimensions = settings.cache_embedding_dimensions
        self._parameters: dict[str, Any] = {"model": settings.cache_embedding_model}
        if self._dimensions is not None:
            self._parameters["dimensions"] = self._dimensions
        self._headers = {b"host": self._url.netloc, b"content-type": b"application/json", b"accept-encoding": b"identity"}
        key = settings.cache_embedding_key or (None if self._foreign else settings.upstream_api_key)
        if key:
            self._headers[b"authorization"] = b"Bearer " + key.get_secret_value().encode("latin-1")
        server = settings.cache_embedding_url or ""  # another server may use the same name for another model
        space = f"{VERSION}\0{server}\0{settings.cache_embedding_model}\0{self._dimensions}\0{settings.cache_namespace}"
        self.space = hashlib.sha256(space.encode()).hexdigest()[:16]
        """Vectors are comparable only within one space."""

    async def embed(
        self, text: str, headers: Mapping[str, str] | None = None, scope: MutableMapping[str, Any] | None = None
    ) -> Vector:
        """Return the vector of ``text``. ``headers`` and ``scope`` are the caller's. Raises ``NoEmbedding``."""
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._transport.handle_async_request(self._request(text, headers or {}, scope))
                try:
                    body = await read_whole(response, _MAX_BYTES)
                finally:
                    await response.aclose()
        except BodyRefused as error:
            raise NoEmbedding(f"the embeddings server sent {error}") from None
        except (httpx.HTTPError, TimeoutError, OSError) as error:
            raise NoEmbedding(f"the embeddings server did not answer: {type(error).__name__}") from error
        if response.status_code != 200:
            raise NoEmbedding(f"the embeddings server answered {response.status_code}")
        return self._vector(body)

    def _request(self, text: str, headers: Mapping[str, str], scope: MutableMapping[str, Any] | None) -> httpx.Request:
        content = orjson.dumps({**self._parameters, "input": text})
        sent = {**self._headers, b"content-length": b"%d" % len(content)}
        extensions: dict[str, Any] = {"timeout": {"connect": self._timeout}}
        if not self._foreign:
            for name, value in headers.items():
                sent.setdefault(name.encode(), value.encode("latin-1"))
            if scope is not None:
                extensions["asgi_scope"] = scope
        return httpx.Request(
            "POST", self._url, headers=list(sent.items()), stream=httpx.ByteStream(content), extensions=extensions
        )

    def _vector(self, body: bytes) -> Vector:
        try:
            vector = self._unit_vector(orjson.loads(body)["data"][0]["embedding"])
        except (ValueError, LookupError, TypeError):
            raise NoEmbedding("the embeddings server sent no embedding") from None
        if self._dimensions is not None and len(vector) != self._dimensions:
            raise NoEmbedding("the embeddings server sent a vector of another size")
        return vector
