"""The page *Try it*: create a response through the whole application, and see its events.

A request costs tokens and acts on behalf of an owner. It therefore needs `ui.actions` and `ui.mode: content`, must come from a
form of this origin, is logged for audits, and counts against the limits of the owner. If the browser disconnects, the response
is cancelled.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import APIError, BadRequest, Forbidden, RateLimited
from ..protocol.sse import DONE, SSEDecoder
from ..telemetry.audit import audit
from ..telemetry.metrics import MODELS
from .api import client_of, error_json, find_report
from .events import MAX_EVENTS, ShownEvent, shown_event
from .forms import read_form
from .inspector_context import CreateOnBehalf, InspectorContext
from .rendering import Renderer
from .report import text_of
from .snippets import request_of, snippets

MAX_FORM = 512 * 1024
MAX_CONCURRENT = 4
"""Maximum number of this page's requests in progress in this process."""
MAX_MORE = 100_000  # maximum number of characters in the field of further members
MAX_RECEIVED = 2 * 1024 * 1024  # maximum number of bytes of an answer that a page without JavaScript shows
_TEXTS = ("key", "tenant", "model", "instructions", "input", "previous_response_id", "max_output_tokens", "more")
_KNOWN_MODELS = 200  # number of recent responses whose models are suggested


@dataclass(frozen=True, slots=True)
class Draft:
    """The fields of the form, as text."""

    key: str = ""
    tenant: str = ""
    model: str = ""
    instructions: str = ""
    input: str = ""
    previous_response_id: str = ""
    max_output_tokens: str = "1024"
    more: str = ""
    """Further members of the request, as a JSON object."""
    store: bool = True

    @classmethod
    def of(cls, form: Mapping[str, str]) -> Draft:
        texts = {name: form[name].replace("\r\n", "\n") for name in _TEXTS if name in form}
        return cls(**texts, store=form.get("store") == "on")

    @classmethod
    def repeating(cls, request: dict[str, Any], key: str) -> Draft:
        """Return a draft that repeats `request` with the API key named `key`."""
        body = dict(request)
        texts = {name: str(body.pop(name)) for name in ("model", "instructions", "previous_response_id") if body.get(name)}
        maximum, store = body.pop("max_output_tokens", ""), body.pop("store", True)
        items = body["input"] if isinstance(body.get("input"), list) else []
        text = text_of(items[0]) if len(items) == 1 and _is_text(items[0]) else ""
        if text:
            del body["input"]
        more = orjson.dumps(body, option=orjson.OPT_INDENT_2).decode() if body else ""
        return cls(key, **texts, input=text, max_output_tokens=str(maximum), store=store is not False, more=more)

    def body(self) -> dict[str, Any]:
        """Return the body of the request. Raises `BadRequest` if a field is malformed."""
        body: dict[str, Any] = {"model": self.model.strip()} if self.model.strip() else {}
        for name in ("instructions", "input"):
            if text := getattr(self, name):
                body[name] = text
        if self.previous_response_id.strip():
            body["previous_response_id"] = self.previous_response_id.strip()
        if maximum := self.max_output_tokens.strip():
            if not (maximum.isdecimal() and len(maximum) < 10):
                raise BadRequest("The maximum number of output tokens must be a number.", param="max_output_tokens")
            body["max_output_tokens"] = int(maximum)
        return {**body, "store": self.store, "stream": True, **self._more()}

    def _more(self) -> dict[str, Any]:
        try:
            more = orjson.loads(self.more) if self.more.strip() else {}
        except ValueError as error:
            raise BadRequest(f"The further members are not JSON: {error}.", param="more") from None
        if not isinstance(more, dict):
            raise BadRequest("The further members must be a JSON object.", param="more")
        return more


def _is_text(item: Any) -> bool:
    parts = item.get("content") if isinstance(item, dict) and item.get("role") == "user" else None
    first = parts[0] if isinstance(parts, list) and len(parts) == 1 else None
    return isinstance(parts, str) or (isinstance(first, dict) and first.get("type") == "input_text")


class Received:
    """An ASGI `send` that collects an answer, for pages without JavaScript."""

    def __init__(self) -> None:
        self.status = 0
        self.is_cut = False
        self._data = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        chunk = message.get("body", b"")
        self.is_cut = self.is_cut or len(self._data) + len(chunk) > MAX_RECEIVED
        if not self.is_cut:
            self._data += chunk

    def answer(self) -> Answer:
        documents = self._documents()
        inner = [one.get("response", one) for one in reversed(documents)]
        response = next((one for one in inner if isinstance(one, dict) and one.get("object") == "response"), {})
        errors = [response.get("error"), *(one.get("error") for one in reversed(documents))]
        return Answer(
            self.status,
            str(response.get("id", "")),
            "\n\n".join(text_of(item) for item in response.get("output") or () if item.get("type") == "message"),
            next((str(error.get("message", "")) for error in errors if isinstance(error, dict)), ""),
            [shown_event(one) for one in documents if "sequence_number" in one][:MAX_EVENTS],
            self._data.decode(errors="replace"),
            self.is_cut,
        )

    def _documents(self) -> list[dict[str, Any]]:
        """Return the events of a stream, or the only document of another answer."""
        data = bytes(self._data)
        frames = [data] if data.lstrip().startswith(b"{") else SSEDecoder().feed(data)
        return [] if self.is_cut and frames == [data] else [orjson.loads(frame) for frame in frames if frame != DONE]


class Answer(NamedTuple):
    """The API's answer. `id` and `text` are those of the response. `raw` is the whole body, truncated if `is_cut`."""

    status: int
    id: str
    text: str
    error: str
    events: Sequence[ShownEvent]
    raw: str
    is_cut: bool


class TryIt:
    def __init__(self, context: InspectorContext, renderer: Renderer) -> None:
        self._context = context
        self._render = renderer.page
        self._running = 0

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/ui/try", self._page),
            Route("/ui/try", self._send, methods=["POST"]),
            Route("/ui/try/stream", self._stream, methods=["POST"]),
        ]

    @property
    def refusal(self) -> str:
        """The reason why requests cannot be sent, or ""."""
        if self._context.api is None or not self._context.can_act:
            return "Requests can be sent only if ui.actions is on, and only by servers, not by workers."
        return "" if self._context.shows_content else "Requests can be sent only if ui.mode is content."

    def _api(self) -> CreateOnBehalf:
        if self.refusal or self._context.api is None:
            raise Forbidden(self.refusal)
        return self._context.api

    async def _page(self, request: Request) -> Response:
        """Show the form. Fill it from the URL's parameters, or from the request of the response with the id `from`."""
        params, fault = dict(request.query_params), ""
        draft = Draft.of({"store": "on", **params})
        if (response_id := params.get("from")) and self._context.shows_content:
            report = await find_report(self._context.state, response_id)
            if report.document is not None:
                audit("content shown", report.id, client_of(request))
                draft = Draft.repeating(request_of(report), self._context.keys.get(report.owner, ""))
        if len(draft.more) > MAX_MORE:
            draft, fault = replace(draft, more=""), "The request is too long for this form. Use a client to repeat it."
        return await self._with_draft(request, draft, fault=fault)

    async def _send(self, request: Request) -> Response:
        """Show the form again, with the code of the request and, after the button *Send*, with the answer."""
        form = await read_form(request, MAX_FORM)
        draft = Draft.of(form)
        try:
            body = draft.body()
            if form.get("do") == "code":
                return await self._with_draft(request, draft, code=tuple(snippets(body)))
            received = Received()
            await self._created(request, self._api(), form, body)(request.scope, request.receive, received.send)
        except APIError as error:
            return await self._with_draft(request, draft, fault=error.message)
        return await self._with_draft(request, draft, answer=received.answer(), code=tuple(snippets(body)))

    async def _stream(self, request: Request) -> ASGIApp:
        """Return the API's answer unchanged, for the page's script."""
        try:
            api, form = self._api(), await read_form(request, MAX_FORM)
            return self._created(request, api, form, Draft.of(form).body())
        except APIError as error:
            return error_json(error)

    def _created(self, request: Request, api: CreateOnBehalf, form: Mapping[str, str], body: dict[str, Any]) -> ASGIApp:
        who = {name: form.get(name, "").strip() for name in ("key", "tenant", "credential")}
        request_id = f"req_{secrets.token_hex(16)}"
        app = api.create(orjson.dumps(body), request_id, **who)
        audit("request sent by the inspector", "", client_of(request), key=who["key"], request=request_id)

        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            if self._running >= MAX_CONCURRENT:
                await error_json(RateLimited(f"At most {MAX_CONCURRENT} requests of this page can be in progress."))(
                    scope, receive, send
                )
                return
            self._running += 1
            try:
                await app(scope, receive, send)
            finally:
                self._running -= 1

        return limited

    async def _with_draft(self, request: Request, draft: Draft, **shown: Any) -> Response:
        recent = await self._context.state.recent.page(limit=_KNOWN_MODELS)
        models = sorted({*MODELS.listed, *(model for one in recent.summaries if (model := one.get("model")))})
        api = self._context.api
        values = {"answer": None, "code": (), "fault": "", **shown}
        return self._render(request, "try.html", draft=draft, api=api, refusal=self.refusal, models=models, **values)
