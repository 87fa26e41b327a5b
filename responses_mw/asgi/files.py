"""The endpoints of the Files API (OpenAI reference, "Files"). `routes.py` lists them."""

from __future__ import annotations

from typing import Any, NoReturn
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp

from ..errors import BadRequest, NotSupported
from ..files import FileLibrary
from ..files.library import UploadedData
from ..protocol import checks
from ..state.files import File
from .http_responses import JSONResponse
from .idempotency import refuse_key
from .multipart import FormReader
from .requests import PARAMETERS_SCOPE, EndpointContext, paging

PURPOSES = frozenset({"assistants", "batch", "evals", "fine-tune", "user_data", "vision"})
MIN_LIFETIME, MAX_LIFETIME = 3600, 30 * 24 * 3600
BATCH_LIFETIME = 30 * 24 * 3600
"""Default lifetime in seconds of files with the purpose `batch`."""
MAX_PAGE = 10_000
_MAX_FILENAME = 255
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


async def create(context: EndpointContext, request: Request) -> ASGIApp:
    library, owner = await _authorize(context, request)
    refuse_key(request.headers)
    data, filename, fields = await _receive(library, owner, request)
    try:
        purpose, lifetime = _options(fields)
    except BadRequest:
        await library.discard(data.file_id, owner)
        raise
    return JSONResponse(file_object(await library.create(data, filename, purpose, lifetime, owner)))


async def list_files(context: EndpointContext, request: Request) -> ASGIApp:
    library, owner = await _authorize(context, request)
    page = paging(request, default=MAX_PAGE, maximum=MAX_PAGE)
    found = await library.records.page(owner, **page, purpose=request.query_params.get("purpose"))
    data = [file_object(file) for file in found.files]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return JSONResponse({"object": "list", "data": data, **ends, "has_more": found.has_more})


async def retrieve(context: EndpointContext, request: Request) -> ASGIApp:
    library, owner = await _authorize(context, request)
    return JSONResponse(file_object(await library.records.get(_id(request), owner)))


async def delete(context: EndpointContext, request: Request) -> ASGIApp:
    library, owner = await _authorize(context, request)
    await library.delete(_id(request), owner)
    return JSONResponse({"id": _id(request), "object": "file", "deleted": True})


async def content(context: EndpointContext, request: Request) -> ASGIApp:
    library, owner = await _authorize(context, request)
    file = await library.records.get(_id(request), owner)
    headers = {
        "content-length": str(file.size),
        # Browsers must not render files that other users have uploaded as pages of this server.
        "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(await library.read(file, owner), headers=headers, media_type="application/octet-stream")


async def refuse_upload(_context: EndpointContext, _request: Request) -> NoReturn:
    raise NotSupported("Uploads in parts are not supported: send the file in one request to /v1/files.")


async def refuse_part(context: EndpointContext, request: Request) -> NoReturn:
    await refuse_upload(context, request)


async def _authorize(context: EndpointContext, request: Request) -> tuple[FileLibrary, str]:
    """Return the library and the verified owner, and count the request. Raises `NotSupported` if there is no state."""
    caller = await context.verify(request)
    if context.files is None:
        raise NotSupported("Files need stored state, but this server has none: configure Redis.")
    await context.limits.request(request.scope, caller)
    return context.files, caller.owner


async def _receive(library: FileLibrary, owner: str, request: Request) -> tuple[UploadedData, str, dict[str, str]]:
    """Return the uploaded file, its name, and the other fields of the form. After an error, nothing is stored."""
    form, fields = FormReader(request), dict[str, str]()
    data, filename = None, ""
    try:
        async for name, sent_as in form:
            if name == "file" and data is None:
                filename = _filename(sent_as)
                data = await library.upload(form.data(), owner)
            elif name in _FIELDS and name not in fields:
                fields[name] = await form.text(name)
            else:
                _refuse_field(name, fields)
        if data is None:
            checks.missing("file")
    except BaseException:
        if data is not None:
            await library.discard(data.file_id, owner)
        raise
    return data, filename, fields


def _refuse_field(name: str, fields: dict[str, str]) -> NoReturn:
    if name == "file" or name in fields:
        checks.invalid(name, "the form has more than one part with this name.")
    checks.unknown(name[:64])


def _filename(sent: str | None) -> str:
    """Return the file name without its directories and unprintable characters. Raises `BadRequest` if nothing is left."""
    if sent is None:
        checks.invalid("file", "the part must have a file name.")
    name = sent.replace("\\", "/").rpartition("/")[2]
    name = "".join(letter for letter in name if letter.isprintable()).strip()
    if name in ("", ".", ".."):
        checks.invalid("file", "the part must have a file name.")
    return checks.string(name, "file.filename", max_length=_MAX_FILENAME)


def _options(fields: dict[str, str]) -> tuple[str, int | None]:
    """Return the purpose and the lifetime in seconds (or None) of a file. Raises `BadRequest` if they are invalid."""
    if "purpose" not in fields:
        checks.missing("purpose")
    purpose = checks.one_of(fields["purpose"], "purpose", PURPOSES)
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return purpose, BATCH_LIFETIME if purpose == "batch" else None
    if anchor is None:
        checks.missing("expires_after.anchor")
    if seconds is None:
        checks.missing("expires_after.seconds")
    checks.one_of(anchor, "expires_after.anchor", {"created_at"})
    checks.string(seconds, "expires_after.seconds", pattern="[0-9]{1,10}")
    bounds: dict[str, Any] = {"minimum": MIN_LIFETIME, "maximum": MAX_LIFETIME}
    return purpose, checks.integer(int(seconds), "expires_after.seconds", **bounds)


def _id(request: Request) -> str:
    return str(request.scope[PARAMETERS_SCOPE]["file_id"])


def file_object(file: File) -> dict[str, Any]:
    """Return a file as the API's object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }
