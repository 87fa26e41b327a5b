"""Remove secrets from texts of other servers before they become errors, log lines, span attributes, records or tool results.

The secrets of the settings are active while the application serves a request or a job. To these, `protect` adds the secrets
that a caller sends with a request. They are kept in a context variable, so that they hold for the tasks of one request only.

A caller who can make another server repeat a text learns whether the text is a secret. Secrets of fewer than `MIN_LENGTH`
characters, which could be guessed in this way, are therefore not removed.
"""

from __future__ import annotations

import base64
import html
import json
import re
from binascii import Error
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlsplit

from pydantic import BaseModel, SecretStr

T = TypeVar("T")

MIN_LENGTH = 8
MARK = "<redacted>"

_BASE64 = "[A-Za-z0-9+/_=-]*"
_NOT_SECRET = frozenset(
    {"traceparent", "tracestate", "baggage", "x-session-id", "x-vllm-priority", "openai-organization", "openai-project"}
)
"""Forwarded headers that contain no credentials."""


class Redactor:
    """Replaces secrets with `MARK`: plain, escaped in JSON, HTML or a URL, or as part of a text in Base64."""

    def __init__(self, secrets: Iterable[str] = (), base: Redactor | None = None) -> None:
        """`base` is applied first."""
        self._sources: tuple[Callable[[], Iterable[str]], ...] = (lambda: secrets,)
        self._base = base

    @classmethod
    def of(cls, settings: BaseModel) -> Redactor:
        """Return a redactor for all secrets in `settings`."""
        return cls(list(_secrets_in(settings)))

    def with_secrets(self, *sources: Callable[[], Iterable[str]]) -> Redactor:
        """Return a redactor that also removes the secrets that `sources` return. They are called when a text is redacted."""
        added = Redactor(base=self)
        added._sources = sources
        return added

    def __call__(self, text: str) -> str:
        if self._base is not None:
            text = self._base(text)
        for form in self._forms:
            if form in text:
                text = text.replace(form, MARK)
        for core in self._encoded:
            if core in text:
                text = re.sub(_BASE64 + re.escape(core) + _BASE64, MARK, text)
        return text

    @cached_property
    def _secrets(self) -> tuple[str, ...]:
        found = chain.from_iterable(source() for source in self._sources)
        return tuple(dict.fromkeys(secret for secret in found if len(secret) >= MIN_LENGTH))

    @cached_property
    def _forms(self) -> tuple[str, ...]:
        """All secrets as they appear in texts, the longest first, because a secret may contain another one."""
        return tuple(sorted({form for secret in self._secrets for form in _forms_of(secret)}, key=len, reverse=True))

    @cached_property
    def _encoded(self) -> tuple[str, ...]:
        return tuple({core for secret in self._secrets for core in _in_base64(secret) if len(core) >= MIN_LENGTH})


def _forms_of(secret: str) -> Iterator[str]:
    yield secret
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    yield secret.replace("/", "\\/")
    yield html.escape(secret)
    for quoted in (quote(secret, safe=""), quote(secret), quote_plus(secret)):
        yield quoted
        yield re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), quoted)


def _in_base64(secret: str) -> Iterator[str]:
    """Yield the characters that encode `secret` within a longer text, such as `user:secret`, for each possible alignment."""
    for offset, dropped in ((0, 0), (1, 2), (2, 3)):
        encoded = base64.b64encode(b"\0" * offset + secret.encode()).decode().rstrip("=")
        is_aligned = (offset + len(secret.encode())) % 3 == 0
        core = encoded[dropped : None if is_aligned else -1]
        yield core
        yield core.replace("+", "-").replace("/", "_")


# -- where secrets are ---------------------------------------------------------------------------------------------------------


def _secrets_in(value: Any) -> Iterator[str]:
    """Yield the secrets in settings: the values of `SecretStr`, and the secret parts of URLs."""
    if isinstance(value, SecretStr):
        yield from _parts(value.get_secret_value())
    elif isinstance(value, str):
        yield from _secrets_in_url(value)
    else:
        for member in _members(value):
            yield from _secrets_in(member)


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, BaseModel):
        return [getattr(value, name) for name in type(value).model_fields]
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _parts(secret: str) -> Iterator[str]:
    """Yield `secret` and, if it is a URL or the value of a header such as `Authorization`, its secret parts."""
    yield secret
    yield from _secrets_in_url(secret)
    scheme, _, credential = secret.strip().partition(" ")
    if not credential:
        return
    yield credential.strip()
    if scheme.lower() == "basic":
        try:
            yield base64.b64decode(credential, validate=True).decode(errors="replace").partition(":")[2]
        except (Error, ValueError):
            return


def _secrets_in_url(url: str) -> Iterator[str]:
    if "://" not in url:
        return
    try:
        parts = urlsplit(url)
        password = parts.password or ""
    except ValueError:
        return
    yield from (password, unquote(password))
    yield from (value for _, value in parse_qsl(parts.query))


def credentials_in(headers: Mapping[str, str]) -> Iterator[str]:
    """Yield the credentials in the forwarded headers of a request."""
    for name, value in headers.items():
        if name not in _NOT_SECRET:
            yield from _parts(value)


def secrets_in_tools(tools: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the credentials that a request sends for MCP servers."""
    for tool in tools:
        headers = tool.get("headers")
        values = [tool.get("authorization"), *(headers.values() if isinstance(headers, Mapping) else ())]
        for value in values:
            if isinstance(value, str):
                yield from _parts(value)
        url = tool.get("server_url")
        if isinstance(url, str):
            yield from _secrets_in_url(url)


# -- the active secrets --------------------------------------------------------------------------------------------------------

NO_SECRETS = Redactor()
_ACTIVE: ContextVar[Redactor] = ContextVar("responses_mw.redactor", default=NO_SECRETS)


def activate(redactor: Redactor) -> None:
    """Use `redactor` in the current task, and in the tasks that it creates from now on."""
    _ACTIVE.set(redactor)


def protect(*sources: Callable[[], Iterable[str]]) -> None:
    """Also remove the secrets that `sources` return, in the current task and in the tasks that it creates from now on.

    Most requests meet no error, so the secrets are looked for only when a text is redacted.
    """
    _ACTIVE.set(_ACTIVE.get().with_secrets(*sources))


def redacted(text: str) -> str:
    """Return `text` without the active secrets."""
    return _ACTIVE.get()(text)


def redacted_values(value: T) -> T:
    """Return a copy of `value`, decoded from JSON, without the active secrets in its strings."""
    redact = _ACTIVE.get()

    def copied(value: Any) -> Any:
        if isinstance(value, str):
            return redact(value) if len(value) >= MIN_LENGTH else value
        if isinstance(value, list):
            return [copied(member) for member in value]
        if isinstance(value, dict):
            return {copied(name): copied(member) for name, member in value.items()}
        return value

    result: T = copied(value)
    return result
