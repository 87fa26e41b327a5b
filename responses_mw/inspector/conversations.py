"""The pages of conversations: a list of those with recent responses, and a page with the items of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..errors import Forbidden, NotFound
from ..protocol.types import Item
from ..state import Damaged, Missing, NewerRecord, OverBound
from ..state.recent import FAILED, RecentFilter, Summary
from ..state.record import ConversationRecord, read_conversation
from ..telemetry.audit import audit
from .api import client_of
from .inspector_context import InspectorContext
from .queries import PERIODS, Query
from .rendering import Renderer
from .report import text_of

ENOUGH = 100
"""Number of conversations after which a page ends."""
_AT_ONCE, MAX_RESPONSES = 200, 5000  # number of responses read at a time, and at most for a page
ITEMS = 50  # number of items on a page


@dataclass(slots=True)
class RecentConversation:
    """A conversation and the totals of its recent responses that match the query. `last` is the latest of them."""

    id: str
    last: Summary
    responses: int = 0
    failed: int = 0
    tokens: int = 0
    models: set[str] = field(default_factory=set)

    def add(self, summary: Summary) -> None:
        self.responses += 1
        self.failed += summary.get("status") in FAILED
        self.tokens += (summary.get("tokens_in") or 0) + (summary.get("tokens_out") or 0)
        if summary.get("model"):
            self.models.add(summary["model"])


def group(summaries: Sequence[Summary], found: dict[str, RecentConversation]) -> None:
    """Add responses, latest first, to their conversations in `found`."""
    for summary in summaries:
        found.setdefault(summary["conversation"], RecentConversation(summary["conversation"], summary)).add(summary)


class Conversations:
    def __init__(self, context: InspectorContext, renderer: Renderer) -> None:
        self._state = context.state
        self._shows_content = context.shows_content
        self._render = renderer.page

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/ui/conversations", self._list),
            Route("/ui/conversations/{id}", self._one),
            Route("/ui/conversations/{id}/text", self._text),
        ]

    async def _list(self, request: Request) -> Response:
        query = Query.parse(request.query_params)
        wanted, position = replace(query.wanted, in_conversation=True), query.before
        found: dict[str, RecentConversation] = {}
        for _ in range(MAX_RESPONSES // _AT_ONCE):
            page = await self._state.recent.page(wanted, before=position, limit=_AT_ONCE)
            group(page.summaries, found)
            position = page.next
            if position is None or len(found) >= ENOUGH:
                break
        shown = [*found.values()]
        return self._render(request, "conversations.html", query=query, found=shown, next=position, periods=[*PERIODS])

    async def _one(self, request: Request) -> Response:
        conversation_id = request.path_params["id"]
        record = await read_conversation(self._state.client, conversation_id)
        recent = (await self._state.recent.page(RecentFilter(conversation=conversation_id), limit=20)).summaries
        if record is None and not recent:
            raise NotFound("Nothing is known about this conversation: it has expired, was deleted, or never existed.")
        before = request.query_params.get("before")
        shown: dict[str, Any] = {"items": (), "metadata": {}, "earlier": "", "hidden": "", "is_earlier": before is not None}
        if record is None:
            shown["hidden"] = "it was deleted, or has expired"
        elif self._shows_content:
            audit("conversation shown", client=client_of(request), conversation=conversation_id)
            shown |= await self._content(conversation_id, record, before)
        owner = record.owner if record is not None else recent[0].get("owner", "")
        facts = {"id": conversation_id, "owner": owner, "record": record, "recent": recent}
        return self._render(request, "conversation.html", shows_content=self._shows_content, **facts, **shown)

    async def _content(self, conversation_id: str, record: ConversationRecord, before: str | None) -> dict[str, Any]:
        """Return the last items before the item `before` in conversation order, or the reason why there are none."""
        conversations = self._state.conversations
        try:
            found = await conversations.get(conversation_id, record.owner)
            page = await conversations.items(conversation_id, record.owner, after=before, limit=ITEMS)
        except (Damaged, Missing, NewerRecord, OverBound) as error:
            return {"hidden": error.message}
        items = list(reversed(page.items))
        return {"items": items, "metadata": found.metadata, "earlier": items[0]["id"] if page.has_more else ""}

    async def _text(self, request: Request) -> Response:
        """Return the whole text of one item: `?item=msg_...`."""
        if not self._shows_content:
            raise Forbidden("The content of conversations is shown only if ui.mode is content.")
        conversation_id, item_id = request.path_params["id"], request.query_params.get("item", "")
        record = await read_conversation(self._state.client, conversation_id)
        if record is None:
            raise NotFound("There is no such conversation.")
        item: Item = await self._state.conversations.item(conversation_id, item_id, record.owner)
        audit("conversation shown as text", client=client_of(request), conversation=conversation_id)
        return Response(text_of(item), media_type="text/plain; charset=utf-8")
