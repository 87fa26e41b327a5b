"""The settings of upstreams: those of one upstream, and the rules that hold between several."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, StringConstraints, field_validator, model_validator

from .values import (
    ACTING_HEADERS,
    CREDENTIAL_HEADERS,
    HEADER_NAME,
    HEADER_VALUE,
    JSON_OBJECT,
    LIST,
    PER_REQUEST_HEADERS,
    Duration,
    EndpointURLs,
    Group,
    Names,
    NamesByName,
    SecretHeaders,
)

DEFAULT = "default"
"""Name of the upstream that the group `upstream` describes."""
UPSTREAM_NAME = r"[a-z0-9][a-z0-9_-]{0,63}"

Fallback = Annotated[str, StringConstraints(pattern=rf"^{UPSTREAM_NAME}(:.+)?$")]


class UpstreamSettings(Group):
    """The Chat Completions servers behind the middleware."""

    url: EndpointURLs = Field(())
    """URLs of equal servers: http://vllm:8000, or dns+http://vllm:8000 for each address of the name (unset: the wrapped app)"""
    api_key: SecretStr | None = None
    """API key sent to the upstream instead of the caller's credential; proxied requests get it only if auth.api_keys is set"""
    headers: SecretHeaders = Field({})
    """headers added to requests to the upstream, as JSON, e.g. {"api-key": "..."}; proxied requests get them like api_key"""
    ca_file: str | None = None
    """PEM file of the CA certificates that the upstream's certificate is checked against (unset: the system's)"""
    client_certificate: str | None = None
    """PEM file of the client certificate that is sent to the upstream, with its chain"""
    client_key: str | None = None
    """PEM file of the client certificate's private key (unset: client_certificate contains it)"""
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
    session_header: str = ""
    """header that carries a hashed key of the chain to a router in the upstream, e.g. X-Session-ID (unset: none)"""
    models: Names = Field([])
    """models that the upstream serves (unset: those that it lists)"""
    aliases: NamesByName = Field({})
    """public names of models, as JSON: {"llama": "meta-llama/Llama-3.3-70B-Instruct"}; clients use these names only"""
    fallbacks: Annotated[list[Fallback], *LIST] = Field([])
    """upstreams that get a request if this one cannot begin to answer it, in order: name, or name:model for another model"""
    allowed_fields: Names = Field([])
    """fields that clients may send although they steer the upstream and api_key is sent: priority, ...; * for all"""
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

    @field_validator("session_header")
    @classmethod
    def _check_session_header(cls, value: str) -> str:
        name = value.lower()
        if name in PER_REQUEST_HEADERS | CREDENTIAL_HEADERS | {"x-request-id"}:
            raise ValueError(f"cannot be {name}, which has another meaning")
        if name and not HEADER_NAME.fullmatch(name):
            raise ValueError("must be the name of a header")
        return name

    @field_validator("forward_headers")
    @classmethod
    def _check_forward_headers(cls, value: list[str]) -> list[str]:
        names = [name.lower() for name in value]
        if own := sorted((PER_REQUEST_HEADERS | {"x-request-id"}).intersection(names)):
            raise ValueError(f"cannot contain {', '.join(own)}: each upstream request has its own")
        return names

    @field_validator("headers")
    @classmethod
    def _check_headers(cls, value: dict[str, SecretStr]) -> dict[str, SecretStr]:
        headers = {name.lower(): secret for name, secret in value.items()}
        if own := sorted((PER_REQUEST_HEADERS | {"x-request-id"}).intersection(headers)):
            raise ValueError(f"cannot contain {', '.join(own)}: each upstream request has its own")
        if not all(map(HEADER_NAME.fullmatch, headers)):
            raise ValueError("the names must be names of headers")
        if not all(HEADER_VALUE.fullmatch(secret.get_secret_value()) for secret in headers.values()):
            raise ValueError("the values must not contain line breaks or characters outside of Latin-1")
        return headers

    @model_validator(mode="after")
    def _check_credentials(self) -> Self:
        if self.api_key is not None and "authorization" in self.headers:
            raise ValueError("api_key and the header authorization replace each other: set only one of them")
        if self.client_key is not None and self.client_certificate is None:
            raise ValueError("client_key needs client_certificate")
        if self.session_header in self.headers:
            raise ValueError("session_header and headers contain the same header: set only one of them")
        return self

    @property
    def own_headers(self) -> dict[str, str]:
        """The operator's headers of each request to the upstream, including `api_key`. The names are in lower case."""
        headers = {name: secret.get_secret_value() for name, secret in self.headers.items()}
        return {**headers, "authorization": f"Bearer {self.api_key.get_secret_value()}"} if self.api_key else headers

    @property
    def forwarded(self) -> list[str]:
        """`forward_headers` or, if it is not set and the operator's credential is sent, those that do not act for its owner."""
        is_chosen = "forward_headers" in self.model_fields_set or not self.has_credential
        return [name for name in self.forward_headers if is_chosen or name not in ACTING_HEADERS]

    @property
    def has_credential(self) -> bool:
        """Whether the operator's headers contain a credential, which the upstream then checks instead of the caller's."""
        return not CREDENTIAL_HEADERS.isdisjoint(self.own_headers)

    def credential_settings(self, name: str) -> str:
        """Return the names of the settings that contain the operator's credential, such as `upstream.api_key`, or "".

        `name` is the name of the upstream.
        """
        has_header, path = not CREDENTIAL_HEADERS.isdisjoint(self.headers), path_of(name)
        named = {f"{path}.api_key": self.api_key is not None, f"{path}.headers": has_header}
        return " or ".join(name for name, is_set in named.items() if is_set)

    @property
    def idle_timeout(self) -> float:
        """Maximum number of seconds without data within an answer of the upstream."""
        return self.timeout / 5


UpstreamName = Annotated[str, StringConstraints(pattern=f"^{UPSTREAM_NAME}$")]
Upstreams = Annotated[dict[UpstreamName, UpstreamSettings], *JSON_OBJECT]


def check_upstreams(upstreams: Mapping[str, UpstreamSettings]) -> None:
    """Check the settings that refer to other upstreams. Raises `ValueError` if they contradict each other."""
    for name, upstream in upstreams.items():
        for fallback in upstream.fallbacks:
            _check_fallback(name, fallback.partition(":")[0], upstreams)
    _check_names(upstreams)


def _check_fallback(name: str, other: str, upstreams: Mapping[str, UpstreamSettings]) -> None:
    if other == name:
        raise ValueError(f"{path_of(name)}.fallbacks contains the upstream itself")
    if other not in upstreams:
        raise ValueError(f"{path_of(name)}.fallbacks contains '{other}', which is none of: {', '.join(upstreams)}")


def _check_names(upstreams: Mapping[str, UpstreamSettings]) -> None:
    """Check that every alias leads to one upstream."""
    found: dict[str, str] = {}
    for name, upstream in upstreams.items():
        for alias in upstream.aliases:
            if alias in found:
                raise ValueError(f"{path_of(name)}.aliases contains '{alias}', as does {path_of(found[alias])}.aliases")
            found[alias] = name
    for name, upstream in upstreams.items():
        for model in upstream.models:
            if found.get(model, name) != name:
                raise ValueError(f"{path_of(found[model])}.aliases contains '{model}', which is in {path_of(name)}.models")


def path_of(name: str) -> str:
    """Return the path of the settings of the upstream `name`: `upstream` or `upstreams.NAME`."""
    return "upstream" if name == DEFAULT else f"upstreams.{name}"


def with_path_of(name: str, text: str) -> str:
    """Return `text`, which names settings such as `upstream.url`, with those of the upstream `name` instead."""
    return re.sub(r"\bupstream\.(?=[a-z])", f"{path_of(name)}.", text) if name != DEFAULT else text
