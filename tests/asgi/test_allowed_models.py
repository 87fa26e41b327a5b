"""API keys that are restricted to models."""

from __future__ import annotations

import gzip
import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.auth import APIKeys
from responses_mw.errors import StartupError
from tests.support.configured import make_settings
from tests.support.scripted import HELLO, completion
from tests.support.websocket import UVICORN, opened

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Start

ONE, TWO, ALL = "key-of-one", "key-of-two", "key-of-all"
SECRET = "a secret that all the replicas of the deployment have"
NOT_ALLOWED = "The model 'secret' does not exist, or your API key may not use it. It may use: {}."
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def line(name: str, key: str, models: str = "") -> str:
    return f"{name}:sha256:{sha256(key.encode()).hexdigest()}{models}"


LINES = [line("one", ONE, ";models=llama"), line("two", TWO, ";models=qwen, llama"), line("all", ALL)]


@pytest.fixture
def ours(start: Start) -> Ours:
    return start(uvicorn=UVICORN, auth__api_keys=LINES, auth__secret_keys=[SECRET], cache__mode="exact")


async def post(ours: Ours, key: str, path: str = "/v1/responses", headers: dict[str, str] | None = None, **body: Any) -> Any:
    given = {} if "messages" in body else {"input": "hi"}
    sent = {"authorization": f"Bearer {key}", **(headers or {})}
    return await ours.http.post(path, json={**given, **body}, headers=sent)


def refusal(answer: httpx.Response) -> tuple[int, str, str | None, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"], error["message"]


# -- our routes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.both_mounts
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/compact", "/v1/responses/input_tokens"])
async def test_a_model_that_the_key_may_not_use_is_not_found(ours: Ours, upstream: ScriptedUpstream, path: str) -> None:
    for key, names in ((ONE, "llama"), (TWO, "llama, qwen")):
        told = refusal(await post(ours, key, path, model="secret"))
        assert told == (404, "model_not_found", "model", NOT_ALLOWED.format(names))
    assert upstream.requests == []


@pytest.mark.parametrize("more", [{"stream": True}, {"background": True}, {"background": True, "stream": True}])
async def test_every_way_to_create_a_response_is_checked(ours: Ours, upstream: ScriptedUpstream, more: dict[str, Any]) -> None:
    assert refusal(await post(ours, ONE, model="secret", **more))[:3] == (404, "model_not_found", "model")
    assert upstream.requests == []


async def test_requests_on_a_websocket_are_checked(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    async with opened(ours, key=ONE) as socket:
        for generate in (True, False):
            refused = await socket.error(model="secret", generate=generate)
            assert (refused["status"], refused["error"]["code"]) == (404, "model_not_found")
        assert (await socket.response(model="llama"))["model"] == "llama"


async def test_a_model_that_the_key_may_use_is_used(ours: Ours, upstream: ScriptedUpstream) -> None:
    for key, model in ((ONE, "llama"), (TWO, "qwen"), (ALL, "secret")):
        upstream.stream(*HELLO)
        assert (await post(ours, key, model=model)).status_code == 200
    assert [asked.json["model"] for asked in upstream.requests] == ["llama", "qwen", "secret"]


@pytest.mark.parametrize("more", [{}, {"model": None}, {"background": True}])
async def test_the_only_model_of_a_key_is_its_default(ours: Ours, upstream: ScriptedUpstream, more: dict[str, Any]) -> None:
    upstream.stream(*HELLO)
    made = await post(ours, ONE, **more)
    assert (made.status_code, made.json()["model"]) == (200, "llama")
    await upstream.received(1)
    assert upstream.requests[0].json["model"] == "llama"


async def test_a_key_with_several_models_must_name_one(ours: Ours, upstream: ScriptedUpstream) -> None:
    message = "Missing required parameter: 'model'. Your API key may use: llama, qwen."
    assert refusal(await post(ours, TWO)) == (400, "missing_required_parameter", "model", message)
    assert upstream.requests == []


@pytest.mark.parametrize("name", ["models", "fallbacks", "lora_path", "Model", "MODELS", "modelſ"])
async def test_no_other_field_can_choose_a_model(start: Start, upstream: ScriptedUpstream, name: str) -> None:
    ours = start(auth__api_keys=LINES, upstream__api_key="operators", upstream__allowed_fields="*")
    members: dict[str, Any] = {name: ["secret"]}
    assert refusal(await post(ours, ONE, model="llama", **members))[::2] == (400, name)
    assert upstream.requests == []


async def test_a_template_cannot_choose_a_model(start: Start, upstream: ScriptedUpstream, tmp_path: Path) -> None:
    (tmp_path / "greeting.json").write_text(json.dumps({"model": "secret", "instructions": "Greet."}))
    ours = start(auth__api_keys=LINES, server__prompts_dir=str(tmp_path))
    told = refusal(await post(ours, ONE, prompt={"id": "greeting"}))
    assert told[:3] == (404, "model_not_found", "model")
    assert upstream.requests == []


async def test_a_cached_or_repeated_answer_of_another_key_is_checked(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(auth__api_keys=LINES, auth__tenant_header="x-tenant", cache__mode="exact")
    upstream.stream(*HELLO)
    headers = {"x-tenant": "same", "idempotency-key": "1"}
    assert (await post(ours, ALL, headers=headers, model="secret")).status_code == 200
    assert (await post(ours, ALL, headers=headers, model="secret")).status_code == 200
    for name in ("idempotency-key", "unset"):
        told = refusal(await post(ours, ONE, headers={"x-tenant": "same", name: "1"}, model="secret"))
        assert told[:3] == (404, "model_not_found", "model")
    assert len(upstream.requests) == 1


async def test_a_chain_of_another_model_continues_with_a_model_of_the_key(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(auth__api_keys=LINES, auth__tenant_header="x-tenant")
    headers = {"x-tenant": "same"}
    upstream.stream(*HELLO)
    first = (await post(ours, ALL, headers=headers, model="secret")).json()["id"]
    told = refusal(await post(ours, ONE, headers=headers, model="secret", previous_response_id=first))
    assert told[:3] == (404, "model_not_found", "model")
    upstream.stream(*HELLO)
    assert (await post(ours, ONE, headers=headers, previous_response_id=first)).json()["model"] == "llama"


# -- requests that pass through --------------------------------------------------------------------------------------------------


async def test_the_model_of_a_body_that_passes_through_is_checked(ours: Ours, upstream: ScriptedUpstream) -> None:
    path = "/v1/chat/completions"
    assert refusal(await post(ours, ONE, path, model="secret", **CHAT))[:3] == (404, "model_not_found", "model")
    assert refusal(await post(ours, TWO, path, **CHAT))[:3] == (400, "missing_required_parameter", "model")
    assert refusal(await post(ours, ONE, path, model=5, **CHAT))[::2] == (400, "model")
    assert upstream.requests == []
    for model in ("llama", None):
        upstream.whole(completion({"content": "Hi"}))
        assert (await post(ours, ONE, path, model=model, **CHAT)).status_code == 200
    assert [asked.json for asked in upstream.requests] == [{**CHAT, "model": "llama"}] * 2


async def test_the_upstream_gets_the_model_that_was_checked(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(completion({"content": "Hi"}))
    twice = b'{"model": "secret", "model": "llama", "messages": []}'
    headers = {"authorization": f"Bearer {ONE}", "content-encoding": "gzip", "content-type": "text/plain"}
    answer = await ours.http.post("/v1/chat/completions", content=gzip.compress(twice), headers=headers)
    assert answer.status_code == 200
    [asked] = upstream.requests
    assert asked.body == b'{"model":"llama","messages":[]}'
    assert (asked.headers["content-type"], "content-encoding" in asked.headers) == ("application/json", False)


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/audio/transcriptions", 403, "model_restricted"),
        ("/v1/engines/secret/chat/completions", 403, "model_restricted"),
        ("/v1/chat/completions?Model=secret", 400, None),
        ("/v1/embeddings", 404, "model_not_found"),
    ],
)
async def test_requests_whose_model_cannot_be_checked_are_refused(
    ours: Ours, upstream: ScriptedUpstream, path: str, status: int, code: str | None
) -> None:
    assert refusal(await post(ours, ONE, path, model="llama" if status != 404 else "secret"))[:2] == (status, code)
    assert upstream.requests == []


async def test_other_keys_and_reads_pass_unchanged(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole({})
    content = b'{ "messages": [], "model": "secret" }'
    headers = {"authorization": f"Bearer {ALL}"}
    answer = await ours.http.post("/v1/chat/completions?model=x", content=content, headers=headers)
    assert (answer.status_code, upstream.requests[0].body) == (200, content)
    assert (await ours.http.get("/v1/models", headers={"authorization": f"Bearer {ONE}"})).status_code == 200


# -- the setting -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [";models=", ";models=a,,b", ";models=a b", ";models=a;b", ";model=a", f";models=a{',a' * 256}", f";models={'a' * 257}"],
)
def test_a_malformed_restriction_is_an_error(wrong: str) -> None:
    with pytest.raises(StartupError, match="line 2"):
        APIKeys([line("all", ALL), line("one", ONE, wrong)])


def test_the_lines_of_a_key_must_agree() -> None:
    APIKeys([line("one", ONE, ";models=a,b"), line("one", ONE, ";models=b,a")])
    with pytest.raises(StartupError, match=r"line 2.*earlier line"):
        APIKeys([line("one", ONE, ";models=a"), line("one", ONE)])


def test_commas_separate_keys_and_models(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(line("all", ALL))
    text = f"{LINES[0]},{line('two', TWO, ';models=meta/llama:8b, qwen')} , @{file},"
    keys = APIKeys.of(make_settings(auth__api_keys=text).auth)
    assert keys is not None
    assert [keys.find(f"Bearer {key}") for key in (ONE, TWO, ALL)] == [
        ("one", {"llama"}),
        ("two", {"meta/llama:8b", "qwen"}),
        ("all", None),
    ]
