"""Record the span and the metrics of a model turn, following OpenTelemetry's conventions for generative AI.

Messages are recorded only if `captures_content` returns true.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind

from ..errors import APIError, cause_of
from ..network import host_and_port
from ..redaction import redacted
from . import metrics
from .captures import CAPTURES, Capture
from .context import MAX_MESSAGE, RequestContext, annotate, current_request, present
from .conventions import (
    ERROR_TYPE,
    EXCEPTION_EVENT,
    EXCEPTION_MESSAGE,
    EXCEPTION_TYPE,
    REQUEST_ATTRIBUTES,
    SERVER_ADDRESS,
    SERVER_PORT,
    GenAI,
    Own,
)
from .failure import kind_of_error
from .tracing import TRACER, captures_content, is_tracing, mark_failed, with_trace_context


class TurnSpan:
    """The span of one turn, from sending the request to the end of the answer. Nothing is measured per token.

    `close` must always be called at the end. It has no effect after `finish` or `fail`.
    """

    def __init__(
        self,
        chat: Mapping[str, Any],
        document: Mapping[str, Any],
        provider: str,
        upstream: str = "",
        server: tuple[str, int] | None = None,
    ) -> None:
        """Start the span of the turn that sends the request `chat` to the upstream.

        `document` is the response in progress, including the items and the usage of earlier turns. `provider` is the type of
        the upstream, and `upstream` its name. `server` is the host and port in its URL. It is None if the upstream has several
        URLs or is an application in this process.
        """
        self._chat = chat
        self._document = document
        self._server: dict[str, str | int] = {GenAI.OPERATION: "chat", GenAI.PROVIDER: provider}
        if server is not None:
            self._server |= {SERVER_ADDRESS: server[0], SERVER_PORT: server[1]}
        self._model = str(chat.get("model", ""))
        self._usage_before = _usage(document)
        self._items_before = len(document["output"] or ())
        self._tokens_kept = 0
        self._first_read: float | None = None
        self._result: dict[str, Any] = {}
        self._is_ended = False
        self._span: Span = INVALID_SPAN
        self.is_traced = is_tracing()
        """Whether requests of this turn need its trace context."""
        if self.is_traced:
            attributes = {**self._server, Own.UPSTREAM: upstream, **_attributes(chat, document)}
            self._span = TRACER.start_span(f"chat {self._model}", kind=SpanKind.CLIENT, attributes=attributes)
        self._capture = _capture_of(document) if CAPTURES.is_on else None
        if self._capture is not None:
            self._capture.begin(chat)
        metrics.TURNS_ACTIVE.add(1)
        self._started = time.perf_counter()

    def with_trace_context(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return a copy of `headers` with this turn's trace context."""
        return with_trace_context(headers, self._span)

    def reach(self, upstream: str, server: tuple[str, int] | None) -> None:
        """Record that the endpoint with the host and port `server` of `upstream` answers. `server` is as in `__init__`."""
        if server is not None and self._span.is_recording():
            self._span.set_attributes({SERVER_ADDRESS: server[0], SERVER_PORT: server[1]})
        annotate(answered_by=upstream)

    def continues(self, tokens: int) -> None:
        """Record that the answer continues an interrupted one of `tokens` tokens, which the usage of the turn will include."""
        self._tokens_kept = tokens

    def start_answer(self, first_chunk: Mapping[str, Any]) -> None:
        """Record that the answer has started. `first_chunk` contains the id and the model of the completion."""
        self._first_read = time.perf_counter()
        if self._span.is_recording():
            names = {GenAI.RESPONSE_ID: first_chunk.get("id"), GenAI.RESPONSE_MODEL: first_chunk.get("model")}
            self._result = {name: redacted(value) for name, value in names.items() if isinstance(value, str)}
        if self._chat.get("stream"):
            self._result[GenAI.TIME_TO_FIRST_CHUNK] = self._first_read - self._started
        request = _request_of(self._document)
        if request is not None and request.first_token is None:
            request.first_token = self._first_read - request.started

    def finish(self, finish_reason: str | None) -> None:
        """Record the duration and the usage, and end the span. The turn's items and usage must be in the document."""
        if self._is_ended:
            return
        metrics.MODELS.admit(self._model)
        if self._capture is not None:
            self._capture.end()
        self._measure()
        if self._span.is_recording():
            if finish_reason:
                finish_reason = redacted(finish_reason)
                self._result[GenAI.FINISH_REASONS] = [finish_reason]
            if self._captures_content():
                self._capture_content(finish_reason)
        self._end()

    def fail(self, error: Exception) -> None:
        """Record that the turn failed with `error`, and end the span. If known, the turn's usage must be in the document."""
        if self._is_ended:
            return
        kind = kind_of_error(error)
        cause = cause_of(error)
        if self._capture is not None:
            message, status = (error.message, error.upstream_status) if isinstance(error, APIError) else (kind, None)
            self._capture.end(message, status)
        self._name_endpoint()
        mark_failed(self._span, kind)
        self._span.set_attribute(Own.CAUSE, cause)
        self._measure({ERROR_TYPE: kind, metrics.CAUSE: cause})
        if self._captures_content():
            message = error.message if isinstance(error, APIError) else ""  # other messages are not meant for anybody
            self._span.add_event(EXCEPTION_EVENT, {EXCEPTION_TYPE: kind, EXCEPTION_MESSAGE: message[:MAX_MESSAGE]})
        self._end(is_broken=True)

    def _name_endpoint(self) -> None:
        """If no endpoint answered, record the one that was tried last."""
        request = current_request()
        if self._first_read is None and request is not None and request.endpoint:
            host, port = host_and_port(request.endpoint)
            self._span.set_attributes({SERVER_ADDRESS: host, SERVER_PORT: port})

    def close(self) -> None:
        """End the span as cancelled, unless it has already ended. Unlike `fail`, this does not mark the span as failed."""
        if not self._is_ended:
            self._result[ERROR_TYPE] = "cancelled"
            self._end(is_broken=True)

    def _end(self, *, is_broken: bool = False) -> None:
        if is_broken and self._first_read is not None:
            self._result[GenAI.FINISH_REASONS] = ["error"]
        if is_broken and self._captures_content():
            self._capture_content("error")
        self._is_ended = True
        request = current_request()
        if request is not None:
            request.phases.add("turn" if request.response_id == self._document["id"] else "summary", self._started)
        metrics.TURNS_ACTIVE.add(-1)
        self._span.set_attributes(self._result)
        self._span.end()

    def _measure(self, error: Mapping[str, str] = {}) -> None:
        duration = time.perf_counter() - self._started
        # If the usage of a turn is unknown, the document's usage becomes null. Count 0 tokens, not a negative number.
        used = [max(now - before, 0) for now, before in zip(_usage(self._document), self._usage_before, strict=True)]
        self._result |= {name: count for name, count in zip(_COUNTS, used, strict=True) if count}
        attributes = {**self._server, GenAI.MODEL: metrics.MODELS.known(self._model)}
        metrics.INFERENCE_DURATION.record(duration, {**attributes, **error})
        for (counter, modality), tokens in zip(_COUNTERS, used, strict=True):
            counter.add(tokens, {**attributes, GenAI.MODALITY: modality})
        if error or self._first_read is None or not self._chat.get("stream"):
            return
        to_first, tokens_out = self._first_read - self._started, used[1] - self._tokens_kept
        metrics.TIME_TO_FIRST_CHUNK.record(to_first, attributes)
        if tokens_out > 1:
            metrics.TIME_PER_OUTPUT_TOKEN.record((duration - to_first) / (tokens_out - 1), attributes)

    def _captures_content(self) -> bool:
        if not self._span.is_recording():
            return False
        request = current_request()
        return captures_content(stores=bool(self._document.get("store")) and (request is None or request.stores))

    def _capture_content(self, finish_reason: str | None) -> None:
        """Record the input, and the output so far."""
        given = list(_input_messages(self._chat))
        made = [_output_message(self._document["output"][self._items_before :], finish_reason)]
        self._span.set_attribute(GenAI.INPUT_MESSAGES, json.dumps(given, ensure_ascii=False))
        self._span.set_attribute(GenAI.OUTPUT_MESSAGES, json.dumps(made, ensure_ascii=False))


def _request_of(document: Mapping[str, Any]) -> RequestContext | None:
    """Return the current request if `document` is its response. A summary of the history has a document of its own."""
    request = current_request()
    return request if request is not None and request.response_id == document["id"] else None


def _capture_of(document: Mapping[str, Any]) -> Capture | None:
    request = _request_of(document)
    return request.capture if request is not None else None


_COUNTS = (GenAI.INPUT_TOKENS, GenAI.OUTPUT_TOKENS, GenAI.CACHED_TOKENS, GenAI.REASONING_TOKENS)
_COUNTERS = (
    (metrics.INPUT_TOKENS, "unknown"),  # the upstream does not report the modality of input tokens
    (metrics.OUTPUT_TOKENS, "text"),
    (metrics.CACHED_TOKENS, "unknown"),
    (metrics.REASONING_TOKENS, "text"),
)


_NO_USAGE = (0,) * len(_COUNTS)


def _usage(document: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the token counts of `document` in the order of `_COUNTS`."""
    usage = document.get("usage")
    if not usage:
        return _NO_USAGE
    cached = (usage.get("input_tokens_details") or {}).get("cached_tokens", 0)
    reasoning = (usage.get("output_tokens_details") or {}).get("reasoning_tokens", 0)
    return usage.get("input_tokens", 0), usage.get("output_tokens", 0), cached, reasoning


def _attributes(chat: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a request and its response for the span of a turn."""
    form = chat.get("response_format") or (chat.get("text") or {}).get("format")
    attributes = {
        GenAI.MODEL: str(chat.get("model", "")),
        GenAI.STREAM: chat.get("stream") or None,
        GenAI.STOP_SEQUENCES: [stop] if isinstance(stop := chat.get("stop") or None, str) else stop,
        GenAI.REASONING_LEVEL: (chat.get("reasoning") or {}).get("effort"),
        GenAI.OUTPUT_TYPE: ("text" if form.get("type") == "text" else "json") if form else None,
        Own.RESPONSE_ID: document["id"],
        GenAI.CONVERSATION_ID: (document.get("conversation") or {}).get("id"),
        GenAI.PREVIOUS_RESPONSE_ID: document.get("previous_response_id"),
    }
    attributes |= {REQUEST_ATTRIBUTES[name]: chat[name] for name in REQUEST_ATTRIBUTES.keys() & chat.keys()}
    return present({name: value for name, value in attributes.items() if _can_be_exported(value)})


def _can_be_exported(value: Any) -> bool:
    """Return whether a value that the client chose, such as `seed`, has a type of the conventions, and at most 64 bits."""
    if isinstance(value, list):
        return all(isinstance(one, str) for one in value)
    return isinstance(value, str | float) or (isinstance(value, int) and value < 2**63)


# -- messages in the formats of `gen_ai.input.messages` and `gen_ai.output.messages` ---------------------------------------

_TEXTS = frozenset({"text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text"})


def _input_messages(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Convert the messages of a chat request, or the input of a Responses request."""
    for message in request.get("messages", ()):
        parts = _parts(message.get("content"))
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            parts.append(_tool_call(call.get("id"), function.get("name"), function.get("arguments")))
        if message.get("role") == "tool":
            parts = [_tool_result(message.get("tool_call_id"), message.get("content"))]
        yield {"role": message.get("role"), "parts": parts}
    for item in request.get("input", ()):
        is_result = item["type"].endswith("_output")
        parts = [_tool_result(item.get("call_id"), item.get("output"))] if is_result else _item_parts(item)
        yield {"role": item.get("role") or ("tool" if is_result else "assistant"), "parts": parts}


def _output_message(items: Sequence[Mapping[str, Any]], finish_reason: str | None) -> dict[str, Any]:
    parts = [part for item in items for part in _item_parts(item)]
    return {"role": "assistant", "parts": parts, "finish_reason": finish_reason}


def _item_parts(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    if item["type"] == "message":
        return _parts(item.get("content"))
    if item["type"] == "reasoning":
        return [{**part, "type": "reasoning"} for part in _parts(item.get("content") or item.get("summary"))]
    if "arguments" in item or "input" in item:
        arguments = item.get("arguments", item.get("input"))
        return [_tool_call(item.get("call_id") or item.get("id"), item.get("name"), arguments)]
    return []


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "content": content}]
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return [
        {"type": "text", "content": part.get("text", part.get("refusal"))}
        if part.get("type") in _TEXTS
        else {"type": part.get("type")}
        for part in parts
    ]


def _tool_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": arguments}


def _tool_result(call_id: Any, response: Any) -> dict[str, Any]:
    return {"type": "tool_call_response", "id": call_id, "response": response}
