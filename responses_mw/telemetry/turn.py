"""A turn of the model: one chat completion, by OpenTelemetry's conventions for generative AI (spans, metrics)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.trace import Span, SpanKind

from ..errors import UpstreamError
from .content import input_messages, output_messages
from .exchange import current
from .names import MODELS, OPERATION_DURATION, TIME_PER_OUTPUT_TOKEN, TIME_TO_FIRST_TOKEN, TOKEN_USAGE
from .tracing import TRACER, captures, carried, is_tracing, mark_failed

# Members of a chat request, and how the conventions call them.
_ASKED = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
}


@dataclass(frozen=True, slots=True)
class Server:
    """Who is asked: ``provider`` names the kind of server, and is one of few. No ``address``: it is in this process."""

    provider: str
    address: str | None = None
    port: int | None = None

    @property
    def attributes(self) -> dict[str, str | int]:
        found: dict[str, str | int] = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": self.provider}
        if self.address:
            found["server.address"] = self.address
        if self.port:
            found["server.port"] = self.port
        return found


class Turn:
    """From the request's leaving to the answer's end. The clock is read at the start, at the first read, and at the end.

    In order: ``began``, then ``ended`` or ``failed``; then ``close``, which may come at any time and more than once.
    """

    __slots__ = ("_began", "_chat", "_document", "_facts", "_first", "_is_over", "_items", "_model", "_named", "_span", "_used")

    def __init__(self, chat: Mapping[str, Any], document: Mapping[str, Any], server: Server) -> None:
        """``chat`` is the chat request; ``document`` the response in the making, with what the turns before have used."""
        self._chat = chat
        self._document = document
        self._facts = server.attributes
        self._model = str(chat.get("model", ""))
        self._used = _usage(document)
        self._items = len(document["output"] or ())
        self._first: float | None = None
        self._named: dict[str, Any] = {}
        self._is_over = False
        asked = {"gen_ai.request.model": self._model, **_asked(chat), **_of_response(document)} if is_tracing() else {}
        self._span = TRACER.start_span(f"chat {self._model}", kind=SpanKind.CLIENT, attributes={**self._facts, **asked})
        self._began = time.perf_counter()

    @property
    def span(self) -> Span:
        return self._span

    def carried(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The caller's ``headers`` for the upstream, whose spans are to stand below this turn's."""
        return carried(headers, self._span)

    def began(self, head: Mapping[str, Any]) -> None:
        """The first read of the answer is there; ``head`` is its first chunk, which names the completion and its model."""
        self._first = time.perf_counter()
        named = {"gen_ai.response.id": head.get("id"), "gen_ai.response.model": head.get("model")}
        self._named = {name: value for name, value in named.items() if isinstance(value, str)}

    def ended(self, finish_reason: str | None) -> None:
        """The answer is whole, and the document has it."""
        if self._is_over:
            return
        took = time.perf_counter() - self._began
        MODELS.admit(self._model)
        given, made = (now - before for now, before in zip(_usage(self._document), self._used, strict=True))
        self._measure(took, given, made)
        span = self._span
        if span.is_recording():
            self._named |= {"gen_ai.usage.input_tokens": given, "gen_ai.usage.output_tokens": made}
            if finish_reason:
                self._named["gen_ai.response.finish_reasons"] = [finish_reason]
            self._show(finish_reason)
        self._over()

    def failed(self, error: Exception) -> None:
        """There is no (whole) answer."""
        if self._is_over:
            return
        kind = str(error.status) if type(error) is UpstreamError else type(error).__name__
        mark_failed(self._span, kind)
        OPERATION_DURATION.record(time.perf_counter() - self._began, {**self._attributes(), "error.type": kind})
        self._over()

    def close(self) -> None:
        """The run is over. A turn that has not ended by now was cancelled, which is no failure: its client left."""
        if not self._is_over:
            self._named["error.type"] = "cancelled"
            self._over()

    def _over(self) -> None:
        self._is_over = True
        self._span.set_attributes(self._named)
        self._span.end()

    def _attributes(self) -> dict[str, str | int]:
        return {**self._facts, "gen_ai.request.model": MODELS.known(self._model)}

    def _measure(self, took: float, given: int, made: int) -> None:
        attributes = self._attributes()
        OPERATION_DURATION.record(took, attributes)
        if given:
            TOKEN_USAGE.record(given, {**attributes, "gen_ai.token.type": "input"})
        if made:
            TOKEN_USAGE.record(made, {**attributes, "gen_ai.token.type": "output"})
        if self._first is None:
            return
        to_first = self._first - self._began
        if self._chat.get("stream"):
            TIME_TO_FIRST_TOKEN.record(to_first, attributes)
            if made > 1:
                TIME_PER_OUTPUT_TOKEN.record((took - to_first) / (made - 1), attributes)

    def _show(self, finish_reason: str | None) -> None:
        """The texts, for those who opted in."""
        exchange = current()
        if not captures(stores=bool(self._document.get("store")) and (exchange is None or exchange.stores)):
            return
        output: Sequence[Mapping[str, Any]] = self._document["output"][self._items :]
        self._span.set_attribute("gen_ai.input.messages", _json(input_messages(self._chat.get("messages", ()))))
        self._span.set_attribute("gen_ai.output.messages", _json(output_messages(output, finish_reason)))


def _usage(document: Mapping[str, Any]) -> tuple[int, int]:
    usage = document.get("usage") or {}
    return usage.get("input_tokens", 0), usage.get("output_tokens", 0)


def _asked(chat: Mapping[str, Any]) -> dict[str, Any]:
    return {_ASKED[name]: chat[name] for name in _ASKED.keys() & chat.keys()}


def _of_response(document: Mapping[str, Any]) -> dict[str, str]:
    found = {"responses_mw.response.id": document["id"]}
    if document.get("conversation"):
        found["gen_ai.conversation.id"] = document["conversation"]["id"]
    return found


def _json(messages: Iterator[dict[str, Any]]) -> str:
    return json.dumps(list(messages), ensure_ascii=False)
