"""Concurrent clients with little overhead, which parse an answer only as far as the figures need.

Run them with `python -m benchmarks.load http://127.0.0.1:8080 --api responses --streams 50`. The server's upstream must be
`benchmarks.upstream`, because the text of each token is the time at which the token was sent.
"""

import argparse
import asyncio
import dataclasses
import json
import math
import sys
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import httptools
import uvloop

from benchmarks.processes import raise_open_files
from benchmarks.upstream import MODEL, STAMPED_DELTA, monotonic_us

PROMPT = "Count the microseconds."


@dataclass(frozen=True, slots=True)
class Api:
    """How to recognize an answer's progress in one of the two APIs without parsing it."""

    path: str
    opening: bytes  # part of the first event
    ending: bytes  # part of the terminal event of a successful stream
    completed: Callable[[dict[str, Any]], bool]  # whether an answer that is not streamed was successful


APIS = {
    "chat": Api(
        "/v1/chat/completions",
        opening=b"chat.completion.chunk",
        ending=b"data: [DONE]",
        completed=lambda document: document["choices"][0]["finish_reason"] == "stop",
    ),
    "responses": Api(
        "/v1/responses",
        opening=b"event: response.created",
        ending=b"event: response.completed",
        completed=lambda document: document["status"] == "completed",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The load: `streams` concurrent clients, each of which requests `tokens` tokens `repeat` times in a row."""

    streams: int
    tokens: int
    repeat: int = 1
    stream: bool = True
    ramp: float = 0.0  # seconds over which the clients start
    timeout: float = 60.0  # seconds after which open answers count as failed

    def body(self, api: str) -> bytes:
        """Return the JSON body of a request to `api`, which is a key of `APIS`."""
        limit = "max_output_tokens" if api == "responses" else "max_tokens"
        body: dict[str, Any] = {"model": MODEL, limit: self.tokens, "stream": self.stream}
        if api == "responses":
            body |= {"input": PROMPT, "store": False}
        else:
            body |= {"messages": [{"role": "user", "content": PROMPT}]}
            body |= {"stream_options": {"include_usage": True}} if self.stream else {}
        return json.dumps(body).encode()


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 99th percentile in milliseconds. Both are NaN if there are no values."""

    median: float
    p99: float

    @classmethod
    def of_us(cls, values: list[int]) -> "Spread":
        """Return the spread of `values` in microseconds."""
        ordered = sorted(values)
        return cls(percentile(ordered, 0.5) / 1000, percentile(ordered, 0.99) / 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of a load. `lag` is the time from sending a token to receiving it. The other spreads start at the request."""

    answers: int
    failed: int
    reasons: dict[str, int]
    tokens: int
    seconds: float
    cpu_seconds: float
    first_event: Spread
    first_token: Spread
    answer: Spread
    lag: Spread

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """Parse the report that `python -m benchmarks.load` printed."""
        fields = json.loads(text)
        spreads = {name: Spread(**value) for name, value in fields.items() if isinstance(value, dict) and "p99" in value}
        return cls(**(fields | spreads))


class Exchange:
    """A request and its answer, with times and token lags in microseconds. `failure` is the reason if the exchange failed."""

    def __init__(self, api: Api, plan: Plan) -> None:
        self.failure: str | None = "timed out"
        self.first_event: int | None = None
        self.first_token: int | None = None
        self.lags: list[int] = []
        self.started = self.ended = monotonic_us()
        self.done = asyncio.get_running_loop().create_future()
        self._api = api
        self._plan = plan
        self._buffer = b""
        self._went_well = False

    def feed(self, body: bytes) -> None:
        """Process a part of the body."""
        self._buffer += body
        if not self._plan.stream:
            return
        end = self._buffer.rfind(b"\n\n") + 2
        if end > 1:
            events, self._buffer = self._buffer[:end], self._buffer[end:]
            self._read(events, monotonic_us())

    def finish(self, status: int) -> None:
        """Process the end of an answer with this HTTP `status`."""
        tokens = len(self.lags)
        if status != 200:
            self.end(f"status {status}")
            return
        if not self._plan.stream:
            self._went_well = self._api.completed(json.loads(self._buffer))
        if not self._went_well:
            self.end("no terminal event" if self._plan.stream else "not completed")
        elif self._plan.stream and tokens != self._plan.tokens:
            self.end(f"{tokens} of {self._plan.tokens} tokens")
        else:
            self.end(None)

    def end(self, failure: str | None) -> None:
        """Record the end of the exchange, with the reason if it failed. Only the first call has an effect."""
        if not self.done.done():
            self.failure, self.ended = failure, monotonic_us()
            self.done.set_result(None)

    def _read(self, events: bytes, now: int) -> None:
        if self.first_event is None and self._api.opening in events:
            self.first_event = now - self.started
        for sent in STAMPED_DELTA.findall(events):
            self.lags.append(now - int(sent))
        if self.first_token is None and self.lags:
            self.first_token = now - self.started
        self._went_well = self._went_well or self._api.ending in events


class Connection(asyncio.Protocol):
    """A client's connection, which carries one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._exchange: Exchange | None = None
        self._parser = httptools.HttpResponseParser(self)

    def start(self, request: bytes, exchange: Exchange) -> None:
        """Send `request` and pass its answer to `exchange`."""
        self._exchange = exchange
        if self._transport.is_closing():
            self._end("connection lost")
        else:
            self._transport.write(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"bad HTTP: {error}")
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("connection lost")

    def on_body(self, body: bytes) -> None:
        if self._exchange:
            self._exchange.feed(body)

    def on_message_complete(self) -> None:
        if self._exchange:
            self._exchange.finish(self._parser.get_status_code())

    def _end(self, failure: str) -> None:
        if self._exchange:
            self._exchange.end(failure)


class Load:
    """The clients of a plan, which load one server."""

    def __init__(self, url: str, api: str, plan: Plan) -> None:
        """`url` is the server's base URL, such as `http://127.0.0.1:8080`. `api` is a key of `APIS`."""
        address = urllib.parse.urlsplit(url)
        self._host, self._port = address.hostname or "127.0.0.1", address.port or 80
        self._api = APIS[api]
        self._plan = plan
        body = plan.body(api)
        head = f"POST {self._api.path} HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
        self._request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        self._exchanges: list[Exchange] = []

    async def run(self) -> Report:
        """Run the plan until it ends or times out. Failures are counted, not raised."""
        started, cpu = time.monotonic(), time.process_time()
        pause = self._plan.ramp / self._plan.streams
        clients = [asyncio.create_task(self._client(number * pause)) for number in range(self._plan.streams)]
        await asyncio.wait(clients, timeout=self._plan.timeout)
        for client in clients:
            client.cancel()
        await asyncio.wait(clients)
        return self._report(time.monotonic() - started, time.process_time() - cpu)

    async def _client(self, delay: float) -> None:
        await asyncio.sleep(delay)
        exchange = self._exchange()
        loop = asyncio.get_running_loop()
        try:
            transport, connection = await loop.create_connection(Connection, self._host, self._port)
        except OSError as error:
            exchange.end(f"no connection: {error.strerror}")
            return
        try:
            for turn in range(self._plan.repeat):
                exchange = self._exchange() if turn else exchange
                connection.start(self._request, exchange)
                await exchange.done
        finally:
            transport.close()

    def _exchange(self) -> Exchange:
        exchange = Exchange(self._api, self._plan)
        self._exchanges.append(exchange)
        return exchange

    def _report(self, seconds: float, cpu_seconds: float) -> Report:
        exchanges = self._exchanges
        answers = self._plan.streams * self._plan.repeat
        reasons = Counter(exchange.failure for exchange in exchanges if exchange.failure)
        if answers > len(exchanges):
            reasons["not begun"] = answers - len(exchanges)
        lags = [lag for exchange in exchanges for lag in exchange.lags]
        return Report(
            answers=answers,
            failed=reasons.total(),
            reasons=dict(reasons),
            tokens=len(lags),
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            first_event=Spread.of_us([each.first_event for each in exchanges if each.first_event is not None]),
            first_token=Spread.of_us([each.first_token for each in exchanges if each.first_token is not None]),
            answer=Spread.of_us([each.ended - each.started for each in exchanges if not each.failure]),
            lag=Spread.of_us(lags),
        )


def percentile(ordered: list[int], share: float) -> float:
    """Return the nearest-rank percentile of values in ascending order, or NaN if there are no values."""
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else math.nan


def main() -> None:
    """Run the command line, which prints the report as JSON."""
    parser = argparse.ArgumentParser(description="Load a server with concurrent clients, and print a report as JSON.")
    parser.add_argument("url")
    parser.add_argument("--api", choices=sorted(APIS), default="responses")
    parser.add_argument("--streams", type=int, default=50, help="number of concurrent clients")
    parser.add_argument("--tokens", type=int, default=100, help="tokens per answer")
    parser.add_argument("--repeat", type=int, default=1, help="consecutive answers that each client requests")
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--ramp", type=float, default=0.0, help="seconds over which the clients start")
    parser.add_argument("--timeout", type=float, default=60.0, help="timeout of the whole load in seconds")
    options = vars(parser.parse_args())
    url, api = options.pop("url"), options.pop("api")
    raise_open_files()
    report = uvloop.run(Load(url, api, Plan(**options)).run())
    json.dump(dataclasses.asdict(report), sys.stdout)


if __name__ == "__main__":
    main()
