"""Check that the upstream continues an unfinished message, and count the tokens of an interrupted answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UpstreamTimeout
from ..protocol.response.seam import Seam
from ..protocol.types import ChatRequest
from .caller import Caller
from .client import Upstream
from .servers import Server, get_if_accepted, server_for
from .token_counting import count_by_completion, is_text

logger = logging.getLogger(__name__)

_MAX_MODELS = 1000
"""Maximum number of models in the cache."""
_REFUSAL_TTL = 300.0
"""Seconds that a negative result is cached for a model."""
_EXTRA_TOKENS = 64
"""Number of tokens to decode besides the text and its reasoning, which are between tags and may begin within a token."""
_SAMPLE = "One two three"
_RESHAPING = frozenset({"truncate_prompt_tokens", "kv_transfer_params"})
"""Parameters of vLLM that change the prompt, but not the result of `/tokenize`."""


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """A prompt that ends with the text to continue."""

    tokens: list[Any]
    end: str
    """The end of the prompt as text, at least from the reasoning that precedes the text to continue."""
    is_trimmed: bool
    """Whether the chat template removed white space from the end of the text."""
    is_counted: bool
    """Whether the server counts the tokens of the prompt as `tokens` does."""

    def seam(self, before: str, tokens: int = 0) -> Seam:
        """Return the check of the text that continues `before`, which has `tokens` tokens."""
        counted = len(self.tokens) if self.is_counted else None
        return Seam(before, is_trimmed=self.is_trimmed, prompt_tokens=counted, tokens=tokens)


class PrefillProof:
    """Checks whether one upstream continues the last message of a request instead of answering it.

    The result depends on the server, the model and its chat template. A server that does not continue the message reports no
    error, but begins a new message. Two conditions are therefore checked:

    1. The prompt that the server renders for the request must end with the text. vLLM returns the prompt through `/tokenize`
       and `/detokenize`, llama.cpp through `/apply-template`.
    2. The server must use this prompt, which vLLM with gpt-oss does not. Therefore, each model answers a sample. The
       sample's rendered prompt must have as many tokens as the usage of the answer reports. This result is cached.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._verdicts: dict[str, tuple[float, bool]] = {}
        """The expiry time of each model's result, and whether the model continues messages."""
        self._timed_out = 0.0
        """The time when the upstream last failed to answer a sample in time."""
        self._trying = asyncio.Lock()

    async def holds(self, model: str, caller: Caller) -> bool:
        """Return whether `model` continues the last message. Raises `UpstreamError` if a request to the upstream fails."""
        dialect = await self._upstream.dialect(caller)
        if not (dialect.prefill and (await server_for(self._upstream, caller)).shows_prompts):
            return False
        asked = time.monotonic()
        async with self._trying:  # when a server dies, many answers are interrupted at once
            expires, verdict = self._verdicts.get(model, (0.0, False))
            if time.monotonic() < expires:
                return verdict
            if self._timed_out > asked:  # the server hangs, and these answers must not wait for it one after the other
                raise UpstreamTimeout("The upstream did not answer in time.")
            try:
                verdict = await self._try_sample(model, dialect.prefill, caller)
            except UpstreamTimeout:
                self._timed_out = time.monotonic()
                raise
            self._remember(model, verdict=verdict)
            return verdict

    def _remember(self, model: str, *, verdict: bool) -> None:
        if len(self._verdicts) >= _MAX_MODELS:
            self._verdicts.clear()
        self._verdicts[model] = (float("inf") if verdict else time.monotonic() + _REFUSAL_TTL, verdict)
        logger.info("interrupted answers of %s %s continued", model, "can be" if verdict else "cannot be")

    async def _try_sample(self, model: str, prefill: str, caller: Caller) -> bool:
        messages = [{"role": "user", "content": "Count to ten."}, {"role": "assistant", "content": _SAMPLE}]
        chat = {"model": model, "messages": messages, prefill: True, "add_generation_prompt": False}
        shown = await self.prompt(chat, _SAMPLE, caller)
        if shown is None:
            return False
        return await get_if_accepted(count_by_completion(self._upstream, chat, caller)) == len(shown.tokens)

    async def prompt(self, chat: ChatRequest, text: str, caller: Caller, thought: str = "") -> ShownPrompt | None:
        """Return the prompt that the server renders for `chat`. The last message of `chat` must be `text`, after `thought`.

        Return None if the server cannot return the prompt, or if the prompt does not end with `text` (apart from white
        space). Raises `UpstreamError` if a request fails.
        """
        server = await server_for(self._upstream, caller)
        tokens = await server.prompt_tokens(chat)
        if tokens is None:
            return None
        end = await server.prompt_end(chat, tokens[-(len((thought + text).encode()) + _EXTRA_TOKENS) :])
        if end is None or not end.rstrip().endswith(text.strip()):
            return None
        is_counted = is_text(chat) and _RESHAPING.isdisjoint(chat)
        return ShownPrompt(tokens, end, is_trimmed=not end.endswith(text.lstrip()), is_counted=is_counted)


async def interrupted_usage(
    server: Server, chat: ChatRequest, prompt: ShownPrompt, text: str, thoughts: Sequence[str]
) -> tuple[int, dict[str, Any] | None]:
    """Return the tokens of an interrupted answer, and its usage as in a chat completion or None if the prompt has images.

    The answer consists of the reasoning texts `thoughts` and `text`. `chat` is the request for the answer, and `prompt` the one
    that continues it. Not every chat template shows the reasoning in that prompt.
    """
    model = chat["model"]
    hidden = "".join(thought for thought in thoughts if thought.strip() not in prompt.end)
    unseen = await server.count_text(model, hidden) if hidden else 0
    tokens = await server.prompt_tokens(chat) if is_text(chat) else None
    thought = "".join(thoughts)
    reasoning = unseen if thought == hidden else await server.count_text(model, thought)
    if tokens is None:
        return reasoning + await server.count_text(model, text), None
    completion = max(len(prompt.tokens) - len(tokens), 0) + unseen
    return completion, {
        "prompt_tokens": len(tokens),
        "completion_tokens": completion,
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
