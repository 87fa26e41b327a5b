"""The tests of `serve --check`: the settings, and the files, ports and servers that they name."""

from __future__ import annotations

import sys
import time
from contextlib import suppress

from ..app import open_tools
from ..asgi.prompt_templates import Prompts
from ..auth import ANONYMOUS, APIKeys
from ..cache_models import open_models_alone
from ..crypto import Sealer
from ..embeddings import BUILTIN, NoEmbedding
from ..errors import APIError, StartupError, UpstreamError, UpstreamTimeout, UpstreamUnreachable
from ..protocol.citations import Sources
from ..protocol.types import Tool
from ..redaction import Redactor, activate
from ..settings import Settings, origins
from ..settings.upstreams import DEFAULT, UpstreamSettings, path_of
from ..state.store import Health
from ..state_opening import check_fitness, open_state
from ..tools.toolbox import Tools
from ..upstream import Caller, Upstream
from ..upstream.caller import REFUSALS
from ..upstream.continuation import PrefillProof
from ..upstream.endpoint import Endpoint
from ..upstream.opening import open_upstreams
from .file_checks import check_files
from .serve import ServeSettings, check_ports, no_app

_PATIENCE = 10.0
"""Timeout in seconds of the cache during the check, and the maximum timeout of the upstream and the tools."""
_MAX_PROVEN = 8  # maximum number of models whose continuation of interrupted answers is tested, which generates a token


async def check(settings: ServeSettings, unknown: list[str]) -> int:
    """Test the settings and the files, ports and servers that they name. Print the results, and return the exit status.

    The status is 1 if a test fails, or if `unknown` lists environment variables.
    """
    activate(Redactor.of(settings))
    hasty = settings.model_copy(
        update={
            "upstream": _hasty(settings.upstream),
            "upstreams": {name: _hasty(upstream) for name, upstream in settings.upstreams.items()},
            "tools": settings.tools.model_copy(update={"timeout": min(settings.tools.timeout, _PATIENCE)}),
            "cache": settings.cache.model_copy(update={"timeout": _PATIENCE}),
            "files": settings.files.model_copy(
                update={f"{name}_timeout": _PATIENCE for name in ("embedding", "rerank", "docling")}
            ),
        }
    )
    results = [_check_files(settings, unknown), _check_ports(settings), await _check_upstreams(hasty)]
    results += [await _check_state(settings), await _check_embeddings(hasty)]
    results += [await _check_file_servers(hasty), await _check_tools(hasty)]
    return 0 if all(results) else 1


def _hasty(upstream: UpstreamSettings) -> UpstreamSettings:
    return upstream.model_copy(update={"timeout": min(upstream.timeout, _PATIENCE)})


def _pass(label: str, text: str) -> bool:
    print(f"{label:10}{text}")
    return True


def _fail(label: str, text: object) -> bool:
    print(f"{label:10}{text}", file=sys.stderr)
    return False


def _check_files(settings: Settings, unknown: list[str]) -> bool:
    try:
        APIKeys.of(settings.auth)
        Prompts(settings.server.prompts_dir)
    except StartupError as error:
        return _fail("settings:", error)
    if unknown:
        return _fail("settings:", f"unknown in the environment: {', '.join(unknown)}")
    _pass("settings:", "valid")
    return all(_pass("", f"{name} from {origin}") for name, origin in origins(settings).items() if name != "check")


def _check_ports(settings: ServeSettings) -> bool:
    try:
        check_ports(settings)
    except OSError as error:
        return _fail("port:", error.strerror)
    return True


async def _check_upstreams(settings: Settings) -> bool:
    """Check all upstreams, one after the other."""
    try:
        async with open_upstreams(no_app, settings) as upstreams:
            return all([await _check_upstream(upstream, is_only=len(upstreams) == 1) for upstream in upstreams])
    except StartupError as error:
        return _fail("upstream:", error)


async def _check_upstream(upstream: Upstream, *, is_only: bool) -> bool:
    """Check that an endpoint of the upstream answers, and report what each of them serves."""
    caller, settings = Caller(), upstream.settings
    name = ", ".join(settings.url) if is_only else f"{upstream.name}: {', '.join(settings.url)}"
    try:
        models = await _models(upstream, settings.api, caller)
        dialect, key = await upstream.dialect(caller), await upstream.check_key(caller)
        continued = await _test_continuation(upstream, models, caller) if settings.api == "chat" else []
    except APIError as error:
        is_refusal = error.upstream_status in REFUSALS
        setting = "--upstream.api-key" if upstream.name == DEFAULT else f"{path_of(upstream.name)}.api_key"
        return _fail("upstream:", f"{name}: {error.message}{f' (its key: {setting})' if is_refusal else ''}")
    if key.fault:
        return _fail("upstream:", f"{name}: {key.fault}")
    _pass("upstream:", f"{name} answers")
    if len(upstream.pool.endpoints) > 1:
        for endpoint in upstream.pool.endpoints:
            await _report_endpoint(upstream, endpoint)
    _pass("dialect:", f"{dialect.name}{'' if settings.dialect == 'auto' else ' (set)'}")
    _pass("models:", ", ".join(settings.models or models) or "none is listed, so requests must name their model")
    return _pass("", f"interrupted answers can be continued for: {', '.join(continued) or 'none'}")


async def _report_endpoint(upstream: Upstream, endpoint: Endpoint) -> None:
    """Report the dialect, the models and the latency of an endpoint, or that it does not answer."""
    began, url = time.perf_counter(), endpoint.address.url
    if not await upstream.answers(endpoint):
        _fail("endpoint:", f"{url} does not answer")
        return
    latency = time.perf_counter() - began
    try:
        dialect = (await upstream.dialect(Caller(), endpoint)).name
    except APIError as error:
        dialect = f"unknown dialect ({error.message})"
    models = ", ".join(endpoint.models or ()) or "none listed"
    _pass("endpoint:", f"{url}: {dialect}, {1000 * latency:.0f} ms, models: {models}")


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


async def _test_continuation(upstream: Upstream, models: list[str], caller: Caller) -> list[str]:
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
                return _pass("state:", "none: responses are not stored")
            await check_fitness(state, settings)
            health = await state.check()
            keys = [secret.get_secret_value() for secret in settings.auth.secret_keys]
            refused = await state.ability.check()
            agree = bool(refused) or not keys or await state.check_keys(Sealer(keys).key_ids)
    except (APIError, StartupError) as error:
        return _fail("state:", error)
    _report_health(health, kind="" if settings.redis.url else " (embedded)")
    if refused:
        _fail("", refused)
    if not agree:
        _fail("", "auth.secret_keys differs from the keys of other replicas")
    return agree and not health.fault and not refused


def _report_health(health: Health, kind: str) -> None:
    maximum = health.max_memory or "unlimited"
    _pass("state:", f"{health.server}{kind}, {health.policy}, {health.used_memory} of {maximum} bytes used")
    for warning in health.warnings:
        (_fail if warning == health.fault else _pass)("", warning)


async def _check_embeddings(settings: Settings) -> bool:
    model = settings.cache.embedding_model
    if model == BUILTIN and settings.cache.mode != "semantic":
        return True
    try:
        async with open_models_alone(settings) as models:
            assert models.embedder is not None
            [vector] = await models.embedder.embed(["Hello"])
    except (NoEmbedding, StartupError) as error:
        return _fail("cache:", error)
    return _pass("cache:", f"{model} makes vectors of {len(vector)} dimensions")


async def _check_file_servers(settings: Settings) -> bool:
    try:
        async with open_upstreams(no_app, settings) as upstreams:
            found = await check_files(upstreams[0], settings)
    except StartupError:
        return True  # the check of the upstreams has reported it
    results = [(_fail if one.is_fault else _pass)("files:", one.text) for one in found]
    return all(results)


_BLOCKED = {"blocked_domains": ["de.wikipedia.org"]}
_SEARCHES: list[Tool] = [
    {"type": "web_search", "filters": {"allowed_domains": ["wikipedia.org"], **_BLOCKED}, "user_location": {"country": "US"}},
    # If both filters are set, some providers send only the allowed domains.
    {"type": "web_search", "filters": _BLOCKED, "search_context_size": "high"},
]


async def _check_tools(settings: Settings) -> bool:
    if all(one.api == "responses" for one in settings.named_upstreams.values()):  # the upstreams run the tools
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
        return _fail("tools:", f"{name}: {error.message.removeprefix(f'{name}: ')}")
    return _pass("tools:", f"{name}: {found}")


async def _accept() -> None:
    """A gate that accepts every call, because the operator may call all tools."""


async def _try_tool(tools: Tools, entry: Tool, arguments: str | None) -> str:
    """Open `entry`, and call its first function unless `arguments` is None. Describe the result for the operator."""
    toolbox = tools.toolbox(tools.check([entry]), [], [], {}, ANONYMOUS, _accept, Sources())
    assert toolbox is not None
    try:
        await toolbox.open()
        if arguments is None:
            return f"lists {len(toolbox.offered)} tool" + "s" * (len(toolbox.offered) != 1)
        result = await toolbox.call(toolbox.offered[0], arguments, "check")
        if result.failed:
            raise APIError(str(result.content))
        return "works, but found nothing" if result.members.get("results") == [] else "works"
    finally:
        await toolbox.aclose()
