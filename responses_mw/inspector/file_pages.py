"""The pages of files and vector stores: a list for each owner, and for each store a page with its files and a search form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from ..auth import ANONYMOUS
from ..errors import APIError, BadRequest, Forbidden, NotFound, NotSupported
from ..files.ranking import Found
from ..state.record import count_files, owner_of_store
from ..state.store_file_records import StoreFilePage
from ..state.store_keys import Range
from ..state.vector_stores import VectorStore
from ..telemetry.audit import audit
from .api import client_of
from .forms import read_form
from .inspector_context import InspectorContext
from .rendering import Renderer

PAGE = 50
"""Number of files or stores on a page."""
MAX_OWNERS = 100
MAX_STORES = 100
"""Maximum number of stores of an owner, latest first, whose files are counted."""
MAX_RESULTS = 10
STATUSES = ("in_progress", "completed", "failed", "cancelled")
_RECENT = 2000  # number of recent responses whose owners are listed
_OWNER = re.compile(r"[a-z0-9]{1,64}")
_STORE = "/ui/files/{owner}/{store}"


class OwnedFiles(NamedTuple):
    """The number of an owner's files and vector stores, and of files in these that wait for ingestion or that failed."""

    owner: str
    files: int
    stores: int
    in_progress: int
    failed: int


class FilePages:
    def __init__(self, context: InspectorContext, renderer: Renderer) -> None:
        self._context = context
        self._state = context.state
        self._render = renderer.page

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/ui/files", self._files),
            Route(_STORE, self._store),
            Route(f"{_STORE}/search", self._search, methods=["POST"]),
        ]

    # -- the files of an owner -------------------------------------------------------------------------------------------------

    async def _files(self, request: Request) -> Response:
        """List the owners with files and, if the URL names one, its files and vector stores."""
        params = request.query_params
        if store_id := params.get("store", "").strip()[:64]:
            return await self._find(store_id)
        owner = self._owner(params["owner"].strip()) if params.get("owner", "").strip() else ""
        values: dict[str, Any] = {
            "owner": owner,
            "given": params.get("owner", "").strip(),
            "owners": await self._owners() if not owner else (),
            "ingestion": await self._state.ingestion_queue.backlog(),
            "files": None,
            "stores": None,
            "after": params.get("after", ""),
            "stores_after": params.get("stores_after", ""),
        }
        if owner:
            self._audit(request, owner=owner)
            wanted = Range(values["stores_after"] or None, limit=PAGE)
            values["stores"] = await self._state.vector_stores.page(owner, wanted)
            options: dict[str, Any] = {"limit": PAGE, "order": "desc", "purpose": None}
            values["files"] = await self._state.files.page(owner, after=values["after"] or None, **options)
        return self._render(request, "files.html", shows_content=self._context.shows_content, **values)

    def _owner(self, text: str) -> str:
        """Return the owner with this id or key name. Raises `BadRequest` if the text can be neither."""
        owner = self._context.owner_named(text)
        if not _OWNER.fullmatch(owner):
            raise BadRequest("'owner' must be the name of an API key, or the id of an owner.", param="owner")
        return owner

    async def _find(self, store_id: str) -> Response:
        """Redirect to the page of the store with this id, whose owner is not known."""
        owner = await owner_of_store(self._state.client, store_id, await self._known_owners())
        if owner is None:
            raise NotFound("No owner with an API key or a recent response has this vector store. Choose its owner first.")
        return RedirectResponse(f"/ui/files/{owner}/{store_id}", 303)

    async def _known_owners(self) -> list[str]:
        """Return the owners with an API key or a recent response."""
        recent = await self._state.recent.page(limit=_RECENT)
        names = dict.fromkeys([*self._context.keys, ANONYMOUS, *(one.get("owner", "") for one in recent.summaries)])
        return [name for name in names if _OWNER.fullmatch(name)][:MAX_OWNERS]

    async def _owners(self) -> list[OwnedFiles]:
        """Return the owners in `_known_owners` that have files or stores."""
        known = await self._known_owners()
        counts = await count_files(self._state.client, known)
        return [await self._count(owner, *counts[owner]) for owner in known if any(counts[owner])]

    async def _count(self, owner: str, files: int, stores: int) -> OwnedFiles:
        found = (await self._state.vector_stores.page(owner, Range(limit=MAX_STORES))).stores if stores else []
        in_progress, failed = (sum(getattr(store.counts, name) for store in found) for name in ("in_progress", "failed"))
        return OwnedFiles(owner, files, stores, in_progress, failed)

    def _audit(self, request: Request, **facts: str) -> None:
        """Log that names of files and stores were shown, unless the page hides them."""
        if self._context.shows_content:
            audit("files shown", client=client_of(request), **facts)

    # -- a store ---------------------------------------------------------------------------------------------------------------

    async def _store(self, request: Request) -> Response:
        return await self._with_results(request)

    async def _search(self, request: Request) -> Response:
        """Search the store. This counts as a use of the store, and may request an embedding, so it is an action."""
        form = await read_form(request)
        if not (self._context.can_act and self._context.shows_content):
            raise Forbidden("Vector stores can be searched only if ui.actions is on and ui.mode is content.")
        if self._context.retrieval is None:
            raise NotSupported("Searching vector stores needs numpy: install responses-mw with the extra 'files'.")
        query, (owner, store_id) = form.get("query", "").strip(), self._place(request)
        audit("vector store searched by the inspector", client=client_of(request), owner=owner, store=store_id)
        try:
            results = await self._context.retrieval.search([store_id], owner, [query], maximum=MAX_RESULTS)
        except APIError as error:
            return await self._with_results(request, query=query, fault=error.message)
        return await self._with_results(request, query=query, results=results)

    def _place(self, request: Request) -> tuple[str, str]:
        return self._owner(request.path_params["owner"]), request.path_params["store"]

    async def _with_results(
        self, request: Request, *, query: str = "", results: Sequence[Found] | None = None, fault: str = ""
    ) -> Response:
        owner, store_id = self._place(request)
        status = request.query_params.get("status") or None
        if status not in (None, *STATUSES):
            raise BadRequest(f"'status' must be one of {', '.join(STATUSES)}.", param="status")
        store: VectorStore = await self._state.vector_stores.get(store_id, owner)
        wanted = Range(request.query_params.get("after") or None, limit=PAGE)
        page: StoreFilePage = await self._state.store_files.page(store_id, owner, wanted, status)
        self._audit(request, owner=owner, store=store_id)
        return self._render(
            request,
            "store.html",
            owner=owner,
            store=store,
            page=page,
            chosen=status or "",
            all_statuses=STATUSES,
            after=wanted.after,
            shows_content=self._context.shows_content,
            can_act=self._context.can_act,
            query=query,
            results=results,
            fault=fault,
        )
