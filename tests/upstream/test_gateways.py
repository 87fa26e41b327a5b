"""Gateways in front of the upstream: headers with credentials, private CAs and client certificates."""

from __future__ import annotations

import json
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from responses_mw import create_app
from responses_mw.errors import StartupError
from tests.support.certificates import create_certificate
from tests.support.configured import make_settings
from tests.support.scripted import ScriptedUpstream, completion

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.servers import Ours, Serve, Start

BODY = {"input": "Hi", "model": "tiny"}
ANSWER = completion({"content": "Hello"})
AZURE = json.dumps({"Api-Key": "secret-of-the-operator", "X-Team": "search"})


async def ask(ours: Ours, **headers: str) -> httpx.Response:
    return await ours.http.post("/v1/responses", json=BODY, headers=headers)


@pytest.mark.both_mounts
async def test_the_headers_of_the_operator_are_sent_and_replace_those_of_the_caller(
    start: Start, upstream: ScriptedUpstream
) -> None:
    basic = {"authorization": "Basic b3VyczpzZWNyZXQ=", "x-session-id": "ours"}
    for headers in (AZURE, json.dumps(basic)):
        upstream.whole(ANSWER)
        assert (await ask(start(upstream__headers=headers), Authorization="Bearer mine")).status_code == 200
    azure, other = (request.headers for request in upstream.requests)
    assert (azure["api-key"], azure["x-team"], azure["authorization"]) == ("secret-of-the-operator", "search", "Bearer mine")
    assert (other["authorization"], other["x-session-id"]) == (basic["authorization"], "ours")


async def test_a_refused_header_of_the_operator_is_a_502_that_does_not_reveal_it(
    start_at: Callable[..., Ours], upstream: ScriptedUpstream
) -> None:
    ours = start_at("proxy", upstream__headers=AZURE)
    upstream.whole({"error": {"message": "Wrong key: secret-of-the-operator"}}, status=401)
    answer = await ask(ours)
    assert (answer.status_code, "secret-of-the-operator" in answer.text) == (502, False)


@pytest.mark.parametrize("has_keys", [True, False])
async def test_proxied_requests_get_the_headers_only_if_there_are_api_keys(
    start_at: Callable[..., Ours], upstream: ScriptedUpstream, has_keys: bool
) -> None:
    keys = {"auth__api_keys": [f"alice:sha256:{sha256(b'sk-alice').hexdigest()}"]} if has_keys else {}
    ours = start_at("proxy", upstream__headers=AZURE, **keys)
    headers = {"authorization": "Bearer sk-alice", "api-key": "the caller's"}
    upstream.whole(ANSWER)
    await ours.http.post("/v1/chat/completions", json={"model": "tiny", "messages": []}, headers=headers)
    assert upstream.requests[-1].headers["api-key"] == ("secret-of-the-operator" if has_keys else "the caller's")


async def test_the_headers_are_not_sent_to_another_server_for_embeddings(
    start_at: Callable[..., Ours], upstream: ScriptedUpstream, serve: Serve
) -> None:
    seen: list[dict[bytes, bytes]] = []

    async def embeddings(scope: Any, receive: Any, send: Any) -> None:
        seen.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body"})

    ours = start_at(
        "proxy",
        upstream__headers=AZURE,
        cache__mode="semantic",
        cache__embedding_model="m",
        cache__embedding_url=serve(embeddings, lifespan="off"),
    )
    upstream.whole(ANSWER)
    assert (await ask(ours)).status_code == 200
    assert seen
    assert not any(b"api-key" in headers for headers in seen)


@pytest.mark.parametrize(
    "headers",
    ['{"Content-Length": "1"}', '{"x y": "1"}', '{"x": "a\\nb"}', '{"x": "\u0416"}', "[]", '{"authorization": "Basic x"}'],
)
def test_invalid_headers_are_refused_without_their_values(headers: str) -> None:
    with pytest.raises(ValueError, match="upstream") as error:
        make_settings(upstream__headers=headers, upstream__api_key="key" if "authorization" in headers else None)
    assert "Basic x" not in str(error.value)


# -- certificates ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def guarded(serve: Serve, upstream: ScriptedUpstream, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """Serve the upstream over TLS for clients with a certificate. Return its URL, and the settings that it needs."""
    create_certificate(tmp_path)
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    url = serve(upstream, ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=cert, ssl_cert_reqs=ssl.CERT_REQUIRED)
    settings = {"upstream__ca_file": cert, "upstream__client_certificate": cert, "upstream__client_key": key}
    return url.replace("http://", "https://"), settings


async def test_a_client_certificate_and_a_private_ca_are_used_for_all_requests(
    start_at: Callable[..., Ours], upstream: ScriptedUpstream, guarded: tuple[str, dict[str, Any]]
) -> None:
    url, settings = guarded
    ours = start_at("proxy", upstream=url, **settings)
    upstream.whole(ANSWER)
    assert (await ask(ours)).status_code == 200
    assert (await ours.http.get("/v1/models")).json()["data"][0]["id"] == "tiny"


async def test_each_upstream_has_its_own_certificates(
    start_at: Callable[..., Ours], serve: Serve, upstream: ScriptedUpstream, guarded: tuple[str, dict[str, Any]]
) -> None:
    url, settings = guarded
    own = {name.removeprefix("upstream__"): value for name, value in settings.items()}
    upstreams = {"plain": {"url": [serve(ScriptedUpstream())], "models": ["other"]}, "guarded": {"url": [url], **own}}
    ours = start_at("proxy", upstream="", upstreams=upstreams)
    for path, body in (("/v1/chat/completions", {"messages": []}), ("/v1/responses", {"input": "Hi"})):
        upstream.whole(ANSWER)
        assert (await ours.http.post(path, json={"model": "tiny", **body})).status_code == 200


async def test_an_untrusted_certificate_authority_is_reported(
    start_at: Callable[..., Ours], guarded: tuple[str, dict[str, Any]]
) -> None:
    answer = await ask(start_at("proxy", upstream=guarded[0]))
    assert answer.status_code == 502
    assert "its certificate is not trusted" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (ssl.TLSVersion.TLSv1_3, "it requires a client certificate"),
        (ssl.TLSVersion.TLSv1_2, "it may require a client certificate"),
    ],
)
async def test_a_missing_client_certificate_is_reported(
    start_at: Callable[..., Ours], tmp_path: Path, version: ssl.TLSVersion, reason: str
) -> None:
    create_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tmp_path / "cert.pem")
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    context.verify_mode, context.maximum_version = ssl.CERT_REQUIRED, version
    # asyncio's servers close the connection without an alert, unlike gateways.
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(refuse_all, listener, context)
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        answer = await ask(start_at("proxy", upstream=url, upstream__ca_file=str(tmp_path / "cert.pem")))
        listener.shutdown(socket.SHUT_RDWR)
    assert answer.status_code == 502
    assert reason in answer.json()["error"]["message"]


def refuse_all(listener: socket.socket, context: ssl.SSLContext) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with suppress(ssl.SSLError), context.wrap_socket(connection, server_side=True) as stream:
                stream.recv(1)


@pytest.mark.parametrize("setting", ["ca_file", "client_certificate"])
def test_an_unreadable_file_prevents_the_start(setting: str) -> None:
    settings = make_settings(upstream__url="https://127.0.0.1:1", **{f"upstream__{setting}": "/missing.pem"})
    with pytest.raises(StartupError, match=r"/missing\.pem cannot be read: No such file or directory"):
        create_app(settings)
