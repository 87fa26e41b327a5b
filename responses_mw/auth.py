"""The gate: nothing has a side effect before its caller has been accepted.

A tool server contacted, code run, a text embedded, anything stored, queued or counted: what does such a thing takes the gate of
its request as an argument that has no default, and awaits it first. So none can be added that forgets it.

The gate of a request is ``Upstream.verify`` for its caller. It costs nothing where he has a key of ours, or once the upstream
has answered this very request; else it asks the upstream, and remembers what that says for a while. It raises ``Unauthorized``
for a caller who is refused, ``UpstreamError`` where nobody knows.

Whose a request is. Every stored object carries its owner, and is there for nobody else.

API keys of our own: who has one may ask, and is the owner of what is stored for it.

A file, or a setting, has a line for each key: ``name:sha256:<the key's SHA-256 in hexadecimal digits>``. Empty lines and such
as begin with ``#`` are skipped. The keys themselves are nowhere; they must be random (32 characters or more), as a guess costs
whoever has the file only a hash. Two lines with one name are one owner, so that a key can be replaced. The file is read at the
start.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.datastructures import Headers

from .errors import BadRequest, Forbidden, StartupError

if TYPE_CHECKING:
    from .settings import Settings

Gate: TypeAlias = Callable[[], Awaitable[None]]


ANONYMOUS = "anonymous"
CONTAINER_OWNER_HEADER = "x-responses-mw-owner"
"""Tells the sandbox whose containers a call may use. No request can set it."""


def owner_of(headers: Headers, tenant_header: str | None) -> str:
    """The owner that ``headers`` tell: the trusted gateway's ``auth.tenant_header`` if set, else the credential. It is a
    hash: neither can be read from what is stored. A changed credential is another owner.

    Raises ``BadRequest`` where the tenant is missing: a gateway that forgot it must not have everybody share one owner.
    """
    if tenant_header:
        return _hashed("tenant", _tenant(headers, tenant_header))
    # A credential that stands there twice tells neither of the two.
    told = ", ".join(headers.getlist("authorization"))
    return _hashed("credential", _canonical(told)) if told else ANONYMOUS


def _tenant(headers: Headers, name: str) -> str:
    """The one value of the header. Two of them are the gateway's and one that its client made up."""
    values = headers.getlist(name)
    if len(values) == 1 and values[0].strip():
        return values[0]
    fault = "is sent more than once" if len(values) > 1 else "is empty" if values else "is missing"
    message = f"The header '{name}', by which this server knows whose a request is, {fault}."
    raise BadRequest(message, param=name, code="invalid_tenant_header")


def _hashed(kind: str, told: str) -> str:
    return sha256(f"{kind}\0{told}".encode()).hexdigest()[:32]


def _canonical(authorization: str) -> str:
    """The header as most write it: a scheme is the same in any case, and a credential behind however many spaces."""
    scheme, _, credential = authorization.strip().partition(" ")
    return f"{scheme.capitalize()} {credential.lstrip()}" if credential else scheme  # which is then the credential


def container_owner(owner: str) -> str:
    """The owner as the sandbox is told it: a hash, as a name may have characters that no header can."""
    return sha256(f"container\0{owner}".encode(errors="surrogatepass")).hexdigest()[:32]


_LINE = re.compile(r"([^:\s]{1,128}):sha256:([0-9a-fA-F]{64})")
API_KEY = "responses_mw.api_key"
"""Where an ASGI scope holds the name of the caller's key."""


class InvalidKeys(StartupError, ValueError):
    """The file of API keys cannot be read, or a line of it; the message tells which."""


class APIKeys:
    """The hashes of the keys, with the names that they have."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Raises ``InvalidKeys``. No line is in its message: it may be a key by mistake."""
        self._hashes: list[tuple[bytes, str]] = []
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            match = _LINE.fullmatch(text)
            if match is None:
                raise InvalidKeys(f"line {number} of the API keys is not name:sha256:<64 hexadecimal digits>")
            self._hashes.append((bytes.fromhex(match[2]), match[1]))

    @classmethod
    def of(cls, settings: Settings) -> APIKeys | None:
        """Those that are set; None if none are to be asked for. Raises ``InvalidKeys``."""
        if settings.auth.api_keys_file is None:
            keys = cls(settings.auth.api_keys) if settings.auth.api_keys else None
        else:
            try:
                lines = Path(settings.auth.api_keys_file).read_text("utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidKeys(f"auth.api_keys_file cannot be read: {type(error).__name__}") from None
            keys = cls([*lines, *settings.auth.api_keys])
            if not keys._hashes:
                raise InvalidKeys("auth.api_keys_file holds no key: nobody could ask for anything")
        unknown = set(settings.auth.tenant_keys) - (keys.names if keys is not None else set())
        if unknown:
            raise InvalidKeys(f"auth.tenant_keys names {', '.join(sorted(unknown))}, which is no API key's name")
        return keys

    @property
    def names(self) -> set[str]:
        return {name for _, name in self._hashes}

    def name(self, authorization: str) -> str | None:
        """The name of the key in an ``Authorization`` header; None if it is none of ours. Takes the same time for any."""
        scheme, _, key = authorization.partition(" ")
        given = sha256(key.strip().encode("latin-1", "replace")).digest()
        found = None
        for known, name in self._hashes:
            if hmac.compare_digest(known, given):
                found = name
        return found if scheme.lower() == "bearer" else None


def has_key(scope: Any) -> bool:
    """Whether the request with this ASGI ``scope`` came with a key of ours."""
    return API_KEY in scope


def owner_in(scope: Any, settings: Settings) -> str:
    """Whose the request with this ASGI ``scope`` is: a trusted gateway's tenant, our key's name, or the credential.

    Raises ``BadRequest`` where the tenant is missing, ``Forbidden`` where the key is none that may name one.
    """
    name, header, headers = scope.get(API_KEY), settings.auth.tenant_header, Headers(scope=scope)
    if name is not None and header and settings.auth.tenant_keys and name not in settings.auth.tenant_keys:
        if header in headers:
            raise Forbidden(f"This API key may not name a tenant: leave '{header}' out.", code="tenant_not_allowed")
        header = None
    if name is not None and not header:
        return sha256(f"key\0{name}".encode()).hexdigest()[:32]
    return owner_of(headers, header)
