"""Choose how the turns of one upstream combine tools with the format of the answer (`protocol.chat.combination`)."""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import orjson

from ...errors import UpstreamError
from ...protocol.chat.chunks import choices_of
from ...protocol.chat.combination import Combination, is_composed
from ...protocol.chat.request import add_reasoning
from ...protocol.dialects import Dialect
from ...protocol.parts import is_unfinished
from ...protocol.types import ChatRequest
from ..caller import REFUSALS, Caller
from ..client import Upstream, member
from ..servers import server_for
from .base import TurnState

logger = logging.getLogger(__name__)

_MAX_REMEMBERED = 1000
"""Maximum number of models, and of refused combinations, because clients choose them."""
_GRAMMAR = re.compile("grammar|schema|structur", re.IGNORECASE)
"""Words in the errors of servers that cannot express a schema as a grammar."""


class Combinations:
    """Knows how the models of one upstream combine tools with a format."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._trials = Trials(upstream)
        self._refused: set[bytes] = set()
        """Hashes of the models, tools and formats that the upstream refused to combine."""

    async def of(self, turn: TurnState, dialect: Dialect) -> Combination:
        """Return the combination for the current turn."""
        if not (turn.request.wants_format and turn.offered) or turn.request.tool_choice == "none":
            return Combination.TOGETHER
        if turn.draft_begins_at is not None or (dialect.prefill and _continues_answer(turn)):
            return Combination.ANSWER
        if dialect.format_with_tools != "strict":
            return Combination.TOGETHER if dialect.format_with_tools == "together" else Combination.DRAFT
        is_refused = bool(self._refused) and _key(turn) in self._refused
        is_possible = is_composed(turn.request.text["format"]) and not is_refused
        return Combination.STRICT if is_possible and await self._trials.run(turn, dialect) else Combination.DRAFT

    async def is_refused(self, turn: TurnState, dialect: Dialect, error: UpstreamError) -> bool:
        """Return whether `error` may mean that the upstream has no grammar for the turn's tools and format together."""
        is_about_grammars = error.upstream_status == 400 and _GRAMMAR.search(error.message) is not None
        return is_about_grammars and await self.of(turn, dialect) is Combination.STRICT

    @contextmanager
    def separate(self, turn: TurnState) -> Iterator[None]:
        """Let `of` return another combination than `STRICT` for the model, tools and format of `turn`.

        This is remembered unless the body fails, because then the upstream had another reason to refuse the turn.
        """
        if len(self._refused) >= _MAX_REMEMBERED:
            self._refused.clear()
        key = _key(turn)
        self._refused.add(key)
        try:
            yield
        except BaseException:
            self._refused.discard(key)
            raise
        logger.info("the upstream cannot combine the tools and the format of a request, and gets them one after the other")


def _continues_answer(turn: TurnState) -> bool:
    """Return whether the model continues a message of the client. It has then decided to answer."""
    last = next(reversed(turn.output or turn.input or turn.earlier), None)
    return last is not None and is_unfinished(last)


def _key(turn: TurnState) -> bytes:
    functions = [one.function for one in turn.offered]
    wanted = turn.request.text["format"]
    return hashlib.sha256(orjson.dumps([turn.model, wanted, turn.request.tool_choice, functions])).digest()


# -- trials ----------------------------------------------------------------------------------------------------------------

_TTL = 3600.0
"""Seconds that a negative result is cached."""
_MAX_TOKENS = 100
_SETTINGS = ("enable_thinking", "thinking", "reasoning_effort")
"""Variables of chat templates that turn reasoning on or off."""
_QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
_RESULT = [
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": "Sunny, 20 degrees."},
]
_FUNCTION = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
_FORMAT = {
    "name": "answer",
    "schema": {"type": "object", "properties": {"weather": {"type": "string"}}, "required": ["weather"]},
}


class Trials:
    """Tests whether models choose between a call and an answer if the grammar of both constrains them.

    - vLLM composes this grammar only in newer versions, and with some tool parsers. With others, no call is possible, or the
      answer does not have the format.
    - A model cannot begin its answer with the text that it prefers, and may make another call instead, without end. After its
      reasoning, a model usually prefers white space, so the choice is left to chance.

    Therefore, a model must call a function to answer a question, and answer when it has the result, both without reasoning.
    While this is unknown, or if the upstream fails, the result is negative.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._results: dict[bytes, tuple[float, bool]] = {}
        """The expiry time and the result of each model with its settings for reasoning."""

    async def run(self, turn: TurnState, dialect: Dialect) -> bool:
        """Return whether the turn's model passed the trial. A model that has not been tested is tested."""
        body = _reasoning_settings(turn, dialect)
        key = hashlib.sha256(orjson.dumps([turn.model, body])).digest()
        expires, result = self._results.get(key, (0.0, False))
        if time.monotonic() < expires:
            return result
        self._remember(key, result=False)  # for other requests during the trial
        try:
            result = await self._run({**body, "model": turn.model, dialect.max_tokens: _MAX_TOKENS}, turn.caller)
        except BaseException as error:
            if not isinstance(error, UpstreamError) or error.is_overload or error.status in REFUSALS:
                self._results.pop(key, None)
            if not isinstance(error, UpstreamError):
                raise
            return False
        self._remember(key, result=result)
        logger.info("%s gets tools and formats %s", turn.model, "together" if result else "one after the other")
        return result

    def _remember(self, key: bytes, *, result: bool) -> None:
        if len(self._results) >= _MAX_REMEMBERED:
            self._results.clear()
        self._results[key] = (float("inf") if result else time.monotonic() + _TTL, result)

    async def _run(self, body: ChatRequest, caller: Caller) -> bool:
        composes = await (await server_for(self._upstream, caller)).composes_grammars()
        if composes is None:  # a gateway that hides the version
            return True
        if not composes:
            return False
        called = await self._answer({**body, "messages": [_QUESTION]}, caller)
        if called.get("reasoning") or called.get("content") or not called.get("tool_calls"):
            return False
        answered = await self._answer({**body, "messages": [_QUESTION, *_RESULT]}, caller)
        return not (answered.get("reasoning") or answered.get("tool_calls")) and _is_formatted(answered.get("content"))

    async def _answer(self, body: ChatRequest, caller: Caller) -> dict[str, Any]:
        constraints = {
            "tools": [{"type": "function", "function": _FUNCTION}],
            "response_format": {"type": "json_schema", "json_schema": _FORMAT},
        }
        async with aclosing(await self._upstream.chat({**body, **constraints, "temperature": 0}, caller)) as stream:
            choices = choices_of(stream.head)
        delta = choices[0].get("delta") if choices else None
        return delta if isinstance(delta, dict) else {}


def _reasoning_settings(turn: TurnState, dialect: Dialect) -> ChatRequest:
    given = turn.request.extra.get("chat_template_kwargs")
    settings = {name: given[name] for name in _SETTINGS if name in given} if isinstance(given, dict) else {}
    body: ChatRequest = {"chat_template_kwargs": settings} if settings else {}
    add_reasoning(body, turn.request, dialect)
    return body


def _is_formatted(content: Any) -> bool:
    try:
        return isinstance(member(orjson.loads(content), "weather"), str)
    except (TypeError, orjson.JSONDecodeError):
        return False
