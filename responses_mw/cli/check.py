"""The tests of `serve --check`: the settings, and the files, ports and servers that they name."""

from __future__ import annotations

import sys
from contextlib import suppress

from ..app import check_fitness, open_embeddings, open_state, open_tools, open_upstream
from ..auth import ANONYMOUS, APIKeys
from ..cache import NoEmbedding
from ..crypto import Sealer
from ..engine.prompt_templates import Prompts
from ..errors import APIError, StartupError, UpstreamError, UpstreamTimeout, UpstreamUnreachable
from ..protocol.types import Tool
from ..settings import Settings, origins
from ..tools.toolbox import Tools
from ..upstream import Caller, Upstream
from ..upstream.prompts import PrefillProof
from .serve import ServeSettings, check_ports, no_app

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
    except UpstreamError as error:
        # An HTTPS port answers 400 to every plain HTTP request.
        if error.upstream_status == 400 or isinstance(error, UpstreamUnreachable | UpstreamTimeout):
            raise
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
