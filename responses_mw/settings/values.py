"""The types of the values of settings: numbers with units, lists, URLs and headers."""

from __future__ import annotations

import json
import re
from ipaddress import ip_address, ip_network
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, StringConstraints
from pydantic_settings import NoDecode


class Group(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )


def _with_unit(units: dict[str, float], expected: str) -> BeforeValidator:
    """Return a validator that converts text with a unit to a number. It raises `ValueError` if the text is malformed."""

    def scale(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or (match[2] and match[2] not in units):
            raise ValueError(f"must be {expected}")
        return float(match[1]) * units[match[2]] if match[2] else match[1]

    return BeforeValidator(scale)


_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"B": 1, **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMG", 1)}}
# Kubernetes omits the B.
_BYTES |= {f"{prefix}i{unit}": 1024**power for power, prefix in enumerate("KMG", 1) for unit in ("B", "")}
UNITS = {"duration": tuple(_SECONDS), "size": tuple(_BYTES)}
"""Units of values by the format of their setting."""
_DURATION = _with_unit(_SECONDS, "a duration such as 30, 500ms, 30s, 10m, 2h or 7d")
_SIZE = _with_unit(_BYTES, "a size such as 1000, 64KiB, 16MiB or 2Gi")


def _split(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [name.strip() for name in value.split(",") if name.strip()]


def _split_keys(value: Any) -> Any:
    """Split the lines of API keys, but not the names of models in a line, which are also separated by commas."""
    if not isinstance(value, str) or value.lstrip().startswith("["):
        return _split(value)
    return [line.strip() for line in re.split(r",(?=\s*(?:@|[^\s,:]+:sha256:|$))", value) if line.strip()]


def _check_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an http:// or https:// URL")
    if parts.username or parts.password:
        raise ValueError("must not contain credentials, because it is logged; use the setting for the key")
    _ = parts.port  # raises ValueError if it is not a number
    return value


DNS_PREFIX = "dns+"
"""Prefix of URLs whose host name is resolved to one endpoint for each address."""


def _check_endpoint(value: str) -> str:
    """Check the URL of one endpoint or, after `DNS_PREFIX`, of all addresses of a name. Return it without a final `/v1`."""
    url = _base(_check_url(value.removeprefix(DNS_PREFIX))).removesuffix("/v1")
    if not value.startswith(DNS_PREFIX):
        return url
    if _is_address(urlsplit(url).hostname or ""):
        raise ValueError(f"{DNS_PREFIX} must be followed by the URL of a name, not of an IP address")
    return DNS_PREFIX + url


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _check_distinct(urls: tuple[str, ...]) -> tuple[str, ...]:
    seen = set[tuple[Any, ...]]()
    for url in urls:
        parts = urlsplit(url)
        default = 443 if parts.scheme.endswith("https") else 80
        place = parts.scheme, parts.hostname, parts.port or default, parts.path
        if place in seen:
            raise ValueError(f"contains {url} twice")
        seen.add(place)
    return urls


def check_networks(values: list[str]) -> list[str]:
    for value in values:
        if value != "*":
            ip_network(value, strict=False)  # raises ValueError
    return values


def _base(url: str) -> str:
    if "?" in url or "#" in url:
        raise ValueError("must not contain a query or a fragment, because paths are appended to it")
    return url.rstrip("/")


Duration = Annotated[float, _DURATION, Field(json_schema_extra={"format": "duration"})]
"""A number of seconds, or text with a unit, such as `30s` or `7d`."""
WholeDuration = Annotated[int, _DURATION, Field(json_schema_extra={"format": "duration"})]
Size = Annotated[int, _SIZE, Field(json_schema_extra={"format": "size"})]
"""A number of bytes, or text with a unit, such as `64MiB`."""
LIST = NoDecode, BeforeValidator(_split)
"""Annotations of a list that may be comma-separated text or a JSON array."""
Names = Annotated[list[str], *LIST]
KeyLines = Annotated[list[str], NoDecode, BeforeValidator(_split_keys)]
Secrets = Annotated[list[SecretStr], *LIST]
URL = Annotated[str, AfterValidator(_check_url)]
ServerURL = Annotated[URL, AfterValidator(_base)]
"""URL to which paths are appended, without a final slash."""
BaseURL = Annotated[ServerURL, AfterValidator(lambda url: url.removesuffix("/v1"))]
"""URL of a server without a final `/v1`."""


def _check_files_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("file", "s3", "gs", "az", "memory") or parts.query or parts.fragment:
        raise ValueError("must be a URL that begins with file://, s3://, gs://, az:// or memory://")
    if parts.scheme == "file" and (parts.netloc or not parts.path.strip("/")):
        raise ValueError("must have three slashes and the path of a directory: file:///var/lib/files")
    if parts.scheme in ("s3", "gs", "az") and not parts.hostname:
        raise ValueError("must name a bucket or a container")
    if "@" in parts.netloc:
        raise ValueError("must not contain credentials; they are read from the environment of the provider")
    return value


def _check_trace_url(value: str) -> str:
    if "{trace_id}" not in value:
        raise ValueError("must contain {trace_id}, which is replaced by the id of the trace")
    return _check_url(value)


TraceURL = Annotated[str, AfterValidator(_check_trace_url)]
"""URL of the page of a trace, with `{trace_id}` in place of its id."""
FilesURL = Annotated[str, AfterValidator(_check_files_url)]
"""URL of a directory or bucket, or `memory://`."""

EndpointURLs = Annotated[
    tuple[Annotated[str, AfterValidator(_check_endpoint)], ...],
    *LIST,
    AfterValidator(_check_distinct),
]
"""URLs of servers, without a final `/v1`. Those that begin with `DNS_PREFIX` stand for all addresses of a name."""

ROUTING_HEADERS = frozenset(
    {"x-http-method", "x-http-method-override", "x-method-override", "x-original-method", "x-forwarded-method"}
    | {"x-original-uri", "x-original-url", "x-rewrite-url", "x-forwarded-uri"}
)
"""Headers from which some servers take another method or path than those of the request."""

ACTING_HEADERS = frozenset({"openai-organization", "openai-project", "x-vllm-priority"})
"""Headers that choose for the owner of a credential who pays for a request, or which requests come first."""

PER_REQUEST_HEADERS = frozenset(
    {"accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect", "host"}
    | {"te", "trailer", "transfer-encoding", "upgrade"}
)
"""Headers that describe one request and its transport, and must not be copied to another request."""


CREDENTIAL_HEADERS = frozenset({"authorization", "api-key", "x-api-key"})
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
HEADER_VALUE = re.compile(r"[^\x00-\x1f\x7f\u0100-\U0010ffff]*")
JSON_OBJECT = NoDecode, BeforeValidator(lambda value: json.loads(value) if isinstance(value, str) else value)
"""Annotations of a mapping that may be text in JSON."""
SecretHeaders = Annotated[dict[str, SecretStr], *JSON_OBJECT]
_Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]
NamesByName = Annotated[dict[_Name, _Name], *JSON_OBJECT]
