"""The scripts in examples/ work as documented, with the official client, a real server and the demo model."""

from __future__ import annotations

import json
import re
import runpy
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from responses_mw import create_app
from responses_mw.demo.upstream import create_upstream
from tests.support.configured import make_settings
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.servers import Serve

    Run = Callable[..., str]

EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example in front of the demo model, with the given settings, and returns what it prints."""

    def run(name: str, **settings: Any) -> str:
        upstream = serve(create_upstream(pace=0.001))
        url = serve(create_app(make_settings(upstream__url=upstream, **settings)), ws="websockets-sansio")
        monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "demo")
        monkeypatch.setenv("NO_PROXY", "*")
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["client"].close()
        return capsys.readouterr().out

    return run


def test_a_chain_is_continued_and_forked(run: Run) -> None:
    printed = run("chain")
    assert "chain: Your favourite colour is teal." in printed
    assert "fork: Your favourite number is 7." in printed
    assert "['message', 'message', 'message']" in printed
    assert "after the delete: Your favourite colour is teal." in printed


def test_a_conversation_collects_items(run: Run) -> None:
    printed = run("conversation")
    assert "answer: Your name is Ada." in printed
    assert printed.count("... message") == 3
    assert "answer: Your city is London." in printed


def test_a_background_response_is_resumed_and_cancelled(run: Run) -> None:
    printed = run("background")
    assert f"resumed: {' '.join(map(str, range(1, 31)))}\n" in printed
    assert "queued -> cancelled" in printed


def test_a_tool_of_an_mcp_server_waits_for_approval(run: Run, serve: Serve) -> None:
    weather = runpy.run_path(str(EXAMPLES / "weather_mcp.py"))["server"]
    url = serve(weather.streamable_http_app())
    printed = run("mcp_approval", tools__mcp_servers={"weather": {"url": f"{url}/mcp"}})
    assert 'approve get_weather({"city": "Paris"}) on weather' in printed
    assert "get_weather returned: It is sunny in Paris." in printed
    assert "answer: get_weather says: It is sunny in Paris." in printed


def test_the_second_answer_comes_from_the_cache(run: Run) -> None:
    first, second = run("cache").splitlines()
    assert first.startswith("first: 6 * 7 = 42. [miss; reason=not_found] resp_")
    assert second.startswith("second: 6 * 7 = 42. [exact; similarity=1.0000; age=")


@pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")  # the SDK uses the library in the older way
def test_a_websocket_continues_an_unstored_response(run: Run) -> None:
    _, second, third = run("websocket").splitlines()
    assert second == "Your favourite fruit is a plum."
    assert third == "2 + 3 = 5."


def test_the_middleware_is_mounted_in_fastapi(serve: Serve, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import openai

    monkeypatch.setenv("RESPONSES_MW_REDIS_URL", redis_url)
    url = serve(runpy.run_path(str(EXAMPLES / "fastapi_app.py"))["app"])
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="key", http_client=http) as client:
        first = client.responses.create(model="parrot", input="Hello")
        assert first.output_text == "You said: Hello"
        second = client.responses.create(model="parrot", input="Again", previous_response_id=first.id, stream=True)
        assert [event.type for event in second][-1] == "response.completed"


def events_of(response: httpx.Response, count: int | None = None) -> list[dict[str, Any]]:
    """The first events of a stream of the assistant, or all."""
    data = (json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line)
    return list(islice(data, count))


@pytest.fixture
def assistant(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    weather = serve(runpy.run_path(str(EXAMPLES / "weather_mcp.py"))["server"].streamable_http_app())
    settings = make_settings(
        upstream__url=serve(create_upstream(pace=0.001)), tools__mcp_servers={"weather": {"url": f"{weather}/mcp"}}
    )
    monkeypatch.setenv("OPENAI_BASE_URL", f"{serve(create_app(settings))}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "demo")
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("MCP_SERVER", "weather")
    with httpx.Client(base_url=serve(runpy.run_path(str(EXAMPLES / "assistant.py"))["app"]), trust_env=False) as client:
        yield client


def ask(assistant: httpx.Client, previous: str | None, *items: dict[str, Any]) -> list[dict[str, Any]]:
    with assistant.stream("POST", "/messages", json={"input": items, "previous": previous}) as response:
        return events_of(response)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


def test_the_assistant_remembers_calls_its_function_and_asks_before_it_calls_a_server(assistant: httpx.Client) -> None:
    told = ask(assistant, None, user("My favourite colour is teal."))
    asked = ask(assistant, told[-1]["response"]["id"], user("What is my favourite colour?"))
    assert text_of(asked) == "Your favourite colour is teal."

    timed = ask(assistant, asked[-1]["response"]["id"], user("What time is it?"))
    assert [event["response"]["status"] for event in timed if event["type"] == "response.completed"] == ["completed"] * 2
    assert re.fullmatch(r"get_time says: \d\d:\d\d\.", text_of(timed))

    wanted = ask(assistant, timed[-1]["response"]["id"], user("How is the weather in Paris?"))
    (request,) = [item for item in wanted[-1]["response"]["output"] if item["type"] == "mcp_approval_request"]
    decision = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
    approved = ask(assistant, wanted[-1]["response"]["id"], decision)
    assert text_of(approved) == "get_weather says: It is sunny in Paris."


def test_the_assistant_resumes_a_stream_that_was_lost(assistant: httpx.Client) -> None:
    with assistant.stream("POST", "/messages", json={"input": [user("Count to 300")]}) as response:
        seen = events_of(response, 20)
    response_id, after = seen[0]["response"]["id"], seen[-1]["sequence_number"]
    with assistant.stream("GET", f"/responses/{response_id}", params={"after": after}) as response:
        rest = events_of(response)
    assert text_of(seen + rest) == " ".join(map(str, range(1, 301)))
    with assistant.stream("GET", f"/responses/{response_id}") as response:
        assert events_of(response) == seen + rest


def test_the_assistant_passes_the_reason_of_a_refusal_on(assistant: httpx.Client) -> None:
    refused = assistant.get("/responses/resp_unknown")
    assert (refused.status_code, "not found" in refused.json()["detail"]) == (502, True)


def test_the_assistants_page_never_shows_a_text_as_html(assistant: httpx.Client) -> None:
    page = assistant.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "textContent" in page.text
    assert not re.search("innerHTML|outerHTML|insertAdjacentHTML|document.write", page.text)


def test_every_example_is_short_and_is_run_here() -> None:
    here = Path(__file__).read_text()
    for example in EXAMPLES.glob("*.py"):
        assert f'"{example.stem}"' in here or f'"{example.name}"' in here
        assert len(example.read_text().splitlines()) <= (100 if example.stem == "assistant" else 50), example.name
