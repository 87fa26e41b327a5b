"""`responses-mw serve --check`: use every configured service once and report the results."""

from __future__ import annotations

import json
import re
import socket
from typing import TYPE_CHECKING, Any

import pytest
from mcp.server.mcpserver import MCPServer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from benchmarks.processes import free_port
from responses_mw.cli import main
from tests.auth.servers import Knowing
from tests.support.mcp_servers import TOKEN, Bearer, weather
from tests.support.search_servers import SEARXNG, SearchServer
from tests.support.valkey import Server

if TYPE_CHECKING:
    from pathlib import Path

    from tests.auth.servers import Listing
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve

NOBODY = "http://127.0.0.1:1"
REFUSED = "the connection was refused"


@pytest.fixture
def flags(serve: Serve, upstream: ScriptedUpstream, redis_url: str) -> list[str]:
    return [f"--upstream={serve(upstream)}", f"--redis={redis_url}", "--port=0", "--check"]


def run(*flags: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["serve", *flags])
    assert isinstance(end.value.code, int)
    return end.value.code


def sandbox() -> MCPServer[None]:
    server = MCPServer("sandbox", log_level="CRITICAL")

    @server.tool(structured_output=False)
    def python(code: str, container_id: str) -> str:
        assert container_id == "auto"
        return code

    return server


def docling_serve(key: str) -> Starlette:
    """A docling-serve without tasks."""

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def poll(request: Request) -> JSONResponse:
        status = 404 if request.headers.get("x-api-key") == key else 401
        return JSONResponse({"detail": "Task not found."}, status)

    return Starlette(routes=[Route("/health", health), Route("/v1/status/poll/{task}", poll)])


def test_working_services_are_reported(
    flags: list[str], serve: Serve, upstream: ScriptedUpstream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream.pages["/v1/embeddings"] = {"data": [{"embedding": [0.6, 0.8]}]}
    upstream.pages["/v1/rerank"] = {"results": [{"index": 0, "relevance_score": 0.9}, {"index": 1, "relevance_score": 0.1}]}
    search = SearchServer(SEARXNG)
    guarded = serve(Bearer(weather().streamable_http_app())) + "/mcp"
    servers = {"weather": {"url": guarded, "authorization": TOKEN, "allowed_tools": ["get_weather"]}}
    status = run(
        *flags,
        "--cache.mode=semantic",
        "--cache.embedding-model=e",
        f"--tools.mcp-servers={json.dumps(servers)}",
        "--search.provider=searxng",
        f"--search.url={serve(search)}",
        f"--tools.sandbox-url={serve(sandbox().streamable_http_app())}",
        f"--files.url=file://{tmp_path}",
        "--files.embedding-model=e",
        "--files.rerank-model=r",
        f"--files.docling-url={serve(docling_serve('key'))}",
        "--files.docling-api-key=key",
    )
    told = capsys.readouterr()
    assert (status, told.err) == (0, "")
    for line in (
        "cache:    e makes vectors of 2 dimensions",
        "tools:    MCP server 'weather': lists 1 tool",
        "tools:    web search (searxng): works",
        "tools:    code interpreter: works",
        f"files:    file://{tmp_path}: a file was written, read and erased",
        "files:    e makes vectors of 2 dimensions",
        "files:    r reranks results",
    ):
        assert f"{line}\n" in told.out
    assert [asked.parameters["q"] for asked in search.asked] == [
        "weather site:wikipedia.org -site:de.wikipedia.org",
        "weather -site:de.wikipedia.org",
    ]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"docling-url": docling_serve("other"), "docling-api-key": "key"},
            "The text recognition server refused the API key.",
        ),
        ({"docling-url": Starlette(), "docling-api-key": "key"}, "The text recognition server answered 404."),
        ({"rerank-url": Starlette()}, "the reranking server supports none of /v1/rerank, /v1/score, /rerank"),
        (
            {"embedding-url": Starlette(), "embedding-model": "e"},
            "the embeddings server answered 404: it does not know the model, or lacks /v1/embeddings",
        ),
    ],
)
def test_a_server_that_files_cannot_use_is_reported(
    flags: list[str], serve: Serve, capsys: pytest.CaptureFixture[str], files: dict[str, Any], said: str
) -> None:
    given = {name: value if isinstance(value, str) else serve(value) for name, value in files.items()}
    assert run(*flags, *(f"--files.{name}={value}" for name, value in given.items())) == 1
    assert capsys.readouterr().err == f"files:    {said}\n"


@pytest.mark.parametrize("provider", ["searxng", "tavily"])
def test_a_search_without_results_is_reported(
    flags: list[str], serve: Serve, capsys: pytest.CaptureFixture[str], provider: str
) -> None:
    url = serve(SearchServer({"results": []}))
    assert run(*flags, f"--search.provider={provider}", f"--search.url={url}", "--search.api-key=key") == 0
    assert f"tools:    web search ({provider}): works, but found nothing\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--tools.mcp-servers={url}", f"tools:    MCP server 'weather': it cannot be reached: {REFUSED}."),
        ("--search.url=http://127.0.0.1:1", "tools:    web search (searxng): The search failed: The search provider cannot be"),
        ("--tools.sandbox-url=http://127.0.0.1:1", f"it cannot be reached: {REFUSED}."),
        ("--cache.embedding-url=http://127.0.0.1:1", f"cache:    the embeddings server did not answer: {REFUSED}"),
        ("--files.embedding-url=http://127.0.0.1:1", f"files:    the embeddings server did not answer: {REFUSED}"),
        ("--files.rerank-url=http://127.0.0.1:1", f"files:    the reranking server did not answer: {REFUSED}"),
        ("--files.docling-url=http://127.0.0.1:1", f"files:    The text recognition server did not answer: {REFUSED}."),
        ("--files.url=file:///proc/files", "files:    files.url cannot be used: "),
    ],
)
def test_an_unreachable_service_is_reported_with_exit_status_1(
    flags: list[str], capsys: pytest.CaptureFixture[str], flag: str, said: str
) -> None:
    needed = {
        "--search": ["--search.provider=searxng"],
        "--cache.": ["--cache.mode=semantic", "--cache.embedding-model=e"],
        "--files.embedding-url": ["--files.embedding-model=e"],
    }
    flag = flag.replace("{url}", json.dumps({"weather": {"url": f"{NOBODY}/mcp"}}))
    assert run(*flags, flag, *next((more for beginning, more in needed.items() if flag.startswith(beginning)), [])) == 1
    told = capsys.readouterr()
    assert said in told.err
    assert len(told.err.splitlines()) == 1
    assert "answers" in told.out


@pytest.mark.parametrize(("listing", "dialect"), [("absent", "auto"), ("forbidden", "openai")])
@pytest.mark.parametrize("key", ["good", "bad"])
def test_the_api_key_is_checked_by_a_chat_request_if_models_cannot_be_listed(
    flags: list[str], serve: Serve, capsys: pytest.CaptureFixture[str], listing: Listing, dialect: str, key: str
) -> None:
    url = serve(Knowing(listing))
    status = run(*flags[1:], f"--upstream={url}", f"--upstream.api-key={key}", f"--upstream.dialect={dialect}")
    told = capsys.readouterr()
    if key == "good":
        assert (status, told.err) == (0, "")
        assert "models:   none is listed, so requests must name their model\n" in told.out
    else:
        refused = f"upstream: {url}: The upstream refused the credential of this server. (its key: --upstream.api-key)\n"
        assert (status, told.err) == (1, refused)


def test_a_redis_that_refuses_a_command_is_reported(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    redis = Server(tmp_path, "--maxmemory-policy", "noeviction")
    redis.start()
    try:
        with redis.client() as admin:
            admin.execute_command("ACL", "SETUSER", "default", "-publish", "-spublish")
        assert run(*flags, f"--redis={redis.url}", "--auth.secret-keys=a secret of more than 32 characters in all") == 1
    finally:
        redis.kill()
    assert "Redis refuses SPUBLISH: its ACL user lacks the permission (add +@pubsub)." in capsys.readouterr().err


def test_an_https_port_is_not_taken_for_an_upstream_that_lists_no_models(
    flags: list[str], serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = PlainTextResponse("Client sent an HTTP request to an HTTPS server.", 400)  # of Go's servers
    url = serve(answer, lifespan="off")
    assert run(*flags[1:], f"--upstream={url}") == 1
    assert capsys.readouterr().err == f"upstream: {url}: Client sent an HTTP request to an HTTPS server.\n"


@pytest.mark.parametrize("flag", ["--port", "--server.admin-port"])
def test_a_port_in_use_is_reported(flags: list[str], capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(*flags, f"{flag}={port}") == 1
    assert capsys.readouterr().err == f"port:     127.0.0.1:{port} cannot be opened: Address already in use\n"


def test_the_same_port_for_requests_and_administration_is_an_error(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    assert run(*flags, "--host=0.0.0.0", f"--port={port}", f"--server.admin-port={port}") == 1
    assert capsys.readouterr().err == f"port:     127.0.0.1:{port} cannot be opened: Address already in use\n"


def test_an_unknown_host_name_is_reported(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(socket.gaierror) as unknown:
        socket.getaddrinfo("nowhere.invalid", 8080)
    assert run(*flags, "--port=8080", "--host=nowhere.invalid") == 1
    assert capsys.readouterr().err == f"port:     nowhere.invalid:8080 cannot be opened: {unknown.value.strerror}\n"


def described(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Return what was printed, without the latencies."""
    told = capsys.readouterr()
    return re.sub(r"\b\d+ ms", "N ms", told.out), told.err


def test_every_endpoint_is_reported_with_its_kind_and_models(
    flags: list[str], serve: Serve, upstream: ScriptedUpstream, capsys: pytest.CaptureFixture[str]
) -> None:
    url = serve(upstream)
    assert run(*flags[1:], f"--upstream={url},{NOBODY}") == 0
    out, err = described(capsys)
    assert f"upstream: {url}, {NOBODY} answers" in out
    assert f"endpoint: {url}: vllm, N ms, models: tiny" in out
    assert f"endpoint: {NOBODY} does not answer" in err


def test_every_upstream_is_reported_and_one_without_a_live_endpoint_is_a_failure(
    flags: list[str], serve: Serve, upstream: ScriptedUpstream, capsys: pytest.CaptureFixture[str]
) -> None:
    url = serve(upstream)
    named = {"llama": {"url": [url]}, "qwen": {"url": [NOBODY]}}
    assert run(*flags[1:], f"--upstreams={json.dumps(named)}") == 1
    out, err = described(capsys)
    assert "upstreams.llama from a flag" in out
    assert f"upstream: llama: {url} answers" in out
    assert f"upstream: qwen: {NOBODY}: " in err
    named["qwen"]["url"] += [url]
    assert run(*flags[1:], f"--upstreams={json.dumps(named)}") == 0


def test_a_refused_key_of_a_named_upstream_is_reported_by_its_setting(
    flags: list[str], serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    named = {"llama": {"url": [serve(Knowing("guarded"))], "api_key": "bad"}}
    assert run(*flags[1:], f"--upstreams={json.dumps(named)}") == 1
    assert "upstreams.llama.api_key" in described(capsys)[1]
