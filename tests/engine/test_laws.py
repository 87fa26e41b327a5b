"""Properties of the whole server: a response does not depend on how the upstream's stream is cut."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from responses_mw import ResponsesMiddleware
from responses_mw.upstream.transports.asgi import ASGITransport
from tests.support.configured import make_settings
from tests.support.oracle import check
from tests.support.scripted import Answer, ScriptedUpstream, call, delta, finish, frame, usage
from tests.support.servers import lifespan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from anyio.from_thread import BlockingPortal

TOOLS = [{"type": "function", "name": name} for name in ("f", "g")]
BODY = {"input": "Hi", "model": "tiny", "tools": TOOLS}

texts = st.tuples(
    st.sampled_from(["content", "reasoning", "refusal"]), st.text(st.sampled_from('aé😀 \n"\\<think>'), max_size=12)
)
calls = st.tuples(
    st.sampled_from(["f", "g"]), st.sampled_from(["", "{}", '{"a": [1, "é😀"]}', '{"b": "' + "x" * 40 + '"}', "{not json"])
)


@dataclass(frozen=True)
class Words:
    """The output of a model: texts, then calls, then a finish reason."""

    texts: list[tuple[str, str]]
    calls: list[tuple[str, str]]
    reason: str


words = st.builds(
    Words,
    st.lists(texts, max_size=4),
    st.lists(calls, max_size=3),
    st.sampled_from(["stop", "tool_calls", "length", "content_filter"]),
)


def cut(whole: Any, places: list[int]) -> list[Any]:
    """Cut `whole` into pieces at `places`, which wrap around its length."""
    bounds = sorted({place % (len(whole) + 1) for place in places} | {0, len(whole)})
    return [whole[start:end] for start, end in pairwise(bounds)] or [whole]


def chunks(words: Words, places: list[int]) -> list[dict[str, Any]]:
    """Return the model's output as chunks, with every text and arguments string cut at `places`."""
    result = [delta(role="assistant", content="")]
    for name, said in words.texts:
        result += [delta(**{name: piece}) for piece in cut(said, places)]
    for index, (name, arguments) in enumerate(words.calls):
        result.append(call("", name=name, call_id=f"call_{index}", index=index))
        result += [call(piece, index=index) for piece in cut(arguments, places)]
    return [*result, finish(words.reason), usage()]


@dataclass
class Opened:
    """The middleware around a scripted upstream, in process."""

    portal: BlockingPortal
    upstream: ScriptedUpstream
    client: httpx.AsyncClient

    def post(self, answer: Answer, *, stream: bool) -> httpx.Response:
        self.upstream.queue(answer)

        async def post() -> httpx.Response:
            return await self.client.post("/v1/responses", json={**BODY, "stream": stream})

        return self.portal.call(post)


@pytest.fixture(scope="module")
def opened(portal: BlockingPortal, shared_redis: str) -> Iterator[Opened]:
    upstream = ScriptedUpstream()

    @asynccontextmanager
    async def mounted() -> AsyncIterator[httpx.AsyncClient]:
        app = ResponsesMiddleware(upstream, make_settings(redis__url=shared_redis))
        async with lifespan(app), httpx.AsyncClient(transport=ASGITransport(app), base_url="http://app") as client:
            yield client

    with portal.wrap_async_context_manager(mounted()) as client:
        yield Opened(portal, upstream, client)


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    if isinstance(value, dict):
        return {name: without_ids(member) for name, member in value.items() if name not in ("id", "created_at", "completed_at")}
    return value


positions = st.lists(st.integers(0, 10_000), max_size=12)


@settings(max_examples=2 * settings().max_examples)
@given(words=words, text_cuts=positions, byte_cuts=positions, line_end=st.sampled_from(["\n", "\r\n", "\r"]))
def test_a_response_does_not_depend_on_how_the_upstream_stream_is_cut(
    opened: Opened, words: Words, text_cuts: list[int], byte_cuts: list[int], line_end: str
) -> None:
    plain = b"".join(map(frame, chunks(words, []))) + b"data: [DONE]\n\n"
    wild = (b"".join(map(frame, chunks(words, text_cuts))) + b"data: [DONE]\n\n").replace(b"\n", line_end.encode())
    expected = check(opened.post(Answer([plain]), stream=True).content).response
    streamed = check(opened.post(Answer(cut(wild, byte_cuts)), stream=True).content).response
    gathered = opened.post(Answer(cut(wild, byte_cuts)), stream=False).json()
    assert without_ids(streamed) == without_ids(expected)
    assert without_ids(gathered) == without_ids(expected)


@settings(max_examples=2 * settings().max_examples)
@given(words=words, text_cuts=positions, byte_cuts=positions, end=st.integers(0, 10_000))
def test_a_stream_without_a_finish_reason_is_a_failed_response_or_a_502(
    opened: Opened, words: Words, text_cuts: list[int], byte_cuts: list[int], end: int
) -> None:
    """A stream that is cut anywhere before its finish chunk is a 502, or ends in `response.failed`."""
    raw = b"".join(map(frame, chunks(words, text_cuts)[:-2]))
    response = opened.post(Answer(cut(raw[: end % (len(raw) + 1)], byte_cuts)), stream=True)
    if response.status_code == 200:
        assert check(response.content).terminal == "response.failed"
    else:
        assert response.status_code == 502
