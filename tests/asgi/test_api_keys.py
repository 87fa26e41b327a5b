"""API keys and tenants."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw import Settings
from responses_mw.asgi.access import APIKeyMiddleware
from responses_mw.auth import APIKeys, owner_in
from responses_mw.errors import BadRequest, StartupError
from tests.support.configured import make_settings
from tests.support.scripted import HELLO

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.types import Message

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Start

ALICE, OTHER_OF_ALICE, BOB = "key-of-alice", "another-of-alice", "key-of-bob"
OPERATORS = "the operator's"


def line(name: str, key: str) -> str:
    return f"{name}:sha256:{sha256(key.encode()).hexdigest()}"


LINES = [line("alice", ALICE), line("alice", OTHER_OF_ALICE), line("bob", BOB)]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def guarded(start: Start) -> Ours:
    return start(auth__api_keys=LINES, upstream__api_key=OPERATORS)


async def create(ours: Ours, key: str | None, **body: Any) -> Any:
    headers = bearer(key) if key else {}
    return await ours.http.post("/v1/responses", json={"model": "tiny", "input": "hi", **body}, headers=headers)


@pytest.mark.parametrize("key", [None, "unknown", LINES[0], LINES[0].partition("sha256:")[2], ""])
async def test_a_request_without_a_valid_key_is_refused_before_the_upstream_is_called(
    guarded: Ours, upstream: ScriptedUpstream, key: str | None
) -> None:
    answer = await create(guarded, key)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert (await guarded.http.get("/v1/responses/x")).status_code == 401
    assert upstream.requests == []


@pytest.mark.both_mounts
async def test_the_upstream_gets_the_operators_key_instead_of_the_callers(guarded: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    assert (await create(guarded, ALICE)).status_code == 200
    [asked] = upstream.requests
    assert asked.headers["authorization"] == f"Bearer {OPERATORS}"
    assert ALICE not in repr(upstream.requests + upstream.visits)


@pytest.mark.both_mounts
async def test_without_an_operators_key_the_upstream_gets_no_authorization(start: Start, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    assert (await create(start(auth__api_keys=LINES), ALICE)).status_code == 200
    assert "authorization" not in upstream.requests[0].headers


async def test_a_stored_response_belongs_to_the_name_of_its_key(guarded: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    made = (await create(guarded, ALICE)).json()["id"]
    found = [
        (await guarded.http.get(f"/v1/responses/{made}", headers=bearer(key))).status_code
        for key in (ALICE, OTHER_OF_ALICE, BOB)
    ]
    assert found == [200, 200, 404]


async def test_with_an_api_key_the_tenant_header_still_determines_the_owner(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(auth__api_keys=LINES, auth__tenant_header="x-tenant")
    upstream.stream(*HELLO)
    headers = {**bearer(ALICE), "x-tenant": "one"}
    made = (await ours.http.post("/v1/responses", json={"model": "tiny", "input": "hi"}, headers=headers)).json()["id"]
    path = f"/v1/responses/{made}"
    assert (await ours.http.get(path, headers=headers)).status_code == 200
    assert (await ours.http.get(path, headers={**headers, "x-tenant": "two"})).status_code == 404


async def test_proxied_paths_need_a_key_too(start_at: Any, upstream: ScriptedUpstream) -> None:
    ours = start_at("proxy", auth__api_keys=LINES, upstream__api_key=OPERATORS)
    body = {"model": "tiny", "messages": []}
    assert (await ours.http.post("/v1/chat/completions", json=body)).status_code == 401
    assert upstream.requests == []
    upstream.whole({})
    assert (await ours.http.post("/v1/chat/completions", json=body, headers=bearer(BOB))).status_code == 200
    assert upstream.requests[0].headers["authorization"] == f"Bearer {OPERATORS}"


@pytest.mark.parametrize(
    ("extensions", "first"), [({}, "websocket.close"), ({"websocket.http.response": {}}, "websocket.http.response.start")]
)
async def test_a_websocket_without_a_key_is_refused(extensions: dict[str, Any], first: str) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    async def app(*_: object) -> None:
        raise AssertionError("it is not reached")

    scope = {"type": "websocket", "headers": [], "extensions": extensions}
    await APIKeyMiddleware(app, APIKeys(LINES))(scope, receive, send)
    assert sent[0]["type"] == first


# -- files of keys ---------------------------------------------------------------------------------------------------------------


def test_a_file_may_have_comments_and_empty_lines(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n".join(["# who may ask", "", f"  {LINES[0]}  ", LINES[2].upper().replace("BOB:SHA", "bob:sha")]))
    keys = APIKeys.of(make_settings(auth__api_keys=[f"@{file}"]).auth)
    assert keys is not None
    assert [keys.find(f"Bearer {key}") for key in (ALICE, BOB, OTHER_OF_ALICE)] == [("alice", None), ("bob", None), None]
    assert keys.find(f"Basic {ALICE}") is None


@pytest.mark.parametrize(
    "wrong", [ALICE, f"alice:{ALICE}", "alice:sha256:abc", "a b:sha256:" + "0" * 64, f"alice:md5:{'0' * 64}"]
)
def test_an_invalid_line_is_reported_by_its_number_without_its_text(wrong: str) -> None:
    with pytest.raises(StartupError) as caught:
        APIKeys([LINES[0], wrong])
    assert "line 2" in str(caught.value)
    assert wrong not in str(caught.value)


def test_a_missing_or_empty_file_prevents_startup(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nobody\n")
    for name in ("absent", "empty"):
        with pytest.raises(StartupError):
            APIKeys.of(make_settings(auth__api_keys=[f"@{tmp_path / name}"]).auth)


def test_api_keys_are_disabled_by_default() -> None:
    assert APIKeys.of(Settings().auth) is None


# -- tenants -------------------------------------------------------------------------------------------------------------------


async def test_only_tenant_keys_may_name_a_tenant(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(auth__api_keys=LINES, auth__tenant_header="X-Tenant", auth__tenant_keys=["alice"])
    body = {"model": "tiny", "input": "hi"}
    upstream.stream(*HELLO)
    by_gateway = await ours.http.post("/v1/responses", json=body, headers={**bearer(ALICE), "x-tenant": "one"})
    upstream.stream(*HELLO)
    by_bob = await ours.http.post("/v1/responses", json=body, headers=bearer(BOB))
    assert (by_gateway.status_code, by_bob.status_code) == (200, 200)
    seen = {
        (who, made.json()["id"]): (await ours.http.get(f"/v1/responses/{made.json()['id']}", headers=headers)).status_code
        for made in (by_gateway, by_bob)
        for who, headers in (("gateway", {**bearer(ALICE), "x-tenant": "one"}), ("bob", bearer(BOB)))
    }
    assert list(seen.values()) == [200, 404, 404, 200]


async def test_a_tenant_header_with_another_key_is_a_403_and_a_tenant_key_without_it_a_400(
    start: Start, upstream: ScriptedUpstream
) -> None:
    ours = start(auth__api_keys=LINES, auth__tenant_header="X-Tenant", auth__tenant_keys=["alice"])
    answer = await ours.http.post(
        "/v1/responses", json={"model": "tiny", "input": "hi"}, headers={**bearer(BOB), "x-tenant": "one"}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "tenant_not_allowed")
    without = await ours.http.get("/v1/responses/x", headers=bearer(ALICE))
    assert (without.status_code, without.json()["error"]["code"]) == (400, "invalid_tenant_header")
    assert upstream.requests == []


@pytest.mark.parametrize("keys", [LINES, []])
def test_tenant_keys_must_be_the_names_of_keys(keys: list[str]) -> None:
    with pytest.raises(StartupError, match="carol"):
        APIKeys.of(make_settings(auth__api_keys=keys, auth__tenant_header="x-tenant", auth__tenant_keys=["carol"]).auth)
    with pytest.raises(ValueError, match="tenant_header"):
        make_settings(auth__api_keys=keys, auth__tenant_keys=["alice"])


# -- owners ------------------------------------------------------------------------------------------------------------------


def owner(*authorization: str, **settings: Any) -> str:
    """Return the owner of a request with these `Authorization` headers."""
    scope = {"type": "http", "headers": [(b"authorization", value.encode()) for value in authorization]}
    return owner_in(scope, make_settings(**settings).auth)


def test_the_owner_of_a_credential_does_not_depend_on_its_spelling() -> None:
    assert owner("Bearer key") == owner("bearer key") == owner(" BEARER   key ")
    others = [(), ("key",), ("KEY",), ("Bearer Key",), ("Bearer other",), ("Basic key",), ("Bearer key", "Bearer other")]
    assert len({owner("Bearer key"), *(owner(*other) for other in others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("values", "fault"), [([], "is missing"), ([b" "], "is empty"), ([b"one", b"two"], "is sent more than once")]
)
def test_the_error_about_a_tenant_header_says_what_is_wrong(values: list[bytes], fault: str) -> None:
    scope = {"type": "http", "headers": [(b"x-tenant", value) for value in values]}
    with pytest.raises(BadRequest, match=fault):
        owner_in(scope, make_settings(auth__tenant_header="X-Tenant").auth)
