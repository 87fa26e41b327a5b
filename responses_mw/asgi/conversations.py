"""The endpoints of the Conversations API (OpenAI reference, "Conversations"). `routes.py` lists them."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from .. import ids
from ..engine.history import resolve_references, with_ids
from ..errors import BadRequest, NotSupported
from ..ids import RunIds
from ..protocol import checks
from ..protocol.request.create import check_metadata
from ..protocol.request.items import parse_input
from ..protocol.request.tools import check_number_of_tools
from ..protocol.types import Item
from ..state import Conversation, Page, State
from ..tasks import by_size
from ..upstream import Caller
from .http_responses import JSONResponse
from .requests import PARAMETERS_SCOPE, EndpointContext, included, listed, paging, shown

MAX_NEW_ITEMS = 20
"""Maximum number of items that one request may add."""


async def create(context: EndpointContext, request: Request) -> ASGIApp:
    state, caller = await _authorize(context, request)
    body, size = await _body(context, request, "items", "metadata")
    tag = ids.new_tag()
    conversation = Conversation(f"conv_{tag}", int(time.time()), check_metadata(body.get("metadata", {}), "metadata"))
    added = await _items(body.get("items", []), size, RunIds(tag), state, caller.owner)
    await state.conversations.create(conversation, added, caller.owner)
    return JSONResponse(_shown(conversation))


async def retrieve(context: EndpointContext, request: Request) -> ASGIApp:
    state, caller = await _authorize(context, request)
    return JSONResponse(_shown(await state.conversations.get(_id(request), caller.owner)))


async def update(context: EndpointContext, request: Request) -> ASGIApp:
    state, caller = await _authorize(context, request)
    # The official client sends null to remove all metadata. A missing member is probably a mistake, so it is refused.
    body, _ = await _body(context, request, "metadata", required="metadata")
    metadata = check_metadata(body.get("metadata", {}), "metadata")
    return JSONResponse(_shown(await state.conversations.update(_id(request), metadata, caller.owner)))


async def delete(context: EndpointContext, request: Request) -> ASGIApp:
    state, caller = await _authorize(context, request)
    await state.conversations.delete(_id(request), caller.owner)
    return JSONResponse({"id": _id(request), "object": "conversation.deleted", "deleted": True})


async def create_items(context: EndpointContext, request: Request) -> ASGIApp:
    include = included(request)
    state, caller = await _authorize(context, request)
    body, size = await _body(context, request, "items")
    if "items" not in body:  # `_body` omits nulls
        checks.missing("items")
    await state.conversations.get(_id(request), caller.owner)
    made = RunIds(_id(request).removeprefix("conv_"))
    added = await _items(body["items"], size, made, state, caller.owner)
    await state.conversations.append(_id(request), added, caller.owner, made.random)
    return JSONResponse(listed(Page(added, has_more=False), include))


async def items(context: EndpointContext, request: Request) -> ASGIApp:
    include, page = included(request), paging(request)
    state, caller = await _authorize(context, request)
    return JSONResponse(listed(await state.conversations.items(_id(request), caller.owner, **page), include))


async def item(context: EndpointContext, request: Request) -> ASGIApp:
    include = included(request)
    state, caller = await _authorize(context, request)
    item_id = request.scope[PARAMETERS_SCOPE]["item_id"]
    return JSONResponse(shown(await state.conversations.item(_id(request), item_id, caller.owner), include))


async def delete_item(context: EndpointContext, request: Request) -> ASGIApp:
    state, caller = await _authorize(context, request)
    item_id = request.scope[PARAMETERS_SCOPE]["item_id"]
    return JSONResponse(_shown(await state.conversations.delete_item(_id(request), item_id, caller.owner)))


async def _authorize(context: EndpointContext, request: Request) -> tuple[State, Caller]:
    caller = await context.verify(request)
    if context.state is None:
        raise NotSupported("Conversations need stored state, but this server has none: configure Redis.")
    return context.state, caller


async def _items(value: Any, size: int, made: RunIds, state: State, owner: str) -> list[Item]:
    """Parse the member `items` of a body of `size` bytes. Resolve references, and take the ids of new items from `made`."""

    def parsed() -> list[Item]:
        check_number_of_tools(None, value)
        return parse_input(checks.array(value, "items", max_length=MAX_NEW_ITEMS), "items")

    return with_ids(await resolve_references(await by_size(size, parsed), state, owner, "items"), made)


async def _body(
    context: EndpointContext, request: Request, *names: str, required: str | None = None
) -> tuple[dict[str, Any], int]:
    """Return the body's members that are not null, and its size in bytes.

    Raises `BadRequest` if a member is not in `names`, or if `required` is missing. `required` may be null.
    """
    sent, size = await context.reader.read(request, lambda body, size: (body, size))
    body = checks.mapping(sent, "body")
    for name in body.keys() - names:
        checks.unknown(name)
    if required is not None and required not in sent:
        checks.missing(required)
    return body, size


def _id(request: Request) -> str:
    conversation_id = str(request.scope[PARAMETERS_SCOPE]["conversation_id"])
    if not conversation_id.startswith("conv_"):
        message = f"Invalid 'conversation_id': '{conversation_id[:64]}'. Expected an ID that begins with 'conv_'."
        raise BadRequest(message, param="conversation_id", code="invalid_value")
    return conversation_id


def _shown(one: Conversation) -> dict[str, Any]:
    return {"id": one.id, "object": "conversation", "created_at": one.created_at, "metadata": one.metadata}
