"""The commands of `responses-mw`.

A command has flags for the settings that match the patterns in its `uses`. Without `uses`, it has a flag for every setting.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

from pydantic import Field
from pydantic_settings import BaseSettings, CliImplicitFlag, CliPositionalArg, SettingsConfigDict

from ..app import create_workers, open_core
from ..asgi.admin import checks, contained, upstream_checks
from ..cache import Entries
from ..errors import APIError, StartupError
from ..inspector.app import create_inspector
from ..inspector.inspector_context import InspectorContext
from ..redaction import Redactor
from ..sandbox import SandboxSettings
from ..server.admin import open_admin
from ..settings import Settings, unknown_variables, variables
from ..state import State
from ..state.recent import FAILED, RecentFilter
from ..state_opening import open_state
from ..tasks import stop_signals
from ..telemetry.setup import set_up_logs, set_up_sdk
from ..upstream import Caller
from .cache_pairs import evaluate, explain
from .check import check
from .inspection import inspect_response, show_jobs, tail
from .serve import ServeSettings, allow_open_files, announce, no_app, serve, summary
from .stores import index_store, list_files, list_stores, rebuild_store, search_store

logger = logging.getLogger(__name__)

FLAGS = SettingsConfigDict(cli_kebab_case=True, cli_hide_none_type=True, cli_implicit_flags=True, cli_avoid_json=True)
_COMMON = "config server.log_* redis.url redis.timeout redis.allow_eviction upstream.url upstream.api_key upstreams"
_READING = "config server.log_* redis.url redis.timeout json_lines"


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
        has_upstream = self.upstream.url or self.upstreams
        if self.check and has_upstream:
            set_up_logs("error", self.server.log_format, Redactor.of(self))  # the check prints its results itself
            sys.exit(asyncio.run(check(self, _unknown_variables())))
        _log(self)
        if not has_upstream:
            sys.exit("responses-mw: no upstream is set. Use --upstream http://host:port, or RESPONSES_MW_UPSTREAM_URL.")
        serve(self)


class WorkerCommand(Settings):
    """Run background responses for servers with the same Redis and the same auth.secret_keys, without serving the API.

    Each setting has a flag, an environment variable (RESPONSES_MW_JOBS_LEASE for --jobs.lease) and a key in the --config file.
    """

    model_config = SettingsConfigDict(cli_prog_name="responses-mw worker", **FLAGS)
    checks_callers: ClassVar = False
    uses: ClassVar = (
        f"{_COMMON} upstream.* server.admin_* server.drain_timeout server.reasoning_events state.* auth.secret_keys jobs.* "
        "tools.* search.* files.* compaction.* limits.*_bytes ui.*"
    )

    def cli_cmd(self) -> None:
        _log(self)
        required = {
            "upstream.url": self.upstream.url or self.upstreams,
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
    """Print the size of the response cache (stats), empty it (purge), or compare two questions (explain) or many (eval):

        responses-mw cache explain "What is the capital of France?" "Tell me the capital of France." "It is Paris."
        responses-mw cache eval --pairs pairs.jsonl

    Each setting has a flag, an environment variable (RESPONSES_MW_REDIS_URL for --redis) and a key in the --config file.
    """

    model_config = SettingsConfigDict(cli_prog_name="responses-mw cache", **FLAGS)
    checks_callers: ClassVar = False
    uses: ClassVar = f"{_COMMON} cache.max_owner_bytes cache.embedding_* cache.threshold cache.judge* cache.timeout owner pairs"
    arguments: ClassVar[str] = "{stats,purge,explain,eval} [QUESTION QUESTION [ANSWER]] "

    action: CliPositionalArg[Literal["stats", "purge", "explain", "eval"]] = Field(description="stats, purge, explain or eval")
    one: CliPositionalArg[str | None] = Field(None, description="for explain: a cached question")
    other: CliPositionalArg[str | None] = Field(None, description="for explain: a new question")
    answer: CliPositionalArg[str | None] = Field(None, description="for explain: the cached answer")
    owner: str | None = Field(None, description="owner to count or purge, as the hash in Redis keys (unset: all owners)")

    pairs: Path | None = Field(None, description="for eval: a file of pairs, one JSON object a line: one, other, same, answer")

    def cli_cmd(self) -> None:
        _log(self)
        if self.action == "explain":
            sys.exit(asyncio.run(explain(self, [text for text in (self.one, self.other, self.answer) if text is not None])))
        if self.action == "eval":
            sys.exit(asyncio.run(evaluate(self, self.pairs)))
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


class _InspectionCommand(Settings):
    """The flags of the commands that read what servers and workers have written to Redis."""

    checks_callers: ClassVar = False

    json_lines: CliImplicitFlag[bool] = Field(False, description="print JSON, one object in each line")

    def run(self, inspect: Callable[[State], Awaitable[int]]) -> NoReturn:
        """Exit with the status that `inspect` returns, or with 2 if Redis is not set or fails."""
        _log(self)
        if self.redis.url is None:
            print("responses-mw: set the servers' Redis with --redis, or RESPONSES_MW_REDIS_URL.", file=sys.stderr)
            sys.exit(2)
        sys.exit(asyncio.run(self._inspect(inspect)))

    async def _inspect(self, inspect: Callable[[State], Awaitable[int]]) -> int:
        try:
            async with open_state(self) as state:
                assert state is not None
                return await inspect(state)
        except (APIError, StartupError) as error:
            print(f"responses-mw: {error}", file=sys.stderr)
            return 2


class InspectCommand(_InspectionCommand):
    """Print what happened to a response: status, error, tokens, tools, cache, and the responses before and after it:

        responses-mw inspect --redis redis://redis:6379 resp_...

    The exit status is 1 if nothing is known about the response, and 2 if Redis cannot be read.
    """

    model_config = SettingsConfigDict(cli_prog_name="responses-mw inspect", **FLAGS)
    uses: ClassVar = f"{_READING} content"
    arguments: ClassVar[str] = "RESPONSE "

    response: CliPositionalArg[str] = Field(description="id of the response, or of its request (x-request-id)")
    content: CliImplicitFlag[bool] = Field(
        False, description="also print the texts, and what was sent to the upstream, if it was captured"
    )

    def cli_cmd(self) -> None:
        self.run(lambda state: inspect_response(state, self.response, content=self.content, as_json=self.json_lines))


class TailCommand(_InspectionCommand):
    """Print the last responses of all servers and workers whose ui.mode is not off:

    responses-mw tail --redis redis://redis:6379 --failed --follow
    """

    model_config = SettingsConfigDict(cli_prog_name="responses-mw tail", **FLAGS)
    uses: ClassVar = f"{_READING} failed unstored follow number model owner tool"

    failed: CliImplicitFlag[bool] = Field(False, description="only responses that failed")
    unstored: CliImplicitFlag[bool] = Field(False, description="only responses that were not stored")
    model: str = Field("", description="only responses of this model")
    owner: str = Field("", description="only responses of this owner (at least 8 characters) or API key")
    tool: str = Field("", description="only responses that called a tool of this kind, such as mcp or web_search")
    number: int = Field(20, ge=1, le=10_000, description="number of responses to print")
    follow: CliImplicitFlag[bool] = Field(False, description="also print further responses when they end")

    def cli_cmd(self) -> None:
        statuses = FAILED if self.failed else frozenset[str]()
        wanted = RecentFilter(statuses, model=self.model, owner=self.owner, tool=self.tool, unstored=self.unstored)
        with suppress(KeyboardInterrupt):
            self.run(lambda state: tail(state, wanted, number=self.number, follow=self.follow, as_json=self.json_lines))


class JobsCommand(_InspectionCommand):
    """Print the queue of background responses: how many wait, of which owners, and which worker runs which response:

    responses-mw jobs --redis redis://redis:6379
    """

    model_config = SettingsConfigDict(cli_prog_name="responses-mw jobs", **FLAGS)
    uses: ClassVar = _READING

    def cli_cmd(self) -> None:
        self.run(lambda state: show_jobs(state, as_json=self.json_lines))


class FilesCommand(_InspectionCommand):
    """Print the files that clients have uploaded:

    responses-mw files --redis redis://redis:6379

    Without --owner, all keys of Redis are scanned.
    """

    model_config = SettingsConfigDict(cli_prog_name="responses-mw files", **FLAGS)
    uses: ClassVar = f"{_READING} owner"

    owner: str | None = Field(None, description="owner of the files, as the hash in Redis keys (unset: all owners)")

    def cli_cmd(self) -> None:
        self.run(lambda state: list_files(state, self.owner, as_json=self.json_lines))


class StoresCommand(_InspectionCommand):
    """Print the vector stores (list), search one (search), embed its files with the model of the settings (rebuild), or build
    or drop its index in a Redis server with a search module (index, drop-index):

        responses-mw stores search vs_... "How many days of leave do I have?" --redis redis://redis:6379
        responses-mw stores rebuild vs_... --redis redis://redis:6379
        responses-mw stores index vs_... --redis redis://redis:6379

    Without --owner, all keys of Redis are scanned. The exit status is 1 if there is no such store, and 2 if it cannot be read.
    """

    model_config = SettingsConfigDict(cli_prog_name="responses-mw stores", **FLAGS)
    uses: ClassVar = f"{_READING} upstream.url upstream.api_key upstreams files.embedding_* files.rerank_* owner number"
    arguments: ClassVar[str] = "{list,search,rebuild,index,drop-index} [STORE] [QUERY] "

    action: CliPositionalArg[Literal["list", "search", "rebuild", "index", "drop-index"]] = Field(
        description="list, search, rebuild, index or drop-index"
    )
    store: CliPositionalArg[str | None] = Field(None, description="id of the store, unless they are listed")
    query: CliPositionalArg[str | None] = Field(None, description="for search: what to search for")
    owner: str | None = Field(None, description="owner of the store or stores, as the hash in Redis keys (unset: all owners)")
    number: int = Field(10, ge=1, le=50, description="for search: maximum number of results")

    def cli_cmd(self) -> None:
        store, query = self.store, self.query
        if self.action == "list":
            self.run(lambda state: list_stores(state, self.owner, as_json=self.json_lines))
        if store is None or (self.action == "search" and query is None):
            sys.exit(f"responses-mw: {self.action} what? See responses-mw stores --help.")
        if self.action == "rebuild":
            self.run(lambda state: rebuild_store(state, store, self.owner))
        if self.action in ("index", "drop-index"):
            self.run(lambda state: index_store(state, store, self.owner, is_dropped=self.action == "drop-index"))
        options: dict[str, Any] = {"owner": self.owner, "number": self.number, "as_json": self.json_lines}
        self.run(lambda state: search_store(state, self, store, query or "", **options))


COMMANDS: dict[str, type[BaseSettings]] = {
    "serve": ServeCommand,
    "worker": WorkerCommand,
    "cache": CacheCommand,
    "inspect": InspectCommand,
    "tail": TailCommand,
    "jobs": JobsCommand,
    "files": FilesCommand,
    "stores": StoresCommand,
    "sandbox": SandboxCommand,
    "demo": DemoCommand,
}


def _log(settings: Settings) -> None:
    set_up_logs(settings.server.log_level, settings.server.log_format, Redactor.of(settings))
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
        workers = create_workers(core, settings)

        def stop() -> None:
            for worker in workers:
                if worker.running and not stopping.is_set():
                    seconds = settings.server.drain_timeout
                    logger.info("stopping: waiting up to %g s for %d %s", seconds, worker.running, worker.jobs)
                worker.stop()
            stopping.set()

        for number in stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, stop)
        probes = {one.name: partial(one.check_key, Caller()) for one in core.upstreams.all}
        measured = upstream_checks(probes)
        readiness = checks(measured, core.state, lambda: not stopping.is_set())
        more: dict[str, Any] = {"cache": core.cache, "retrieval": core.files.retrieval if core.files is not None else None}
        shown = InspectorContext(core.state, settings, **more) if core.state is not None else None
        inspector = create_inspector(shown, settings.server, contained(readiness))
        async with open_admin(settings.server, readiness, core.state, inspector=inspector, upstreams=measured):
            announce(settings, "runs background responses", summary(settings, core.upstreams.all, has_state=True))
            await asyncio.gather(*(worker.run() for worker in workers))


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
