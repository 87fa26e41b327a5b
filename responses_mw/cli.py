"""The command line: ``responses-mw serve``, ``worker``, ``cache``, ``sandbox``, ``demo``."""

from __future__ import annotations

import asyncio
import gc
import math
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, CliImplicitFlag, CliPositionalArg, SettingsConfigDict, SettingsError

from . import flags, sandbox
from .app import UnfitState, open_core, open_state, open_upstream
from .asgi.admin import checks, open_admin
from .auth import APIKeys, InvalidKeys
from .cache import Entries
from .crypto import Sealer
from .engine.prompt_templates import Prompts, UnfitPrompt
from .errors import APIError, StartupError
from .jobs import Worker
from .sandbox import SandboxSettings
from .settings import Settings
from .state import EmbeddedFailed
from .telemetry import set_up_logs, set_up_sdk
from .upstream import Caller

_FLAGS = SettingsConfigDict(cli_kebab_case=True, cli_hide_none_type=True, cli_implicit_flags=True)


_PATIENCE = 10.0
"""Seconds that a check waits for an upstream that is connected and silent."""


class Serve(Settings):
    """Serve the Responses API in front of a Chat Completions server, and pass every other path through to it:

        responses-mw serve --upstream http://vllm:8000

    Every flag is also an environment variable: RESPONSES_MW_ and its name in capitals.
    """

    model_config = SettingsConfigDict(cli_prog_name="responses-mw serve", **_FLAGS)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on")
    check: CliImplicitFlag[bool] = Field(
        False, description="only check the settings and the upstream, say what was found, and exit"
    )

    def cli_cmd(self) -> None:
        if self.upstream is None:
            sys.exit("responses-mw: no upstream is set. Use --upstream http://host:port, or RESPONSES_MW_UPSTREAM.")
        if self.check:
            set_up_logs("error", self.log_format)  # what is to be known it says itself
            sys.exit(asyncio.run(check(self)))
        _log(self)
        serve(self)


class Work(Settings):
    """Run background responses that servers with the same Redis and the same secret_keys took; no HTTP is served.

    Every flag is also an environment variable: RESPONSES_MW_ and its name in capitals.
    """

    model_config = SettingsConfigDict(cli_prog_name="responses-mw worker", **_FLAGS)

    def cli_cmd(self) -> None:
        _log(self)
        missing = [name for name in ("upstream", "redis", "secret_keys", "workers") if not getattr(self, name)]
        if missing:
            sys.exit(f"responses-mw: a worker needs {', '.join(missing)}: see responses-mw worker --help.")
        try:
            asyncio.run(work(self))
        except StartupError as error:
            sys.exit(f"responses-mw: {error}")


class CacheOf(Settings):
    """Tell how much the cache holds (stats), or empty it (purge): of one owner, or of all.

    Every flag is also an environment variable: RESPONSES_MW_ and its name in capitals.
    """

    model_config = SettingsConfigDict(cli_prog_name="responses-mw cache", **_FLAGS)

    action: CliPositionalArg[Literal["stats", "purge"]] = Field(description="stats or purge")
    owner: str | None = Field(None, description="whose: the hash that stands in the keys of Redis (not set: everybody's)")

    def cli_cmd(self) -> None:
        _log(self)
        if self.redis is None:
            sys.exit("responses-mw: an embedded cache ends with its server. Use --redis, or RESPONSES_MW_REDIS.")
        sys.exit(asyncio.run(tell_or_purge(self)))


class Demo(BaseSettings):
    """Start a demo upstream and the server in front of it, and let the official openai client take a tour."""

    model_config = SettingsConfigDict(env_prefix="RESPONSES_MW_DEMO_", cli_prog_name="responses-mw demo", **_FLAGS)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port to listen on; 0 takes a free one (not set: 8080, or a free one where that is in use)",
    )
    once: CliImplicitFlag[bool] = Field(False, description="exit after the tour, with status 0 if all went well")

    def cli_cmd(self) -> None:
        from .demo import run

        sys.exit(run(once=self.once, host=self.host, port=self.port))


class Sandbox(SandboxSettings):
    """Run the sandbox in which a code interpreter runs its code: an MCP server of its own.

    Every flag is also an environment variable: RESPONSES_MW_SANDBOX_ and its name in capitals.
    """

    model_config = SettingsConfigDict(cli_prog_name="responses-mw sandbox", **_FLAGS)

    def cli_cmd(self) -> None:
        sandbox.serve(self)


COMMANDS: dict[str, type[BaseSettings]] = {"serve": Serve, "worker": Work, "cache": CacheOf, "sandbox": Sandbox, "demo": Demo}


def _log(settings: Settings) -> None:
    set_up_logs(settings.log_level, settings.log_format)


def serve(settings: Serve) -> None:
    """Runs the server until it is told to stop."""
    import uvicorn

    from .app import create_app
    from .asgi.listener import HTTPProtocol, websocket_protocol
    from .inbound import Inbound

    set_up_sdk()
    # What is loaded by now stays: the collector need not look at it again and again, nor often at what streams leave behind.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    print(f"responses-mw: http://{settings.host}:{settings.port}/v1 in front of {settings.upstream}", flush=True)
    try:
        app = create_app(settings)
    except InvalidKeys as error:
        sys.exit(f"responses-mw: {error}")

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.stop()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=HTTPProtocol,
        log_config=None,  # what is logged goes our way
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=math.ceil(settings.drain_seconds),
        ws=websocket_protocol(Inbound(max(settings.max_inbound_bytes, settings.max_body_bytes))),
        ws_max_size=settings.max_body_bytes,
        ws_ping_timeout=60.0,  # a client that is slow to read is slow to answer, too
        ws_per_message_deflate=False,  # it costs more than all the rest of a token
        server_header=False,
        date_header=False,
    )
    server = Server(config)
    server.run()
    if not server.started:
        sys.exit(3)  # as uvicorn itself


async def work(settings: Settings) -> None:
    """Runs background responses until it is told to stop."""
    set_up_sdk()
    stopping = asyncio.Event()
    async with open_core(_no_app, settings) as (upstream, state, sealer, runner, _):
        assert state is not None
        worker = Worker(runner, state, sealer, settings)

        def stop() -> None:
            stopping.set()
            worker.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        async with open_admin(settings, checks(upstream, state, lambda: not stopping.is_set()), state):
            print(f"responses-mw: working for {settings.upstream}", flush=True)
            await worker.run()


async def tell_or_purge(settings: CacheOf) -> int:
    """Does what was asked of the cache; 0 if it could be done."""
    try:
        async with open_state(settings) as state:
            assert state is not None
            entries = Entries(state.client, settings)
            if settings.action == "purge":
                print(f"cache: {await entries.purge(settings.owner)} entries removed")
                return 0
            stats = await entries.stats(settings.owner)
    except (APIError, UnfitState, EmbeddedFailed, ValueError) as error:
        print(f"cache: {error}", file=sys.stderr)
        return 1
    print(f"cache: {stats.entries} entries of {stats.owners} owners, in {stats.partitions} partitions, {stats.bytes} bytes")
    return 0


async def check(settings: Settings) -> int:
    """Says what the upstream and the store are; 0 if they can be used."""
    timeouts = {name: min(getattr(settings, name), _PATIENCE) for name in ("first_byte_timeout", "idle_timeout")}
    settings = settings.model_copy(update=timeouts)
    results = [_check_files(settings), await _check_upstream(settings), await _check_state(settings)]
    return 0 if all(results) else 1


def _check_files(settings: Settings) -> bool:
    try:
        APIKeys.of(settings)
        Prompts(settings.prompts_dir)
    except (InvalidKeys, UnfitPrompt, OSError) as error:
        print(f"settings: {error}", file=sys.stderr)
        return False
    print("settings: valid")
    return True


async def _check_upstream(settings: Settings) -> bool:
    caller = Caller()
    try:
        async with open_upstream(_no_app, settings) as upstream:
            models = await upstream.models(caller)
            dialect = await upstream.dialect(caller)
    except APIError as error:
        advice = " (its key: --upstream-api-key)" if error.status in (401, 403) else ""
        print(f"upstream: {settings.upstream}: {error.message}{advice}", file=sys.stderr)
        return False
    print(f"upstream: {settings.upstream} answers")
    print(f"dialect:  {dialect.name}{'' if settings.dialect == 'auto' else ' (set)'}")
    print(f"models:   {', '.join(model['id'] for model in models) or 'none'}")
    return True


async def _check_state(settings: Settings) -> bool:
    try:
        async with open_state(settings) as state:
            if state is None:
                print("state:    none: responses are not stored")
                return True
            health = await state.check()
            keys = [secret.get_secret_value() for secret in settings.secret_keys]
            agree = not keys or await state.check_keys(Sealer(keys).key_ids)
    except (APIError, UnfitState, EmbeddedFailed) as error:
        print(f"state:    {error}", file=sys.stderr)
        return False
    kind = "" if settings.redis else " (embedded)"
    most = health.max_memory or "unlimited"
    print(f"state:    {health.server}{kind}, {health.policy}, {health.used_memory} of {most} bytes used")
    for warning in health.warnings:
        print(f"          {warning}")
    if not agree:
        print("          secret_keys are not those of the other replicas", file=sys.stderr)
    return agree


async def _no_app(*_: object) -> None:
    raise NotImplementedError("a check calls no application")


def _usage() -> str:
    lines = [f"  {name:8}{(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: responses-mw COMMAND [options]", "", "commands:", *lines, "", "responses-mw COMMAND --help tells more."]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of ``responses-mw``."""
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(_usage())
        return
    command = COMMANDS.get(name)
    if command is None:
        sys.exit(f"responses-mw: unknown command '{name}'\n\n{_usage()}")
    try:
        flags.run(command, rest)
    except (ValidationError, SettingsError) as error:
        sys.exit(f"responses-mw {name}: {_explained(error)}")
    except ModuleNotFoundError as missing:  # the light core is for host applications
        sys.exit(f"responses-mw {name} needs the package {missing.name}: pip install 'responses-mw[all]'")


def _explained(error: ValidationError | SettingsError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    faults = [(".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")) for fault in error.errors()]
    return "; ".join(f"{where}: {what}" if where else what for where, what in faults)
