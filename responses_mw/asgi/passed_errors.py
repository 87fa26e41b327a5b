"""Find out who caused the error that the upstream sent for a passed request.

The status tells most causes. For chats, the error's text counts too, as it does for responses: a path that is unknown to the
upstream is not the client's mistake, but an unknown model is. The beginning of the text is kept while it is forwarded.
"""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.types import Message, Scope, Send

from ..auth import API_KEY
from ..errors import Cause
from ..telemetry.context import annotate
from ..telemetry.failure import Failure
from ..upstream.errors import cause_of_answer, cause_of_status

_MAX_BODY = 16 * 1024
"""Maximum number of bytes of an error that are kept."""
_CHATS = b"/chat/completions"


def recording(scope: Scope, path: bytes, status: int, send: Send, *, is_encoded: bool) -> Send:
    """Return a `send` for the upstream's answer to a request for `path`. If the answer is an error, record who caused it.

    `is_encoded` is whether the answer has a `Content-Encoding`.
    """
    if status < 400:
        return send
    error = _Error(scope, status, send)
    error.record(cause_of_status(status, **error.keys))
    is_chat = scope["method"] == "POST" and path.rstrip(b"/").endswith(_CHATS)
    return error.send if is_chat and not is_encoded else send


class _Error:
    """Sends an error of the upstream, and keeps its beginning."""

    def __init__(self, scope: Scope, status: int, send: Send) -> None:
        has_credential = any(name == b"authorization" for name, _ in scope["headers"])
        self.keys = {"own_key": API_KEY in scope, "callers_key": has_credential}
        self._status = status
        self._send = send
        self._body = b""

    def send(self, message: Message) -> Awaitable[None]:
        self._body += message.get("body", b"")[: _MAX_BODY - len(self._body)]
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.record(cause_of_answer(self._status, self._body, **self.keys))
        return self._send(message)

    def record(self, cause: Cause) -> None:
        annotate(failure=Failure(kind=str(self._status), upstream_status=self._status, cause=cause))
