"""Find out which session a request belongs to, so that it reaches the server that has the beginning of its prompt in memory."""

from __future__ import annotations

import orjson

from ..protocol.request.create import CreateResponse
from ..upstream.affinity import session_key
from .history import RunContext


def session_of_key(owner: str, prompt_cache_key: str) -> str:
    """Return the key of the session that a `prompt_cache_key` of `owner` names, in responses and in chats that pass through."""
    return session_key("key", owner, prompt_cache_key)


def session_of(request: CreateResponse, context: RunContext, *, is_stored: bool) -> str:
    """Return the key of a request's session. The prompts of a session's requests begin alike.

    It is the request's `prompt_cache_key`, else the conversation or chain. A request that begins a chain, but repeats the
    output of earlier responses, belongs to a history that the client keeps, and so does one that is not stored. Such a history
    is identified by its beginning, up to the first message of the user.
    """
    if request.prompt_cache_key:
        return session_of_key(context.owner, request.prompt_cache_key)
    is_repeated = any(item["type"] != "message" or item["role"] == "assistant" for item in context.input)
    if context.chain.items or context.chain.conversation is not None or (is_stored and not is_repeated):
        return session_key("chain", context.ids.tag)
    end = next((place for place, item in enumerate(context.input, 1) if item.get("role") == "user"), 1)
    texts = [{name: value for name, value in item.items() if name != "id"} for item in context.input[:end]]
    return session_key("start", context.owner, request.instructions or "", orjson.dumps(texts))
