"""The sandbox service (`responses-mw sandbox`), which runs Python code in containers for the code interpreter tool."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from ..settings import Environment
from ..settings.values import Names

MIB = 1024 * 1024
MIN_MEMORY = 64 * MIB


class SandboxSettings(BaseSettings):
    """Settings of `responses-mw sandbox`, read from environment variables that begin with `RESPONSES_MW_SANDBOX_`."""

    model_config = SettingsConfigDict(env_prefix="RESPONSES_MW_SANDBOX_", extra="forbid", frozen=True, validate_default=True)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8090, ge=0, le=65535, description="port to listen on")
    token: SecretStr | None = Field(
        None, min_length=16, description="bearer token that callers must send; required unless the host is a loopback address"
    )
    allow_weak_isolation: bool = Field(False, description="start without namespaces; only for a pod that is itself the sandbox")
    packages: Names = Field(
        [], description="directories of packages that the code may import, created with pip install --target"
    )

    # -- containers
    max_containers: int = Field(
        16,
        gt=0,
        le=1000,
        description="maximum number of containers; a further one replaces an idle one of the owner with the most containers",
    )
    keep: float = Field(1200.0, gt=0, description="time that a container is kept after its last call, in seconds")
    first_uid: int = Field(
        40_000,
        gt=0,
        le=60_000,
        description="user id of the first container, if the service runs as root; the other containers have the next ids",
    )

    # -- limits of a container
    call_timeout: float = Field(60.0, gt=0, description="timeout of a call, in seconds; after it, the container is stopped")
    cpu_seconds: int = Field(300, gt=0, description="maximum CPU time of a process over all calls, in seconds")
    memory_bytes: int = Field(
        1024 * MIB, ge=MIN_MEMORY, description="maximum memory of a container, and address space of a process"
    )
    disk_bytes: int = Field(
        256 * MIB, ge=MIB, description="maximum size of a container's files, which are in memory; no limit without namespaces"
    )
    file_bytes: int = Field(64 * MIB, ge=MIB, description="maximum size of a file, and of the output of a call")
    max_processes: int = Field(64, gt=0, description="maximum number of processes and threads of a container")
    max_open_files: int = Field(256, ge=32, description="maximum number of open files of a process")
    output_bytes: int = Field(
        100_000,
        gt=0,
        description="maximum size in the outcome of a call: bytes of stdout and of stderr, characters of the result and of the "
        "traceback",
    )

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_args: Any, **_others: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, Environment(settings_cls)

    @model_validator(mode="after")
    def _check_token(self) -> Self:
        if self.token is None and not _is_loopback(self.host):
            raise ValueError("a token is required to listen on any address but loopback: every caller can run code")
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
