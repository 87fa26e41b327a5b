"""Several upstreams behind one server: where a model's requests go, fallbacks, and endpoints that die."""

from __future__ import annotations

import asyncio
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from responses_mw.asgi.admin import checks, upstream_checks
from responses_mw.cli.serve import no_app
from responses_mw.errors import StartupError
from responses_mw.settings.upstreams import UpstreamSettings
from responses_mw.upstream import Caller
from responses_mw.upstream.opening import open_upstreams, upstream_tls
from tests.jobs.test_background import ended
from tests.support.configured import make_settings
from tests.support.oracle import stream
from tests.support.scripted import HELLO, ScriptedUpstream, error, listing

if TYPE_CHECKING:
    from tests.support.servers import Ours, Serve, Several, Start


@pytest.fixture
def llama() -> ScriptedUpstream:
    return listing(ScriptedUpstream(), "meta/llama")


@pytest.fixture
def qwen() -> ScriptedUpstream:
    return listing(ScriptedUpstream(), "qwen")


async def create(ours: Ours, **body: Any) -> Any:
    return await ours.http.post("/v1/responses", json={"input": "Hi", **body})


async def test_a_model_is_served_by_the_upstream_that_lists_it(
    several: Several, llama: ScriptedUpstream, qwen: ScriptedUpstream
) -> None:
    ours = several()
    for upstream in (llama, qwen):
        upstream.stream(*HELLO)
    assert (await create(ours, model="qwen")).json()["model"] == "qwen"
    assert (await create(ours, model="meta/llama")).json()["model"] == "meta/llama"
    assert [asked.json["model"] for asked in qwen.requests] == ["qwen"]
    assert [asked.json["model"] for asked in llama.requests] == ["meta/llama"]


async def test_the_upstream_gets_its_own_name_of_a_model_and_the_client_sees_the_alias(
    several: Several, llama: ScriptedUpstream
) -> None:
    ours = several()
    llama.stream(*HELLO)
    assert (await create(ours, model="llama")).json()["model"] == "llama"
    assert llama.requests[0].json["model"] == "meta/llama"


async def test_a_model_that_nobody_serves_is_an_error_that_lists_the_models(several: Several) -> None:
    answer = await create(several(), model="gpt")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert answer.json()["error"]["param"] == "model"
    assert "llama, qwen" in answer.json()["error"]["message"]


async def test_without_a_model_the_error_lists_the_models(several: Several) -> None:
    answer = await create(several())
    assert answer.status_code == 400
    assert "llama, qwen" in answer.json()["error"]["message"]


async def test_a_model_that_appears_later_is_found(several: Several, qwen: ScriptedUpstream) -> None:
    ours = several()
    qwen.models.append({"id": "qwen-adapter", "object": "model", "created": 1, "owned_by": "vllm", "parent": "qwen"})
    qwen.stream(*HELLO)
    assert (await create(ours, model="qwen-adapter")).json()["status"] == "completed"


async def test_the_models_of_all_upstreams_are_listed_under_public_names(several: Several) -> None:
    ours = several()
    listed = (await ours.http.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["llama", "qwen"]
    assert (await ours.http.get("/v1/models/llama")).json()["object"] == "model"
    missing = await ours.http.get("/v1/models/gpt")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_chain_can_continue_with_a_model_of_another_upstream(
    several: Several, llama: ScriptedUpstream, qwen: ScriptedUpstream
) -> None:
    ours = several()
    llama.stream(*HELLO)
    qwen.stream(*HELLO)
    first = (await create(ours, model="llama")).json()
    second = await create(ours, model="qwen", previous_response_id=first["id"])
    assert second.json()["status"] == "completed"
    assert [message["role"] for message in qwen.requests[0].json["messages"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_to_an_unreachable_upstream_goes_to_its_fallback(
    several: Several, qwen: ScriptedUpstream, away: str, streamed: bool
) -> None:
    ours = several({"url": [away], "fallbacks": ["qwen:qwen"], "models": ["meta/llama"]})
    qwen.stream(*HELLO)
    if streamed:
        events = await stream(ours, model="llama")
        assert events.terminal == "response.completed"
        response = events.response
    else:
        response = (await create(ours, model="llama")).json()
    assert response["status"] == "completed"
    assert response["model"] == "qwen"
    assert qwen.requests[0].json["model"] == "qwen"


@pytest.mark.parametrize("status", [429, 503])
async def test_a_request_to_an_overloaded_upstream_goes_to_its_fallback(
    several: Several, llama: ScriptedUpstream, qwen: ScriptedUpstream, status: int
) -> None:
    ours = several({"fallbacks": ["qwen:qwen"]})
    for _ in range(5):
        llama.whole(error("busy", status), status)
    qwen.stream(*HELLO)
    assert (await create(ours, model="llama")).json()["model"] == "qwen"


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_the_fallback_of_an_unreachable_upstream_gets_the_text_of_a_file(
    several: Several, qwen: ScriptedUpstream, away: str, api: str
) -> None:
    llama = {"url": [away], "api": api, "fallbacks": ["qwen:qwen"], "models": ["meta/llama"]}
    ours = several(llama, auth__api_keys=[f"alice:sha256:{sha256(b'key').hexdigest()}"])
    file = await ours.client.files.create(file=("notes.txt", b"28 days of leave"), purpose="user_data")
    qwen.stream(*HELLO)
    message: Any = {"role": "user", "content": [{"type": "input_file", "file_id": file.id}]}
    answer = await ours.client.responses.create(model="llama", input=[message])
    assert answer.status == "completed"
    assert "28 days of leave" in orjson.dumps(qwen.requests[0].json["messages"]).decode()


async def test_a_request_error_does_not_go_to_the_fallback(
    several: Several, llama: ScriptedUpstream, qwen: ScriptedUpstream
) -> None:
    ours = several({"fallbacks": ["qwen:qwen"]})
    llama.whole(error("too hot"), 400)
    assert (await create(ours, model="llama")).status_code == 400
    assert not qwen.requests


async def test_a_fallback_does_not_get_the_credential_of_the_caller(
    several: Several, llama: ScriptedUpstream, qwen: ScriptedUpstream, away: str
) -> None:
    ours = several({"fallbacks": ["qwen:qwen"]})
    ours.http.headers["authorization"] = "Bearer secret-of-the-caller"
    for _ in range(5):
        llama.whole(error("busy", 503), 503)
    qwen.stream(*HELLO)
    assert (await create(ours, model="llama")).json()["model"] == "qwen"
    assert llama.requests[0].headers["authorization"] == "Bearer secret-of-the-caller"
    assert all("authorization" not in asked.headers for asked in [*qwen.requests, *qwen.visits])


# -- endpoints -----------------------------------------------------------------------------------------------------------


async def test_the_turns_of_a_chain_stay_at_one_endpoint(start_at: Start, serve: Serve) -> None:
    replicas = [listing(ScriptedUpstream(), "tiny"), listing(ScriptedUpstream(), "tiny"), listing(ScriptedUpstream(), "tiny")]
    urls = [serve(replica) for replica in replicas]
    ours = start_at("proxy", upstream=",".join(urls))
    for chain in range(6):
        for upstream in replicas:
            for _ in range(3):
                upstream.stream(*HELLO)
            upstream.requests.clear()
        previous = ""
        for _ in range(3):
            body = {"previous_response_id": previous} if previous else {}
            answer = (await create(ours, model="tiny", **body)).json()
            previous = answer["id"]
        assert sorted(len(upstream.requests) for upstream in replicas) == [0, 0, 3], chain


async def test_clients_do_not_notice_a_dead_endpoint(start_at: Start, serve: Serve, away: str) -> None:
    alive = listing(ScriptedUpstream(), "tiny")
    ours = start_at("proxy", upstream=f"{away},{serve(alive)}")
    for _ in range(10):
        alive.stream(*HELLO)
    answers = await asyncio.gather(*(create(ours, model="tiny") for _ in range(10)))
    assert [answer.status_code for answer in answers] == [200] * 10


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_is_retried_if_its_endpoint_dies_before_the_answer(
    start_at: Start, serve: Serve, streamed: bool
) -> None:
    asked = 0

    async def dying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST /v1/chat"):
            asked += 1
            await asyncio.sleep(0.1)  # a connection that is closed at once would have been stale
        else:
            listed = b'{"object":"list","data":[{"id":"tiny"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(listed), listed))
        writer.close()

    alive = listing(ScriptedUpstream(), "tiny")
    async with await asyncio.start_server(dying, "127.0.0.1") as server:
        dead = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ours = start_at("proxy", upstream=f"{dead},{serve(alive)}", upstream__dialect="vllm")
        for number in range(20):
            alive.stream(*HELLO)
            if streamed:
                assert (await stream(ours, model="tiny", prompt_cache_key=str(number))).terminal == "response.completed"
            else:
                assert (await create(ours, model="tiny", prompt_cache_key=str(number))).json()["status"] == "completed"
    assert asked > 0
    assert len(alive.requests) == 20


async def test_the_session_header_names_the_session_and_not_the_caller(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(upstream__session_header="X-Session-ID")
    for _ in range(3):
        upstream.stream(*HELLO)
    for key in ("private key", "private key", "other"):
        await create(ours, model="tiny", prompt_cache_key=key)
    sessions = [asked.headers["x-session-id"] for asked in upstream.requests]
    assert sessions[0] == sessions[1] != sessions[2]
    assert "private" not in orjson.dumps(sessions).decode()


async def test_a_session_header_from_the_client_is_kept(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(upstream__session_header="x-session-id")
    upstream.stream(*HELLO)
    await ours.http.post("/v1/responses", json={"model": "tiny", "input": "Hi"}, headers={"X-Session-ID": "mine"})
    assert upstream.requests[0].headers["x-session-id"] == "mine"


KEYS_OF_ALICE = {
    "auth__api_keys": [f"alice:sha256:{sha256(b'alices').hexdigest()}"],  # accepted while the upstream is away
    "auth__secret_keys": ["a secret that all the replicas of the deployment have"],
}


async def test_an_unreachable_upstream_does_not_delay_background_responses_of_another(
    several: Several, away: str, qwen: ScriptedUpstream
) -> None:
    ours = several({"url": [away], "models": ["meta/llama"]}, **KEYS_OF_ALICE)
    ours.http.headers["authorization"] = "Bearer alices"
    waiting = [(await create(ours, model="llama", background=True)).json()["id"] for _ in range(3)]
    qwen.stream(*HELLO)
    done = await ended(ours, (await create(ours, model="qwen", background=True)).json()["id"])
    assert (done["status"], done["output_text"]) == ("completed", "Hello")
    for job in waiting:
        assert (await ours.http.get(f"/v1/responses/{job}")).json()["status"] in ("queued", "in_progress")


async def test_background_responses_of_an_unreachable_upstream_run_at_its_fallback(
    several: Several, away: str, qwen: ScriptedUpstream
) -> None:
    ours = several({"url": [away], "fallbacks": ["qwen:qwen"], "models": ["meta/llama"]}, **KEYS_OF_ALICE)
    ours.http.headers["authorization"] = "Bearer alices"
    for _ in range(2):  # the second one begins when the upstream is known to be away
        qwen.stream(*HELLO)
        done = await ended(ours, (await create(ours, model="llama", background=True)).json()["id"])
        assert (done["status"], done["output_text"]) == ("completed", "Hello")


# -- what served it ---------------------------------------------------------------------------------------------------------

UPSTREAM = "x-responses-upstream"


async def test_a_header_names_the_upstream_that_answered(
    several: Several, llama: ScriptedUpstream, qwen: ScriptedUpstream
) -> None:
    ours = several(cache__mode="exact", upstream__status_grace=30)
    llama.stream(*HELLO)
    qwen.stream(*HELLO)
    assert (await create(ours, model="llama")).headers[UPSTREAM] == "llama"
    assert (await create(ours, model="qwen")).headers[UPSTREAM] == "qwen"
    assert UPSTREAM not in (await create(ours, model="qwen")).headers  # a cache hit
    assert UPSTREAM not in (await create(ours, model="gpt")).headers


async def test_a_header_names_the_fallback_that_answered_a_stream(several: Several, qwen: ScriptedUpstream, away: str) -> None:
    ours = several({"url": [away], "fallbacks": ["qwen:qwen"], "models": ["meta/llama"], "status_grace": 30})
    qwen.stream(*HELLO)
    body = {"model": "llama", "input": "Hi", "stream": True}
    async with ours.http.stream("POST", "/v1/responses", json=body) as answer:
        assert answer.headers[UPSTREAM] == "qwen"
        await answer.aread()


async def test_no_header_names_a_single_upstream(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    assert UPSTREAM not in (await create(ours, model="tiny")).headers


async def logged(caplog: pytest.LogCaptureFixture, name: str) -> dict[str, Any]:
    """Return the facts of the first record of the logger `name`. It may be written after the response."""
    async with asyncio.timeout(60):
        while not (found := [vars(one)["facts"] for one in caplog.records if one.name == name]):
            await asyncio.sleep(0.01)
    return found[0]  # type: ignore[no-any-return]


async def test_the_access_line_names_the_upstream_and_the_endpoint_that_answered(
    several: Several, serve: Serve, llama: ScriptedUpstream, away: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "responses_mw.access")
    llama.stream(*HELLO)
    url = serve(llama)
    ours = several({"url": [away, url], "models": ["meta/llama"]})
    assert (await create(ours, model="llama")).json()["status"] == "completed"
    line = await logged(caplog, "responses_mw.access")
    assert (line["upstream"], line["endpoint"]) == ("llama", url)


async def test_the_warning_about_a_failure_names_the_upstream_and_its_settings(
    several: Several, away: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours = several({"url": [away], "models": ["meta/llama"], "overload_timeout": 0})
    assert (await create(ours, model="llama")).status_code == 502
    line = await logged(caplog, "responses_mw.runs")
    assert (line["upstream"], line["endpoint"]) == ("llama", away)
    assert "upstreams.llama.url" in line["remedy"]


async def test_readiness_names_the_upstreams_without_a_live_endpoint(serve: Serve, qwen: ScriptedUpstream, away: str) -> None:
    named = {"llama": [away], "qwen": [away, serve(qwen)]}
    upstreams = {name: {"url": url} for name, url in named.items()}
    async with open_upstreams(no_app, make_settings(upstreams=upstreams)) as opened:
        probes = {one.name: partial(one.check_key, Caller()) for one in opened}
        finding = await checks(upstream_checks(probes), None, None)["upstream"]()
    assert finding.fault.startswith("llama: ")
    assert "qwen" not in finding.fault


def test_an_unreadable_certificate_names_its_upstream_in_the_error() -> None:
    with pytest.raises(StartupError, match=r"^upstreams\.llama\.url: "):
        upstream_tls(UpstreamSettings(url=("https://a",), ca_file="/nowhere.pem"), "llama")
