"""The command line: ``responses-mw serve``, ``worker``, ``cache``, ``sandbox``, ``demo``."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import re
import signal
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from functools import partial
from inspect import cleandoc
from typing import Any, Literal

from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliImplicitFlag,
    CliPositionalArg,
    CliSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from . import sandbox
from .app import open_core, open_state, open_upstream
from .asgi.admin import checks, open_admin
from .auth import APIKeys, InvalidKeys
from .cache import Entries
from .crypto import Sealer
from .engine.prompt_templates import InvalidPrompt, Prompts
from .errors import APIError, StartupError
from .jobs import Worker
from .sandbox import SandboxSettings
from .settings import Settings, origins, unknown_variables, variables
from .telemetry import set_up_logs, set_up_sdk
from .upstream import Caller

logger = logging.getLogger(__name__)

_FLAGS = SettingsConfigDict(cli_kebab_case=True, cli_hide_none_type=True, cli_implicit_flags=True, cli_avoid_json=True)
_SHORT_FLAGS = {"--upstream": "--upstream.url", "--redis": "--redis.url"}
"""The names of groups cannot be ``cli_shortcuts``."""
_PATIENCE = 10.0
"""Maximum seconds that a check waits for an upstream that is connected and silent."""


class Serve(Settings):
    """Serve the Responses API in front of a Chat Completions server, and pass every other path through to it:

        responses-mw serve --upstream http://vllm:8000

    Every flag is also an environment variable (--cache.mode is RESPONSES_MW_CACHE_MODE) and a key of the --config file.
    --upstream and --redis are short for --upstream.url and --redis.url.
    """

    model_config = SettingsConfigDict(cli_prog_name="responses-mw serve", **_FLAGS)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on")
    check: CliImplicitFlag[bool] = Field(
        False, description="check the settings, the upstream and Redis, print what was found, and exit"
    )

    def cli_cmd(self) -> None:
        if self.check and self.upstream.url is not None:
            set_up_logs("error", self.server.log_format)  # the check prints what matters
            sys.exit(asyncio.run(check(self)))
        _log(self)
        if self.upstream.url is None:
            sys.exit("responses-mw: no upstream is set. Use --upstream http://host:port, or RESPONSES_MW_UPSTREAM_URL.")
        serve(self)


class Work(Settings):
    """Run background responses of servers that have the same Redis and the same auth.secret_keys, without serving HTTP.

    Every flag is also an environment variable (--cache.mode is RESPONSES_MW_CACHE_MODE) and a key of the --config file.
    --upstream and --redis are short for --upstream.url and --redis.url.
    """

    model_config = SettingsConfigDict(cli_prog_name="responses-mw worker", **_FLAGS)

    def cli_cmd(self) -> None:
        _log(self)
        required = {
            "upstream.url": self.upstream.url,
            "redis.url": self.redis.url,
            "auth.secret_keys": self.auth.secret_keys,
            "jobs.concurrency": self.jobs.concurrency,
        }
        missing = [name for name, value in required.items() if not value]
        if missing:
            sys.exit(f"responses-mw: a worker needs {', '.join(missing)}: see responses-mw worker --help.")
        try:
            asyncio.run(work(self))
        except StartupError as error:
            sys.exit(f"responses-mw: {error}")


class CacheOf(Settings):
    """Print the size of the response cache (stats), or empty it (purge), for one owner or for all.

    Every flag is also an environment variable (--cache.mode is RESPONSES_MW_CACHE_MODE) and a key of the --config file.
    --upstream and --redis are short for --upstream.url and --redis.url.
    """

    model_config = SettingsConfigDict(cli_prog_name="responses-mw cache", **_FLAGS)

    action: CliPositionalArg[Literal["stats", "purge"]] = Field(description="stats or purge")
    owner: str | None = Field(None, description="owner, as the hash in the keys of Redis (unset: all owners)")

    def cli_cmd(self) -> None:
        _log(self)
        if self.redis.url is None:
            sys.exit("responses-mw: an embedded cache ends with its server. Use --redis, or RESPONSES_MW_REDIS_URL.")
        sys.exit(asyncio.run(run_cache_command(self)))


class Demo(BaseSettings):
    """Start a demo upstream and a server in front of it, and show a tour with the official openai client."""

    model_config = SettingsConfigDict(env_prefix="RESPONSES_MW_DEMO_", cli_prog_name="responses-mw demo", **_FLAGS)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port to listen on; 0 takes a free one (unset: 8080, or a free one if it is in use)",
    )
    once: CliImplicitFlag[bool] = Field(False, description="exit after the tour, with status 0 if it succeeded")

    def cli_cmd(self) -> None:
        from .demo import run

        sys.exit(run(once=self.once, host=self.host, port=self.port))


class Sandbox(SandboxSettings):
    """Run the sandbox of the code interpreter, which is an MCP server.

    Every flag is also an environment variable: RESPONSES_MW_SANDBOX_ and its name in capitals.
    """

    model_config = SettingsConfigDict(cli_prog_name="responses-mw sandbox", **_FLAGS)

    def cli_cmd(self) -> None:
        _warn_of_unknown_variables()
        sandbox.serve(self)


COMMANDS: dict[str, type[BaseSettings]] = {"serve": Serve, "worker": Work, "cache": CacheOf, "sandbox": Sandbox, "demo": Demo}


def _log(settings: Settings) -> None:
    set_up_logs(settings.server.log_level, settings.server.log_format)
    _warn_of_unknown_variables()


def _warn_of_unknown_variables() -> None:
    if unknown := _unknown_variables():
        logger.warning("unknown settings in the environment: %s", ", ".join(unknown))


def _unknown_variables() -> list[str]:
    return unknown_variables(name for command in COMMANDS.values() for name in variables(command))


def serve(settings: Serve) -> None:
    """Serve until a signal stops the process."""
    import uvicorn

    from .app import create_app
    from .asgi.inbound import Inbound
    from .asgi.listener import END_TIMEOUT, DrainingServer, HTTPProtocol, websocket_protocol

    set_up_sdk()
    # Modules stay loaded, so the collector need not traverse them; what streams leave behind is collected rarely.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    print(f"responses-mw: http://{settings.host}:{settings.port}/v1 in front of {settings.upstream.url}", flush=True)
    try:
        app = create_app(settings)
    except InvalidKeys as error:
        sys.exit(f"responses-mw: {error}")

    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=HTTPProtocol,
        log_config=None,  # set_up_logs has configured logging
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=math.ceil(settings.server.drain_timeout + END_TIMEOUT),
        ws=websocket_protocol(Inbound(max(settings.limits.memory_bytes, settings.limits.max_request_bytes))),
        ws_max_size=settings.limits.max_request_bytes,
        ws_ping_timeout=60.0,  # a client that reads slowly also answers pings slowly
        ws_per_message_deflate=False,  # costs more than everything else that a token does
        server_header=False,
        date_header=False,
    )
    server = DrainingServer(config, app, settings.server.drain_timeout)
    server.run()
    if not server.started:
        sys.exit(3)  # as uvicorn does


async def work(settings: Settings) -> None:
    """Run background responses until a signal stops the process."""
    set_up_sdk()
    stopping = asyncio.Event()
    async with open_core(_no_app, settings) as (upstream, state, sealer, runner, _):
        assert state is not None
        worker = Worker(runner, state, sealer, settings.jobs, settings.redis, drain_timeout=settings.server.drain_timeout)

        def stop() -> None:
            stopping.set()
            worker.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        async with open_admin(settings.server, checks(upstream, state, lambda: not stopping.is_set()), state):
            print(f"responses-mw: working for {settings.upstream.url}", flush=True)
            await worker.run()


async def run_cache_command(settings: CacheOf) -> int:
    """Run ``stats`` or ``purge``, and return the exit status."""
    try:
        async with open_state(settings) as state:
            assert state is not None
            entries = Entries(state.client, settings.cache)
            if settings.action == "purge":
                print(f"cache: {await entries.purge(settings.owner)} entries removed")
                return 0
            stats = await entries.stats(settings.owner)
    except (APIError, StartupError, ValueError) as error:
        print(f"cache: {error}", file=sys.stderr)
        return 1
    print(f"cache: {stats.entries} entries of {stats.owners} owners, in {stats.partitions} partitions, {stats.bytes} bytes")
    return 0


async def check(settings: Settings) -> int:
    """Print what the settings, the upstream and the state are, and return the exit status: 0 if all can be used."""
    timeouts = {name: min(getattr(settings.upstream, name), _PATIENCE) for name in ("first_byte_timeout", "idle_timeout")}
    hasty = settings.model_copy(update={"upstream": settings.upstream.model_copy(update=timeouts)})
    results = [_check_files(settings), await _check_upstream(hasty), await _check_state(settings)]
    return 0 if all(results) else 1


def _check_files(settings: Settings) -> bool:
    try:
        APIKeys.of(settings.auth)
        Prompts(settings.server.prompts_dir)
    except (InvalidKeys, InvalidPrompt, OSError) as error:
        print(f"settings: {error}", file=sys.stderr)
        return False
    if unknown := _unknown_variables():
        print(f"settings: unknown in the environment: {', '.join(unknown)}", file=sys.stderr)
        return False
    print("settings: valid")
    for name, origin in origins(settings).items():
        if name != "check":
            print(f"          {name} from {origin}")
    return True


async def _check_upstream(settings: Settings) -> bool:
    caller = Caller()
    try:
        async with open_upstream(_no_app, settings) as upstream:
            models = await upstream.models(caller)
            dialect = await upstream.dialect(caller)
    except APIError as error:
        advice = " (its key: --upstream.api-key)" if error.status in (401, 403) else ""
        print(f"upstream: {settings.upstream.url}: {error.message}{advice}", file=sys.stderr)
        return False
    print(f"upstream: {settings.upstream.url} answers")
    print(f"dialect:  {dialect.name}{'' if settings.upstream.dialect == 'auto' else ' (set)'}")
    print(f"models:   {', '.join(model['id'] for model in models) or 'none'}")
    return True


async def _check_state(settings: Settings) -> bool:
    try:
        async with open_state(settings) as state:
            if state is None:
                print("state:    none: responses are not stored")
                return True
            health = await state.check()
            keys = [secret.get_secret_value() for secret in settings.auth.secret_keys]
            agree = not keys or await state.check_keys(Sealer(keys).key_ids)
    except (APIError, StartupError) as error:
        print(f"state:    {error}", file=sys.stderr)
        return False
    kind = "" if settings.redis.url else " (embedded)"
    maximum = health.max_memory or "unlimited"
    print(f"state:    {health.server}{kind}, {health.policy}, {health.used_memory} of {maximum} bytes used")
    for warning in health.warnings:
        print(f"          {warning}")
    if not agree:
        print("          auth.secret_keys differ from those of other replicas", file=sys.stderr)
    return agree


async def _no_app(*_: object) -> None:
    raise NotImplementedError("a check calls no application")


def _usage() -> str:
    lines = [f"  {name:8}{(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: responses-mw COMMAND [options]",
            "",
            "commands:",
            *lines,
            "",
            "Run responses-mw COMMAND --help for its options.",
        ]
    )


_PLACEHOLDERS = {"float": "SECONDS", "int": "N", "str": "TEXT", "SecretStr": "SECRET", "dict[str,JSON]": "JSON"}
_ENDINGS = {
    "url": "URL",
    "_bytes": "SIZE",
    "ttl": "SECONDS",
    "_file": "PATH",
    "_dir": "PATH",
    "host": "ADDRESS",
    "config": "PATH",
    "threshold": "N",
}


def _add_argument(parser: ArgumentParser, *names: str, **options: Any) -> Any:
    """Add a flag with a readable placeholder, and without a default that is empty."""
    kind = options.get("metavar")
    if kind is not None and "dest" in options:
        ending = next((placeholder for ending, placeholder in _ENDINGS.items() if options["dest"].endswith(ending)), None)
        options["metavar"] = "A,B,..." if kind.startswith("list[") else ending or _PLACEHOLDERS.get(kind, kind)
    text = re.sub(r" \(default: (None||False|\[\]|\{\})\)$", "", options["help"])
    options["help"] = re.sub(r"\(default: \['(.*)'\]\)", lambda names: f"(default: {names[1]})".replace("', '", ","), text)
    return parser.add_argument(*names, **options)


def run(command: type[BaseSettings], arguments: Sequence[str]) -> None:
    """Run ``command`` with flags and the environment."""
    formatter = partial(RawDescriptionHelpFormatter, max_help_position=36)
    source: CliSettingsSource[Any] = CliSettingsSource(command, add_argument_method=_add_argument, formatter_class=formatter)
    source.root_parser.usage = f"%(prog)s {'{stats,purge} ' if command is CacheOf else ''}[options]"
    source.root_parser.description = cleandoc(command.__doc__ or "")
    CliApp.run(command, cli_args=[_lengthen(argument) for argument in arguments], cli_settings_source=source)


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
        run(command, rest)
    except (ValidationError, SettingsError) as error:
        sys.exit(f"responses-mw {name}: {_explained(error)}")
    except ModuleNotFoundError as missing:  # the core alone is for applications that mount it
        sys.exit(f"responses-mw {name} needs the package {missing.name}: pip install 'responses-mw[all]'")


def _lengthen(argument: str) -> str:
    """Replace a short flag: ``--upstream=URL`` becomes ``--upstream.url=URL``."""
    name, equals, value = argument.partition("=")
    return f"{_SHORT_FLAGS.get(name, name)}{equals}{value}"


def _explained(error: ValidationError | SettingsError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    faults = [(".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")) for fault in error.errors()]
    return "; ".join(f"{where}: {what}" if where else what for where, what in faults)
