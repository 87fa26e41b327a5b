"""Who makes a request: API keys, owners, and the gate before side effects.

- An *API key* is issued by the operator of this server. It admits its bearer.
- Every stored object has an *owner*, and is invisible to all others. The owner is a hash of the tenant that a trusted gateway
  names, of the API key's name, or of the credential.
- A *gate* is awaited before any side effect: calling a tool server, running code, embedding text, storing, queueing or
  counting. Every function with such an effect takes the gate as a required argument, so that none can omit it. A request's
  gate is `Upstream.verify` for its caller. It returns at once for a caller with an API key, and after the upstream has
  accepted this request. Otherwise it asks the upstream and caches the result. It raises `Unauthorized` if the upstream refuses
  the caller, and `UpstreamError` if the upstream does not answer.
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
    from .settings import AuthSettings

Gate: TypeAlias = Callable[[], Awaitable[None]]

ANONYMOUS = "anonymous"
CONTAINER_OWNER_HEADER = "x-responses-mw-owner"
"""The header that tells the sandbox who owns a container. Requests cannot set it."""

API_KEY = "responses_mw.api_key"
"""The member of an ASGI scope that holds the name of the caller's API key."""

_LINE = re.compile(r"([^:\s]{1,128}):sha256:([0-9a-fA-F]{64})")


class InvalidKeys(StartupError, ValueError):
    """The API keys cannot be read. The message says why. It quotes no line, because a line may be a key by mistake."""


class APIKeys:
    """The names of the API keys and their hashes.

    A line is `name:sha256:<SHA-256 of the key in hexadecimal>`. Empty lines and lines that start with `#` are skipped. Lines
    with the same name belong to one owner, so that a key can be replaced. Keys must be random (32 characters or more), because
    testing a guess against a hash is cheap.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        """Parse `lines`. Raises `InvalidKeys`."""
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
    def of(cls, settings: AuthSettings) -> APIKeys | None:
        """Return the configured keys, or None if there are none. Raises `InvalidKeys`."""
        given = settings.api_keys
        keys = cls(line for entry in given for line in _read_lines(entry)) if given else None
        if keys is not None and not keys.names:
            raise InvalidKeys("auth.api_keys contains no keys: every request would be refused")
        unknown = set(settings.tenant_keys) - (keys.names if keys is not None else set())
        if unknown:
            raise InvalidKeys(f"auth.tenant_keys contains names of unknown API keys: {', '.join(sorted(unknown))}")
        return keys

    @property
    def names(self) -> set[str]:
        return {name for _, name in self._hashes}

    def name(self, authorization: str) -> str | None:
        """Return the name of the key in an `Authorization` header, or None if it is unknown. Compares keys in constant time."""
        scheme, _, key = authorization.partition(" ")
        given = sha256(key.strip().encode("latin-1", "replace")).digest()
        found = None
        for known, name in self._hashes:
            if hmac.compare_digest(known, given):
                found = name
        return found if scheme.lower() == "bearer" else None


def _read_lines(entry: str) -> list[str]:
    """Return the lines of the file that `@path` names, or `entry` itself."""
    if not entry.startswith("@"):
        return [entry]
    try:
        return Path(entry.removeprefix("@")).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidKeys(f"auth.api_keys: the file cannot be read: {type(error).__name__}") from None


def has_key(scope: Any) -> bool:
    """Return whether the request with this ASGI `scope` carries a valid API key."""
    return API_KEY in scope


def key_in(scope: Any) -> str:
    """Return the name of the API key of the request with this ASGI `scope`, or "" if it has none."""
    return str(scope.get(API_KEY, ""))


def owner_in(scope: Any, settings: AuthSettings) -> str:
    """Return the owner of the request with this ASGI `scope`.

    It is the tenant that a trusted gateway names in `auth.tenant_header`, else the API key, else the credential. A changed
    credential is another owner.

    Raises `BadRequest` if the tenant is missing or ambiguous: without it, all users of the gateway would share one owner.
    Raises `Forbidden` if the API key may not name a tenant.
    """
    name, header, headers = scope.get(API_KEY), settings.tenant_header, Headers(scope=scope)
    if name is not None and header and settings.tenant_keys and name not in settings.tenant_keys:
        if header in headers:
            raise Forbidden(f"This API key may not name a tenant: remove the header '{header}'.", code="tenant_not_allowed")
        header = None
    if header:
        return _hash("tenant", _tenant(headers, header))
    if name is not None:
        return _hash("key", name)
    authorization = ", ".join(headers.getlist("authorization"))  # if there are several, none of them is the owner
    return _hash("credential", _canonical(authorization)) if authorization else ANONYMOUS


def _tenant(headers: Headers, name: str) -> str:
    """Return the header's only value. Raises `BadRequest` if there are several: the gateway's client may have forged one."""
    values = headers.getlist(name)
    if len(values) == 1 and values[0].strip():
        return values[0]
    fault = "is sent more than once" if len(values) > 1 else "is empty" if values else "is missing"
    raise BadRequest(f"The header '{name}', which names the tenant, {fault}.", param=name, code="invalid_tenant_header")


def _hash(kind: str, value: str) -> str:
    return sha256(f"{kind}\0{value}".encode()).hexdigest()[:32]


def _canonical(authorization: str) -> str:
    """Normalize the case of the scheme and the spaces before the credential."""
    scheme, _, credential = authorization.strip().partition(" ")
    return f"{scheme.capitalize()} {credential.lstrip()}" if credential else scheme  # a single word is the credential itself


def container_owner(owner: str) -> str:
    """Return the owner's name for the sandbox: a hash, because an owner may contain characters that a header cannot."""
    return sha256(f"container\0{owner}".encode(errors="surrogatepass")).hexdigest()[:32]
