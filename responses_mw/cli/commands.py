"""The commands of `responses-mw`.

A command has flags for the settings that match the patterns in its `uses`. Without `uses`, it has a flag for every setting.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from contextlib import suppress
from functools import partial
from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, CliImplicitFlag, CliPositionalArg, SettingsConfigDict

from ..app import check_fitness, create_worker, open_core, open_embeddings, open_state, open_tools, open_upstream
from ..asgi.admin import checks, open_admin
from ..auth import ANONYMOUS, APIKeys
from ..cache import Entries, NoEmbedding, explain
from ..crypto import Sealer
from ..engine.prompt_templates import Prompts
from ..errors import APIError, StartupError
from ..protocol.types import Tool
from ..sandbox import SandboxSettings
from ..settings import Settings, origins, unknown_variables, variables
from ..telemetry.setup import set_up_logs, set_up_sdk
from ..tools.toolbox import Tools
from ..upstream import Caller, Upstream
from ..upstream.prompts import PrefillProof
from .serve import ServeSettings, allow_open_files, announce, check_ports, serve, summary

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


async def no_app(*_: object) -> None:
    """ASGI application for commands that wrap no application. Always raises `NotImplementedError`."""
    raise NotImplementedError("this command calls no application")


# -- serve --check ------------------------------------------------------------------------------------------------------

_PATIENCE = 10.0
"""Timeout in seconds of the cache during the check, and the maximum timeout of the upstream and the tools."""
_MAX_PROVEN = 8  # maximum number of models whose continuation of interrupted answers is tested, which generates a token


async def check(settings: ServeSettings, unknown: list[str]) -> int:
    """Test the settings and the files, ports and servers that they name. Print the results, and return the exit status.

    The status is 1 if a test fails, or if `unknown` lists environment variables.
    """
    hasty = settings.model_copy(
        update={
            "upstream": settings.upstream.model_copy(update={"timeout": min(settings.upstream.timeout, _PATIENCE)}),
            "tools": settings.tools.model_copy(update={"timeout": min(settings.tools.timeout, _PATIENCE)}),
            "cache": settings.cache.model_copy(update={"timeout": _PATIENCE}),
        }
    )
    results = [_check_files(settings, unknown), _check_ports(settings), await _check_upstream(hasty)]
    results += [await _check_state(settings), await _check_embeddings(hasty), await _check_tools(hasty)]
    return 0 if all(results) else 1


def _passed(label: str, text: str) -> bool:
    print(f"{label:10}{text}")
    return True


def _failed(label: str, text: object) -> bool:
    print(f"{label:10}{text}", file=sys.stderr)
    return False


def _check_files(settings: Settings, unknown: list[str]) -> bool:
    try:
        APIKeys.of(settings.auth)
        Prompts(settings.server.prompts_dir)
    except StartupError as error:
        return _failed("settings:", error)
    if unknown:
        return _failed("settings:", f"unknown in the environment: {', '.join(unknown)}")
    _passed("settings:", "valid")
    return all(_passed("", f"{name} from {origin}") for name, origin in origins(settings).items() if name != "check")


def _check_ports(settings: ServeSettings) -> bool:
    try:
        check_ports(settings)
    except OSError as error:
        return _failed("port:", error.strerror)
    return True


async def _check_upstream(settings: Settings) -> bool:
    caller, url = Caller(), settings.upstream.url
    try:
        async with open_upstream(no_app, settings) as upstream:
            models = await _models(upstream, settings.upstream.api, caller)
            dialect = await upstream.dialect(caller)
            continued = await _continued(upstream, models, caller) if settings.upstream.api == "chat" else []
    except APIError as error:
        advice = " (its key: --upstream.api-key)" if error.status in (401, 403) else ""
        return _failed("upstream:", f"{url}: {error.message}{advice}")
    _passed("upstream:", f"{url} answers")
    _passed("dialect:", f"{dialect.name}{'' if settings.upstream.dialect == 'auto' else ' (set)'}")
    _passed("models:", ", ".join(models) or "none is listed, so requests must name their model")
    return _passed("", f"interrupted answers can be continued for: {', '.join(continued) or 'none'}")


async def _models(upstream: Upstream, api: str, caller: Caller) -> list[str]:
    """Return the ids of the upstream's models, or an empty list if it lists none but reports an empty request as invalid."""
    try:
        return [model["id"] for model in await upstream.models(caller)]
    except APIError:
        try:
            await upstream.post("/v1/responses" if api == "responses" else "/v1/chat/completions", {}, caller)
        except APIError as error:
            if error.status not in (400, 422):
                raise
        return []


async def _continued(upstream: Upstream, models: list[str], caller: Caller) -> list[str]:
    """Check the first `_MAX_PROVEN` models, and return the models whose interrupted answers can be continued."""
    proof, proven = PrefillProof(upstream), []
    for model in models[:_MAX_PROVEN]:
        with suppress(APIError):  # not a chat model, e.g. an embedding model
            proven += [model] if await proof.holds(model, caller) else []
    return proven


async def _check_state(settings: Settings) -> bool:
    try:
        async with open_state(settings) as state:
            if state is None:
                return _passed("state:", "none: responses are not stored")
            await check_fitness(state, settings)
            health = await state.check()
            keys = [secret.get_secret_value() for secret in settings.auth.secret_keys]
            agree = not keys or await state.check_keys(Sealer(keys).key_ids)
    except (APIError, StartupError) as error:
        return _failed("state:", error)
    kind = "" if settings.redis.url else " (embedded)"
    maximum = health.max_memory or "unlimited"
    _passed("state:", f"{health.server}{kind}, {health.policy}, {health.used_memory} of {maximum} bytes used")
    for warning in health.warnings:
        (_failed if warning == health.fault else _passed)("", warning)
    if not agree:
        _failed("", "auth.secret_keys differs from the keys of other replicas")
    return agree and not health.fault


async def _check_embeddings(settings: Settings) -> bool:
    model = settings.cache.embedding_model
    if model is None:
        return True
    try:
        async with open_embeddings(settings) as embeddings:
            assert embeddings is not None
            vector = await embeddings.embed("Hello")
    except (NoEmbedding, StartupError) as error:
        return _failed("cache:", error)
    return _passed("cache:", f"{model} makes vectors of {len(vector)} dimensions")


_BLOCKED = {"blocked_domains": ["de.wikipedia.org"]}
_SEARCHES: list[Tool] = [
    {"type": "web_search", "filters": {"allowed_domains": ["wikipedia.org"], **_BLOCKED}, "user_location": {"country": "US"}},
    # If both filters are set, some providers send only the allowed domains.
    {"type": "web_search", "filters": _BLOCKED, "search_context_size": "high"},
]


async def _check_tools(settings: Settings) -> bool:
    if settings.upstream.api == "responses":  # the upstream runs the tools
        return True
    used: dict[str, tuple[list[Tool], str | None]] = {
        f"MCP server '{label}'": ([{"type": "mcp", "server_label": label}], None) for label in settings.tools.mcp_servers
    }
    if settings.search.provider != "none":
        used[f"web search ({settings.search.provider})"] = (_SEARCHES, '{"query": "weather"}')
    if settings.tools.sandbox_url is not None:
        used["code interpreter"] = ([{"type": "code_interpreter", "container": {"type": "auto"}}], '{"code": "1"}')
    async with open_tools(settings) as tools:
        return all([await _check_tool(tools, name, entries, arguments) for name, (entries, arguments) in used.items()])


async def _check_tool(tools: Tools, name: str, entries: list[Tool], arguments: str | None) -> bool:
    """Test a tool with each of `entries`, which are entries of a request's `tools`. For `arguments`, see `_try_tool`."""
    try:
        found = [await _try_tool(tools, entry, arguments) for entry in entries][-1]
    except APIError as error:
        return _failed("tools:", f"{name}: {error.message.removeprefix(f'{name}: ')}")
    return _passed("tools:", f"{name}: {found}")


async def _accept() -> None:
    """A gate that accepts every call, because the operator may call all tools."""


async def _try_tool(tools: Tools, entry: Tool, arguments: str | None) -> str:
    """Open `entry`, and call its first function unless `arguments` is None. Return what was found, for the operator."""
    toolbox = tools.toolbox(tools.check([entry]), [], [], {}, ANONYMOUS, _accept)
    assert toolbox is not None
    try:
        await toolbox.open()
        if arguments is None:
            return f"lists {len(toolbox.offered)} tool" + "s" * (len(toolbox.offered) != 1)
        result = await toolbox.call(toolbox.offered[0].form, arguments, "check")
        if result.failed:
            raise APIError(str(result.content))
        return "works, but found nothing" if result.members.get("results") == [] else "works"
    finally:
        await toolbox.aclose()
