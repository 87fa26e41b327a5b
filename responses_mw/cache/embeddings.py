"""A client of an OpenAI-compatible `/v1/embeddings` endpoint (OpenAI reference, "Create embeddings").

The embeddings server is the upstream, which gets the operator's key or the caller's credential, or another server, which never
gets the caller's headers.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias

import httpx
import orjson
from pydantic import SecretStr

from ..http import BodyRefused, read_body
from ..network import failure_reason
from ..settings import CacheSettings
from ..telemetry.context import WarningLimit
from ..telemetry.tracing import measured_embedding
from .guard import RULES, difference, signature

if TYPE_CHECKING:
    from .vectors import Vector

logger = logging.getLogger(__name__)

Headers: TypeAlias = Mapping[str, str] | None
Scope: TypeAlias = MutableMapping[str, Any] | None

_PATH = "/v1/embeddings"
VERSION = 1
_MAX_BYTES = 4 * 1024 * 1024  # maximum size of a response in bytes, about fifty times the size of the largest vectors in use
MAX_TEXT_LENGTH = 1000
"""Maximum length in characters of a text for semantic lookup. Longer texts cannot be distinguished by a single vector."""


class NoEmbedding(Exception):
    """The text could not be embedded. The message gives the reason without quoting the text."""


class Embeddings:
    """A client that sends requests to the embeddings server over `transport`.

    `base` is the upstream's URL without `/v1`, and `api_key` is the upstream's key. Both are used unless the settings name
    another embeddings server. Raises `ModuleNotFoundError` if numpy is not installed.
    """

    def __init__(
        self, transport: httpx.AsyncBaseTransport, base: str, settings: CacheSettings, api_key: SecretStr | None = None
    ) -> None:
        from .vectors import unit_vector

        assert settings.embedding_model is not None
        self._unit_vector = unit_vector
        self._transport = transport
        self._foreign = settings.embedding_url is not None
        self._url = httpx.URL((settings.embedding_url or base) + _PATH)
        self._timeout = settings.timeout
        self._model = settings.embedding_model
        self._headers = {b"host": self._url.netloc, b"content-type": b"application/json", b"accept-encoding": b"identity"}
        key = settings.embedding_api_key or (None if self._foreign else api_key)
        if key:
            self._headers[b"authorization"] = b"Bearer " + key.get_secret_value().encode("latin-1")
        server = settings.embedding_url or ""  # another server may use the same name for another model
        space = f"{VERSION}\0{server}\0{settings.embedding_model}\0{settings.namespace}"
        self.space = hashlib.sha256(space.encode()).hexdigest()[:16]
        """The id of the vector space. Only vectors of the same space are comparable."""
        self._warnings = WarningLimit()

    async def embed(self, text: str, headers: Headers = None, scope: Scope = None) -> Vector:
        """Return the vector of `text`. Raises `NoEmbedding` on every failure.

        `headers` and `scope` belong to the caller's request, and are used only if the embeddings server is the upstream.
        """
        with measured_embedding(self._model):
            return await self._embed(text, headers, scope)

    async def embed_or_warn(self, text: str, headers: Headers, scope: Scope) -> Vector | None:
        """Like `embed`, but log a failure and return None."""
        try:
            return await self.embed(text, headers, scope)
        except NoEmbedding as error:
            # Without embeddings, the semantic cache has no hits, which nobody would notice without a warning.
            level = logging.WARNING if self._warnings.is_due() else logging.DEBUG
            logger.log(level, "no semantic cache: %s", error)
            return None

    async def _embed(self, text: str, headers: Headers, scope: Scope) -> Vector:
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._transport.handle_async_request(self._request(text, headers or {}, scope))
                try:
                    body = await read_body(response, _MAX_BYTES)
                finally:
                    await response.aclose()
        except BodyRefused as error:
            raise NoEmbedding(f"the embeddings server sent {error}") from None
        except (httpx.HTTPError, TimeoutError, OSError) as error:
            reason = failure_reason(error) or type(error).__name__
            raise NoEmbedding(f"the embeddings server did not answer: {reason}") from error
        if response.status_code != 200:
            raise NoEmbedding(f"the embeddings server answered {response.status_code}")
        try:
            return self._unit_vector(orjson.loads(body)["data"][0]["embedding"])
        except (ValueError, LookupError, TypeError):
            raise NoEmbedding("the embeddings server sent no embedding") from None

    def _request(self, text: str, headers: Mapping[str, str], scope: Scope) -> httpx.Request:
        content = orjson.dumps({"model": self._model, "input": text})
        sent = {**self._headers, b"content-length": b"%d" % len(content)}
        extensions: dict[str, Any] = {"timeout": {"connect": self._timeout}}
        if not self._foreign:
            for name, value in headers.items():
                sent.setdefault(name.encode(), value.encode("latin-1"))
            if scope is not None:
                extensions["asgi_scope"] = scope
        stream = httpx.ByteStream(content)
        return httpx.Request("POST", self._url, headers=list(sent.items()), stream=stream, extensions=extensions)


async def explain(
    one: str, other: str, embeddings: Embeddings | None, settings: CacheSettings
) -> tuple[bool, tuple[str, str, str]]:
    """Return whether a cached answer to `one` would be returned for `other`, and three lines that explain the result.

    The requests are assumed to differ only in these last user texts.
    """
    similarity, compared = await _compare(one, other, embeddings, settings)
    rule = difference(signature(one), signature(other), strict=settings.guard == "strict")
    guarded = f"guard ({settings.guard}): " + (f'refuses by "{rule}": {RULES[rule]}' if rule else "accepts")
    is_hit = one == other or (similarity is not None and similarity >= settings.threshold and rule is None)
    verdict = "hit: exact, the texts are equal" if one == other else f"hit: {'semantic' if is_hit else 'none'}"
    return is_hit, (f"similarity: {compared}", guarded, verdict)


async def _compare(one: str, other: str, embeddings: Embeddings | None, settings: CacheSettings) -> tuple[float | None, str]:
    """Return the cosine similarity, or None if it is unknown, and a description of the comparison."""
    if embeddings is None:
        return None, "unknown: cache.embedding_model and a server for it are not set"
    if max(len(one), len(other)) > MAX_TEXT_LENGTH:
        return None, f"not compared: a text has more than {MAX_TEXT_LENGTH:,} characters"
    try:
        vectors = [await embeddings.embed(text) for text in (one, other)]
    except NoEmbedding as error:
        return None, f"unknown: {error}"
    if len(vectors[0]) != len(vectors[1]):
        return None, "unknown: the vectors differ in size"
    similarity = float(vectors[0] @ vectors[1])
    relation = "reaches" if similarity >= settings.threshold else "is below"
    return similarity, f"{similarity:.4f} {relation} cache.threshold ({settings.threshold:g})"
