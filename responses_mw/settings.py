"""Every setting, in one typed place.

Each is an environment variable (``RESPONSES_MW_`` and the name in capitals) and, for ``responses-mw serve``, a flag. Inside
vLLM, which builds the middleware without arguments, the environment is the only way. Lists are given as JSON
or comma-separated.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

MIB = 1024 * 1024
LEAST_SECRET = 32

Names = Annotated[list[str], NoDecode]

OF_EACH_CALL = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "expect",
        "host",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers that say what one request is and how it travels; a caller's would be wrong in another."""


EVERY_TOOL = "*"
"""In a list of names, stands for each."""


class ToolFilter(BaseModel):
    """Which tools of an MCP server are meant: those that fit all that is set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tool_names: list[str] | None = None
    read_only: bool | None = None


class ApprovalFilters(BaseModel):
    """Which tools of an MCP server always need approval, and which never do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    always: ToolFilter | None = None
    never: ToolFilter | None = None


class ToolServer(BaseModel):
    """An MCP server of the operator's. Requests name it by its label or connector id, and learn neither its URL nor secrets."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    headers: dict[str, SecretStr] = Field({})
    authorization: SecretStr | None = None
    """A bearer token; a request may bring another."""
    allowed_tools: list[str] | ToolFilter | None = None
    """Requests cannot go beyond it."""
    require_approval: Literal["always", "never"] | ApprovalFilters | None = None
    """What holds where a request says nothing; not set: ``always``."""

    @field_validator("url")
    @classmethod
    def _web(cls, value: str) -> str:
        return _http_url(value)

    def excludes(self, name: str) -> bool:
        """Whether ``allowed_tools`` rules out a tool by its name alone."""
        names = self.allowed_tools.tool_names if isinstance(self.allowed_tools, ToolFilter) else self.allowed_tools
        return names is not None and name not in names and EVERY_TOOL not in names


ToolServers = Annotated[dict[str, ToolServer], NoDecode]


class Settings(BaseSettings):
    """Settings of the middleware. Times are in seconds, sizes in bytes."""

    model_config = SettingsConfigDict(
        env_prefix="RESPONSES_MW_", extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True
    )

    # -- the upstream
    upstream: str | None = Field(
        None, description="URL of the Chat Completions server, e.g. http://vllm:8000 (not set: the app it is mounted in)"
    )
    upstream_api_key: SecretStr | None = Field(
        None,
        description="key for the upstream, in place of the caller's own; what passes through has it only with api_keys",
    )
    dialect: Literal["auto", "openai", "vllm", "tgi", "sglang", "llamacpp", "ollama", "litellm", "transformers"] = Field(
        "auto", description="what kind of server the upstream is; auto asks it"
    )
    forward_headers: Names = Field(
        ["traceparent", "tracestate", "baggage", "x-session-id", "x-vllm-priority", "openai-organization", "openai-project"],
        description="request headers that go on to the upstream, beside authorization",
    )
    upstream_api: Literal["chat", "responses"] = Field(
        "chat", description="what the upstream is asked by: /v1/chat/completions, or its own /v1/responses (state stays ours)"
    )
    think_tag: str | None = Field(None, description="tag of reasoning that the model writes into its text, e.g. think")
    connect_timeout: float = Field(5.0, gt=0, description="longest wait for a connection to the upstream")
    first_byte_timeout: float = Field(600.0, gt=0, description="longest wait for the upstream's answer to begin")
    idle_timeout: float = Field(120.0, gt=0, description="longest silence of the upstream within an answer")
    upstream_connections: int = Field(
        10_000, gt=0, description="most connections to the upstream at a time, and as many again for what passes through"
    )
    status_grace: float = Field(
        0.05,
        ge=0,
        description="how long a stream waits for the upstream's status before its own 200 is sent; retries fit within",
    )

    # -- what we answer
    base_path: str = Field("", description="path that stands before /v1 here, e.g. /openai")
    cors_origins: Names = Field([], description="origins whose pages may call, beside this server's own; * for all")
    reasoning_events: Literal["openai", "open_responses"] = Field(
        "openai", description="how the events of reasoning are named: response.reasoning_text.*, or response.reasoning.*"
    )
    sse_done: bool = Field(True, description="end streams with 'data: [DONE]'")
    keep_alive: float = Field(15.0, gt=0, description="send a comment on a stream that was silent for so long")
    keepalive_event: bool = Field(
        False, description="send a 'keepalive' event in place of the comment (for Codex; some old SDKs fail on it)"
    )

    # -- WebSockets
    websocket: bool = Field(True, description="serve WebSockets at /v1/responses; else an upgrade is refused with 426")
    websocket_seconds: float = Field(3600.0, gt=0, description="how long a connection may last; a response is not cut")
    websocket_connections: int = Field(1000, gt=0, description="most connections of an owner to this process")
    websocket_lanes: int = Field(32, gt=0, description="most responses under way on a connection")
    websocket_total_connections: int = Field(5000, gt=0, description="most connections of all owners to this process")
    websocket_held_bytes: int = Field(
        64 * MIB,
        gt=0,
        description="most bytes that an owner's connections hold here: responses with store: false, and waiting requests",
    )
    websocket_total_held_bytes: int = Field(256 * MIB, gt=0, description="most of these bytes of all owners")

    # -- state
    redis: SecretStr | None = Field(
        None,
        description="URL of Redis: redis://, rediss://, redis+sentinel://, redis+cluster:// (not set: an embedded Valkey)",
    )
    data_dir: str | None = Field(None, description="where an embedded Valkey keeps its data (not set: in memory only)")
    allow_eviction: bool = Field(
        False, description="start although Redis may evict what is stored (its maxmemory-policy is not noeviction)"
    )
    state_required: bool = Field(False, description="refuse with 503 what cannot be stored, in place of answering unstored")
    state_timeout: float = Field(2.0, gt=0, description="longest wait for Redis")
    ttl: int = Field(
        7 * 24 * 3600, gt=0, description="how long a response is kept, in seconds; a chain keeps alive what it stands on"
    )
    max_answer_bytes: int = Field(
        128 * MIB, gt=0, description="most bytes that the upstream and tools may send for a response, stored or not"
    )
    max_response_bytes: int = Field(16 * MIB, gt=0, description="largest response that is stored")
    max_chain_bytes: int = Field(64 * MIB, gt=0, description="largest history that is read for a response")
    max_chain_items: int = Field(10_000, gt=0, description="most items in a history")
    recent_chain_bytes: int = Field(
        64 * MIB, ge=0, description="most of the histories read last that this process keeps in memory; 0 keeps nothing"
    )
    tenant_header: str | None = Field(
        None, description="header by which a trusted gateway tells the owner (not set: the credential is it)"
    )
    tenant_keys: Names = Field(
        [], description="names of the API keys whose holders may use tenant_header (not set: all of them)"
    )
    secret_keys: Annotated[list[SecretStr], NoDecode] = Field(
        [], description="secrets of at least 32 characters, the same on every replica: the first encrypts, all decrypt"
    )

    # -- background responses
    workers: int = Field(32, ge=0, description="background responses run at a time in this process; 0 leaves them to others")
    lease_seconds: float = Field(
        15.0, gt=0, description="how long a background response whose worker is lost stays in progress"
    )
    drain_seconds: float = Field(30.0, ge=0, description="how long a stop waits for running background responses")
    max_attempts: int = Field(
        3, gt=0, description="how often a background response is begun whose workers were lost before its first output"
    )
    queue_partitions: int = Field(8, gt=0, description="parts of the queue of background responses, the same on every replica")
    log_ttl: int = Field(
        24 * 3600, gt=0, description="how long the events of a background response can be streamed after its end, in seconds"
    )

    # -- cache
    cache: Literal["off", "exact", "semantic"] = Field(
        "off", description="cache of answers: equal requests (exact), or also those that ask the same (semantic)"
    )
    cache_max_mode: Literal["off", "exact", "semantic"] = Field(
        "semantic", description="highest cache mode that a request may select"
    )
    cache_ask: Names = Field(["body", "header"], description="where a request may select a cache mode (off: always)")
    cache_ttl: int = Field(3600, gt=0, description="maximum lifetime of a cached answer, in seconds")
    cache_wait: float = Field(
        5.0, ge=0, description="how long a request waits for an equal one in progress, in seconds; a stream waits at most 1 s"
    )
    cache_timeout: float = Field(0.25, gt=0, description="timeout of the cache's Redis calls, in seconds; then it is a miss")
    cache_namespace: str = Field("", description="part of every cache key; changing it invalidates the cache")
    cache_entry_bytes: int = Field(MIB, gt=0, description="maximum size of a cached answer")
    cache_partition_entries: int = Field(
        10_000, gt=0, description="maximum number of cached answers that differ only in the last user text (a partition)"
    )
    cache_partition_bytes: int = Field(64 * MIB, gt=0, description="maximum bytes of a partition")
    cache_owner_entries: int = Field(160_000, gt=0, description="maximum number of cached answers of an owner")
    cache_owner_bytes: int = Field(1024 * MIB, gt=0, description="maximum bytes of an owner's cached answers")
    cache_threshold: float = Field(0.95, ge=0, le=1, description="minimum cosine similarity of a semantic hit")
    cache_guard: Literal["strict", "loose"] = Field(
        "strict", description="how equal the words of a semantic hit must be; loose needs a strong embedding model"
    )
    cache_max_text: int = Field(1000, gt=0, description="maximum length, in characters, of a text for semantic lookup")
    cache_memory: int = Field(256 * MIB, gt=0, description="maximum bytes of vectors and records held for semantic lookup")
    cache_embedding_model: str | None = Field(None, description="embedding model; required for the semantic cache")
    cache_embedding_url: str | None = Field(
        None, description="server of /v1/embeddings (not set: the upstream, with the caller's credential)"
    )
    cache_embedding_key: SecretStr | None = Field(None, description="API key for cache_embedding_url")
    cache_embedding_dimensions: int | None = Field(None, gt=0, description="size of the vectors (not set: the model's default)")
    cache_embedding_timeout: float = Field(0.3, gt=0, description="timeout of an embedding, in seconds; then it is a miss")

    # -- tools
    mcp_servers: ToolServers = Field(
        {}, description='MCP servers by label, as JSON: {"label": {"url", "headers", "authorization", "allowed_tools", ...}}'
    )
    connectors: ToolServers = Field({}, description="MCP servers that stand for a connector_id, as mcp_servers")
    allow_private_urls: bool = Field(
        False, description="let the URLs that a request names lead to private addresses: whoever may ask reaches them"
    )
    sandbox_url: str | None = Field(
        None, description="URL of the code interpreter's sandbox (responses-mw sandbox), e.g. http://sandbox:8090"
    )
    sandbox_token: SecretStr | None = Field(None, description="the sandbox's token")
    max_turns: int = Field(
        64, gt=0, description="most turns of a response; in the last one the model is offered no tools of the server's"
    )
    tool_timeout: float = Field(60.0, gt=0, description="longest time that a call of a tool may take")
    max_tool_output_bytes: int = Field(MIB, ge=1024, description="most of a tool's output that the model is given")
    mcp_max_tools: int = Field(512, gt=0, description="most tools of an MCP server")
    web_search: Literal["none", "searxng", "tavily", "brave", "mcp"] = Field(
        "none", description="what serves the tool web_search; mcp: a search tool of a configured MCP server"
    )
    web_search_url: str | None = Field(None, description="URL of SearXNG, or of what stands in for Tavily's or Brave's own")
    web_search_key: SecretStr | None = Field(None, description="key for the search provider")
    web_search_tool: str | None = Field(None, description="the MCP tool that searches, as label/tool")
    web_search_timeout: float = Field(15.0, gt=0, description="longest wait for the search provider")
    web_search_results: int = Field(10, gt=0, description="most results of a search that a model is given")

    # -- prompt templates
    prompts_dir: str | None = Field(None, description="directory of prompt templates, a TOML or JSON file each")

    # -- compaction
    compaction_prompt: str | None = Field(
        None, description="what the model is told to sum a history up (not set: a text of ours)"
    )
    compaction_threshold: int = Field(
        100_000, gt=0, description="tokens above which context_management compacts that names no compact_threshold"
    )
    compaction_max_tokens: int = Field(0, ge=0, description="most tokens of a summary; 0 leaves it to the model")

    # -- bounds of a request
    max_body_bytes: int = Field(32 * MIB, gt=0, description="largest request body")
    max_inbound_bytes: int = Field(
        256 * MIB, gt=0, description="most bytes of large request bodies that are received at a time; more are refused with 503"
    )
    max_input_items: int = Field(10_000, gt=0, description="most input items")
    max_tools: int = Field(1024, gt=0, description="most tools of a request, those in namespaces and input items included")
    max_depth: int = Field(64, gt=0, description="deepest nesting of a request's JSON")
    max_values: int = Field(1_000_000, gt=0, description="most values (members and elements) in a request's JSON")
    body_timeout: float = Field(60.0, gt=0, description="longest wait for the next piece of a request's body")

    # -- limits
    api_keys_file: str | None = Field(
        None, description="file of our own API keys, name:sha256:hash a line; without one of them requests are refused"
    )
    api_keys: Names = Field([], description="such lines, beside those of the file")
    proxy_paths: Names = Field(
        ["/v1/", "GET /health", "GET /ping", "GET /version"],
        description="what passes to the upstream where there are API keys: paths (all below, with a slash at the end), each "
        "for GET, HEAD, OPTIONS and POST, or for the method before it",
    )
    limit_requests_per_minute: int = Field(
        0, ge=0, description="responses that an owner may ask for in a minute, at all replicas; 0 is no limit"
    )
    limit_streams: int = Field(0, ge=0, description="most streams of an owner that are open at a time; 0 is no limit")
    limit_background: int = Field(
        0, ge=0, description="most background responses of an owner that wait or run at a time; 0 is no limit"
    )
    limit_stored_bytes: int = Field(
        0, ge=0, description="most bytes of stored responses and conversations of an owner, as JSON; 0 is no limit"
    )

    # -- telemetry
    admin_port: int = Field(0, ge=0, le=65535, description="port of /livez, /readyz and /metrics; 0 opens none")
    admin_host: str = Field("127.0.0.1", description="address of that port")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what is logged")
    log_format: Literal["human", "json"] = Field("human", description="how it is logged")

    @field_validator("upstream", "cache_embedding_url")
    @classmethod
    def _server_url(cls, value: str | None) -> str | None:
        """Accepts the URL with and without its /v1, as clients have it."""
        if value is None:
            return None
        return _http_url(value).rstrip("/").removesuffix("/v1")

    @field_validator("sandbox_url")
    @classmethod
    def _sandbox_url(cls, value: str | None) -> str | None:
        """Accepts the URL with and without its /mcp."""
        if value is None:
            return None
        return _http_url(value).rstrip("/").removesuffix("/mcp") + "/mcp"

    @field_validator("mcp_servers", "connectors", mode="before")
    @classmethod
    def _by_label(cls, value: object) -> object:
        """Accepts a list too, in which each has its ``label``."""
        decoded = json.loads(value) if isinstance(value, str) else value
        if not isinstance(decoded, list):
            return decoded
        if not all(isinstance(server, dict) and isinstance(server.get("label"), str) for server in decoded):
            raise ValueError("each server in the list must have a label")
        return {server["label"]: {name: server[name] for name in server if name != "label"} for server in decoded}

    @field_validator("web_search_url")
    @classmethod
    def _search_url(cls, value: str | None) -> str | None:
        return _http_url(value).rstrip("/") if value is not None else None

    @model_validator(mode="after")
    def _search_is_complete(self) -> Settings:
        """Says at the start what a search would lack later."""
        wanted = {"searxng": "web_search_url", "tavily": "web_search_key", "brave": "web_search_key", "mcp": "web_search_tool"}
        lacking = wanted.get(self.web_search)
        if lacking and not getattr(self, lacking):
            raise ValueError(f"web_search: {self.web_search} needs {lacking}")
        if self.web_search == "mcp":
            label, slash, tool = (self.web_search_tool or "").partition("/")
            if not slash or not tool:
                raise ValueError("web_search_tool must be label/tool")
            if label not in self.mcp_servers:
                raise ValueError(f"web_search_tool names '{label}', which is not among mcp_servers")
            if self.mcp_servers[label].excludes(tool):
                raise ValueError(f"web_search_tool names '{tool}', which allowed_tools of '{label}' does not allow")
        return self

    @model_validator(mode="after")
    def _tenants_have_a_header(self) -> Settings:
        if self.tenant_keys and not self.tenant_header:
            raise ValueError("tenant_keys needs tenant_header")
        return self

    @field_validator("base_path")
    @classmethod
    def _base_path(cls, value: str) -> str:
        if value and not value.startswith("/"):
            raise ValueError("must begin with a slash")
        return value.rstrip("/")

    @field_validator("secret_keys")
    @classmethod
    def _long_enough(cls, value: list[SecretStr]) -> list[SecretStr]:
        if any(len(secret.get_secret_value()) < LEAST_SECRET for secret in value):
            raise ValueError(f"each must have at least {LEAST_SECRET} characters")
        return value

    @field_validator("cache_ask")
    @classmethod
    def _ways_to_ask(cls, value: list[str]) -> list[str]:
        if not set(value) <= {"body", "header"}:
            raise ValueError("may contain body and header")
        return value

    @model_validator(mode="after")
    def _can_embed(self) -> Settings:
        if self.cache == "semantic" and not self.cache_embedding_model:
            raise ValueError("cache: semantic requires cache_embedding_model")
        return self

    @field_validator("forward_headers")
    @classmethod
    def _forwardable(cls, value: list[str]) -> list[str]:
        names = [name.lower() for name in value]
        if own := sorted((OF_EACH_CALL | {"x-request-id"}).intersection(names)):
            raise ValueError(f"cannot hold {', '.join(own)}: each call of the upstream has its own")
        return names

    @field_validator("proxy_paths")
    @classmethod
    def _paths(cls, value: list[str]) -> list[str]:
        if not all(re.fullmatch(r"([A-Z]+ )?/[!-~]*", line) for line in value):
            raise ValueError("each must be a path that begins with a slash, or a method and such a path")
        return value

    @field_validator(
        "cache_ask", "forward_headers", "cors_origins", "secret_keys", "api_keys", "proxy_paths", "tenant_keys", mode="before"
    )
    @classmethod
    def _comma_separated(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        if value.lstrip().startswith("["):
            return json.loads(value)
        return [name.strip() for name in value.split(",") if name.strip()]


def _http_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an http:// or https:// URL")
    if parts.username or parts.password:
        raise ValueError("must hold no credentials: it is logged; keys have settings of their own")
    _ = parts.port  # raises for one that is no number
    return value
