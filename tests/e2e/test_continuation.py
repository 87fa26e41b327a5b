"""Answers of a real server are interrupted at every tenth token, and compared with the whole answer at temperature 0.

`scripts/e2e continuation --upstream http://127.0.0.1:8000 --model NAME`: a vLLM. A proxy between that and ours cuts the streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import orjson
import pytest
from anyio.from_thread import start_blocking_portal
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from benchmarks.processes import running
from tests.support.servers import serving

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

STEP = 10
CHARGED = ("input_tokens", "output_tokens", "total_tokens")  # what is cached depends on what was asked before
QUESTIONS = [
    "Write three sentences about the sea.",
    "Count from one to forty, in digits.",
    "Say something in Japanese, with emojis.",
]
MODES: dict[str, dict[str, Any]] = {
    "reasoning": {},
    "no reasoning": {"chat_template_kwargs": {"enable_thinking": False}},
    "limit": {"max_output_tokens": 200},
}


class Cut(Exception):
    """Ends a connection in the middle of a body."""


class CuttingProxy:
    """Relays to `upstream`, and interrupts the next stream after a number of tokens."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self.after: int | None = None
        self.cuts = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        request = Request(scope, receive)
        async with httpx.AsyncClient(base_url=self._upstream, timeout=300, trust_env=False) as client:
            headers = {"content-type": "application/json"}
            content = await request.body()
            async with client.stream(request.method, request.url.path, content=content, headers=headers) as answer:
                kind = answer.headers.get("content-type", "")
                if kind.startswith("text/event-stream"):
                    await StreamingResponse(self._frames(answer), media_type=kind)(scope, receive, send)
                else:
                    await Response(await answer.aread(), answer.status_code, media_type=kind)(scope, receive, send)

    async def _frames(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        after, self.after, tokens, pending = self.after, None, 0, b""
        async for data in answer.aiter_raw():
            *frames, pending = (pending + data).split(b"\n\n")
            for frame in frames:
                if tokens == after:
                    self.cuts += 1
                    raise Cut
                yield frame + b"\n\n"
                tokens += _has_text(frame)


def _has_text(frame: bytes) -> bool:
    choices = orjson.loads(frame[6:])["choices"] if frame.startswith(b"data: {") else []
    return any(choices and choices[0]["delta"].get(name) for name in ("content", "reasoning", "reasoning_content"))


@pytest.fixture
def proxy(request: pytest.FixtureRequest) -> CuttingProxy:
    upstream = request.config.getoption("--upstream")
    if not upstream:
        pytest.skip("needs --upstream")
    return CuttingProxy(upstream)


@pytest.fixture
def url(proxy: CuttingProxy) -> Iterator[str]:
    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal("asyncio"))
        serve = stack.enter_context(serving(portal, []))
        server = stack.enter_context(running("responses_mw", "serve", "--upstream", serve(proxy)))
        yield f"{server.url}/v1/responses"


async def ask(url: str, body: dict[str, Any]) -> tuple[dict[str, Any], str, int]:
    """Return the response, its text, and the number of deltas."""
    async with httpx.AsyncClient(timeout=300, trust_env=False) as client:
        answer = await client.post(url, json=body)
    events = [orjson.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    document = events[-1]["response"]
    said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    parts = [part for item in document["output"] if item["type"] == "message" for part in item["content"]]
    assert said == "".join(part["text"] for part in parts)
    return document, said, sum(event["type"].endswith(".delta") for event in events)


@pytest.mark.parametrize("mode", MODES)
async def test_a_continued_answer_equals_the_uninterrupted_answer(
    url: str, proxy: CuttingProxy, request: pytest.FixtureRequest, mode: str
) -> None:
    result: Counter[str] = Counter()
    for question in QUESTIONS:
        body = {"input": question, "stream": True, "temperature": 0, **MODES[mode]}
        body |= {"model": request.config.getoption("--model")} if request.config.getoption("--model") else {}
        whole, text, deltas = await ask(url, body)
        for after in range(STEP, deltas, STEP):
            proxy.after, proxy.cuts = after, 0
            broken, said, _ = await ask(url, body)
            if not proxy.cuts:  # vLLM has put several tokens into one chunk, so that there were fewer
                continue
            charged = [[one["usage"][count] for count in CHARGED] for one in (broken, whole)]
            is_same = said == text and broken["status"] == whole["status"] and charged[0] == charged[1]
            result["same" if is_same else "other"] += 1
            assert broken["status"] != "failed", broken["error"]
            assert not said.startswith(text + text[:20]), "it is repeated"
    print(f"{mode}: {dict(result)}")
    assert result.total() >= 2
    assert result["same"] >= 0.95 * result.total()
