"""A relay to a server with a search module, which answers FT.HYBRID as the documentation of Redis 8.4 says.

The syntax is that of https://redis.io/docs/latest/commands/ft.hybrid/ with those options that can be expressed by two searches of
the server. The form of the reply is that of RediSearch (`src/hybrid/hybrid_exec.c`, `tests/pytests/test_hybrid.py`): a map in
RESP3, and a list of its members in RESP2.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

_UNKNOWN = b"-ERR unknown argument\r\n"


class HybridRelay:
    """`reply` is sent instead of what FT.HYBRID finds, unless it is None. `calls` are the arguments of FT.HYBRID."""

    def __init__(self, port: int, reply: bytes | None = None) -> None:
        self._server_port = port
        self._server: Any = Redis(port=port, protocol=2)
        self.reply = reply
        self.calls = list[list[bytes]]()
        self.port = 0
        self._connections = set[asyncio.Task[None]]()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            await asyncio.gather(*self._connections)  # the clients have closed them
            await self._server.aclose()

    def _accept(self, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        self._connections.add(asyncio.create_task(self._connect(client, answers)))

    async def _connect(self, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        replies, server = await asyncio.open_connection("127.0.0.1", self._server_port)
        protocol = 2
        try:
            while command := await _read(client):
                words = _strings(command)
                if words[0] == b"HELLO":
                    protocol = int(words[1])
                if words[0] == b"FT.HYBRID":
                    self.calls.append(words[1:])
                    answers.write(self.reply if self.reply is not None else await self._hybrid(words[1:], protocol))
                    continue
                if words[:2] == [b"COMMAND", b"INFO"]:  # in place of FT.HYBRID, answer about a command that the server knows
                    command = command.replace(b"FT.HYBRID", b"FT.SEARCH")
                server.write(command)
                answers.write(await _read(replies))
        finally:
            server.close()
            answers.close()

    async def _hybrid(self, words: list[bytes], protocol: int) -> bytes:
        try:
            found = await self._search(iter(words))
        except (KeyError, RuntimeError, ValueError):  # RuntimeError: the command is too short
            return _UNKNOWN
        rows = [{"__key": key, "__score": f"{score:.12g}"} for key, score in found]
        reply = {"total_results": len(rows), "results": rows, "warnings": [], "execution_time": "0.5"}
        return _encoded(reply, protocol)

    async def _search(self, words: Iterator[bytes]) -> list[tuple[bytes, float]]:
        options: dict[bytes, Any] = {b"index": next(words), b"LIMIT": (0, 10), b"TIMEOUT": 500}
        for word in words:
            match word:
                case b"SEARCH" | b"SCORER" | b"FILTER" | b"TIMEOUT":
                    options[word] = next(words)
                case b"VSIM":
                    options[word] = (next(words), next(words))
                case b"KNN" | b"PARAMS":
                    options[word] = _pairs(words)
                case b"COMBINE":
                    method = next(words)
                    options[method] = _pairs(words)
                case b"LIMIT":
                    options[word] = (int(next(words)), int(next(words)))
                case _:
                    raise ValueError(word)
        return await self._fused(options)

    async def _fused(self, options: dict[bytes, Any]) -> list[tuple[bytes, float]]:
        (field, parameter), knn, window = options[b"VSIM"], options[b"KNN"], int(options[b"RRF"][b"WINDOW"])
        vector = options[b"PARAMS"][parameter.removeprefix(b"$")]
        count = min(int(knn[b"K"]), window)
        chosen = b"(%s)" % options[b"FILTER"] if b"FILTER" in options else b"*"
        query = b"%s=>[KNN %d %s $q EF_RUNTIME %d AS d]" % (chosen, count, field, int(knn[b"EF_RUNTIME"]))
        scores: defaultdict[bytes, float] = defaultdict(float)
        for arguments in (
            (options[b"SEARCH"], "SCORER", options[b"SCORER"], "LIMIT", 0, window),
            (query, "PARAMS", 2, "q", vector, "SORTBY", "d", "LIMIT", 0, count),
        ):
            reply = await self._server.execute_command("FT.SEARCH", options[b"index"], *arguments, "NOCONTENT", "DIALECT", 2)
            for rank, key in enumerate(reply[1:]):
                scores[key] += 1 / (60 + rank + 1)
        start, number = options[b"LIMIT"]
        return sorted(scores.items(), key=lambda pair: -pair[1])[start : start + number]


def _pairs(words: Iterator[bytes]) -> dict[bytes, bytes]:
    return {next(words): next(words) for _ in range(int(next(words)) // 2)}


async def _read(stream: asyncio.StreamReader) -> bytes:
    """Return one value of the protocol as it is, or nothing at the end of the stream."""
    line = await stream.readline()
    if line[:1] in b"$=!" and line[:1] and int(line[1:]) >= 0:
        return line + await stream.readexactly(int(line[1:]) + 2)
    if line[:1] in b"*%~>" and line[:1]:
        count = max(0, int(line[1:])) * (2 if line[:1] == b"%" else 1)
        return line + b"".join([await _read(stream) for _ in range(count)])
    return line


def _strings(command: bytes) -> list[bytes]:
    """Return the words of a command."""
    words, rest = list[bytes](), command.split(b"\r\n", 1)[1]
    while rest:
        size, rest = rest.split(b"\r\n", 1)
        words.append(rest[: int(size[1:])])
        rest = rest[int(size[1:]) + 2 :]
    return words


def _encoded(value: Any, protocol: int) -> bytes:
    match value:
        case dict():
            members = b"".join(_encoded(one, protocol) for pair in value.items() for one in pair)
            return (b"%%%d\r\n" % len(value) if protocol == 3 else b"*%d\r\n" % (2 * len(value))) + members
        case list():
            return b"*%d\r\n" % len(value) + b"".join(_encoded(one, protocol) for one in value)
        case int():
            return b":%d\r\n" % value
        case _:
            data = value if isinstance(value, bytes) else value.encode()
            return b"$%d\r\n%s\r\n" % (len(data), data)
