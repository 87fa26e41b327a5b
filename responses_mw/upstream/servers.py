"""Query each kind of model server for token counts, context lengths and rendered prompts."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from ..errors import UpstreamError
from ..protocol.types import ChatRequest
from .caller import Caller
from .client import Upstream, member

T = TypeVar("T")

_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})")


@dataclass(frozen=True, slots=True)
class Server:
    """Access to a server's own endpoints, such as its tokenizer, for one caller. Each kind of server has a subclass.

    Methods return None if the server does not provide the value. They raise `UpstreamError` if the server is overloaded, fails
    or refuses the caller.
    """

    upstream: Upstream
    caller: Caller
    has_tokenizer: ClassVar[bool] = False
    """Whether `prompt_tokens` may return tokens."""
    shows_prompts: ClassVar[bool] = False
    """Whether `prompt_end` may return a prompt."""

    async def context_length(self, model: str) -> Any:
        """Return the context length in tokens, as the server states it. Raises `UpstreamError` after any error response."""
        return None

    async def composes_grammars(self) -> bool | None:
        """Return whether the server's version can compose a grammar from strict functions and a response format."""
        return None

    async def prompt_tokens(self, chat: ChatRequest) -> list[Any] | None:
        """Return the prompt tokens of `chat`, which must contain only text."""
        return None

    async def prompt_end(self, chat: ChatRequest, tokens: list[Any]) -> str | None:
        """Return the rendered `chat`, or at least its end, as text. `tokens` are the last tokens of the rendered `chat`."""
        return None

    async def count_text(self, model: str, text: str) -> int:
        """Return the number of tokens of `text` without special tokens, or 0 if the server does not count tokens."""
        return 0

    async def _query(self, path: str, body: ChatRequest, name: str, kind: type[T]) -> T | None:
        """Post `body` to `path`, and return the member `name` of the answer.

        Return None if the member is not a `kind`, or if the request is rejected.
        """
        value = member(await get_if_accepted(self.upstream.post(path, body, self.caller)), name)
        return value if isinstance(value, kind) else None

    async def _metadata(self, path: str, *members: str) -> Any:
        return member(await self.upstream.get(path, self.caller), *members)

    async def _length_of_models(self, model: str) -> Any:
        """Return `max_model_len` from `/v1/models`. An adapter has the length of its parent."""
        listed = {one["id"]: one for one in await self.upstream.models(self.caller)}
        found = listed.get(model, {})
        parent = found.get("parent")
        return found.get("max_model_len") or (listed.get(parent, {}).get("max_model_len") if isinstance(parent, str) else None)


async def get_if_accepted(answer: Awaitable[T]) -> T | None:
    """Return the result of `answer`, or None if the server rejects the request as invalid or unknown.

    Raises `UpstreamError` if the server is overloaded, refuses the credential or fails.
    """
    try:
        return await answer
    except UpstreamError as error:
        if error.is_overload or error.status in (401, 403) or error.status >= 500:
            raise
        return None


class _VLLM(Server):
    has_tokenizer = shows_prompts = True
    _COMPOSES_SINCE = (0, 32)
    _SHOWN = (
        *("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"),
        "add_special_tokens",
    )

    async def context_length(self, model: str) -> Any:
        return await self._length_of_models(model)

    async def composes_grammars(self) -> bool | None:
        version = member(await get_if_accepted(self.upstream.get("/version", self.caller)), "version")
        if not isinstance(version, str):
            return None
        numbers = _VERSION.match(version)
        return numbers is not None and (int(numbers[1]), int(numbers[2])) >= self._COMPOSES_SINCE

    async def prompt_tokens(self, chat: ChatRequest) -> list[Any] | None:
        return await self._query("/tokenize", self._rendered(chat), "tokens", list)

    async def prompt_end(self, chat: ChatRequest, tokens: list[Any]) -> str | None:
        return await self._query("/detokenize", {"model": chat["model"], "tokens": tokens}, "prompt", str)

    async def count_text(self, model: str, text: str) -> int:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return await self._query("/tokenize", body, "count", int) or 0

    def _rendered(self, chat: ChatRequest) -> ChatRequest:
        """Return the body for `/tokenize`. It passes `reasoning_effort` and `documents` as arguments of the chat template."""
        arguments = {**(chat.get("chat_template_kwargs") or {}), **_only(chat, ("reasoning_effort", "documents"))}
        return {**_only(chat, self._SHOWN), **({"chat_template_kwargs": arguments} if arguments else {})}


class _SGLang(Server):
    has_tokenizer = True
    _UNSEEN = frozenset({"chat_template_kwargs", "reasoning_effort", "continue_final_message"})

    async def context_length(self, model: str) -> Any:
        return await self._length_of_models(model)

    async def prompt_tokens(self, chat: ChatRequest) -> list[Any] | None:
        if chat.keys() & self._UNSEEN:
            return None
        return await self._query("/tokenize", _only(chat, ("model", "messages", "tools")), "tokens", list)


class _TGI(Server):
    has_tokenizer = True

    async def context_length(self, model: str) -> Any:
        return await self._metadata("/info", "max_total_tokens")

    async def prompt_tokens(self, chat: ChatRequest) -> list[Any] | None:
        return await self._query("/chat_tokenize", chat, "tokenize_response", list)


class _LlamaCpp(Server):
    has_tokenizer = shows_prompts = True
    _SHOWN = (
        *("messages", "tools", "tool_choice", "response_format", "reasoning_effort", "chat_template_kwargs"),
        *("add_generation_prompt", "continue_final_message"),
    )

    async def context_length(self, model: str) -> Any:
        return await self._metadata("/props", "default_generation_settings", "n_ctx")

    async def prompt_tokens(self, chat: ChatRequest) -> list[Any] | None:
        prompt = await self._prompt(chat)
        return None if prompt is None else await self._tokens(prompt, special=True)

    async def prompt_end(self, chat: ChatRequest, tokens: list[Any]) -> str | None:
        return await self._prompt(chat)

    async def count_text(self, model: str, text: str) -> int:
        return len(await self._tokens(text, special=False) or ())

    async def _prompt(self, chat: ChatRequest) -> str | None:
        return await self._query("/apply-template", _only(chat, self._SHOWN), "prompt", str)

    async def _tokens(self, text: str, *, special: bool) -> list[Any] | None:
        """Return the tokens of `text`. With `special`, parse and add special tokens."""
        body = {"content": text, "add_special": special, "parse_special": special}
        return await self._query("/tokenize", body, "tokens", list)


_SERVERS: dict[str, type[Server]] = {"vllm": _VLLM, "sglang": _SGLang, "tgi": _TGI, "llamacpp": _LlamaCpp}


async def server_for(upstream: Upstream, caller: Caller) -> Server:
    """Return the `Server` for the upstream's dialect. Raises `UpstreamError` if the dialect cannot be detected."""
    return _SERVERS.get((await upstream.dialect(caller)).name, Server)(upstream, caller)


def _only(chat: ChatRequest, names: Iterable[str]) -> ChatRequest:
    return {name: chat[name] for name in names if name in chat}
