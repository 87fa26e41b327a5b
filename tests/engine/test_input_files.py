"""Files in requests: by id and as data, as text for models that read only text."""

from __future__ import annotations

import asyncio
import base64
import tracemalloc
from typing import TYPE_CHECKING, Any

import openai
import pytest
from starlette.responses import PlainTextResponse, RedirectResponse

from responses_mw.engine import input_files
from responses_mw.engine.input_files import InputFiles
from responses_mw.engine.text_cache import ENTRY, TextCache
from tests.asgi.test_files import create
from tests.files.test_extraction import DOCUMENTS, pdf
from tests.support.scripted import completion

if TYPE_CHECKING:
    from openai.types.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Serve, Start

PNG = b"\x89PNG\r\n\x1a\n123"
PDF = pdf("28 days of leave")


def data_url(data: bytes) -> str:
    return f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"


def by_id(file_id: str, kind: str = "input_file") -> dict[str, Any]:
    return {"type": kind, "file_id": file_id}


async def ask(ours: Ours, *parts: dict[str, Any], **options: Any) -> Response:
    message: Any = {"role": "user", "content": [{"type": "input_text", "text": "What?"}, *parts]}
    response: Response = await ours.client.responses.create(model="tiny", input=[message], **options)
    return response


async def refusal(ours: Ours, *parts: dict[str, Any]) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as raised:
        await ask(ours, *parts)
    return raised.value


def content(upstream: ScriptedUpstream, message: int = -1) -> Any:
    return upstream.requests[-1].json["messages"][message]["content"]


@pytest.fixture(autouse=True)
def answers(upstream: ScriptedUpstream) -> None:
    for _ in range(4):
        upstream.whole(completion({"content": "Hello"}))


async def test_a_file_by_id_becomes_text(ours: Ours, upstream: ScriptedUpstream) -> None:
    file = await create(ours, PDF, "handbook.pdf")
    await ask(ours, by_id(file.id))
    assert content(upstream)[1]["text"].strip() == "handbook.pdf:\n28 days of leave"


async def test_a_document_as_data_becomes_text(ours: Ours, upstream: ScriptedUpstream) -> None:
    document = (DOCUMENTS / "a.docx").read_bytes()
    await ask(ours, {"type": "input_file", "filename": "policy.docx", "file_data": data_url(document)})
    assert content(upstream)[1]["text"].startswith("policy.docx:\nLeave policy\nEmployees have 28 days of leave.")


async def test_a_pdf_stays_a_file_for_an_upstream_that_accepts_it(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(upstream__dialect="openai")
    file = await create(ours, PDF, "handbook.pdf")
    await ask(ours, by_id(file.id))
    sent = content(upstream)[1]
    assert sent["type"] == "file"
    assert sent["file"]["filename"] == "handbook.pdf"
    assert base64.b64decode(sent["file"]["file_data"].partition(",")[2]) == PDF


async def test_an_image_by_id_becomes_a_data_url(ours: Ours, upstream: ScriptedUpstream) -> None:
    file = await create(ours, PNG, "a.png", purpose="vision")
    await ask(ours, {**by_id(file.id, "input_image"), "detail": "low"})
    assert content(upstream)[1] == {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(PNG).decode()}", "detail": "low"},
    }


async def test_the_history_keeps_the_id_and_the_model_sees_the_text_again(ours: Ours, upstream: ScriptedUpstream) -> None:
    file = await create(ours, PDF, "handbook.pdf")
    first = await ask(ours, by_id(file.id))
    listed = (await ours.http.get(f"/v1/responses/{first.id}/input_items", headers={"authorization": "Bearer key"})).json()
    assert listed["data"][0]["content"][1]["file_id"] == file.id
    second = await ask(ours, previous_response_id=first.id)
    assert "28 days of leave" in content(upstream, 0)[1]["text"]
    await ours.client.files.delete(file.id)
    await ask(ours, previous_response_id=second.id)
    assert content(upstream, 0)[1]["text"] == f"(The file {file.id} is no longer available.)"


async def test_a_file_that_cannot_be_read_is_an_error(ours: Ours, upstream: ScriptedUpstream) -> None:
    for data, reason in ((b"", "no text"), (pdf(), "no text"), (PNG, "image"), (b"PK\x03\x04", "malformed")):
        error = await refusal(ours, by_id((await create(ours, data)).id))
        assert error.param == "input[0].content[1].file_id"
        assert reason in error.message
    error = await refusal(ours, {"type": "input_file", "file_data": data_url(b"\xff\xfe\xfd")})
    assert error.param == "input[0].content[1].file_data"
    assert (await refusal(ours, by_id((await create(ours, PDF)).id, "input_image"))).code == "invalid_image_format"
    assert upstream.requests == []


async def test_a_file_of_another_owner_is_missing(ours: Ours) -> None:
    other = ours.client.with_options(api_key="other").files
    file = await other.create(file=("a.txt", b"secret"), purpose="user_data")
    for kind in ("input_file", "input_image"):
        error = await refusal(ours, by_id(file.id, kind))
        assert (error.param, "not found" in error.message) == ("input[0].content[1].file_id", True)


async def test_the_files_of_a_request_have_a_maximum_size(start: Start) -> None:
    ours = start(limits__max_request_bytes="100KiB")
    file = await create(ours, b"x" * 60_000)
    await ask(ours, by_id(file.id))
    with pytest.raises(openai.APIStatusError) as raised:
        await ask(ours, by_id(file.id), by_id(file.id))
    assert raised.value.status_code == 413


class Web:
    """A web server with files."""

    def __init__(self) -> None:
        self.visits: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await no_lifespan(scope, receive, send)
        self.visits.append(scope["path"])
        name = scope["path"].rpartition("/")[2]
        answers: dict[str, ASGIApp] = {
            "handbook.pdf": PlainTextResponse(PDF),
            "moved": RedirectResponse("/files/handbook.pdf"),
            "loop": RedirectResponse("/files/loop"),
            "packed": PlainTextResponse(b"x", headers={"content-encoding": "gzip"}),
            "large": PlainTextResponse(b"x" * 200_000),
        }
        return await answers.get(name, PlainTextResponse("no", 404))(scope, receive, send)


async def no_lifespan(_scope: Scope, receive: Receive, send: Send) -> None:
    for state in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{state}.complete"})


def at(url: str) -> dict[str, Any]:
    return {"type": "input_file", "file_url": url}


@pytest.mark.parametrize("name", ["handbook.pdf", "moved"])
async def test_a_file_at_a_url_becomes_text(start: Start, serve: Serve, upstream: ScriptedUpstream, name: str) -> None:
    ours = start(tools__allow_private_urls=True)
    await ask(ours, at(f"{serve(Web())}/files/{name}"))
    assert content(upstream)[1]["text"].strip() == "handbook.pdf:\n28 days of leave"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("none", "status 404"), ("loop", "redirects"), ("packed", "compressed"), ("large", "larger than")],
)
async def test_a_file_that_cannot_be_downloaded_is_an_error(start: Start, serve: Serve, name: str, reason: str) -> None:
    ours = start(tools__allow_private_urls=True, limits__max_request_bytes="100KiB")
    error = await refusal(ours, at(f"{serve(Web())}/{name}"))
    assert (error.param, error.code) == ("input[0].content[1].file_url", "failed_to_download_file")
    assert reason in error.message


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "10.0.0.1", "169.254.169.254", "[::ffff:127.0.0.1]"])
async def test_no_file_is_downloaded_from_a_private_address(ours: Ours, serve: Serve, host: str) -> None:
    web = Web()
    port = serve(web).rpartition(":")[2]
    error = await refusal(ours, at(f"http://{host}:{port}/handbook.pdf"))
    assert "public address" in error.message
    assert web.visits == []


async def test_a_file_of_the_history_that_is_gone_from_the_web_becomes_a_note(
    start: Start, serve: Serve, upstream: ScriptedUpstream
) -> None:
    ours, url = start(tools__allow_private_urls=True), serve(Web())
    first = await ask(ours, at(f"{url}/handbook.pdf"))
    second = start(tools__allow_private_urls=False)
    await ask(second, previous_response_id=first.id)
    assert content(upstream, 0)[1]["text"] == "(A file can no longer be read.)"


async def test_a_file_at_a_url_is_downloaded_once_for_a_history(start: Start, serve: Serve, upstream: ScriptedUpstream) -> None:
    web = Web()
    ours, url = start(tools__allow_private_urls=True), f"{serve(web)}/handbook.pdf"
    first = await ask(ours, at(url))
    await ask(ours, previous_response_id=first.id)
    assert content(upstream, 0)[1]["text"].strip() == "handbook.pdf:\n28 days of leave"
    assert web.visits == ["/handbook.pdf"]
    await ask(ours, at(url))  # the request may mean another version
    assert web.visits == 2 * ["/handbook.pdf"]


async def test_without_files_an_id_is_refused(start: Start) -> None:
    assert (await refusal(start(files__enabled=False), by_id("file-1"))).param == "input[0].content[1].file_id"


@pytest.mark.parametrize("background", [False, True])
async def test_a_compacted_history_and_a_background_response_read_files(
    start: Start, upstream: ScriptedUpstream, *, background: bool
) -> None:
    ours = start(auth__secret_keys=["k" * 32])
    file = await create(ours, b"28 days", "a.txt")
    if background:
        response = await ask(ours, by_id(file.id), background=True)
        while response.status in ("queued", "in_progress"):
            response = await ours.client.responses.retrieve(response.id)
        assert response.status == "completed"
    else:
        first = await ask(ours, by_id(file.id))
        await ours.client.responses.compact(model="tiny", previous_response_id=first.id)
    assert "28 days" in str(upstream.requests[-1].json["messages"])


async def test_a_document_that_runs_read_at_the_same_time_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "MAX_CACHED", 2 * (ENTRY + 10) + 5)
    files = InputFiles(None, 1000)
    pages = 4 * [b"<html>1234567890"] + [b"<html>abcdefghij"]
    texts = [page.removeprefix(b"<html>").decode() for page in pages]
    assert await asyncio.gather(*(files.text(page, "a.html") for page in pages)) == texts
    assert sorted(files.texts) == ["1234567890", "abcdefghij"]


async def test_the_names_of_cached_texts_take_no_memory() -> None:
    files = InputFiles(None, 1000)
    tracemalloc.start()
    try:
        for number in range(20):
            await files.text(b"%d" % number, "x" * 1_000_000)
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


def test_many_short_texts_are_limited_too() -> None:
    cache = TextCache(10 * (ENTRY + 1))
    for number in range(100):
        cache.put(b"%d" % number, "x")
        cache.put(b"%d" % number, "y")
    assert [*cache] == ["y"] * 10
