"""The endpoints of the Responses API (OpenAI reference, "Responses"). `routes.py` lists them."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Scope

from ..cache.policy import HEADER as CACHE_HEADER
from ..cache.policy import policy_of
from ..engine.run import Outlet, RunMode
from ..errors import BadRequest, MethodNotAllowed, NotFound, NotSupported, UpgradeRequired
from ..jobs import JobService
from ..protocol import checks
from ..protocol.request.create import CreateResponse
from ..protocol.response.compaction import create_body
from ..protocol.response.document import whole
from ..protocol.types import Document, Event
from ..state import State, StateUnavailable
from ..telemetry.captures import HEADER as CAPTURE_HEADER
from ..telemetry.context import annotate, current_request
from ..upstream import Caller
from .capture_header import capture_status
from .http_responses import BODY_WRITER, EventStreamResponse, JSONResponse, LogStreamResponse, RunJSONResponse
from .idempotency import Guard, once
from .requests import PARAMETERS_SCOPE, EndpointContext, Reader, flag, included, listed, number, paging, shown
from .telemetry import add_headers

_MAX_SEQUENCE_NUMBER = 2**53
_FORWARDED, _NOT_OFFERED = "x-responses-forwarded", "x-responses-not-offered"
_MAX_NAMES, _MAX_NAME = 16, 64
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_.-]")


async def create(context: EndpointContext, request: Request) -> ASGIApp:
    body, parsed = await context.reader.read(request, partial(context.reader.resolve_and_parse, scope=request.scope))
    caller = context.reader.caller(request, parsed.model)
    await context.limits.request(request.scope, caller)
    if parsed.stream:
        await context.limits.stream(request.scope, caller)
    for header, names in ((_FORWARDED, parsed.extra), (_NOT_OFFERED, context.runner.factory.not_offered(parsed, caller))):
        if names:
            add_headers(request.scope, {header: _listed_names(names)})
    if (facts := current_request()) is not None and facts.is_captured:
        add_headers(request.scope, {CAPTURE_HEADER: capture_status(stored=parsed.store)})
    asked = "; ".join(request.headers.getlist(CACHE_HEADER))
    policy = policy_of(parsed.cache, asked, context.settings.cache, stored=parsed.store)
    guard = await once(request.headers, context.state, parsed, body, caller, partial(context.upstreams.verify, caller))
    if parsed.background:
        return await _create_in_background(context, parsed, body, caller, guard)
    mode = RunMode.STREAMED if parsed.stream else RunMode.WHOLE
    outlet = Outlet() if parsed.stream and BODY_WRITER in request.scope else None
    batches = context.runner.run(parsed, caller, mode, policy=policy, outlet=outlet)
    is_open = context.settings.server.reasoning_events == "open_responses"
    batches = guard.run(batches, parsed, open_reasoning=is_open)
    add_headers(request.scope, _cache_status)
    if parsed.stream:
        return EventStreamResponse(batches, context.settings.server, outlet)
    return RunJSONResponse(batches, context.settings.server)


async def _create_in_background(
    context: EndpointContext, parsed: CreateResponse, body: dict[str, Any], caller: Caller, guard: Guard
) -> ASGIApp:
    if context.jobs is None:
        message = "'background' needs stored state, but this server has none: configure Redis."
        raise NotSupported(message, param="background")
    await context.upstreams.verify(caller)
    await context.jobs.check_secrets()
    async with guard.hold_key():
        earlier = await guard.find_earlier(wait=True)
        if earlier is not None:
            document = earlier.document
            annotate(outcome="repeated", response=document)
        else:
            document = await _enqueue(context, context.jobs, parsed, body, caller, guard)
    if parsed.stream:
        return LogStreamResponse(context.jobs.follow(document), context.settings.server)
    return JSONResponse(whole(document, parsed.include))


async def _enqueue(
    context: EndpointContext,
    jobs: JobService,
    parsed: CreateResponse,
    body: dict[str, Any],
    caller: Caller,
    guard: Guard,
) -> Document:
    run = await context.runner.factory.prepare(parsed, caller)
    await context.runner.checks.check(run)
    response_id = run.document["id"]
    async with context.limits.background(response_id, caller):
        await guard.name(response_id)
        document = await jobs.create(run, body, partial(context.upstreams.verify, caller))
    await guard.complete(response_id)
    return document


async def connect(_: EndpointContext, request: Request) -> ASGIApp:
    """Raise `UpgradeRequired` for a WebSocket upgrade that the ASGI server ignored, otherwise `MethodNotAllowed`."""
    if request.headers.get("upgrade", "").lower() == "websocket":
        raise UpgradeRequired("This server does not accept WebSockets; use HTTP.")
    raise MethodNotAllowed("Method GET is not allowed for /v1/responses.", headers={"allow": "POST"})


async def retrieve(context: EndpointContext, request: Request) -> ASGIApp:
    include = included(request)
    streamed, after = flag(request, "stream"), _starting_after(request)
    flag(request, "include_obfuscation")  # accepted, but no padding is added
    state, jobs, caller, response_id = await _authorize(context, request)
    stored = await state.responses.get(response_id, caller.owner)
    annotate(response=stored.document)
    if stored.lost:
        with suppress(StateUnavailable):  # return the response as it is stored
            await jobs.settle(response_id)
            stored = await state.responses.get(response_id, caller.owner)
    if not streamed:
        return JSONResponse(whole(stored.document, include))
    if not stored.document["background"]:
        message = f"Response with id '{response_id}' cannot be streamed again: it was not created with background=true."
        raise BadRequest(message, param="stream", code="not_a_background_response")
    await context.limits.stream(request.scope, caller)
    return LogStreamResponse(jobs.follow(stored.document, after=after), context.settings.server)


async def delete(context: EndpointContext, request: Request) -> ASGIApp:
    _, jobs, caller, response_id = await _authorize(context, request)
    if context.cache is not None:  # before the response is deleted, so that the client can retry a failed request
        await context.cache.entries.forget(caller.owner, response_id)
    await jobs.delete(response_id, caller.owner)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def cancel(context: EndpointContext, request: Request) -> ASGIApp:
    _, jobs, caller, response_id = await _authorize(context, request)
    return JSONResponse(whole(await jobs.cancel(response_id, caller.owner)))


async def input_items(context: EndpointContext, request: Request) -> ASGIApp:
    include, page, before = included(request), paging(request), request.query_params.get("before")
    state, _, caller, response_id = await _authorize(context, request)
    items = await state.responses.input_items(response_id, caller.owner, before=before, **page)
    return JSONResponse(listed(items, include))


async def compact(context: EndpointContext, request: Request) -> ASGIApp:
    """Compact a history. Nothing is stored."""
    parsed = await context.reader.read(request, lambda body, size: context.reader.parse(create_body(body), size, request.scope))
    caller = context.reader.caller(request, parsed.model)
    await context.limits.request(request.scope, caller)

    async def events() -> AsyncGenerator[list[Event], None]:
        compacted = await context.runner.compact(parsed, caller)
        output = [shown(item, frozenset()) for item in compacted["output"]]
        yield [Event("response.completed", {"response": {**compacted, "output": output}})]

    return RunJSONResponse(events(), context.settings.server)


async def count_tokens(context: EndpointContext, request: Request) -> ASGIApp:
    """Return the number of input tokens of the first model call that `create` would make."""
    parsed = await context.reader.read(request, partial(_parse_counted, context.reader, request.scope))
    caller = await context.verify(request, parsed.model)  # some upstreams tokenize without a credential
    await context.limits.request(request.scope, caller)  # without a tokenizer, the model reads the whole prompt
    count = await context.runner.checks.count_tokens(parsed, caller)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": count})


def _parse_counted(reader: Reader, scope: Scope, body: Any, size: int) -> CreateResponse:
    if isinstance(body, dict) and body.pop("personality", None) is not None:
        checks.unsupported("personality", "only OpenAI's models have it.")
    return replace(reader.parse(body, size, scope), stream=False, store=False, background=False)


async def _authorize(context: EndpointContext, request: Request) -> tuple[State, JobService, Caller, str]:
    """Return the state, the jobs, the verified caller and the response id. Raises `NotFound` if there is no state."""
    caller, response_id = await context.verify(request), request.scope[PARAMETERS_SCOPE]["response_id"]
    if context.state is None or context.jobs is None:
        raise NotFound(f"Response with id '{response_id}' not found.")
    return context.state, context.jobs, caller, response_id


def _cache_status() -> dict[str, str]:
    facts = current_request()
    return {CACHE_HEADER: facts.cache_status} if facts is not None and facts.cache_status else {}


def _listed_names(names: Iterable[str]) -> str:
    """Return up to 16 of the `names` as a header value, and `...` if there are more. Shorten and sanitize each name."""
    listed = sorted(_NOT_IN_NAMES.sub("_", name[:_MAX_NAME]) for name in names)
    return ", ".join(listed[:_MAX_NAMES] + ["..."] * (len(listed) > _MAX_NAMES))


def _starting_after(request: Request) -> int:
    if "starting_after" not in request.query_params:
        return -1  # the stream begins with the first event
    return checks.integer(number(request, "starting_after", 0), "starting_after", minimum=0, maximum=_MAX_SEQUENCE_NUMBER)
