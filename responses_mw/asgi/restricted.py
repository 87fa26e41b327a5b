"""Check the requests that pass through to the upstream, if their API key is restricted to models.

Such a key may only read, and send requests to `PATHS`. The bodies of these requests are written anew, so that the upstream
cannot find another model in them than this server did.
"""

from __future__ import annotations

from typing import Any

from starlette.datastructures import QueryParams
from starlette.types import Scope

from ..errors import BadRequest, Forbidden
from ..protocol import checks
from .model_access import check_body

PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/moderations",
    }
    | {"/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/pooling", "/classify", "/tokenize", "/detokenize"}
    | {"/v1/images/generations", "/v1/audio/speech"}
)
"""Paths of requests whose body is JSON with the member `model`, which determines the model."""


def check_request(scope: Scope, base_path: str) -> None:
    """Check the method, the path and the query of a request that changes something.

    `base_path` precedes `PATHS`. Raises `Forbidden` or `BadRequest` if the model of the request cannot be checked.
    """
    path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/")).removeprefix(base_path)
    if scope["method"] != "POST" or path not in PATHS:
        message = "Your API key is restricted to models, and may not send this request, whose model cannot be checked."
        raise Forbidden(message, code="model_restricted")
    # FastAPI reads a parameter of the query in place of a member of the body.
    if any(name.casefold() == "model" for name in QueryParams(scope["query_string"])):
        message = "The parameter 'model' is not accepted with your API key. Send it in the body."
        raise BadRequest(message, param="model")


def checked_body(scope: Scope, body: Any) -> dict[str, Any]:
    """Return the decoded `body` with the model that the API key may use. Raises the errors of `check_body`."""
    model = checks.body(body).get("model")
    if model is not None:
        checks.string(model, "model")
    checked: dict[str, Any] = check_body(scope, body)
    return checked
