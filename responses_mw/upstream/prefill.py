"""Check that the upstream continues the last message of a request instead of answering it.

The result depends on the server, the model and its chat template. A server that does not continue the message reports no error,
but begins a new message. Two conditions are therefore checked:

1. The prompt that the server renders for this request must end with the text. vLLM returns the prompt through `/tokenize` and
   `/detokenize`, llama.cpp through `/apply-template`.
2. Some servers return a prompt that they do not use (vLLM with gpt-oss). For each model, the prompt of a sample must therefore
   have as many tokens as the usage of an answer to the sample reports.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from ..protocol.types import ChatRequest
from .caller import Caller
from .client import Upstream
from .context_window import count_by_completion
from .servers import accepted, server_for

logger = logging.getLogger(__name__)

_REFUSAL_TTL = 300.0
"""Seconds for which a negative result for a model is cached."""
_MAX_MODELS = 1000
"""Maximum number of models whose results are cached."""
_MARGIN = 16
"""Number of tokens to decode before the text, because the text may begin within a token."""
_SAMPLE = "One two three"


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """A prompt that ends with the text to continue."""

    tokens: list[Any]
    is_trimmed: bool
    """Whether the chat template removed white space from the end of the text."""


class PrefillProof:
    """Checks whether one upstream continues messages, and caches the result for each model."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._verdicts: dict[str, tuple[float, bool]] = {}
        """The expiry time of each model's result, and whether the model continues messages."""
        self._trying = asyncio.Lock()

    async def holds(self, model: str, caller: Caller) -> bool:
        """Return whether the upstream continues messages with `model`. Raises `UpstreamError` if a request fails."""
        dialect = await self._upstream.dialect(caller)
        if not (dialect.prefill and (await server_for(self._upstream, caller)).shows_prompts):
            return False
        async with self._trying:  # when a server dies, many answers are interrupted at once
            now = asyncio.get_running_loop().time()
            expires, verdict = self._verdicts.get(model, (0.0, False))
            if now >= expires:
                verdict = await self._try_sample(model, dialect.prefill, caller)
                if len(self._verdicts) >= _MAX_MODELS:
                    self._verdicts.clear()
                self._verdicts[model] = (float("inf") if verdict else now + _REFUSAL_TTL, verdict)
                logger.info("interrupted answers of %s %s continued", model, "can be" if verdict else "cannot be")
            return verdict

    async def _try_sample(self, model: str, prefill: str, caller: Caller) -> bool:
        messages = [{"role": "user", "content": "Count to ten."}, {"role": "assistant", "content": _SAMPLE}]
        chat = {"model": model, "messages": messages, prefill: True, "add_generation_prompt": False}
        shown = await self.prompt(chat, _SAMPLE, caller)
        if shown is None:
            return False
        return await accepted(count_by_completion(self._upstream, chat, caller)) == len(shown.tokens)

    async def prompt(self, chat: ChatRequest, text: str, caller: Caller) -> ShownPrompt | None:
        """Return the prompt of `chat`, or None if the server does not show a prompt that ends with `text`, the last message.

        Raises `UpstreamError` if a request fails.
        """
        server = await server_for(self._upstream, caller)
        tokens = await server.prompt_tokens(chat)
        if tokens is None:
            return None
        prompt = await server.prompt_end(chat, tokens[-(len(text.encode()) + _MARGIN) :])
        if prompt is None or not prompt.rstrip().endswith(text.strip()):
            return None
        return ShownPrompt(tokens, is_trimmed=not prompt.endswith(text.lstrip()))
