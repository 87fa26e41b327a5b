"""Implementation of `responses-mw serve --check`, which tests the settings and all servers and files that they refer to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

from ..app import open_embeddings, open_state, open_tools, open_upstream
from ..auth import ANONYMOUS, APIKeys, InvalidKeys
from ..cache import NoEmbedding
from ..crypto import Sealer
from ..engine.prompt_templates import InvalidPrompt, Prompts
from ..errors import APIError, StartupError
from ..protocol.types import Tool
from ..settings import Settings, origins
from ..tools.toolbox import Tools
from ..upstream import Caller, Upstream
from ..upstream.prefill import PrefillProof

_PATIENCE = 10.0
"""Maximum number of seconds that a check waits for the answer of a server to which it has connected."""
_MAX_PROVEN = 8
"""Maximum number of models for which the continuation of interrupted answers is tested."""


async def check(settings: Settings, unknown: list[str], check_ports: Callable[[], None]) -> int:
    """Test the settings and everything that they refer to, and print the results. Return 0 if all tests succeed, or else 1.

    `unknown` are the environment variables that have our prefix but are not settings. If there are any, the test fails.
    `check_ports` raises `OSError` if a port cannot be opened.
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


def _check_files(settings: Settings, unknown: list[str]) -> bool:
    try:
        APIKeys.of(settings.auth)
        Prompts(settings.server.prompts_dir)
    except (InvalidKeys, InvalidPrompt, OSError) as error:
        print(f"settings: {error}", file=sys.stderr)
        return False
    if unknown:
        print(f"settings: unknown in the environment: {', '.join(unknown)}", file=sys.stderr)
        return False
    print("settings: valid")
    for name, origin in origins(settings).items():
        if name != "check":
            print(f"          {name} from {origin}")
    return True


async def _check_upstream(settings: Settings) -> bool:
    caller, is_chat = Caller(), settings.upstream.api == "chat"
    try:
        async with open_upstream(no_app, settings) as upstream:
            models = await upstream.models(caller)
            dialect = await upstream.dialect(caller)
            continued = await _continued(upstream, [model["id"] for model in models], caller) if is_chat else []
    except APIError as error:
        advice = " (its key: --upstream.api-key)" if error.status in (401, 403) else ""
        print(f"upstream: {settings.upstream.url}: {error.message}{advice}", file=sys.stderr)
        return False
    print(f"upstream: {settings.upstream.url} answers")
    print(f"dialect:  {dialect.name}{'' if settings.upstream.dialect == 'auto' else ' (set)'}")
    print(f"models:   {', '.join(model['id'] for model in models) or 'none'}")
    print(f"          interrupted answers can be continued for: {', '.join(continued) or 'none'}")
    return True


async def _continued(upstream: Upstream, models: list[str], caller: Caller) -> list[str]:
    """Return the models whose interrupted answers can be continued.

    Only the first `_MAX_PROVEN` of `models` are tested. Each test generates one token.
    """
    proof, proven = PrefillProof(upstream), []
    for model in models[:_MAX_PROVEN]:
        with suppress(APIError):  # not a chat model, e.g. an embedding model
            proven += [model] if await proof.holds(model, caller) else []
    return proven


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
        print(f"          {warning}", file=sys.stderr if warning == health.fault else sys.stdout)
    if not agree:
        print("          auth.secret_keys differs from the keys of other replicas", file=sys.stderr)
    return agree and not health.fault


def _check_ports(check_ports: Callable[[], None]) -> bool:
    try:
        check_ports()
    except OSError as error:
        print(f"port:     {error.strerror}", file=sys.stderr)
        return False
    return True


async def _check_embeddings(settings: Settings) -> bool:
    if settings.cache.embedding_model is None:
        return True
    try:
        async with open_embeddings(settings) as embeddings:
            assert embeddings is not None
            vector = await embeddings.embed("Hello")
    except (NoEmbedding, StartupError) as error:
        print(f"cache:    {error}", file=sys.stderr)
        return False
    print(f"cache:    {settings.cache.embedding_model} makes vectors of {len(vector)} dimensions")
    return True


async def _check_tools(settings: Settings) -> bool:
    """Test each configured tool. Do nothing if the upstream has a Responses API, because it runs the tools itself."""
    if settings.upstream.api == "responses":
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
    """Open the tool, call it unless `arguments` is None, and print the result. Return whether the tool works."""
    try:
        toolbox = tools.toolbox(tools.check([tool]), [], [], {}, ANONYMOUS, _accept)
        assert toolbox is not None
        try:
            await toolbox.open()
            offered = len(toolbox.offered)
            result = await toolbox.call(toolbox.offered[0].form, arguments, "check") if arguments else None
        finally:
            await toolbox.aclose()
    except APIError as error:
        fault = error.message
    else:
        fault = str(result.content) if result is not None and result.failed else ""
    if fault:
        print(f"tools:    {name}: {fault.removeprefix(f'{name}: ')}", file=sys.stderr)
        return False
    print(f"tools:    {name}: {'works' if arguments else 'lists ' + str(offered) + (' tool' if offered == 1 else ' tools')}")
    return True


async def _accept() -> None:
    """Accept every call. This is the gate for the checks, because the operator may call all tools."""


async def no_app(*_: object) -> None:
    """Raise `NotImplementedError`. This takes the place of the wrapped application in commands that have none."""
    raise NotImplementedError("a check calls no application")
