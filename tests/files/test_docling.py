"""A scripted docling-serve recognizes the text of images and scanned documents."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from responses_mw.embedding_models import open_docling
from responses_mw.errors import Unavailable
from responses_mw.files import docling
from responses_mw.files.extraction import ExtractionFailed, Extractor
from tests.cache.asking import settings

from .test_extraction import pdf

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from tests.support.servers import Serve

PNG = b"\x89PNG\r\n\x1a\n123"
ASYNC, POLL, RESULT = "/v1/convert/source/async", "/v1/status/poll/t-1", "/v1/result/t-1"


@dataclass
class DoclingServe:
    """A server that needs `polls` polls. `answers` replaces the status and the body of its answers by path."""

    polls: int = 1
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    queries: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        body += message.get("body", b"")
        self.keys.append(dict(scope["headers"]).get(b"x-api-key", b"").decode())
        status, answer = self.answers.get(scope["path"]) or (200, self._answer(scope, body))
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": orjson.dumps(answer)})

    def _answer(self, scope: Scope, body: bytes) -> Any:
        if scope["path"] == ASYNC:
            assert scope["method"] == "POST"
            self.bodies.append(orjson.loads(body))
            return {"task_id": "t-1", "task_type": "convert", "task_status": "pending", "task_position": 1}
        assert scope["method"] == "GET"
        if scope["path"] == POLL:
            self.queries.append(scope["query_string"])
            self.polls -= 1
            return {"task_id": "t-1", "task_status": "started" if self.polls > 0 else "success"}
        return {"document": {"filename": "a", "md_content": "# Recognized"}, "status": "success", "errors": []}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> DoclingServe:
    monkeypatch.setattr(docling, "_PAUSE", 0.001)
    return DoclingServe()


async def read(serve: Serve, server: DoclingServe, data: bytes, name: str = "a.png", **given: Any) -> str:
    url = serve(server, lifespan="off")
    async with open_docling(settings(files__docling_url=url, files__docling_api_key="secret", **given)) as opened:
        assert opened is not None
        return await Extractor(opened.read).extract(data, name)


@pytest.mark.parametrize("data", [PNG, b"\xff\xd8\xff", pdf()], ids=["png", "jpeg", "scan"])
async def test_the_text_of_an_image_or_a_scan_is_recognized(serve: Serve, server: DoclingServe, data: bytes) -> None:
    server.polls = 3
    assert await read(serve, server, data, "a.name") == "# Recognized"
    [body] = server.bodies
    [source] = body["sources"]
    assert (source["kind"], source["filename"], base64.b64decode(source["base64_string"])) == ("file", "a.name", data)
    assert body["options"] == {"to_formats": ["md"], "do_ocr": True, "image_export_mode": "placeholder"}
    assert server.queries == [b"wait=5"] * 3
    assert set(server.keys) == {"secret"}


async def test_a_document_with_text_is_not_sent_to_docling(serve: Serve, server: DoclingServe) -> None:
    assert "Hello" in await read(serve, server, pdf("Hello"))
    assert server.keys == []


@pytest.mark.parametrize(
    ("path", "status", "answer", "code", "reason"),
    [
        (ASYNC, 413, {"detail": "x"}, "invalid_file", "refused the document"),
        (ASYNC, 422, {"detail": "x"}, "server_error", "refused the request"),
        (ASYNC, 401, {"detail": "x"}, "server_error", "API key"),
        (ASYNC, 200, {"task_id": "../x", "task_status": "success"}, "server_error", "malformed answer"),
        (ASYNC, 200, [], "server_error", "malformed answer"),
        (POLL, 200, {"task_status": "failure", "error_message": "no models", "failure": None}, "server_error", "has failed"),
        (POLL, 200, {"task_status": "failure"}, "server_error", "has failed"),
        (POLL, 200, {}, "server_error", "malformed answer"),
        (RESULT, 200, {"status": "failure", "document": {}}, "invalid_file", "could not be recognized"),
        (RESULT, 200, {"status": "skipped", "document": {"md_content": None}}, "invalid_file", "could not be recognized"),
        (RESULT, 200, {"status": "success", "document": {"md_content": 1}}, "server_error", "malformed answer"),
        (RESULT, 200, {"status": "success", "document": {"md_content": " "}}, "invalid_file", "no text"),
        (RESULT, 200, {"status": "success", "document": None}, "server_error", "malformed answer"),
    ],
)
async def test_a_failed_recognition_has_a_readable_reason(
    serve: Serve, server: DoclingServe, path: str, status: int, answer: Any, code: str, reason: str
) -> None:
    server.answers[path] = status, answer
    with pytest.raises(ExtractionFailed, match=reason) as raised:
        await read(serve, server, PNG)
    assert raised.value.code == code
    assert str(raised.value).endswith(".")


@pytest.mark.parametrize("path", [ASYNC, POLL, RESULT])
async def test_an_unavailable_docling_server_is_a_temporary_failure(serve: Serve, server: DoclingServe, path: str) -> None:
    server.answers[path] = 503, {"detail": "x"}
    with pytest.raises(Unavailable, match="503"):
        await read(serve, server, PNG)


async def test_a_retryable_failure_of_a_task_is_unavailable_and_logged(
    serve: Serve, server: DoclingServe, caplog: pytest.LogCaptureFixture
) -> None:
    failure = {"category": "capacity", "message": "busy", "retryable": True, "phase": "dispatch"}
    server.answers[POLL] = 200, {"task_status": "failure", "error_message": "The queue is full.", "failure": failure}
    with pytest.raises(Unavailable, match="has failed"):
        await read(serve, server, PNG)
    assert "docling-serve (files.docling_url) has failed: The queue is full." in caplog.text


async def test_a_document_that_takes_too_long_or_is_too_large_fails(
    serve: Serve, server: DoclingServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.polls = 10**9
    with pytest.raises(ExtractionFailed, match="too long"):
        await read(serve, server, PNG, files__docling_timeout=0.05)
    monkeypatch.setattr(docling, "MAX_BYTES", 10)
    with pytest.raises(ExtractionFailed, match="larger"):
        await read(serve, server, PNG)
