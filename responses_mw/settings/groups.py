"""The groups of settings, and the types of their values. A class receives only the groups that it uses, not all settings."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

EVERY_TOOL = "*"
"""Entry in a list of tool names that matches every tool."""


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


_DURATION = _with_unit(
    {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}, "a duration such as 30, 500ms, 30s, 10m, 2h or 7d"
)
_SIZE = _with_unit(
    {"B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3},
    "a size such as 1000, 64KiB, 16MiB or 2GiB",
)


def _split(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [name.strip() for name in value.split(",") if name.strip()]


def _check_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an http:// or https:// URL")
    if parts.username or parts.password:
        raise ValueError("must not contain credentials, because it is logged; use the setting for the key")
    _ = parts.port  # raises ValueError if it is not a number
    return value


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
Secrets = Annotated[list[SecretStr], *LIST]
URL = Annotated[str, AfterValidator(_check_url)]
ServerURL = Annotated[URL, AfterValidator(_base)]
"""URL to which paths are appended, without a final slash."""
BaseURL = Annotated[ServerURL, AfterValidator(lambda url: url.removesuffix("/v1"))]
"""URL of a server without a final `/v1`."""

PER_REQUEST_HEADERS = frozenset(
    {"accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect", "host"}
    | {"te", "trailer", "transfer-encoding", "upgrade"}
)
"""Headers that describe one request and its transport, and must not be copied to another request."""


class ToolFilter(BaseModel, extra="forbid", frozen=True):
    """Criteria for the tools of an MCP server. A tool must meet all criteria that are set."""

    tool_names: list[str] | None = None
    read_only: bool | None = None


class ApprovalFilters(BaseModel, extra="forbid", frozen=True):
    always: ToolFilter | None = None
    never: ToolFilter | None = None


class ToolServer(BaseModel, extra="forbid", frozen=True):
    """An MCP server of the operator. Clients select the server by label or connector id, and never see its URL or secrets."""

    url: URL
    headers: dict[str, SecretStr] = Field({})
    authorization: SecretStr | None = None
    """Bearer token for requests that do not contain one."""
    allowed_tools: list[str] | ToolFilter | None = None
    """Tools that requests may use. None allows all tools."""
    require_approval: Literal["always", "never"] | ApprovalFilters | None = None
    """Default for requests that do not set `require_approval`. None means `always`."""

    def excludes(self, name: str) -> bool:
        """Return whether the names in `allowed_tools` exclude the tool `name`."""
        names = self.allowed_tools.tool_names if isinstance(self.allowed_tools, ToolFilter) else self.allowed_tools
        return names is not None and name not in names and EVERY_TOOL not in names


ToolServers = Annotated[
    dict[str, ToolServer], NoDecode, BeforeValidator(lambda value: json.loads(value) if isinstance(value, str) else value)
]


class Group(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )


class UpstreamSettings(Group):
    """The Chat Completions server behind the middleware."""

    url: BaseURL | None = None
    """URL of the Chat Completions server, e.g. http://vllm:8000 (unset: the wrapped app)"""
    api_key: SecretStr | None = None
    """API key sent to the upstream instead of the caller's credential; proxied requests get it only if auth.api_keys is set"""
    dialect: Literal["auto", "openai", "vllm", "tgi", "sglang", "llamacpp", "ollama", "litellm", "transformers"] = "auto"
    """type of the upstream server; auto detects it"""
    api: Literal["chat", "responses"] = "chat"
    """upstream API: chat is /v1/chat/completions, responses is its own /v1/responses; this server stores the state with both"""
    think_tag: str | None = None
    """tag that encloses reasoning in the model's text, e.g. think (unset: the text contains no reasoning)"""
    forward_headers: Names = Field(
        ["traceparent", "tracestate", "baggage", "x-session-id", "x-vllm-priority", "openai-organization", "openai-project"]
    )
    """request headers forwarded to the upstream, in addition to authorization"""
    timeout: Duration = Field(600.0, gt=0)
    """timeout for the first byte of the upstream's answer; a pause within the answer may last a fifth of this time"""
    status_grace: Duration = Field(0.05, ge=0)
    """time that a stream waits for the upstream's answer to begin before it sends a 200"""
    overload_timeout: Duration = Field(
        30.0,
        ge=0,
        description="time that a stream waits for an overloaded upstream (429, 502, 503 or no connection); background "
        "responses wait 20 times as long; 0 disables waiting, and the continuation of interrupted answers",
    )

    @field_validator("forward_headers")
    @classmethod
    def _check_forward_headers(cls, value: list[str]) -> list[str]:
        names = [name.lower() for name in value]
        if own := sorted((PER_REQUEST_HEADERS | {"x-request-id"}).intersection(names)):
            raise ValueError(f"cannot contain {', '.join(own)}: each upstream request has its own")
        return names

    @property
    def idle_timeout(self) -> float:
        """Maximum number of seconds without data within an answer of the upstream."""
        return self.timeout / 5


class ServerSettings(Group):
    """Client interface, shutdown, logs and the admin port."""

    base_path: Annotated[str, AfterValidator(lambda path: path.rstrip("/"))] = Field("", pattern="^(/.*)?$")
    """path prefix before /v1, e.g. /openai"""
    cors_origins: Names = Field([])
    """origins of web pages that may send requests, in addition to the server's own origin; * allows all"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """minimum level of log records"""
    log_format: Literal["human", "json"] = "human"
    """format of log records"""
    admin_port: int = Field(0, ge=0, le=65535)
    """port of /livez, /readyz, /metrics and /usage; 0 disables the port"""
    admin_host: str = "127.0.0.1"
    """address of the admin port"""
    drain_timeout: Duration = Field(30.0, ge=0)
    """time that responses in progress have to finish when the process stops"""
    prompts_dir: str | None = None
    """directory of prompt templates, one TOML or JSON file each"""
    keep_alive: Literal["comment", "event"] = "comment"
    """message sent at least every 15 s on an idle stream: a comment, or an event (for Codex; some old SDKs reject it)"""
    reasoning_events: Literal["openai", "open_responses"] = "openai"
    """names of reasoning events: response.reasoning_text.*, or response.reasoning.*"""
    unknown_fields: Literal["forward", "refuse"] = "forward"
    """unknown fields of a request: forward them to the upstream, or refuse them with a 400"""
    max_websockets: int = Field(5000, ge=0)
    """maximum number of WebSockets of this process; an owner may have a fifth of this number; 0 refuses upgrades with 426"""


class RedisSettings(Group):
    """The Redis that stores the state."""

    url: SecretStr | None = None
    """Redis URL: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// (unset: an embedded Valkey)"""
    data_dir: str | None = None
    """data directory of the embedded Valkey (unset: in memory only)"""
    allow_eviction: bool = False
    """start even if Redis may evict state (maxmemory-policy is not noeviction)"""
    timeout: Duration = Field(2.0, gt=0)
    """timeout of a Redis call"""


class StateSettings(Group):
    """Stored responses and conversations."""

    ttl: WholeDuration = Field(7 * 24 * 3600, gt=0)
    """lifetime of a stored response; continuing it extends the lifetime of its history"""
    required: bool = False
    """fail a request if its response cannot be stored (503; 413 or 429 at a limit), instead of sending an unstored response"""


class AuthSettings(Group):
    """Credentials, owners and encryption."""

    secret_keys: Secrets = Field([])
    """secrets of at least 32 characters, equal on all replicas; the first secret encrypts, and all secrets decrypt"""
    api_keys: Names = Field([])
    """API keys as name:sha256:hash, or @PATH of a file with one key per line; if set, requests without a key are refused"""
    tenant_header: str | None = None
    """header in which a trusted gateway names the owner (unset: the API key or the credential identifies the owner)"""
    tenant_keys: Names = Field([])
    """names of the API keys that may use tenant_header (unset: all)"""
    proxy_paths: Annotated[list[Annotated[str, Field(pattern=r"^([A-Z]+ )?/[!-~]*$")]], *LIST] = Field(
        ["/v1/", "GET /health", "GET /ping", "GET /version"],
        description="paths proxied to the upstream when there are API keys: a final slash includes all paths below; "
        "a method before the path restricts it, otherwise GET, HEAD, OPTIONS and POST are proxied",
    )

    @field_validator("secret_keys")
    @classmethod
    def _check_length(cls, value: list[SecretStr]) -> list[SecretStr]:
        if any(len(secret.get_secret_value()) < 32 for secret in value):
            raise ValueError("each must have at least 32 characters")
        return value

    @model_validator(mode="after")
    def _check_tenants(self) -> Self:
        if self.tenant_keys and not self.tenant_header:
            raise ValueError("tenant_keys needs tenant_header")
        return self


class JobSettings(Group):
    """Background responses."""

    concurrency: int = Field(32, ge=0)
    """maximum number of background responses that run in this process at a time; 0 runs none"""
    lease: Duration = Field(15.0, gt=0)
    """time after which the background response of a lost worker is taken over"""


class CacheSettings(Group):
    """The response cache."""

    mode: Literal["off", "exact", "semantic"] = "off"
    """cache mode: exact answers identical requests from the cache, semantic also answers requests with the same meaning"""
    ttl: WholeDuration = Field(3600, gt=0)
    """maximum lifetime of a cached answer"""
    embedding_model: str | None = None
    """embedding model; required for the semantic cache"""
    embedding_url: BaseURL | None = None
    """URL of the server with /v1/embeddings (unset: the upstream)"""
    embedding_api_key: SecretStr | None = None
    """API key for embedding_url"""
    threshold: float = Field(0.95, ge=0, le=1)
    """minimum cosine similarity of a semantic hit"""
    guard: Literal["strict", "loose"] = "strict"
    """how closely the words of a semantic hit must match; loose needs a strong embedding model"""
    max_mode: Literal["off", "exact", "semantic"] = "semantic"
    """highest cache mode that a request may select"""
    namespace: str = ""
    """part of every cache key; changing it invalidates the cache"""
    timeout: Duration = Field(0.3, gt=0)
    """timeout of the cache's Redis calls and of an embedding; a timeout is treated as a cache miss"""
    max_owner_bytes: Size = Field(1024**3, gt=0)
    """maximum size of an owner's cached answers"""

    @model_validator(mode="after")
    def _check_embeddings(self) -> Self:
        if self.mode == "semantic" and not self.embedding_model:
            raise ValueError("mode: semantic requires embedding_model")
        return self


class ToolSettings(Group):
    """Tools that the server calls: tools of MCP servers and the code interpreter."""

    mcp_servers: ToolServers = Field({})
    """MCP servers by label or connector_id, as JSON: {"label": {"url", "headers", "authorization", "allowed_tools", ...}}"""
    allow_private_urls: bool = False
    """allow requests to name MCP servers at private addresses; every caller can then reach them"""
    sandbox_url: Annotated[ServerURL, AfterValidator(lambda url: url.removesuffix("/mcp") + "/mcp")] | None = None
    """URL of the code interpreter's sandbox (responses-mw sandbox), e.g. http://sandbox:8090"""
    sandbox_token: SecretStr | None = None
    """bearer token of the sandbox"""
    timeout: Duration = Field(60.0, gt=0)
    """timeout of a tool call or a web search"""


SEARCH_PROVIDERS = {"none": None, "searxng": "url", "tavily": "api_key", "brave": "api_key"}
"""Maps each value of `search.provider` to the setting that it requires. The classes are in `tools/search.py`."""


class SearchSettings(Group):
    """The web search tool."""

    provider: str = Field(
        "none",
        pattern=f"^({'|'.join(SEARCH_PROVIDERS)}|[^/]+/.+)$",
        description=f"provider of web_search: {', '.join(SEARCH_PROVIDERS)}, or label/tool for a tool in tools.mcp_servers",
    )
    url: ServerURL | None = None
    """URL of the provider; required for searxng, optional for providers that have a default URL"""
    api_key: SecretStr | None = None
    """API key for the search provider"""

    @model_validator(mode="after")
    def _check_complete(self) -> Self:
        required = SEARCH_PROVIDERS.get(self.provider)
        if required and not getattr(self, required):
            raise ValueError(f"provider: {self.provider} needs {required}")
        return self


class CompactionSettings(Group):
    """Compaction of histories."""

    prompt: str | None = None
    """instruction to summarize a history (unset: a built-in one)"""


class LimitSettings(Group):
    """Limits of requests, responses, owners and memory."""

    requests_per_minute: int = Field(0, ge=0)
    """maximum number of responses, compactions and token counts of an owner per minute on all replicas; 0 is unlimited"""
    streams: int = Field(0, ge=0)
    """maximum number of open streams of an owner; 0 is unlimited"""
    background: int = Field(0, ge=0)
    """maximum number of unfinished background responses of an owner; 0 is unlimited"""
    stored_bytes: Size = Field(0, ge=0)
    """maximum size of an owner's stored responses and conversations; 0 is unlimited"""
    max_request_bytes: Size = Field(32 * 1024**2, gt=0)
    """maximum size of a request body and of a stored response; a history may be twice as large, and take 16 times the memory"""
    memory_bytes: Size = Field(
        256 * 1024**2,
        gt=0,
        description="maximum memory of this process for each of: large request bodies being received; large responses not "
        "yet read; WebSocket messages being received; unstored WebSocket responses (a quarter per owner); vectors of the "
        "semantic cache",
    )
