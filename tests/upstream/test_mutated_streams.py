"""Mutated captured streams: the fast and the slow path give the same response, and no output is lost silently.

Each example mutates one capture a few times: members are moved and renamed, frames are repeated, exchanged, cut, relabelled and
inserted. `scripts/test-deep` runs 2,000 examples.
"""

from __future__ import annotations

import copy
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import anyio
import httpx
import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from responses_mw.errors import UpstreamBrokeOff, UpstreamError
from responses_mw.protocol.chat.chunks import Text
from responses_mw.protocol.response.builder import ResponseOptions
from responses_mw.protocol.sse import decode, encode
from responses_mw.protocol.types import Event
from responses_mw.upstream.pool import Pool
from responses_mw.upstream.stream import ChatStream
from tests.protocol.runs import assembler
from tests.support.leases import lease
from tests.support.replay import check
from tests.upstream.test_captures import ANSWERED, body, is_stream, request

DONE = b"data: [DONE]\n\n"
NAMES = [name for name in ANSWERED if is_stream(name)]
COMPLETE, LIMITS = (
    ("stop", "tool_calls", "STOP", "end_turn", "eos_token"),
    ("length", "MAX_TOKENS", "repetition", {"type": "length"}),
)
FILTERS, FAULTS, UNKNOWN = ("content_filter", "SAFETY"), ("abort", "network_error"), ("unheard_of",)
SCALARS = (b"data: null\n\n", b"data: 5\n\n", b": ping\n\n", b"event: ping\n\n", b"data:\n\n", b'data: "x"\n\n')
ERRORS = (
    b'data: {"error":{"message":"boom"}}\n\n',
    b'{"error":{"message":"boom"}}\n\n',
    b"event: error\n: boom\n\n",
    b"event: error\ndata: boom\n\n",
    b'data: {"detail":"boom"}\n\n',
    b'data: {"choices":null,"base_resp":{"status_code":1,"status_msg":"boom"}}\n\n',
)
JUNK = (b"data: bye\n\n", b"data: {\n\n", b"data: [1]\n\n")

Frame = dict[str, Any] | bytes


# -- mutations ---------------------------------------------------------------------------------------------------------


def frames_of(name: str) -> list[Frame]:
    payloads = [frame.removeprefix(b"data: ") for frame in body(name).split(b"\n\n") if frame.strip()]
    return [DONE if payload == b"[DONE]" else orjson.loads(payload) for payload in payloads]


def rename_texts(frames: list[Frame], random: Random) -> None:
    """Send the texts of a random part of the stream in another form."""
    first, last = sorted(random.choices(range(len(frames) + 1), k=2))
    form = random.choice(FORMS)
    for frame in frames[first:last]:
        if isinstance(frame, dict) and frame.get("choices"):
            form(frame["choices"][0].get("delta") or {})


def _under_another_name(name: str, wrap: Callable[[str], Any]) -> Callable[[dict[str, Any]], None]:
    def convert(delta: dict[str, Any]) -> None:
        if isinstance(thought := delta.get("reasoning"), str) and thought:
            del delta["reasoning"]
            delta[name] = wrap(thought)

    return convert


def _as_parts(delta: dict[str, Any]) -> None:
    text, thought = delta.get("content"), delta.pop("reasoning", None)
    parts = (
        [{"type": "thinking", "thinking": [{"type": "text", "text": thought}]}] if isinstance(thought, str) and thought else []
    )
    if isinstance(text, str) and text:
        parts.append({"type": "text", "text": text})
    if parts:
        delta["content"] = parts
    elif thought is not None:
        delta["reasoning"] = thought


def _with_other_members(delta: dict[str, Any]) -> None:
    delta |= {"audio": {"data": "x"}, "refusal": None, "thinking": None, "name": ""}


FORMS = (
    _under_another_name("reasoning_content", str),
    _under_another_name("reasoning_text", str),
    _under_another_name("reasoning_details", lambda text: [{"type": "reasoning.text", "text": text}]),
    _under_another_name("reasoning", lambda text: {"content": text}),
    _as_parts,
    _with_other_members,
)


def repeat(frames: list[Frame], random: Random) -> None:
    at = random.randrange(len(frames))
    frames.insert(random.choice((at, len(frames))), copy.deepcopy(frames[at]))


def exchange(frames: list[Frame], random: Random) -> None:
    one, other = random.randrange(len(frames)), random.randrange(len(frames))
    frames[one], frames[other] = frames[other], frames[one]


def drop(frames: list[Frame], random: Random) -> None:
    del frames[random.randrange(len(frames))]


def cut(frames: list[Frame], random: Random) -> None:
    del frames[random.randrange(1, len(frames) + 1) :]


def relabel_the_end(frames: list[Frame], random: Random) -> None:
    word = random.choice((*COMPLETE, *LIMITS, *FILTERS, *FAULTS, *UNKNOWN, None, "null"))
    for frame in frames:
        for choice in (frame.get("choices") or ()) if isinstance(frame, dict) else ():
            if choice.get("finish_reason"):
                choice["finish_reason"] = word


def move_the_end(frames: list[Frame], random: Random) -> None:
    """Send the finish reason with another chunk."""
    words = []
    for frame in frames:
        for choice in (frame.get("choices") or ()) if isinstance(frame, dict) else ():
            if choice.get("finish_reason"):
                words.append(choice["finish_reason"])
                choice["finish_reason"] = None
    target = random.choice(frames)
    if words and isinstance(target, dict) and target.get("choices"):
        target["choices"][0]["finish_reason"] = words[-1]


def move_the_usage(frames: list[Frame], random: Random) -> None:
    target = random.choice(frames)
    if isinstance(target, dict):
        target["usage"] = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def insert(frames: list[Frame], random: Random) -> None:
    kind = random.choice((SCALARS, SCALARS, ERRORS, JUNK, (DONE,)))
    frames.insert(random.randrange(len(frames) + 1), random.choice(kind))


def add_numbers(frames: list[Frame], random: Random) -> None:
    """Add a marker that becomes `NaN` or an infinity, which JSON does not have."""
    target = random.choice(frames)
    if isinstance(target, dict):
        target["timings"] = random.choice(("@NaN@", "@-Infinity@", "@Infinity@"))


def send_whole(frames: list[Frame], random: Random) -> None:
    """Name a delta `message`."""
    frame = random.choice(frames)
    if isinstance(frame, dict) and frame.get("choices") and "delta" in frame["choices"][0]:
        frame["choices"][0]["message"] = frame["choices"][0].pop("delta")


MUTATIONS = (
    *(rename_texts, repeat, exchange, drop, cut, relabel_the_end, move_the_end, move_the_usage, insert, add_numbers),
    *(send_whole, rename_texts, insert),
)


def encoded(frame: Frame) -> bytes:
    if isinstance(frame, bytes):
        return frame
    return re.sub(rb'"@(\S+?)@"', rb"\1", b"data: %b\n\n" % orjson.dumps(frame))


def in_reads(data: list[bytes], random: Random) -> list[bytes]:
    """Split a stream into network reads: one for each frame, one for all, or any."""
    way = random.randrange(4)
    if way < 2:
        return data
    whole = b"".join(data)
    ends = [] if way == 2 else sorted(random.sample(range(1, len(whole)), k=min(len(whole) - 1, random.randrange(1, 40))))
    return [whole[begin:end] for begin, end in zip([0, *ends], [*ends, len(whole)], strict=True)]


# -- both paths --------------------------------------------------------------------------------------------------------


class SlowStream(ChatStream):
    """A stream that parses every frame."""

    _reads_texts = False


class Reads(httpx.AsyncByteStream):
    """A body that arrives in these reads. As in `transports/http11.py`, a read may be taken before the reader wakes."""

    def __init__(self, reads: list[bytes]) -> None:
        self._reads = reads
        self.take: Callable[[bytes], bool] = lambda _: False
        self.taken = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for data in self._reads:
            if self.take(data):
                self.taken += 1
            else:
                yield data

    def divert(self, take: Callable[[bytes], bool]) -> None:
        self.take = take


@dataclass
class Outcome:
    frames: bytes
    taken: int
    error: str | None


async def respond(kind: type[ChatStream], reads: list[bytes], options: ResponseOptions, asked: dict[str, Any]) -> Outcome:
    """Make a response of an answer as the engine does, without continuing it."""
    source, building, error = Reads(reads), assembler(options, tools=asked["tools"]), None
    response = httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=source)
    if kind is ChatStream:
        response.extensions["divert"] = source.divert
    stream = kind(response, lease(Pool.of("http://upstream")), first_chunk_timeout=60, idle_timeout=60, max_bytes=10_000_000)
    frames = bytearray(encode(building.start()))

    def take(text: Text) -> bool:
        delta = building.delta(text)
        frames.extend(delta or b"")
        return delta is not None

    try:
        await stream.begin()
        stream.divert(take)
        async for chunks in stream:
            frames += encode(building.feed(*chunks))
        building.check_end(done=stream.done)
        frames += encode(building.end_turn())
        building.conclude(1_700_000_001)
    except UpstreamError as failure:
        if isinstance(failure, UpstreamBrokeOff) and building.ended and building.answer.finish_reason is not None:
            frames += encode(building.end_turn())
            building.conclude(1_700_000_001)
        else:
            error = failure.message
            building.fail("server_error", error)
    finally:
        await stream.aclose()
    return Outcome(bytes(frames) + encode(building.terminal()), source.taken, error)


# -- what the upstream sent --------------------------------------------------------------------------------------------


@dataclass
class Sent:
    """What a mutated stream says, read independently of the product code."""

    texts: dict[str, str] = field(default_factory=lambda: {"content": "", "reasoning": ""})
    has_calls: bool = False
    word: Any = None
    is_done: bool = False
    usage_is_last: bool = False
    has_bare_chunk: bool = False
    failed: bool = False

    @classmethod
    def of(cls, frames: list[Frame]) -> Sent:
        sent = cls()
        for frame in frames:
            if not sent.take(frame):
                break
        return sent

    @property
    def has_output(self) -> bool:
        return self.has_calls or any(self.texts.values())

    def take(self, frame: Frame) -> bool:
        """Read a frame, and return whether the answer goes on."""
        if frame == DONE:
            self.is_done = True
            return False
        if isinstance(frame, bytes):
            is_junk = frame in JUNK and self.word is not None
            self.failed = not (frame in SCALARS or is_junk)
            return not self.failed
        self.usage_is_last = bool(frame.get("usage"))
        self.has_bare_chunk |= not self.usage_is_last
        for choice in frame.get("choices") or ():
            message = choice.get("message") if not self.has_output else None
            self._take_delta(choice.get("delta") or message or {})
            word = choice.get("finish_reason")
            self.word = word if word not in (None, "null") else self.word
        return True

    def _take_delta(self, delta: dict[str, Any]) -> None:
        thoughts = [delta.get(name) for name in ("reasoning", "reasoning_content", "reasoning_text", "reasoning_details")]
        self.texts["reasoning"] += _flat(next(filter(None, thoughts), ""))
        for part in delta["content"] if isinstance(delta.get("content"), list) else [delta.get("content")]:
            is_thought = isinstance(part, dict) and part["type"] == "thinking"
            self.texts["reasoning" if is_thought else "content"] += _flat(part)
        self.has_calls |= bool(delta.get("tool_calls"))

    def status(self) -> str:
        """Return the status that the response must have. A call that was cut off may also make it fail or be incomplete."""
        if self.word in FAULTS:
            return "failed"
        if self.word is not None:
            return "incomplete" if self.word in (*LIMITS, *FILTERS) else "completed"
        is_over = self.is_done or (self.usage_is_last and self.has_bare_chunk)
        return "completed" if is_over and self.has_output and not self.failed else "failed"


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return next((_flat(value[name]) for name in ("text", "content", "thinking") if value.get(name)), "")
    return "".join(map(_flat, value)) if isinstance(value, list) else (value or "")


def said(response: dict[str, Any], kind: str) -> str:
    """Return the text of the items of a `kind`, without white space, which may be dropped between items."""
    parts = [
        part for item in response["output"] if item["type"] == kind for part in item.get("content") or item.get("summary") or ()
    ]
    return "".join("".join(part["text"].split()) for part in parts)


def expect(response: dict[str, Any], sent: Sent) -> None:
    """Assert that a response has the status and the texts that the upstream sent."""
    if not sent.has_calls:
        assert response["status"] == sent.status()
    elif response["status"] == "completed":
        assert sent.status() == "completed"
    if response["status"] != "failed":
        assert said(response, "message") == "".join(sent.texts["content"].split())
        assert said(response, "reasoning") == "".join(sent.texts["reasoning"].split())


def test_the_fast_path_takes_most_reads_of_a_capture() -> None:
    reads = [encoded(frame) for frame in frames_of("chat_stream")]
    assert anyio.run(respond, ChatStream, reads, ResponseOptions(), request("chat_stream")).taken > len(reads) / 3


def mutated(name: str, random: Random) -> list[Frame]:
    frames = frames_of(name)
    for mutate in random.choices(MUTATIONS, k=random.randrange(4)):
        mutate(frames, random)
        frames = frames or [DONE]
    return frames


@settings(max_examples=4 * settings().max_examples)
@given(st.sampled_from(NAMES), st.integers(0, 2**32), st.booleans())
def test_a_mutated_stream_gives_the_same_response_on_both_paths(name: str, seed: int, summary: bool) -> None:
    random, asked = Random(seed), request(name)
    frames = mutated(name, random)
    options = ResponseOptions(summary=summary, logprobs="include" in asked)
    reads = in_reads([encoded(frame) for frame in frames], random)
    fast = anyio.run(respond, ChatStream, reads, options, asked)
    slow = anyio.run(respond, SlowStream, [b"".join(reads)], options, asked)
    assert (fast.frames, fast.error) == (slow.frames, slow.error)
    expect(check([Event(event["type"], event) for event in decode(fast.frames)]), Sent.of(frames))
