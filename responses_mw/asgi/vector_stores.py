"""The endpoints of vector stores (OpenAI reference, "Vector stores"). `routes.py` lists them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from ..errors import NotSupported
from ..files.ranking import Ranking
from ..files.rewriting import rewrite
from ..files.vector_stores import VectorStores
from ..protocol import checks
from ..state import Missing
from ..state.store_file_records import FileBatch, StoreFile, StoreFilePage
from ..state.store_keys import Range
from ..tasks import by_size
from ..upstream import Caller
from . import store_bodies as bodies
from .http_responses import JSONResponse
from .idempotency import refuse_key
from .requests import PARAMETERS_SCOPE, EndpointContext, paging

_RESULTS = 10  # maximum number of results, unless the request sets another one
_YOUNG = 3  # age in seconds of an object after which a client should poll less often


async def create(context: EndpointContext, request: Request) -> ASGIApp:
    stores, owner = await _authorize(context, request)
    refuse_key(request.headers)
    body = await _body(context, request, bodies.CREATE)
    texts, lifetime = (body.get("name", ""), body.get("description", "")), body.get("expires_after")
    with _files_of("file_ids"):
        store = await stores.create(owner, *texts, body.get("metadata", {}), lifetime, bodies.additions(body))
    return JSONResponse(bodies.store_object(store))


async def list_stores(context: EndpointContext, request: Request) -> ASGIApp:
    wanted = _range(request)
    stores, owner = await _authorize(context, request)
    page = await stores.records.page(owner, wanted)
    return JSONResponse(bodies.page_of([bodies.store_object(one) for one in page.stores], has_more=page.has_more))


async def retrieve(context: EndpointContext, request: Request) -> ASGIApp:
    stores, owner = await _authorize(context, request)
    return JSONResponse(bodies.store_object(await stores.records.get(_id(request), owner)))


async def update(context: EndpointContext, request: Request) -> ASGIApp:
    stores, owner = await _authorize(context, request)
    body = await _body(context, request, bodies.UPDATE, nulls=True)
    return JSONResponse(bodies.store_object(await stores.update(_id(request), owner, bodies.changes(body))))


async def delete(context: EndpointContext, request: Request) -> ASGIApp:
    stores, owner = await _authorize(context, request)
    await stores.delete(_id(request), owner)
    return JSONResponse({"id": _id(request), "object": "vector_store.deleted", "deleted": True})


async def search(context: EndpointContext, request: Request) -> ASGIApp:
    caller = await _caller(context, request)
    body = await _body(context, request, bodies.SEARCH)
    if "query" not in body:
        checks.missing("query")
    if context.retrieval is None:
        raise NotSupported("Searching vector stores needs numpy: install responses-mw with the extra 'files'.")
    options = {"filters": body.get("filters"), "maximum": body.get("max_num_results", _RESULTS), "caller": caller}
    ranking = body.get("ranking_options", Ranking())
    queries = body["query"]
    if body.get("rewrite_query", False):
        queries = await _rewrite(context, _id(request), queries, caller)
    found = await context.retrieval.search([_id(request)], caller.owner, queries, ranking=ranking, **options)
    return JSONResponse(bodies.search_page(queries, found))


async def _rewrite(context: EndpointContext, store_id: str, queries: Sequence[str], caller: Caller) -> Sequence[str]:
    model = context.settings.files.rewrite_model
    if model is None:
        checks.unsupported("rewrite_query", "this server has no model for it (files.rewrite_model).")
    assert context.vector_stores is not None
    await context.vector_stores.records.get(store_id, caller.owner)  # before the model is asked
    return await rewrite(queries, context.upstreams, model, caller)


# -- files -----------------------------------------------------------------------------------------------------------


async def add_file(context: EndpointContext, request: Request) -> ASGIApp:
    stores, owner = await _authorize(context, request)
    refuse_key(request.headers)
    body = await _body(context, request, bodies.ADD)
    with _files_of("file_id"):
        return _file_response(await stores.add(_id(request), owner, bodies.addition(body)))


async def list_files(context: EndpointContext, request: Request) -> ASGIApp:
    wanted, status = _range(request), _status(request)
    stores, owner = await _authorize(context, request)
    await stores.records.get(_id(request), owner)
    return _page_response(await stores.files.page(_id(request), owner, wanted, status))


async def retrieve_file(context: EndpointContext, request: Request) -> ASGIApp:
    stores, owner = await _authorize(context, request)
    return _file_response(await stores.file(_id(request), owner, _id(request, "file_id")))


async def update_file(context: EndpointContext, request: Request) -> ASGIApp:
    stores, owner = await _authorize(context, request)
    body = await _body(context, request, bodies.DESCRIBE, nulls=True)
    if "attributes" not in body:
        checks.missing("attributes")
    file = await stores.describe(_id(request), owner, _id(request, "file_id"), body["attributes"] or {})
    return JSONResponse(bodies.file_object(file))


async def delete_file(context: EndpointContext, request: Request) -> ASGIApp:
    stores, owner = await _authorize(context, request)
    file_id = _id(request, "file_id")
    await stores.remove(_id(request), owner, file_id)
    return JSONResponse({"id": file_id, "object": "vector_store.file.deleted", "deleted": True})


async def file_content(context: EndpointContext, request: Request) -> ASGIApp:
    stores, owner = await _authorize(context, request)
    parts = await stores.text(_id(request), owner, _id(request, "file_id"))
    data = [{"type": "text", "text": part} for part in parts]
    page = {"object": "vector_store.file_content.page", "data": data, "has_more": False, "next_page": None}
    return await by_size(sum(map(len, parts)), JSONResponse, page)


# -- batches ---------------------------------------------------------------------------------------------------------


async def add_batch(context: EndpointContext, request: Request) -> ASGIApp:
    stores, owner = await _authorize(context, request)
    refuse_key(request.headers)
    body = await _body(context, request, bodies.ADD_BATCH)
    with _files_of("files" if "files" in body else "file_ids"):
        batch = await stores.add_batch(_id(request), owner, bodies.batch_additions(body))
    return _batch_response(batch)


async def retrieve_batch(context: EndpointContext, request: Request) -> ASGIApp:
    stores, owner = await _authorize(context, request)
    return _batch_response(await stores.batch(_id(request), owner, _id(request, "batch_id")))


async def cancel_batch(context: EndpointContext, request: Request) -> ASGIApp:
    stores, owner = await _authorize(context, request)
    return _batch_response(await stores.cancel(_id(request), owner, _id(request, "batch_id")))


async def list_batch_files(context: EndpointContext, request: Request) -> ASGIApp:
    wanted, status, batch_id = _range(request), _status(request), _id(request, "batch_id")
    stores, owner = await _authorize(context, request)
    await stores.batch(_id(request), owner, batch_id)
    return _page_response(await stores.files.page(_id(request), owner, wanted, status, batch_id))


# -- helpers of all endpoints ------------------------------------------------------------------------------------------


async def _authorize(context: EndpointContext, request: Request) -> tuple[VectorStores, str]:
    """Return the vector stores and the owner of the request. Raises the same errors as `_caller`."""
    caller = await _caller(context, request)
    assert context.vector_stores is not None
    return context.vector_stores, caller.owner


async def _caller(context: EndpointContext, request: Request) -> Caller:
    """Return the verified caller, and count the request against its limits. Raises `NotSupported` if there is no state."""
    caller = await context.verify(request)
    if context.vector_stores is None:
        raise NotSupported("Vector stores need stored state, but this server has none: configure Redis.")
    await context.limits.request(request.scope, caller)
    return caller


async def _body(
    context: EndpointContext, request: Request, members: Mapping[str, checks.Check], *, nulls: bool = False
) -> dict[str, Any]:
    check = partial(bodies.parse, members=members, nulls=nulls)
    return await context.reader.read(request, lambda body, _size: check(body))


@contextmanager
def _files_of(param: str) -> Iterator[None]:
    """In the error for a missing file, set `param` to the parameter that has its id."""
    try:
        yield
    except Missing as error:
        if not error.object_id.startswith("vs_"):
            error.param = param
        raise


def _id(request: Request, name: str = "vector_store_id") -> str:
    return str(request.scope[PARAMETERS_SCOPE][name])


def _range(request: Request) -> Range:
    return Range(**paging(request), before=request.query_params.get("before"))


def _status(request: Request) -> str | None:
    status = request.query_params.get("filter")
    return None if status is None else checks.one_of(status, "filter", bodies.STATUSES)


def _page_response(page: StoreFilePage) -> ASGIApp:
    return JSONResponse(bodies.page_of([bodies.file_object(one) for one in page.files], has_more=page.has_more))


def _file_response(file: StoreFile) -> ASGIApp:
    return _pollable_response(bodies.file_object(file))


def _batch_response(batch: FileBatch) -> ASGIApp:
    return _pollable_response(bodies.batch_object(batch))


def _pollable_response(shown: dict[str, Any]) -> ASGIApp:
    """Return an object, with the header that sets the polling interval of the official clients."""
    response = JSONResponse(shown)
    if shown["status"] == "in_progress":
        response.headers["openai-poll-after-ms"] = "200" if shown["created_at"] + _YOUNG > time.time() else "1000"
    return response
