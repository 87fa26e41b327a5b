"""Answers that break off at random places, from servers with different manners, and what must become of them.

`CutServer` is a vLLM or llama.cpp server whose model always gives the same answer. `play` cuts one answer and checks the result.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import httpx
import orjson

from responses_mw.crypto import Sealer
from responses_mw.engine.drain import Drain
from responses_mw.engine.history import History
from responses_mw.engine.input_files import InputFiles
from responses_mw.engine.run import RunMode
from responses_mw.engine.run_factory import RunFactory
from responses_mw.engine.runner import Runner
from responses_mw.protocol import sse
from responses_mw.protocol.request.create import parse
from responses_mw.tools.toolbox import Tools
from responses_mw.upstream import Caller, Upstream
from responses_mw.upstream.backends.chat import ChatBackend
from responses_mw.upstream.pool import Pool
from responses_mw.upstream.routing import Upstreams
from responses_mw.upstream.transports.asgi import ASGITransport
from tests.support.configured import make_settings
from tests.support.scripted import DONE, TINY, Chunk, completion, delta, frame, read_body, reasoning, text, usage

UNITS = [
    *(
        "ha ",
        "ab",
        "-",
        "=-",
        "Row, row, row your boat\n",
        "la la ",
        "\n- item",
        "  ",
        "🎉",
        "Ein Hut, drei Ecken\n\n",
        "0",
        "aab",
    ),
    *("word", " and", " then\n", "Ümläute ", "。", "once upon a time ", "x = 1\n    ", "The end."),
]
CONTINUES, SENDS_AGAIN, STARTS_OVER, STARTS_ANOTHER = "continues", "sends the message again", "starts over", "starts another"
EACH_CHUNK, FIRST_AND_LAST, LAST = "each chunk", "first and last chunk", "last chunk"


@dataclass(frozen=True)
class Cut:
    """An answer, the places where it is cut, and the manners of the server."""

    said: str
    thought: str
    places: tuple[int, ...]
    """Numbers of text chunks after which an answer breaks off."""
    manner: str
    counts: str
    """Which chunks report the usage."""
    limit: int | None
    per_chunk: int
    """Tokens in a chunk."""
    by_word: bool
    """Whether a token is a word. Otherwise, it is a character."""
    trims: bool
    hides_thought: bool
    llamacpp: bool

    def tokens(self, content: str) -> list[str]:
        return re.findall(r"\s?\w+|\s|[^\w\s]", content) if self.by_word else list(content)

    @property
    def tags(self) -> tuple[str, str]:
        """The tags around the reasoning. The model generates them, unless the chat template hides the reasoning."""
        return ("", "") if self.hides_thought or not self.thought else ("<think>", "</think>")

    @property
    def generated(self) -> list[str]:
        """The tokens of the whole answer."""
        begin, end = self.tags
        tags_and_thought = [*self.tokens(begin), *self.tokens(self.thought), *self.tokens(end)]
        return [*tags_and_thought, *self.tokens(self.said)][: self.limit]

    @property
    def before_text(self) -> int:
        return sum(len(self.tokens(one)) for one in (self.tags[0], self.thought, self.tags[1]))


def draw(random: Random) -> Cut:
    """Draw a cut. Half of the texts repeat themselves."""
    units = random.choices(UNITS, k=random.choice([1, 1, 2, 3]))
    said = "".join(random.choices(units, k=random.randint(2, 12))) if random.random() < 0.5 else _repeated(random)
    said = said.strip() or "ha ha"
    thought = random.choice(["", "", "I think.", "So: " + said[:9].strip() + "."])
    manner = random.choice([CONTINUES] * 4 + [SENDS_AGAIN, STARTS_OVER, STARTS_ANOTHER])
    by_word = random.random() < 0.5
    size = len(said) // (4 if by_word else 1)
    llamacpp = random.random() < 0.2
    counts = LAST if llamacpp else random.choice([EACH_CHUNK, EACH_CHUNK, FIRST_AND_LAST, LAST])
    # Nothing shows that a part of another answer without usage does not continue the message.
    most = 1 if manner == STARTS_ANOTHER and counts == LAST else 3
    cut = Cut(
        said=said,
        thought=thought,
        places=tuple(random.randint(1, max(size, 1)) for _ in range(min(random.choice([1, 1, 2, 3]), most))),
        manner=manner,
        counts=counts,
        limit=None,
        per_chunk=random.choice([1, 1, 2, 3]),
        by_word=by_word,
        trims=manner == CONTINUES and random.random() < 0.3,
        hides_thought=random.random() < 0.4,
        llamacpp=llamacpp,
    )
    return cut if random.random() < 0.6 else replace(cut, limit=cut.before_text + random.randint(3, 40))


def _repeated(random: Random) -> str:
    """Return a text whose first part comes again at once."""
    part = "".join(random.choices(UNITS, k=random.randint(1, 4)))
    return part * random.randint(2, 4) + random.choice(["", part[: len(part) // 2], "The end."])


@dataclass
class CutServer:
    """The ASGI application of the server. `cut` may change between requests."""

    cut: Cut
    left: deque[int] = field(default_factory=deque)
    """The places where the next answers break off."""
    limits: list[int | None] = field(default_factory=list)
    """The limits in the requests for streams."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path, body = scope["path"], orjson.loads(await read_body(receive) or b"{}")
        if path != "/v1/chat/completions":
            await _send(send, orjson.dumps(self._page(path, body)))
        elif body.get("stream"):
            await self._stream(body, send)
        else:
            await _send(send, orjson.dumps(self._sample(body)))

    def _sample(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = self._prompt(body, is_open=bool(body.get("continue_final_message")))
        return completion({"content": "x"}, "length", usage(len(self.cut.tokens(prompt)), 1)["usage"])

    async def _stream(self, body: dict[str, Any], send: Any) -> None:
        frames, is_cut = self._frames(body, is_open=bool(body.get("continue_final_message")))
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for one in frames:
            await send({"type": "http.response.body", "body": one, "more_body": True})
        if not is_cut:
            await send({"type": "http.response.body", "body": DONE, "more_body": False})

    def _page(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/models":
            return {"object": "list", "data": [TINY]}
        if path == "/apply-template":
            return {"prompt": self._prompt(body, is_open=bool(body.get("continue_final_message")))}
        if path == "/detokenize":
            return {"prompt": "".join(map(_TEXTS.__getitem__, body["tokens"]))}
        given = body.get("prompt", body.get("content"))
        prompt = given if given is not None else self._prompt(body, is_open=bool(body.get("continue_final_message")))
        tokens = [_number(token) for token in self.cut.tokens(prompt)]
        return {"tokens": tokens, "count": len(tokens)}

    def _prompt(self, body: dict[str, Any], *, is_open: bool) -> str:
        prompt, last = "", len(body["messages"]) - 1
        for place, message in enumerate(body["messages"]):
            thought = message.get("reasoning") or message.get("reasoning_content")
            shown = f"<think>{thought}</think>" if thought and not self.cut.hides_thought else ""
            content = message["content"].rstrip() if self.cut.trims else message["content"]
            prompt += f"[{message['role']}]{shown}{content}{'' if is_open and place == last else '[/]'}"
        return prompt + ("" if is_open else "[assistant]")

    def _frames(self, body: dict[str, Any], *, is_open: bool) -> tuple[list[bytes], bool]:
        """Return the frames of an answer, and whether it breaks off."""
        cut, limit = self.cut, body.get("max_completion_tokens", body.get("max_tokens"))
        self.limits.append(limit)
        before = body["messages"][-1]["content"] if is_open else ""
        seen = before.rstrip() if cut.trims else before
        starts = is_open and cut.manner in (STARTS_OVER, STARTS_ANOTHER)
        prompt = len(cut.tokens(self._prompt(body, is_open=is_open and not starts)))
        skipped = 0 if starts or not is_open else len(seen)
        said = cut.said if cut.manner != STARTS_ANOTHER or not is_open else "Quite another answer. " * 4
        free = 0 if is_open else cut.before_text
        whole = cut.tokens(said[skipped:])
        told = whole if limit is None else whole[: max(limit - free, 0)]
        again = cut.tokens(seen) if is_open and cut.manner == SENDS_AGAIN else []
        pieces = [*_pieces(again, 0, 0, cut.per_chunk), *_pieces(told, free, 1, cut.per_chunk)]
        chunks: list[tuple[Chunk, int]] = [(delta(role="assistant", content=""), 0)]
        chunks += [(reasoning(cut.thought), cut.before_text)] if cut.thought and not is_open else []
        first, count = len(chunks), free + len(told)
        chunks += [(text(piece), total) for piece, total in pieces]
        chunks.append((delta("stop" if limit is None or count < limit else "length"), count))
        is_asked = bool(body.get("stream_options", {}).get("continuous_usage_stats"))
        frames = [
            frame({**chunk, "usage": usage(prompt, total)["usage"]} if is_asked and _is_counted(cut, place) else chunk)
            for place, (chunk, total) in enumerate(chunks)
        ]
        frames.append(frame(usage(prompt, count)))
        place = self.left.popleft() if self.left else len(chunks)
        is_cut = first + place < len(chunks)
        return (frames[: first + place] if is_cut else frames), is_cut


def _is_counted(cut: Cut, place: int) -> bool:
    return cut.counts == EACH_CHUNK or (cut.counts == FIRST_AND_LAST and place == 0)


def _pieces(tokens: list[str], before: int, weight: int, per_chunk: int) -> Iterator[tuple[str, int]]:
    for at in range(0, len(tokens), per_chunk):
        piece = tokens[at : at + per_chunk]
        yield "".join(piece), before + weight * (at + len(piece))


_TEXTS: dict[int, str] = {}
_NUMBERS: dict[str, int] = {}


def _number(token: str) -> int:
    number = _NUMBERS.setdefault(token, len(_NUMBERS))
    _TEXTS[number] = token
    return number


async def _send(send: Any, body: bytes) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


# -- the check of one cut ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def running(server: CutServer, dialect: str) -> AsyncIterator[Runner]:
    """Open a runner in front of `server`, without a state store."""
    settings = make_settings(upstream__dialect=dialect, upstream__status_grace=0)
    upstream = Upstream(ASGITransport(server), Pool.of("http://upstream"), settings.upstream)
    sealer = Sealer([])
    async with httpx.AsyncClient() as http:
        tools = Tools(settings.tools, settings.search, http, sealer)
        backend = ChatBackend(upstream, sealer, settings.upstream, open_reasoning=False)
        upstreams = Upstreams({upstream: backend})
        factory = RunFactory(upstreams, History(None, required=False), tools, tools, InputFiles(None, 0))
        yield Runner(factory, upstreams, sealer, settings.compaction, None, Drain())
        await tools.aclose()


async def respond(runner: Runner, cut: Cut) -> tuple[dict[str, Any], str]:
    """Return the response, and the text of its deltas."""
    body = {"model": "tiny", "input": "Hi", "stream": True, "store": False}
    request = parse(body if cut.limit is None else {**body, "max_output_tokens": cut.limit})
    data = b"".join([sse.encode(events) async for events in runner.run(request, Caller(), RunMode.STREAMED)])
    events = list(sse.decode(data))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    told = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    return events[-1]["response"], told


def text_of(response: dict[str, Any]) -> str:
    messages = [item for item in response["output"] if item["type"] == "message"]
    assert len(messages) <= 1
    return "".join(part["text"] for message in messages for part in message["content"])


async def play(runner: Runner, server: CutServer, cut: Cut) -> str:
    """Cut an answer, check the response, and return its status."""
    server.cut, server.left, server.limits = cut, deque(cut.places), []
    response, told = await respond(runner, cut)
    assert told == text_of(response)
    expected = "".join(cut.generated[cut.before_text :])
    is_whole = cut.limit is None or len(cut.generated) < cut.limit
    if response["status"] == "failed":
        check_failure(cut, response, told, expected, requests=len(server.limits))
        return "failed"
    assert told == expected, "text is lost or doubled"
    assert response["status"] == ("completed" if is_whole else "incomplete")
    counts = response["usage"]
    assert counts["output_tokens"] == len(cut.generated)
    assert counts["input_tokens"] == len(cut.tokens("[user]Hi[/][assistant]"))
    return str(response["status"])


def check_failure(cut: Cut, response: dict[str, Any], told: str, expected: str, *, requests: int) -> None:
    """Check that the response failed for a reason, and with no other text than that before the break."""
    message = response["error"]["message"]
    assert requests > 1, message
    assert cut.manner in (STARTS_OVER, STARTS_ANOTHER), message
    assert "new answer" in message, message
    if cut.manner == STARTS_OVER:
        assert cut.limit is not None
        assert expected.startswith(told)
        assert len(cut.tokens(told)) + cut.before_text <= cut.limit
    elif cut.counts == EACH_CHUNK:
        assert expected.startswith(told)
