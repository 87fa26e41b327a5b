"""Requests that pass through to one of several upstreams or endpoints."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from responses_mw import create_app
from responses_mw.asgi.passed_bodies import MAX_ROUTED, with_model
from tests.support.configured import make_settings
from tests.support.scripted import HELLO, BrokenOff, ScriptedUpstream, Signal, error, json_answer, listing, text
from tests.support.servers import lifespan

if TYPE_CHECKING:
    from responses_mw.asgi.middleware import Application
    from tests.support.scripted import Answer, Asked
    from tests.support.servers import Ours, Serve, Several, Start

CHAT = "/v1/chat/completions"
KEY, RESTRICTED = "key-for-all", "key-for-qwen"


def line(name: str, key: str, models: str = "") -> str:
    return f"{name}:sha256:{sha256(key.encode()).hexdigest()}{models}"


KEYS = {"auth__api_keys": [line("alice", KEY), line("bob", RESTRICTED, ";models=qwen,gone")]}


class Repeating(ScriptedUpstream):
    """Answers each chat request that is not scripted, and each page."""

    def unscripted(self, asked: Asked) -> Answer:
        return json_answer({"model": asked.json["model"], "choices": []})

    def page(self, asked: Asked) -> Answer:
        return super().page(asked) if asked.path in {"/v1/models", *self.pages} else json_answer({"path": asked.path})

    @property
    def passed(self) -> list[Asked]:
        """All requests but those of this server for the models, and to check credentials."""
        visits = [asked for asked in self.visits if asked.path != "/v1/models" and asked.body != b"{}"]
        return [*self.requests, *visits]


@pytest.fixture
def llama() -> Repeating:
    return listing(Repeating(), "meta/llama")


@pytest.fixture
def qwen() -> Repeating:
    return listing(Repeating(), "qwen", "secret")


def chat(model: Any, **members: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "model": model, **members}


# -- upstreams -----------------------------------------------------------------------------------------------------------


async def test_a_chat_goes_to_the_upstream_that_serves_its_model_with_the_same_bytes(
    several: Several, llama: Repeating, qwen: Repeating
) -> None:
    ours = several()
    for model, upstream in (("qwen", qwen), ("meta/llama", llama)):
        content = b'{ "messages":[],\n"n" : 1.0, "model": "%b" }' % model.encode()
        answer = await ours.http.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert answer.json()["model"] == model
        assert [asked.body for asked in upstream.passed] == [content]


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/tokenize"])
async def test_the_upstream_gets_its_own_name_of_a_model(
    several: Several, llama: Repeating, qwen: Repeating, path: str
) -> None:
    ours = several()
    content = b'{"model" :"llama" ,  "x": 1e0}'
    assert (await ours.http.post(path, content=content)).status_code == 200
    assert [asked.body for asked in llama.passed] == [b'{"model" :"meta/llama" ,  "x": 1e0}']
    assert not qwen.passed


BODIES = {
    "nested before": (b'{"x": {"model": "llama"}, "model": "llama"}', b'{"x": {"model": "llama"}, "model": "new"}'),
    "nested after": (b'{"model": "llama", "x": {"model": "llama"}}', b'{"model": "new", "x": {"model": "llama"}}'),
    "in text": (b'{"x": "\\"model\\": \\"llama\\"", "model":"llama"}', b'{"x": "\\"model\\": \\"llama\\"", "model":"new"}'),
    "twice": (b'{"model": "other", "model": "llama"}', b'{"model": "other", "model": "new"}'),
    "escaped value": (b'{"model": "ll\\u0061ma"}', b'{"model": "new"}'),
    "escaped name": (b'{"mod\\u0065l": "llama", "a":  1}', b'{"model":"new","a":1}'),
    "far": (
        b'{"x": [%b{}], "model": "llama"}' % (b'{"model": "llama"},' * 9),
        b'{"x":[%b{}],"model":"new"}' % (b'{"model":"llama"},' * 9),
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_only_the_model_of_a_body_is_replaced(name: str) -> None:
    before, after = BODIES[name]
    assert with_model(before, json.loads(before), "new") == after


async def test_a_compressed_body_with_an_alias_is_written_anew(several: Several, llama: Repeating) -> None:
    ours = several()
    body = gzip.compress(json.dumps(chat("llama")).encode())
    answer = await ours.http.post(CHAT, content=body, headers={"content-encoding": "gzip"})
    assert answer.status_code == 200
    assert llama.passed[0].json == chat("meta/llama")
    assert "content-encoding" not in llama.passed[0].headers


async def test_a_compressed_body_passes_unchanged_to_the_upstream_of_its_model(several: Several, qwen: Repeating) -> None:
    ours = several()
    qwen.queue(json_answer({}))
    body = gzip.compress(json.dumps(chat("qwen")).encode())
    await ours.http.post(CHAT, content=body, headers={"content-encoding": "gzip"})
    assert (qwen.passed[0].body, qwen.passed[0].headers["content-encoding"]) == (body, "gzip")


async def test_an_unknown_model_is_the_same_error_as_for_responses(several: Several, llama: Repeating, qwen: Repeating) -> None:
    ours = several()
    passed = await ours.http.post(CHAT, json=chat("gpt"))
    created = await ours.http.post("/v1/responses", json={"model": "gpt", "input": "Hi"})
    assert (passed.status_code, passed.json()) == (created.status_code, created.json())
    assert passed.json()["error"]["code"] == "model_not_found"
    assert not llama.passed
    assert not qwen.passed


OTHERS: dict[str, bytes] = {
    "form": b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nqwen\r\n--x--\r\n',
    "list": b'[{"model": "qwen"}]',
    "no model": b'{"x": "qwen"}',
    "null": b'{"model": null}',
    "not a text": b'{"model": 5}',
    "not JSON": b'{"model": "qwen"',
    "large": b'{"model": "qwen", "x": "%b"}' % (b"x" * MAX_ROUTED),
    "deep": b'{"model": "qwen", "x": %b}' % (b"[" * 100 + b"]" * 100),
    "empty": b"",
}


@pytest.mark.parametrize("name", OTHERS)
async def test_all_other_bodies_go_to_the_first_upstream_unchanged(
    several: Several, llama: Repeating, qwen: Repeating, name: str
) -> None:
    ours = several()
    assert (await ours.http.post("/v1/x", content=OTHERS[name])).status_code == 200
    assert [asked.body for asked in llama.passed] == [OTHERS[name]]
    assert not qwen.passed


async def test_a_body_of_an_unknown_coding_goes_to_the_first_upstream(several: Several, llama: Repeating) -> None:
    ours = several()
    assert (await ours.http.post("/v1/x", content=b"{", headers={"content-encoding": "br"})).status_code == 200
    assert llama.passed[0].body == b"{"


async def test_a_read_goes_to_the_first_upstream(several: Several, llama: Repeating, qwen: Repeating) -> None:
    assert (await several().http.get("/v1/x?model=qwen")).json() == {"path": "/v1/x"}
    assert [asked.method for asked in llama.passed] == ["GET"]
    assert not qwen.passed


async def test_a_large_body_is_forwarded_while_it_arrives(several: Several, serve: Serve, llama: Repeating) -> None:
    arrived = Signal()

    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"model": "qwen", "x": "' + b"x" * MAX_ROUTED
        await arrived.wait()
        yield b'"}'

    async def page(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == "/v1/x":
            assert (await receive())["body"].startswith(b'{"model"')
            arrived.set()
        await llama(scope, receive, send)

    ours = several({"url": [serve(page)]})
    assert (await ours.http.post("/v1/x", content=pieces())).status_code == 200


async def test_each_piece_of_an_answer_is_forwarded_before_the_next_one(several: Several, llama: Repeating) -> None:
    ours = several()
    more = Signal()
    llama.stream(text("one"), more, text("two"))
    async with ours.http.stream("POST", CHAT, json=chat("llama", stream=True)) as answer:
        lines = answer.aiter_lines()
        assert "one" in await anext(lines)
        more.set()
        assert "two" in "".join([line async for line in lines])


async def test_a_disconnect_cancels_the_request_at_the_upstream_of_its_model(several: Several, qwen: Repeating) -> None:
    ours = several()
    before = qwen.stream(*HELLO, before=Signal())
    during = qwen.stream(text("one"), Signal(), text("two"))
    request = asyncio.create_task(ours.http.post(CHAT, json=chat("qwen", stream=True)))
    await before.asked.wait()
    request.cancel()
    await before.left.wait()
    async with ours.http.stream("POST", CHAT, json=chat("qwen", stream=True)) as answer:
        await anext(answer.aiter_lines())
    await during.left.wait()


# -- credentials -----------------------------------------------------------------------------------------------------------

OWN: dict[str, dict[str, str]] = {"llama": {"authorization": "Bearer of-llama"}, "qwen": {"api-key": "of-qwen", "x-own": "7"}}
GIVEN = {"api-key": "the caller's", "x-api-key": "the caller's", "x_own": "the caller's", "openai-project": "the caller's"}


@pytest.fixture
def keyed(several: Several) -> Ours:
    return several({"api_key": "of-llama"}, {"headers": OWN["qwen"]}, **KEYS)


@pytest.mark.parametrize("model", ["llama", "qwen"])
@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_only_the_upstream_of_the_request_gets_its_credential(
    keyed: Ours, llama: Repeating, qwen: Repeating, model: str, path: str
) -> None:
    given = {**GIVEN, "authorization": f"Bearer {KEY}"}
    assert (await keyed.http.post(path, json=chat(model), headers=given)).status_code == 200
    served, other = (llama, qwen) if model == "llama" else (qwen, llama)
    [asked] = served.passed
    assert not other.passed
    assert asked.headers.items() >= OWN[model].items()
    foreign = [value for name, one in OWN.items() if name != model for value in one.values()]
    assert not {KEY, f"Bearer {KEY}", *foreign}.intersection(asked.headers.values())
    assert "openai-project" not in asked.headers
    assert ("x_own" in asked.headers) == (model == "llama")
    for upstream, own in ((llama, OWN["qwen"]), (qwen, OWN["llama"])):
        for visit in (*upstream.requests, *upstream.visits):
            assert not visit.headers.items() & own.items()


async def test_without_a_model_the_first_upstream_gets_its_credential(keyed: Ours, llama: Repeating) -> None:
    await keyed.http.get("/v1/x", headers={"authorization": f"Bearer {KEY}"})
    assert llama.passed[0].headers["authorization"] == "Bearer of-llama"
    assert "api-key" not in llama.passed[0].headers


@pytest.mark.parametrize("model", ["llama", "qwen"])
async def test_a_callers_own_credential_goes_only_to_the_upstream_of_its_request(
    several: Several, llama: Repeating, qwen: Repeating, model: str
) -> None:
    ours = several()
    given = {"authorization": "Bearer own", "api-key": "own"}
    assert (await ours.http.post(CHAT, json=chat(model), headers=given)).status_code == 200
    served, other = (llama, qwen) if model == "llama" else (qwen, llama)
    assert served.passed[0].headers.items() >= given.items()
    assert all(not asked.headers.items() & given.items() for asked in (*other.requests, *other.visits))


async def test_the_credential_of_one_upstream_is_not_sent_without_an_api_key(
    start_at: Start, serve: Serve, llama: Repeating
) -> None:
    ours = start_at("proxy", upstream=serve(llama), upstream__api_key="the operator's")
    await ours.http.post(CHAT, json=chat("meta/llama"))
    assert "authorization" not in llama.passed[0].headers


async def test_a_fail_over_never_leads_to_another_upstream(
    several: Several, qwen: Repeating, llama: Repeating, away: str
) -> None:
    ours = several({"url": [away], "models": ["meta/llama"], "fallbacks": ["qwen:qwen"]})
    answer = await ours.http.post(CHAT, json=chat("llama"))
    assert answer.status_code in (502, 503)
    assert away not in answer.text
    assert not qwen.passed


async def test_a_field_that_steers_is_refused_if_one_upstream_with_a_credential_does_not_allow_it(
    several: Several, llama: Repeating, qwen: Repeating
) -> None:
    bearer = {"authorization": f"Bearer {KEY}"}
    ours = several({"api_key": "x", "allowed_fields": ["priority", "kv_transfer_params"]}, {"api_key": "y"}, **KEYS)
    for model in ("llama", "qwen"):
        refused = await ours.http.post(CHAT, json=chat(model, priority=1), headers=bearer)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    ours = several({"api_key": "x", "allowed_fields": ["priority"]}, **KEYS)
    assert (await ours.http.post(CHAT, json=chat("qwen", priority=1), headers=bearer)).status_code == 200
    assert [len(upstream.passed) for upstream in (llama, qwen)] == [0, 1]


# -- restricted API keys ---------------------------------------------------------------------------------------------------


async def test_a_restricted_key_reaches_the_upstream_of_its_model(several: Several, qwen: Repeating, llama: Repeating) -> None:
    ours = several({"api_key": "of-llama"}, **KEYS)
    bearer = {"authorization": f"Bearer {RESTRICTED}"}
    large = chat("qwen", x="x" * MAX_ROUTED)
    assert (await ours.http.post(CHAT, json=large, headers=bearer)).status_code == 200
    assert qwen.passed[0].json == large
    for model in ("llama", "secret"):
        assert (await ours.http.post(CHAT, json=chat(model), headers=bearer)).json()["error"]["code"] == "model_not_found"
    assert not llama.passed


async def test_a_restricted_key_may_use_an_alias(several: Several, llama: Repeating) -> None:
    ours = several(auth__api_keys=[line("carol", KEY, ";models=llama")])
    bearer = {"authorization": f"Bearer {KEY}"}
    assert (await ours.http.post(CHAT, json=chat(None), headers=bearer)).status_code == 200
    assert llama.passed[0].json == chat("meta/llama")


async def test_errors_do_not_reveal_other_models_to_a_restricted_key(several: Several) -> None:
    ours = several(**KEYS)
    bearer = {"authorization": f"Bearer {RESTRICTED}"}
    chats = await ours.http.post(CHAT, json=chat("gone"), headers=bearer)
    created = await ours.http.post("/v1/responses", json={"model": "gone", "input": "Hi"}, headers=bearer)
    for answer in (chats, created):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert "secret" not in answer.text
        assert "llama" not in answer.text


async def test_a_restricted_key_sees_only_its_models_of_several_upstreams(several: Several) -> None:
    ours = several(**KEYS)
    bearer = {"authorization": f"Bearer {RESTRICTED}"}
    assert [one["id"] for one in (await ours.http.get("/v1/models", headers=bearer)).json()["data"]] == ["qwen"]
    assert (await ours.http.get("/v1/models/qwen", headers=bearer)).json()["id"] == "qwen"
    assert (await ours.http.get("/v1/models/secret", headers=bearer)).status_code == 404
    everything = (await ours.http.get("/v1/models", headers={"authorization": f"Bearer {KEY}"})).json()
    assert [one["id"] for one in everything["data"]] == ["llama", "qwen", "secret"]


SPELLINGS = ["/v1/models", "/v1/models/", "/v1//models", "/v1/Models", "/v1/models;x", "/v1/%6dodels", "/v1/models%2fsecret"]


@pytest.mark.parametrize("path", [*SPELLINGS, "/v1/models/secret"])
async def test_a_restricted_key_sees_only_its_models_of_one_upstream(
    start_at: Start, serve: Serve, qwen: Repeating, path: str
) -> None:
    qwen.pages = {one: {"object": "list", "data": qwen.models} for one in [*SPELLINGS, "/v1/models/secret"]}
    ours = start_at("proxy", upstream=serve(qwen), **KEYS)
    request = httpx.Request(
        "GET", f"{ours.url}/x", headers={"authorization": f"Bearer {RESTRICTED}"}, extensions={"target": path.encode()}
    )
    answer = await ours.http.send(request)
    assert "secret" not in answer.text.replace("'secret' does not exist", "")
    if path == "/v1/models":
        assert [one["id"] for one in answer.json()["data"]] == ["qwen"]


async def test_the_upstreams_error_is_passed_on_if_it_lists_no_models(start_at: Start, serve: Serve, qwen: Repeating) -> None:
    ours = start_at("proxy", upstream=serve(qwen), **KEYS)
    qwen.pages["/v1/models"] = json_answer(error("busy"), 503)
    assert (await ours.http.get("/v1/models", headers={"authorization": f"Bearer {RESTRICTED}"})).status_code == 503


# -- endpoints -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def replicas() -> list[Repeating]:
    return [listing(Repeating(), "tiny") for _ in range(3)]


async def test_clients_do_not_notice_a_dead_endpoint(
    start_at: Start, serve: Serve, replicas: list[Repeating], away: str
) -> None:
    ours = start_at("proxy", upstream=f"{away},{serve(replicas[0])}")
    answers = await asyncio.gather(*(ours.http.post(CHAT, json=chat("tiny")) for _ in range(10)))
    assert [answer.status_code for answer in answers] == [200] * 10


async def test_an_upload_is_sent_to_another_endpoint_if_none_of_it_was_read(
    start_at: Start, serve: Serve, replicas: list[Repeating], away: str
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        await asyncio.sleep(0.01)
        yield b"two"

    ours = start_at("proxy", upstream=f"{away},{serve(replicas[0])}")
    for _ in range(5):
        assert (await ours.http.post("/v1/x", content=pieces())).status_code == 200
    assert [asked.body for asked in replicas[0].passed] == [b"onetwo"] * 5


@pytest.mark.parametrize("status", [429, 502, 503])
async def test_a_chat_that_is_refused_at_once_goes_to_another_endpoint(
    start_at: Start, serve: Serve, replicas: list[Repeating], status: int
) -> None:
    ours = start_at("proxy", upstream=",".join(map(serve, replicas)))
    for upstream in replicas[:2]:
        for _ in range(10):
            upstream.whole(error("busy"), status)
    for _ in range(5):
        assert (await ours.http.post(CHAT, json=chat("tiny"))).status_code == 200
    assert len(replicas[2].passed) == 5


async def test_the_last_refusal_is_passed_on(start_at: Start, serve: Serve, replicas: list[Repeating]) -> None:
    ours = start_at("proxy", upstream=",".join(map(serve, replicas)))
    for number, upstream in enumerate(replicas):
        upstream.whole(error(f"busy {number}"), 503, headers={"retry-after": "7"})
    answer = await ours.http.post(CHAT, json=chat("tiny"))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert [len(upstream.passed) for upstream in replicas] == [1, 1, 1]


@pytest.mark.parametrize("status", [400, 401, 404, 500, 504])
async def test_other_errors_are_not_retried(start_at: Start, serve: Serve, replicas: list[Repeating], status: int) -> None:
    ours = start_at("proxy", upstream=",".join(map(serve, replicas)))
    for upstream in replicas:
        upstream.whole(error("no"), status)
    assert (await ours.http.post(CHAT, json=chat("tiny"))).status_code == status
    assert sum(len(upstream.passed) for upstream in replicas) == 1


async def test_a_body_that_is_read_from_the_client_is_never_sent_twice(
    start_at: Start, serve: Serve, replicas: list[Repeating]
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        await asyncio.sleep(0.01)
        yield b"two"

    ours = start_at("proxy", upstream=",".join(map(serve, replicas)))
    for upstream in replicas:
        upstream.pages["/v1/x"] = json_answer(error("busy"), 503)
    assert (await ours.http.post("/v1/x", content=pieces())).status_code == 503
    assert [asked.body for upstream in replicas for asked in upstream.passed] == [b"onetwo"]


async def test_a_request_that_may_have_been_processed_is_not_sent_again(
    start_at: Start, serve: Serve, replicas: list[Repeating]
) -> None:
    ours = start_at("proxy", upstream=",".join(map(serve, replicas)))
    for upstream in replicas:
        upstream.stream(BrokenOff(), done=False)
    with pytest.raises(httpx.RemoteProtocolError):
        await ours.http.post(CHAT, json=chat("tiny"))
    assert sum(len(upstream.passed) for upstream in replicas) == 1


@pytest.mark.parametrize("by", ["header", "key"])
async def test_the_requests_of_a_session_stay_at_one_endpoint(
    start_at: Start, serve: Serve, replicas: list[Repeating], by: str
) -> None:
    aliases = {"upstream__aliases": {"small": "tiny"}} if by == "key" else {}
    ours = start_at("proxy", upstream=",".join(map(serve, replicas)), **aliases)
    seen = set()
    for session in range(12):
        for upstream in replicas:
            upstream.requests.clear()
        for _ in range(4):
            members = {"prompt_cache_key": f"s{session}"} if by == "key" else {}
            headers = {"x-session-id": f"s{session}"} if by == "header" else {}
            assert (await ours.http.post(CHAT, json=chat("tiny", **members), headers=headers)).status_code == 200
        counts = [len(upstream.passed) for upstream in replicas]
        assert sorted(counts) == [0, 0, 4]
        seen.add(counts.index(4))
    assert len(seen) > 1


async def test_a_chat_belongs_to_the_session_of_responses_with_the_same_key(
    start_at: Start, serve: Serve, upstream: ScriptedUpstream
) -> None:
    settings = {"upstream__session_header": "x-router", "upstream__aliases": {"small": "tiny"}}
    ours = start_at("proxy", upstream=serve(upstream), **settings)
    upstream.stream(*HELLO)
    upstream.whole({})
    upstream.whole({})
    await ours.http.post("/v1/responses", json={"model": "small", "input": "Hi", "stream": True, "prompt_cache_key": "k"})
    await ours.http.post(CHAT, json=chat("small", prompt_cache_key="k"))
    await ours.http.post(CHAT, json=chat("small", prompt_cache_key="k"), headers={"x-router": "mine"})
    sessions = [asked.headers["x-router"] for asked in upstream.requests]
    assert sessions[0] == sessions[1] != "k"
    assert sessions[2] == "mine"


async def test_a_redirect_does_not_reveal_the_address_of_an_endpoint(several: Several, serve: Serve, llama: Repeating) -> None:
    local = serve(llama).replace("127.0.0.1", "localhost")
    other = serve(Repeating()).replace("127.0.0.1", "127.0.0.2")
    ours = several({"url": [f"{local}/base"]}, {"url": [other]})
    expected = {
        f"{local}/base/v1/y": "/v1/y",
        f"{local}/elsewhere": None,
        f"{other}/v1/y": None,
        "/base/v1/y": "/v1/y",
        "https://example.com/y": "https://example.com/y",
    }
    for location, shown in expected.items():
        llama.pages["/base/v1/x"] = json_answer({}, 307, {"location": location})
        assert (await ours.http.get("/v1/x")).headers.get("location") == shown, location


# -- the pool --------------------------------------------------------------------------------------------------------------


async def test_requests_in_flight_are_counted_until_their_answers_end(
    serve: Serve, replicas: list[Repeating], redis_url: str
) -> None:
    app = create_app(make_settings(upstream__url=",".join(map(serve, replicas)), redis__url=redis_url))
    transport = httpx.ASGITransport(app)

    def loads(application: Application | None) -> int:
        assert application is not None
        return sum(endpoint.in_flight for endpoint in application.upstreams.default.pool.endpoints)

    seen: list[int] = []
    async with lifespan(app), httpx.AsyncClient(transport=transport, base_url="http://x", timeout=60) as http:
        more = Signal()
        for upstream in replicas:
            upstream.stream(text("one"), more, text("two"))
        request = asyncio.create_task(http.post(CHAT, json=chat("tiny")))
        async with asyncio.timeout(60):
            while not loads(app.application):
                await asyncio.sleep(0.01)
        seen.append(loads(app.application))
        more.set()
        assert (await request).status_code == 200
        seen.append(loads(app.application))
    assert seen == [1, 0]


async def test_passed_requests_alone_eject_a_dead_endpoint(
    serve: Serve, replicas: list[Repeating], redis_url: str, away: str
) -> None:
    app = create_app(make_settings(upstream__url=f"{away},{serve(replicas[0])}", redis__url=redis_url))
    transport = httpx.ASGITransport(app)
    async with lifespan(app), httpx.AsyncClient(transport=transport, base_url="http://x", timeout=60) as http:
        assert app.application is not None
        [dead] = [one for one in app.application.upstreams.default.pool.endpoints if one.address.url == away]
        dead.succeed()
        async with asyncio.timeout(60):
            while not dead.is_ejected:
                assert (await http.post(CHAT, json=chat("tiny"))).status_code == 200
