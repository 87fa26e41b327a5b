"""`responses-mw serve --check`: test the settings, and all servers and files that they name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

from ..app import open_embeddings, open_state, open_tools, open_upstream
from ..auth import ANONYMOUS, APIKeys
from ..cache import NoEmbedding
from ..crypto import Sealer
from ..engine.prompt_templates import Prompts
from ..errors import APIError, StartupError
from ..protocol.types import Tool
from ..settings import Settings, origins
from ..tools.toolbox import Tools
from ..upstream import Caller, Upstream
from ..upstream.prompts import PrefillProof

_PATIENCE = 10.0
"""Maximum value of `upstream.timeout` and `tools.timeout`, and value of `cache.timeout`, during the check."""
_MAX_PROVEN = 8
"""Maximum number of models whose continuation of interrupted answers is tested. Each test generates one token."""


async def check(settings: Settings, unknown: list[str], check_ports: Callable[[], None]) -> int:
    """Test the settings and everything that they name, and print the results. Return the exit status: 0, or 1 if a test fails.

    `unknown` are the names of unknown environment variables. If there are any, a test fails. `check_ports` may raise `OSError`.
    """
    hasty = settings.model_copy(
        update={
            "upstream": settings.upstream.model_copy(update={"timeout": min(settings.upstream.timeout, _PATIENCE)}),
            "tools": settings.tools.model_copy(update={"timeout": min(settings.tools.timeout, _PATIENCE)}),
            "cache": settings.cache.model_copy(update={"timeout": _PATIENCE}),
        }
    )
    results = [_check_files(settings, unknown), _check_ports(check_ports), await _check_upstream(hasty)]
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
    except (StartupError, OSError) as error:
        return _failed("settings:", error)
    if unknown:
        return _failed("settings:", f"unknown in the environment: {', '.join(unknown)}")
    _passed("settings:", "valid")
    return all(_passed("", f"{name} from {origin}") for name, origin in origins(settings).items() if name != "check")


def _check_ports(check_ports: Callable[[], None]) -> bool:
    try:
        check_ports()
    except OSError as error:
        return _failed("port:", error.strerror)
    return True


async def _check_upstream(settings: Settings) -> bool:
    caller, url = Caller(), settings.upstream.url
    try:
        async with open_upstream(no_app, settings) as upstream:
            models = [model["id"] for model in await upstream.models(caller)]
            dialect = await upstream.dialect(caller)
            continued = await _continued(upstream, models, caller) if settings.upstream.api == "chat" else []
    except APIError as error:
        advice = " (its key: --upstream.api-key)" if error.status in (401, 403) else ""
        return _failed("upstream:", f"{url}: {error.message}{advice}")
    _passed("upstream:", f"{url} answers")
    _passed("dialect:", f"{dialect.name}{'' if settings.upstream.dialect == 'auto' else ' (set)'}")
    _passed("models:", ", ".join(models) or "none")
    return _passed("", f"interrupted answers can be continued for: {', '.join(continued) or 'none'}")


async def _continued(upstream: Upstream, models: list[str], caller: Caller) -> list[str]:
    """Return those of the first `_MAX_PROVEN` models whose interrupted answers can be continued."""
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


async def _check_tools(settings: Settings) -> bool:
    if settings.upstream.api == "responses":  # the upstream runs the tools
        return True
    used: dict[str, tuple[Tool, str | None]] = {
        f"MCP server '{label}'": ({"type": "mcp", "server_label": label}, None) for label in settings.tools.mcp_servers
    }
    if settings.search.provider != "none":
        used[f"web search ({settings.search.provider})"] = ({"type": "web_search"}, '{"query": "weather"}')
    if settings.tools.sandbox_url is not None:
        used["code interpreter"] = ({"type": "code_interpreter", "container": {"type": "auto"}}, '{"code": "1"}')
    async with open_tools(settings) as tools:
        return all([await _check_tool(tools, name, tool, arguments) for name, (tool, arguments) in used.items()])


async def _check_tool(tools: Tools, name: str, tool: Tool, arguments: str | None) -> bool:
    """Open the tool, and call it unless `arguments` is None."""

    async def accept() -> None:
        """Accept every call, because the operator may call all tools."""

    try:
        toolbox = tools.toolbox(tools.check([tool]), [], [], {}, ANONYMOUS, accept)
        assert toolbox is not None
        try:
            await toolbox.open()
            offered = len(toolbox.offered)
            result = await toolbox.call(toolbox.offered[0].form, arguments, "check") if arguments else None
        finally:
            await toolbox.aclose()
    except APIError as error:
        return _failed("tools:", f"{name}: {error.message.removeprefix(f'{name}: ')}")
    if result is not None and result.failed:
        return _failed("tools:", f"{name}: {str(result.content).removeprefix(f'{name}: ')}")
    return _passed("tools:", f"{name}: {'works' if arguments else f'lists {offered} tool' + 's' * (offered != 1)}")


async def no_app(*_: object) -> None:
    """ASGI application for commands that wrap no application. Always raises `NotImplementedError`."""
    raise NotImplementedError("a check calls no application")
