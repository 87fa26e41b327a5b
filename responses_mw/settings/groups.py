"""The groups of settings. A class receives only the groups that it uses, not all settings."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, SecretStr, field_validator, model_validator

from ..network import is_loopback
from .values import (
    JSON_OBJECT,
    LIST,
    URL,
    BaseURL,
    Duration,
    FilesURL,
    Group,
    KeyLines,
    Names,
    Secrets,
    ServerURL,
    Size,
    TraceURL,
    WholeDuration,
    check_networks,
)

EVERY_TOOL = "*"
"""Entry in a list of tool names that matches every tool."""


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


ToolServers = Annotated[dict[str, ToolServer], *JSON_OBJECT]


class ServerSettings(Group):
    """Client interface, shutdown, logs and the admin port."""

    base_path: Annotated[str, AfterValidator(lambda path: path.rstrip("/"))] = Field("", pattern="^(/.*)?$")
    """path prefix before /v1, e.g. /openai"""
    cors_origins: Names = Field([])
    """origins of web pages that may send requests, in addition to the server's own origin; * allows all"""
    allowed_hosts: Names = Field(
        [],
        description="host names that this server and its admin port accept, *.example.com for all names below, * for all "
        "(unset: only localhost on a loopback address, all names on other addresses); IP addresses are always accepted",
    )
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
    idle_timeout: WholeDuration = Field(75, gt=0)
    """time that a connection stays open between two requests; longer than that of a proxy in front"""
    trusted_proxies: Annotated[Names, AfterValidator(check_networks)] = Field([])
    """addresses or networks (10.0.0.0/8) of proxies whose X-Forwarded-For names the client (unset: 127.0.0.1); * trusts all"""
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

    @property
    def admin_is_local(self) -> bool:
        """Whether the admin port is bound to a loopback address."""
        return is_loopback(self.admin_host)


class RedisSettings(Group):
    """The Redis that stores the state."""

    url: SecretStr | None = None
    """Redis URL: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// (unset: an embedded Valkey)"""
    data_dir: str | None = None
    """data directory of the embedded Valkey (unset: in memory only)"""
    allow_eviction: bool = False
    """start even if Redis may evict state (maxmemory-policy is not noeviction)"""
    timeout: Duration = Field(2.0, gt=0)
    """timeout of a Redis call; making a new connection and its login may take as long again (not in a cluster)"""


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
    api_keys: KeyLines = Field(
        [],
        description="API keys as name:sha256:hash, or @PATH of a file with one key per line; ;models=A,B at the end of a key "
        "restricts it to these models; if set, requests without a key are refused",
    )
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
    embedding_model: str = Field("builtin", min_length=1)
    """embedding model of the semantic cache: builtin, or a model of the server with /v1/embeddings"""
    embedding_url: BaseURL | None = None
    """URL of the server with /v1/embeddings (unset: the upstream); unused by builtin"""
    embedding_api_key: SecretStr | None = None
    """API key for embedding_url"""
    threshold: float = Field(0.5, ge=0, le=1)
    """minimum cosine similarity of a question that is a candidate for a semantic hit"""
    judge: Literal["off", "race", "before"] = "race"
    """when the judge of candidates is asked: race, with the upstream; before, before it; off: a hit needs the same words"""
    judge_kind: Literal["chat", "score"] = "chat"
    """kind of judge: chat, a chat model that says yes or no; score, a cross-encoder at /v1/score, /v1/rerank or /rerank"""
    judge_model: str | None = Field(None, min_length=1)
    """model that judges (unset: the model of the request)"""
    judge_url: BaseURL | None = None
    """URL of the judge's server (unset: the upstream)"""
    judge_api_key: SecretStr | None = None
    """API key for judge_url"""
    judge_prompt: str | None = Field(None, min_length=1)
    """instructions of a chat judge (unset: built-in ones)"""
    judge_min_probability: float = Field(0.9, gt=0, le=1)
    """minimum probability of an approval"""
    judge_max_per_minute: int = Field(600, ge=0)
    """maximum number of requests to the judge per minute and process"""
    judge_timeout: Duration = Field(5, gt=0)
    """timeout of the judge; a timeout is treated as a refusal, and the pair is judged again later"""
    audit: float = Field(0.01, ge=0, le=1)
    """share of the hits for other questions that the upstream answers too, so that the judge can compare both answers"""
    max_mode: Literal["off", "exact", "semantic"] = "semantic"
    """highest cache mode that a request may select"""
    namespace: str = ""
    """part of every cache key; changing it invalidates the cache"""
    timeout: Duration = Field(0.3, gt=0)
    """timeout of the cache's Redis calls and of an embedding; a timeout is treated as a cache miss"""
    max_owner_bytes: Size = Field(1024**3, gt=0)
    """maximum size of an owner's cached answers"""

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        if self.embedding_url is not None and self.embedding_model == "builtin":
            raise ValueError("embedding_url requires embedding_model")
        if self.judge_url is not None and self.judge_model is None:
            raise ValueError("judge_url requires judge_model")
        return self


HostedTool = Literal[
    "code_interpreter",
    "computer",
    "computer_use",
    "computer_use_preview",
    "container",
    "file_search",
    "image_generation",
    "programmatic_tool_calling",
    "web_search",
    "web_search_preview",
]


class ToolSettings(Group):
    """Tools that the server calls: tools of MCP servers and the code interpreter."""

    mcp_servers: ToolServers = Field({})
    """MCP servers by label or connector_id, as JSON: {"label": {"url", "headers", "authorization", "allowed_tools", ...}}"""
    allow_private_urls: bool = False
    """allow requests to name MCP servers and files at private addresses; every caller can then reach them"""
    sandbox_url: Annotated[ServerURL, AfterValidator(lambda url: url.removesuffix("/mcp") + "/mcp")] | None = None
    """URL of the code interpreter's sandbox (responses-mw sandbox), e.g. http://sandbox:8090"""
    sandbox_token: SecretStr | None = None
    """bearer token of the sandbox"""
    timeout: Duration = Field(60.0, gt=0)
    """timeout of a tool call or a web search"""
    omitted: Annotated[list[HostedTool], *LIST] = Field(["web_search", "web_search_preview", "image_generation"])
    """hosted tools that are not offered to the model if this server does not serve them; requests with others get a 400"""


SEARCH_PROVIDERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "searxng": ("url",),
    "tavily": ("api_key",),
    "brave": ("api_key",),
}
"""Maps each value of `search.provider` to the settings that it requires. The classes are in `tools/search.py`."""
_WITH_URL = ", ".join(name for name, required in SEARCH_PROVIDERS.items() if "url" in required)


class SearchSettings(Group):
    """The web search tool."""

    provider: str = Field(
        "none",
        pattern=f"^({'|'.join(SEARCH_PROVIDERS)}|[^/]+/.+)$",
        description=f"provider of web_search: {', '.join(SEARCH_PROVIDERS)}, or label/tool for a tool in tools.mcp_servers",
    )
    url: ServerURL | None = Field(
        None, description=f"URL of the provider; required for {_WITH_URL}, optional for providers that have a default URL"
    )
    api_key: SecretStr | None = None
    """API key for the search provider"""

    @model_validator(mode="after")
    def _check_complete(self) -> Self:
        missing = [name for name in SEARCH_PROVIDERS.get(self.provider, ()) if not getattr(self, name)]
        if missing:
            raise ValueError(f"provider: {self.provider} needs {' and '.join(missing)}")
        return self


class FileSettings(Group):
    """Files that clients upload."""

    enabled: bool = True
    """serve /v1/files; if false, or if each upstream has api: responses, these paths are proxied to the upstream"""
    url: FilesURL | None = Field(
        None,
        description="where files are stored: file:///directory, s3://bucket/prefix, gs://bucket/prefix or "
        "az://container/prefix (unset: files of up to 1 MiB in Redis)",
    )
    max_bytes: Size = Field(512 * 1024**2, gt=0)
    """maximum size of a file"""
    embedding_model: str = Field("builtin", min_length=1)
    """embedding model of vector stores: builtin, or a model of the server with /v1/embeddings"""
    embedding_url: BaseURL | None = None
    """URL of the server with /v1/embeddings (unset: the upstream); unused by builtin"""
    embedding_api_key: SecretStr | None = None
    """API key for embedding_url; without it, the upstream is asked with upstream.api_key"""
    embedding_timeout: Duration = Field(30, gt=0)
    """timeout of a request for embeddings"""
    rerank_model: str | None = Field(None, min_length=1)
    """model that reranks the results of searches, at a server with /v1/rerank, /v1/score or /rerank (unset: none)"""
    rerank_url: BaseURL | None = None
    """URL of the server that reranks (unset: the upstream); it needs no rerank_model if it has only one"""
    rerank_api_key: SecretStr | None = None
    """API key for rerank_url; without it, the upstream is asked with upstream.api_key"""
    rerank_timeout: Duration = Field(10, gt=0)
    """timeout of a request to rerank results"""
    rewrite_model: str | None = Field(None, min_length=1)
    """chat model that rewrites the queries of searches with rewrite_query (unset: these get a 400)"""
    docling_url: BaseURL | None = None
    """URL of a docling-serve that recognizes the text of images and scanned PDF files in vector stores (unset: they fail)"""
    docling_api_key: SecretStr | None = None
    """API key for docling_url, sent as X-Api-Key"""
    docling_timeout: Duration = Field(600, gt=0)
    """timeout of recognizing the text of one document"""
    ingestion_concurrency: int = Field(2, ge=0)
    """maximum number of files that this process adds to vector stores at a time; 0 adds none"""
    search_memory_bytes: Size = Field(512 * 1024**2, gt=0)
    """maximum memory of this process for the vectors and words of vector stores that it has searched"""

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if self.embedding_url is not None and self.embedding_model == "builtin":
            raise ValueError("embedding_url requires embedding_model")
        return self


class CompactionSettings(Group):
    """Compaction of histories."""

    prompt: str | None = None
    """instruction to summarize a history (unset: a built-in one)"""


class LimitSettings(Group):
    """Limits of requests, responses, owners and memory."""

    requests_per_minute: int = Field(0, ge=0)
    """maximum number of requests of an owner per minute on all replicas; proxied ones count with auth.api_keys; 0: unlimited"""
    streams: int = Field(0, ge=0)
    """maximum number of open streams of an owner; 0 is unlimited"""
    background: int = Field(0, ge=0)
    """maximum number of unfinished background responses of an owner; 0 is unlimited"""
    connections_per_address: int = Field(0, ge=0)
    """maximum number of connections of a client's address to this process; 0 is unlimited, as needed behind a proxy"""
    stored_bytes: Size = Field(0, ge=0)
    """maximum size of an owner's stored responses, conversations, files and vector stores; 0 is unlimited"""
    max_request_bytes: Size = Field(32 * 1024**2, gt=0)
    """maximum size of a request body and of a stored response; a history may be twice as large, and take 16 times the memory"""
    memory_bytes: Size = Field(
        256 * 1024**2,
        gt=0,
        description="maximum memory of this process for each of: large request bodies being received; large responses not "
        "yet read; WebSocket messages being received; unstored WebSocket responses (a quarter per owner); vectors of the "
        "semantic cache",
    )


class UISettings(Group):
    """The inspector: the index of recent responses, and its pages on the admin port."""

    mode: Literal["off", "metadata", "content"] = "off"
    """what the inspector shows of recent responses: nothing, facts such as status, tokens and errors, or also their content"""
    responses: int = Field(20_000, ge=100, le=1_000_000)
    """number of recent responses in the index, each with about 500 bytes in Redis; none are added if the mode is off"""
    token: Annotated[SecretStr, Field(min_length=16)] | None = None
    """token for the inspector's pages and JSON; required if the admin port is not bound to a loopback address"""
    actions: bool = False
    """let users of the pages cancel and delete responses, send requests as any caller, and empty the cache"""
    captures: int = Field(100, ge=0, le=10_000)
    """number of failed or captured responses whose requests to the upstream, and its answers, are kept for up to a day"""
    trace_url: TraceURL | None = None
    """URL of a trace in your tracing system, with `{trace_id}` in place of its id (unset: the inspector links to no traces)"""
