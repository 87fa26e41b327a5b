"""A paced Chat Completions upstream that streams like vLLM, and uses little enough CPU to run beside the server under test.

Its HTTP server is a bare `asyncio.Protocol`, and one timer serves all streams. Each token is one socket write. Its text is the
time of that write, in microseconds of the monotonic clock, which all processes of a machine share. So a token's lag is the
reader's time minus the text. Run it with `python -m benchmarks.upstream --port 8000 --tokens-per-second 40`.
"""

import argparse
import asyncio
import json
import re
import time
from collections import deque
from http import HTTPStatus
from typing import Any, cast

import httptools
import uvloop

MODEL = "bench"
TOKEN = b"@%015d "
STAMPED_DELTA = re.compile(rb'"(?:delta|content)": ?"@(\d{15}) ')
DEFAULT_TOKENS = 100
# Streams that are due in the same tick share a wake-up. A shorter tick would cost CPU without improving the figures.
TICK_SECONDS = 0.001


def monotonic_us() -> int:
    """Return the time of the clock that stamps the tokens, in microseconds. All processes of a machine share it."""
    return time.monotonic_ns() // 1000


def chunked(body: bytes) -> bytes:
    """Encode `body` as one chunk of HTTP's chunked transfer encoding."""
    return b"%x\r\n%b\r\n" % (len(body), body)


def sse(data: dict[str, Any]) -> bytes:
    """Encode `data` as one server-sent event, formatted like vLLM's."""
    return b"data: %b\n\n" % json.dumps(data, separators=(",", ":")).encode()


class Stream:
    """One streamed answer: a token per turn, then the finish chunk, the usage and `[DONE]`."""

    def __init__(self, transport: asyncio.WriteTransport, request: dict[str, Any], tokens: int) -> None:
        self.paused = False
        self._transport = transport
        self._left = tokens
        self._envelope = {
            "id": f"chatcmpl-{id(self):016x}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.get("model") or MODEL,
        }
        before, after = self._chunk({"content": "<token>"}).split(b"<token>")
        token = TOKEN % 0
        self._before = b"%x\r\n%b" % (len(before) + len(token) + len(after), before)
        self._after = after + b"\r\n"
        self._ending = self._last_chunks(request, tokens)

    @property
    def waiting(self) -> bool:
        """Whether the next turn may send a token: tokens are left, and the reader is connected and keeps up."""
        return self._left > 0 and not self.paused and not self._transport.is_closing()

    def start(self) -> None:
        """Send the response headers and the role chunk."""
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        self._transport.write(head + chunked(self._chunk({"role": "assistant", "content": ""})))

    def send_token(self) -> None:
        """Send the next token. After the last one, also send the end of the answer."""
        self._transport.write(self._before + TOKEN % monotonic_us() + self._after)
        self._left -= 1
        if self._left == 0:
            self._transport.write(self._ending)

    def _chunk(self, delta: dict[str, str], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return sse(self._envelope | {"choices": [choice]})

    def _last_chunks(self, request: dict[str, Any], tokens: int) -> bytes:
        ending = chunked(self._chunk({}, finish_reason="stop"))
        if (request.get("stream_options") or {}).get("include_usage"):
            ending += chunked(sse(self._envelope | {"choices": [], "usage": usage(tokens)}))
        return ending + chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Wheel:
    """A scheduler that sends the tokens of all streams with one timer.

    All streams have the same interval, so the queue stays in order when a stream's next turn is appended.
    """

    def __init__(self, tokens_per_second: float) -> None:
        """`tokens_per_second` is the rate of each stream. With 0, tokens are sent as fast as the readers accept them."""
        self.interval = 1 / tokens_per_second if tokens_per_second else 0.0
        self._turns: deque[tuple[float, Stream]] = deque()
        self._armed = False

    def add(self, stream: Stream) -> None:
        """Send a token of `stream` in every interval from now on, until the stream is no longer waiting."""
        if stream.waiting:
            self._turns.append((time.monotonic() + self.interval, stream))
            self._arm()

    def _arm(self) -> None:
        if self._armed or not self._turns:
            return
        self._armed = True
        loop = asyncio.get_running_loop()
        if self.interval:
            loop.call_later(max(TICK_SECONDS, self._turns[0][0] - time.monotonic()), self._turn)
        else:
            loop.call_soon(self._turn)

    def _turn(self) -> None:
        now = time.monotonic()
        for _ in range(len(self._turns)):
            due, stream = self._turns[0]
            if due > now:
                break
            self._turns.popleft()
            if stream.waiting:
                stream.send_token()
            if stream.waiting:
                self._turns.append((due + self.interval, stream))
        self._armed = False
        self._arm()


class Connection(asyncio.Protocol):
    """One client's HTTP/1.1 connection, which carries one request at a time."""

    def __init__(self, wheel: Wheel, first_byte_delay: float) -> None:
        self._wheel = wheel
        self._first_byte_delay = first_byte_delay
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.WriteTransport
        self._stream: Stream | None = None
        self._path = b""
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def pause_writing(self) -> None:
        if self._stream:
            self._stream.paused = True

    def resume_writing(self) -> None:
        if self._stream:
            self._stream.paused = False
            self._wheel.add(self._stream)

    def on_url(self, url: bytes) -> None:
        self._path, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._path == b"/v1/models":
            self._send_json({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm"}]})
        elif self._body == b"{}":  # a check of the credential
            self._send_json({"error": {"message": "no messages"}}, HTTPStatus.BAD_REQUEST)
        elif self._path == b"/v1/chat/completions":
            self._complete(json.loads(self._body))
        else:
            error = {"message": "Not Found", "type": "Not Found", "param": None, "code": 404}
            self._send_json({"error": error}, HTTPStatus.NOT_FOUND)

    def _complete(self, request: dict[str, Any]) -> None:
        tokens = request.get("max_completion_tokens") or request.get("max_tokens") or DEFAULT_TOKENS
        loop = asyncio.get_running_loop()
        if request.get("stream"):
            stream = Stream(self._transport, request, tokens)
            loop.call_later(self._first_byte_delay, self._start, stream)
        else:
            seconds = self._first_byte_delay + tokens * self._wheel.interval
            loop.call_later(seconds, lambda: self._send_json(completion(request, tokens)))

    def _start(self, stream: Stream) -> None:
        self._stream = stream
        stream.start()
        stream.send_token()
        self._wheel.add(stream)

    def _send_json(self, document: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        body = json.dumps(document).encode()
        head = f"HTTP/1.1 {status} {status.phrase}\r\ncontent-type: application/json\r\n"
        self._transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)


def usage(tokens: int) -> dict[str, int]:
    """Return the usage of an answer of `tokens` tokens."""
    return {"prompt_tokens": 10, "total_tokens": 10 + tokens, "completion_tokens": tokens}


def completion(request: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return the answer to a `request` that is not streamed."""
    text = (TOKEN % monotonic_us()).decode() * tokens
    message = {"role": "assistant", "content": text, "refusal": None, "reasoning": None}
    return {
        "id": f"chatcmpl-{monotonic_us():016x}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.get("model") or MODEL,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": usage(tokens),
    }


async def serve(port: int, tokens_per_second: float, first_byte_delay: float) -> None:
    """Serve on 127.0.0.1 until cancelled.

    `tokens_per_second` is the rate of each stream; 0 means as fast as possible. `first_byte_delay` is the delay of each
    answer's status line in seconds.
    """
    wheel = Wheel(tokens_per_second)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(wheel, first_byte_delay), "127.0.0.1", port, backlog=2048)
    async with server:
        await server.serve_forever()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="A paced Chat Completions upstream.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokens-per-second", type=float, default=0, help="rate of each stream; 0 is as fast as possible")
    parser.add_argument("--first-byte-delay", type=float, default=0, help="seconds before the status line")
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.tokens_per_second, options.first_byte_delay))


if __name__ == "__main__":
    main()
