"""Every setting, in one typed place.

Each is an environment variable (``RESPONSES_MW_`` and the name in capitals) and, for ``responses-mw serve``, a flag. Inside
vLLM, which builds the middleware without arguments, the environment is the only way. Lists are given as JSON
or comma-separated.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

MIB = 1024 * 1024
LEAST_SECRET = 32

Names = Annotated[list[str], NoDecode]


class Settings(BaseSettings):
    """Settings of the middleware. Times are in seconds, sizes in bytes."""

    model_config = SettingsConfigDict(env_prefix="RESPONSES_MW_", extra="forbid", frozen=True, validate_default=True)

    # -- the upstream
    upstream: str | None = Field(
        None, description="URL of the Chat Completions server, e.g. http://vllm:8000 (not set: the app it is mounted in)"
    )
    upstream_api_key: SecretStr | None = Field(None, description="key for the upstream, in place of the caller's own")
    dialect: Literal["auto", "openai", "vllm", "tgi", "sglang", "llamacpp", "ollama", "litellm", "transformers"] = Field(
        "auto", description="what kind of server the upstream is; auto asks it"
    )
    forward_headers: Names = Field(
        ["traceparent", "tracestate", "baggage", "x-session-id", "x-vllm-priority", "openai-organization", "openai-project"],
        description="request headers that go on to the upstream, beside authorization",
    )
    think_tag: str | None = Field(None, description="tag of reasoning that the model writes into its text, e.g. think")
    connect_timeout: float = Field(5.0, gt=0, description="longest wait for a connection to the upstream")
    first_byte_timeout: float = Field(600.0, gt=0, description="longest wait for the upstream's answer to begin")
    idle_timeout: float = Field(120.0, gt=0, description="longest silence of the upstream within an answer")
    upstream_connections: int = Field(10_000, gt=0, description="most connections to the upstream at a time")
    status_grace: float = Field(
        0.05,
        ge=0,
        description="how long a stream waits for the upstream's status before its own 200 is sent; retries fit within",
    )

    # -- what we answer
    base_path: str = Field("", description="path before /v1, e.g. /openai")
    cors_origins: Names = Field([], description="origins that browsers may call from; * for all")
    sse_done: bool = Field(True, description="end streams with 'data: [DONE]'")
    keep_alive: float = Field(15.0, gt=0, description="send a comment on a stream that was silent for so long")
    keepalive_event: bool = Field(
        False, description="send a 'keepalive' event in place of the comment (for Codex; some old SDKs fail on it)"
    )

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
    max_response_bytes: int = Field(16 * MIB, gt=0, description="largest response that is stored")
    max_chain_bytes: int = Field(64 * MIB, gt=0, description="largest history that is read for a response")
    max_chain_items: int = Field(10_000, gt=0, description="most items in a history")
    tenant_header: str | None = Field(
        None, description="header by which a trusted gateway tells the owner (not set: the credential is it)"
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

    # -- bounds of a request
    max_body_bytes: int = Field(32 * MIB, gt=0, description="largest request body")
    max_input_items: int = Field(10_000, gt=0, description="most input items")
    max_tools: int = Field(512, gt=0, description="most tools")
    max_depth: int = Field(64, gt=0, description="deepest nesting of a request's JSON")

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what is logged")

    @field_validator("upstream")
    @classmethod
    def _upstream_url(cls, value: str | None) -> str | None:
        """Accepts the URL with and without its /v1, as clients have it."""
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be an http:// or https:// URL")
        _ = parts.port  # raises for one that is no number
        return value.rstrip("/").removesuffix("/v1")

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

    @field_validator("forward_headers", "cors_origins", "secret_keys", mode="before")
    @classmethod
    def _comma_separated(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        if value.lstrip().startswith("["):
            return json.loads(value)
        return [name.strip() for name in value.split(",") if name.strip()]
