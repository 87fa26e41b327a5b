"""Check the bodies of requests whose API key is restricted to models."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from ..auth import ALLOWED_MODELS, check_model
from ..errors import BadRequest

_CHOOSING = frozenset(
    # OpenRouter and LiteLLM: other models, or where they are served
    {"models", "fallbacks", "context_window_fallbacks", "context_window_fallback_dict", "content_policy_fallbacks"}
    | {"model_list", "model_info", "base_model", "custom_llm_provider", "api_base", "base_url", "user_config", "extra_body"}
    # SGLang and llama.cpp: adapters
    | {"lora_path", "lora"}
)
"""Fields that choose the model of some upstreams in place of `model`."""


def check_body(scope: Scope, body: Any) -> Any:
    """Return the decoded `body` of a request with the model that `check_model` returns. Raises its errors.

    Raises `BadRequest` if the API key is restricted to models, and another field could choose the model: Some upstreams ignore
    the case of names. A body that is not an object, or whose model is not text, is returned as it is, because it is invalid.
    """
    if scope.get(ALLOWED_MODELS) is None or not isinstance(body, dict):
        return body
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        return body
    for name, value in body.items():
        folded = name.casefold()
        if (folded in _CHOOSING and value is not None) or (folded == "model" and name != "model"):
            message = f"'{name[:64]}' is not accepted with your API key, which is restricted to models. Use 'model'."
            raise BadRequest(message, param=name[:64])
    return {**body, "model": check_model(scope, model)}
