"""Authentication: API keys, owners and gates.

- An *API key* is issued by the operator of this server. If there are API keys, requests without a valid key are refused.
- Every stored object has an *owner*. Callers with a different owner cannot see the object.
- A *gate* is a function that checks the caller. A run awaits its gate before any side effect, such as a tool call or a write to
  Redis. Code that causes these side effects takes the gate as an argument, so that it cannot omit the check. Endpoints without
  a run call `EndpointContext.verify` first. Both call `Upstream.verify`, which accepts callers with an API key. For others,
  it raises `Unauthorized` if the upstream refuses the caller, and `UpstreamError` if the upstream gives no clear answer.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from starlette.datastructures import Headers

from .errors import BadRequest, Forbidden, NotFound, StartupError

if TYPE_CHECKING:
    from .settings.groups import AuthSettings

Gate: TypeAlias = Callable[[], Awaitable[None]]

ANONYMOUS = "anonymous"
CONTAINER_OWNER_HEADER = "x-responses-mw-owner"
"""The header that names the owner of a container to the sandbox. Clients cannot set this header."""

API_KEY = "responses_mw.api_key"
"""The key in an ASGI scope under which `APIKeyMiddleware` stores the name of the request's API key."""

ALLOWED_MODELS = "responses_mw.allowed_models"
"""The key in an ASGI scope under which `APIKeyMiddleware` stores the models that the request's API key may use, or None."""

MAX_MODELS = 256
"""Maximum number of models of an API key."""

_LINE = re.compile(r"([^:\s]{1,128}):sha256:([0-9a-fA-F]{64})(?:;models=(.*))?")
_MODEL = re.compile(r"[^\s,;\x00-\x1f\x7f]{1,256}")


class APIKey(NamedTuple):
    name: str
    models: frozenset[str] | None
    """The public names of the models that the key may use. None allows all models."""


class APIKeys:
    """The names and hashes of the API keys. Error messages quote no line, because a line may contain a plain key.

    Keys should be random and at least 32 characters long. Anyone who obtains the hashes can find shorter keys by guessing.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        """Parse lines of the form `name:sha256:<SHA-256 of the key in hexadecimal>`. Skip empty lines and comments (`#`).

        `;models=A,B` at the end restricts the key to these models. Lines with the same name belong to one owner, so that a key
        can be replaced. Raises `StartupError` for a malformed line, or if a key has two lines that differ.
        """
        self._keys: dict[bytes, APIKey] = {}
        """Maps the hashes of the keys to the keys."""
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            match = _LINE.fullmatch(text)
            if match is None:
                raise StartupError(f"line {number} of the API keys is not name:sha256:<64 hexadecimal digits>[;models=A,B]")
            key = APIKey(match[1], _models_in(match[3], number))
            if self._keys.setdefault(bytes.fromhex(match[2]), key) != key:
                raise StartupError(f"line {number} of the API keys contains the key of an earlier line, but they differ")

    @classmethod
    def of(cls, settings: AuthSettings) -> APIKeys | None:
        """Return the keys in `auth.api_keys`, or None if the setting is empty. Raises `StartupError` in these cases:

        - A file cannot be read, a line is malformed, or no line contains a key.
        - `auth.tenant_keys` contains an unknown name.
        """
        keys = cls(line for entry in settings.api_keys for line in _read_lines(entry))
        if settings.api_keys and not keys.names:
            raise StartupError("auth.api_keys contains no keys: every request would be refused")
        if unknown := set(settings.tenant_keys) - keys.names:
            raise StartupError(f"auth.tenant_keys contains names of unknown API keys: {', '.join(sorted(unknown))}")
        return keys if keys.names else None

    @property
    def names(self) -> set[str]:
        return {key.name for key in self._keys.values()}

    def named(self, name: str) -> APIKey | None:
        """Return the API key `name`, or None if it is unknown.

        If several lines have the name, the key may use only the models that all of them allow.
        """
        found = [key.models for key in self._keys.values() if key.name == name]
        allowed = [models for models in found if models is not None]
        return APIKey(name, frozenset.intersection(*allowed) if allowed else None) if found else None

    def find(self, authorization: str) -> APIKey | None:
        """Return the API key in an `Authorization` header, or None if it contains no known bearer token."""
        scheme, _, key = authorization.partition(" ")
        given = sha256(key.strip().encode("latin-1", "replace")).digest()
        # The time of the lookup may depend on the hashes, but nobody can choose a key by a part of its hash.
        return self._keys.get(given) if scheme.lower() == "bearer" else None


def _models_in(text: str | None, number: int) -> frozenset[str] | None:
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    if len(names) > MAX_MODELS or not all(map(_MODEL.fullmatch, names)):
        raise StartupError(f"line {number} of the API keys: models must be 1 to {MAX_MODELS} names, separated by commas")
    return frozenset(names)


def check_model(scope: Any, model: str | None) -> str | None:
    """Return `model` or, if it is None and the request's API key may use only one model, that model.

    Raises `NotFound` if the key may not use the model, and `BadRequest` if `model` is None and the key may use several.
    """
    models: frozenset[str] | None = scope.get(ALLOWED_MODELS)
    if models is None or model in models:
        return model
    names = ", ".join(sorted(models))
    if model is not None:
        message = f"The model '{model[:256]}' does not exist, or your API key may not use it. It may use: {names}."
        raise NotFound(message, param="model", code="model_not_found")
    if len(models) > 1:
        message = f"Missing required parameter: 'model'. Your API key may use: {names}."
        raise BadRequest(message, param="model", code="missing_required_parameter")
    return names


def _read_lines(entry: str) -> list[str]:
    if not entry.startswith("@"):
        return [entry]
    try:
        return Path(entry.removeprefix("@")).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"auth.api_keys: the file cannot be read: {type(error).__name__}") from None


def owner_in(scope: Any, settings: AuthSettings) -> str:
    """Return the owner of the request with this ASGI `scope`. The owner is a hash of the first of these that applies:

    1. the tenant that a trusted gateway sends in `auth.tenant_header`, unless `auth.tenant_keys` excludes the request's API key
    2. the name of the request's API key
    3. the header `Authorization`

    If none applies, return `ANONYMOUS`. Raises `BadRequest` if the first applies, but the header is missing, empty or sent more
    than once. Raises `Forbidden` if the request names a tenant, but `auth.tenant_keys` excludes its API key.
    """
    name, header, headers = scope.get(API_KEY), settings.tenant_header, Headers(scope=scope)
    if name is not None and header and settings.tenant_keys and name not in settings.tenant_keys:
        if header in headers:
            raise Forbidden(f"This API key may not name a tenant: remove the header '{header}'.", code="tenant_not_allowed")
        header = None
    if header:
        return _hash("tenant", _tenant(headers, header))
    if name is not None:
        return owner_of_key(name)
    authorization = ", ".join(headers.getlist("authorization"))  # several headers are hashed as one credential
    return _hash("credential", _canonical(authorization)) if authorization else ANONYMOUS


def _tenant(headers: Headers, name: str) -> str:
    values = headers.getlist(name)
    if len(values) == 1 and values[0].strip():  # the gateway's client may have forged a second value
        return values[0]
    fault = "is sent more than once" if len(values) > 1 else "is empty" if values else "is missing"
    raise BadRequest(f"The header '{name}', which names the tenant, {fault}.", param=name, code="invalid_tenant_header")


def _hash(kind: str, value: str) -> str:
    return sha256(f"{kind}\0{value}".encode()).hexdigest()[:32]


def _canonical(authorization: str) -> str:
    scheme, _, credential = authorization.strip().partition(" ")
    return f"{scheme.capitalize()} {credential.lstrip()}" if credential else scheme  # a single word is the credential itself


def owner_of_key(name: str) -> str:
    """Return the owner of requests with the API key `name`."""
    return _hash("key", name)


def container_owner(owner: str) -> str:
    """Return a hash of `owner` for `CONTAINER_OWNER_HEADER`. The sandbox does not need to know the owner itself."""
    return _hash("container", owner)
