"""The commands of `responses-mw`.

A command has flags for the settings that match the patterns in its `uses`. Without `uses`, it has a flag for every setting.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from functools import partial
from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, CliImplicitFlag, CliPositionalArg, SettingsConfigDict

from ..app import create_worker, open_core, open_embeddings, open_state
from ..asgi.admin import checks, open_admin
from ..cache import Entries, explain
from ..errors import APIError, StartupError
from ..sandbox import SandboxSettings
from ..settings import Settings, unknown_variables, variables
from ..telemetry.setup import set_up_logs, set_up_sdk
from ..upstream import Caller
from .check import check
from .serve import ServeSettings, allow_open_files, announce, no_app, serve, summary

logger = logging.getLogger(__name__)

FLAGS = SettingsConfigDict(cli_kebab_case=True, cli_hide_none_type=True, cli_implicit_flags=True, cli_avoid_json=True)
_COMMON = "config server.log_* redis.url redis.timeout redis.allow_eviction upstream.url upstream.api_key"


class ServeCommand(ServeSettings):
    """Serve the Responses API in front of a Chat Completions server, and proxy every other path to it:

        responses-mw serve --upstream http://vllm:8000

    Each setting has a flag, an environment variable (RESPONSES_MW_CACHE_MODE for --cache.mode) and a key in the --config file.
    """

    model_config = SettingsConfigDict(cli_prog_name="responses-mw serve", **FLAGS)

    check: CliImplicitFlag[bool] = Field(
        False, description="check the settings and the files, ports and servers that they name, print the results, and exit"
    )

    def cli_cmd(self) -> None:
        if self.check and self.upstream.url is not None:
            set_up_logs("error", self.server.log_format)  # the check prints its results itself
            sys.exit(asyncio.run(check(self, _unknown_variables())))
        _log(self)
        if self.upstream.url is None:
            sys.exit("responses-mw: no upstream is set. Use --upstream http://host:port, or RESPONSES_MW_UPSTREAM_URL.")
        serve(self)


class WorkerCommand(Settings):
    """Run background responses for servers with the same Redis and the same auth.secret_keys, without serving the API.

    Each setting has a flag, an environment variable (RESPONSES_MW_JOBS_LEASE for --jobs.lease) and a key in the --config file.
    """

    model_config = SettingsConfigDict(cli_prog_name="responses-mw worker", **FLAGS)
    uses: ClassVar = (
        f"{_COMMON} upstream.* server.admin_* server.drain_timeout server.reasoning_events state.* auth.secret_keys jobs.* "
        "tools.* search.* compaction.* limits.*_bytes"
    )

    def cli_cmd(self) -> None:
        _log(self)
        required = {
            "upstream.url": self.upstream.url,
            "redis.url": self.redis.url,
            "auth.secret_keys": self.auth.secret_keys,
            "jobs.concurrency": self.jobs.concurrency,
        }
        if missing := [name for name, value in required.items() if not value]:
            sys.exit(f"responses-mw: a worker needs {', '.join(missing)}: see responses-mw worker --help.")
        allow_open_files()
        try:
            asyncio.run(work(self))
        except StartupError as error:
            sys.exit(f"responses-mw: {error}")


class CacheCommand(Settings):
    """Print the size of the response cache (stats), empty it (purge), or compare two texts (explain):

        responses-mw cache explain "What is the capital of France?" "Tell me the capital of France."

    Each setting has a flag, an environment variable (RESPONSES_MW_REDIS_URL for --redis) and a key in the --config file.
    """

    model_config = SettingsConfigDict(cli_prog_name="responses-mw cache", **FLAGS)
    uses: ClassVar = f"{_COMMON} cache.max_owner_bytes cache.embedding_* cache.threshold cache.guard cache.timeout owner"
    arguments: ClassVar[str] = "{stats,purge,explain} [TEXT TEXT] "

    action: CliPositionalArg[Literal["stats", "purge", "explain"]] = Field(description="stats, purge or explain")
    texts: CliPositionalArg[list[str]] = Field([], description="the two texts that explain compares")
    owner: str | None = Field(None, description="owner to count or purge, as the hash in Redis keys (unset: all owners)")

    def cli_cmd(self) -> None:
        _log(self)
        if self.action == "explain":
            sys.exit(asyncio.run(explain_cache(self)))
        if self.redis.url is None:
            sys.exit("responses-mw: cache stats and purge need the servers' Redis. Use --redis, or RESPONSES_MW_REDIS_URL.")
        sys.exit(asyncio.run(run_cache_command(self)))


class DemoCommand(BaseSettings):
    """Start a demo upstream and two servers in front of it, and give a tour with the official openai client."""

    model_config = SettingsConfigDict(env_prefix="RESPONSES_MW_DEMO_", cli_prog_name="responses-mw demo", **FLAGS)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port to listen on; 0 selects a free one (unset: 8080, or a free one if it is in use)",
    )
    once: CliImplicitFlag[bool] = Field(False, description="exit after the tour, with status 0 if it succeeded")

    def cli_cmd(self) -> None:
        from ..demo.tour import run_tour

        sys.exit(run_tour(self.once, self.host, self.port))


class SandboxCommand(SandboxSettings):
    """Run the sandbox of the code interpreter, which is an MCP server.

    Each setting has a flag and an environment variable (RESPONSES_MW_SANDBOX_MAX_CONTAINERS for --max-containers).
    """

    model_config = SettingsConfigDict(cli_prog_name="responses-mw sandbox", **FLAGS)

    def cli_cmd(self) -> None:
        from ..sandbox.app import serve  # the package mcp loads slowly

        _warn_of_unknown_variables()
        serve(self)


COMMANDS: dict[str, type[BaseSettings]] = {
    "serve": ServeCommand,
    "worker": WorkerCommand,
    "cache": CacheCommand,
    "sandbox": SandboxCommand,
    "demo": DemoCommand,
}


def _log(settings: Settings) -> None:
    set_up_logs(settings.server.log_level, settings.server.log_format)
    _warn_of_unknown_variables()


def _warn_of_unknown_variables() -> None:
    if unknown := _unknown_variables():
        logger.warning("unknown settings in the environment: %s", ", ".join(unknown))


def _unknown_variables() -> list[str]:
    return unknown_variables(name for command in COMMANDS.values() for name in variables(command))


async def work(settings: Settings) -> None:
    """Run background responses until a signal stops the process. Raises `StartupError` if the worker cannot start."""
    set_up_sdk()
    stopping = asyncio.Event()
    async with open_core(no_app, settings) as core:
        worker = create_worker(core, settings)

        def stop() -> None:
            if worker.running and not stopping.is_set():
                seconds = settings.server.drain_timeout
                logger.info("stopping: waiting up to %g s for %d background responses", seconds, worker.running)
            stopping.set()
            worker.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        readiness = checks(partial(core.upstream.probe, Caller()), core.state, lambda: not stopping.is_set())
        async with open_admin(settings.server, readiness, core.state):
            announce(settings, "runs background responses", summary(settings, core.upstream.known_dialect, has_state=True))
            await worker.run()


async def explain_cache(settings: CacheCommand) -> int:
    """Print whether the cache treats two texts as equivalent. Return 0 if it does, 1 if it does not, or 2 for an error."""
    if len(settings.texts) != 2:
        print("cache: explain needs two texts", file=sys.stderr)
        return 2
    try:
        async with open_embeddings(settings) as embeddings:
            one, other = settings.texts
            is_hit, lines = await explain(one, other, embeddings, settings.cache)
    except StartupError as error:
        print(f"cache: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0 if is_hit else 1


async def run_cache_command(settings: CacheCommand) -> int:
    """Run `cache stats` or `cache purge`. Return the exit status: 0, or 1 if an error was printed."""
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
