"""`responses-mw serve --check`: use every configured service once and report the results."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import pytest
from mcp.server.mcpserver import MCPServer
from starlette.responses import PlainTextResponse

from benchmarks.processes import free_port
from responses_mw.cli import main
from tests.auth.servers import Knowing
from tests.support.mcp_servers import TOKEN, Bearer, weather
from tests.support.search_servers import SEARXNG, SearchServer

if TYPE_CHECKING:
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


def test_working_services_are_reported(
    flags: list[str], serve: Serve, upstream: ScriptedUpstream, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream.pages["/v1/embeddings"] = {"data": [{"embedding": [0.6, 0.8]}]}
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
    )
    told = capsys.readouterr()
    assert (status, told.err) == (0, "")
    for line in (
        "cache:    e makes vectors of 2 dimensions",
        "tools:    MCP server 'weather': lists 1 tool",
        "tools:    web search (searxng): works",
        "tools:    code interpreter: works",
    ):
        assert f"{line}\n" in told.out
    assert [asked.parameters["q"] for asked in search.asked] == [
        "weather site:wikipedia.org -site:de.wikipedia.org",
        "weather -site:de.wikipedia.org",
    ]


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
    ],
)
def test_an_unreachable_service_is_reported_with_exit_status_1(
    flags: list[str], capsys: pytest.CaptureFixture[str], flag: str, said: str
) -> None:
    needed = {
        "--search": ["--search.provider=searxng"],
        "--cache.": ["--cache.mode=semantic", "--cache.embedding-model=e"],
    }
    flag = flag.replace("{url}", json.dumps({"weather": {"url": f"{NOBODY}/mcp"}}))
    assert run(*flags, flag, *needed.get(flag[:8], [])) == 1
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
    status = run(*flags, f"--upstream={url}", f"--upstream.api-key={key}", f"--upstream.dialect={dialect}")
    told = capsys.readouterr()
    if key == "good":
        assert (status, told.err) == (0, "")
        assert "models:   none is listed, so requests must name their model\n" in told.out
    else:
        refused = f"upstream: {url}: The upstream refused the credential of this server.\n"
        assert (status, told.err) == (1, refused)


def test_an_https_port_is_not_taken_for_an_upstream_that_lists_no_models(
    flags: list[str], serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = PlainTextResponse("Client sent an HTTP request to an HTTPS server.", 400)  # of Go's servers
    url = serve(answer, lifespan="off")
    assert run(*flags, f"--upstream={url}") == 1
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
