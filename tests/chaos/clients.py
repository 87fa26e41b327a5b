"""Clients of background and foreground responses, and checks of the results that the clients receive."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from responses_mw.state.jobs import MAX_ATTEMPTS

from .deployment import LONG, RUNNING, TERMINAL, WORDS, Deployment, Process, event, events_of

RETRIED = {429, 502, 503}


@dataclass
class Job:
    response_id: str
    question: str
    events: list[bytes] = field(default_factory=list)
    """The frames that the job's follower has read."""
    cancelled: dict[str, Any] | None = None
    """The answer to the job's cancellation; None if the job was not cancelled."""
    deleted: bool = False
    damaged: str = ""
    """The name of the job's damaged key, or an empty string."""
    followed: bool = False
    """Whether the job's follower has read the stream to the end."""


class Jobs:
    """Creates and follows jobs, and cancels or deletes some jobs."""

    def __init__(self, deployment: Deployment, client: httpx.AsyncClient) -> None:
        self._deployment = deployment
        self._client = client
        self.jobs: list[Job] = []

    async def create(self, number: int) -> None:
        """Create a job and follow it to its end."""
        draw = self._deployment.draw(f"job {number}")
        question = f"question {number}"
        while True:
            with suppress(httpx.HTTPError):
                body = {"model": "tiny", "input": question, "background": True}
                answer = await self._client.post(draw.choice(self._deployment.replicas).url, json=body)
                if answer.status_code == 200:
                    break
            question += "+"  # the job may have been created, so ask a different question
            await asyncio.sleep(0.2)
        job = Job(answer.json()["id"], question)
        self.jobs.append(job)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.end_early(job, draw))
            while not await self.follow(job, draw):
                await asyncio.sleep(0.1)
        job.followed = True

    async def end_early(self, job: Job, draw: random.Random) -> None:
        """Cancel the job, delete the job, or do nothing, at random."""
        what = draw.choices(["", "cancel", "delete"], [8, 2, 1])[0]
        if not what:
            return
        await asyncio.sleep(draw.uniform(0, 2))
        while not job.damaged:
            with suppress(httpx.HTTPError):
                url = f"{draw.choice(self._deployment.replicas).url}/{job.response_id}"
                answer = await (self._client.post(f"{url}/cancel") if what == "cancel" else self._client.delete(url))
                if what == "cancel" and answer.status_code == 200:
                    job.cancelled = answer.json()
                    break
                if what == "delete" and answer.status_code in (200, 404):
                    job.deleted = True
                    break
            await asyncio.sleep(0.1)
        self._deployment.checked[what] += 1

    async def follow(self, job: Job, draw: random.Random) -> bool:
        """Read the job's stream from where the last call stopped. Return whether no more events will follow."""
        params = {"stream": "true"} | ({"starting_after": str(len(job.events) - 1)} if job.events else {})
        url = f"{draw.choice(self._deployment.replicas).url}/{job.response_id}"
        with suppress(httpx.HTTPError):
            async with self._client.stream("GET", url, params=params) as answer:
                if answer.status_code != 200:
                    return (answer.status_code == 404 and job.deleted) or (answer.status_code == 500 and bool(job.damaged))
                pending = b""
                async for data in answer.aiter_raw():
                    *frames, pending = (pending + data).split(b"\n\n")
                    job.events += [frame for frame in frames if frame.startswith(b"event:")]
        return bool(job.events) and event(job.events[-1])["type"] in TERMINAL

    @property
    def ends(self) -> Counter[str]:
        """The number of jobs by final status or error message."""
        ended = [job for job in self.jobs if job.followed and job.events and not (job.deleted or job.damaged)]
        documents = [event(job.events[-1])["response"] for job in ended]
        return Counter((one["error"] or {}).get("message") or one["status"] for one in documents)

    async def check(self) -> None:
        problems = self._deployment.problems
        for job in self.jobs:
            self._deployment.checked["damaged jobs" if job.damaged else "jobs"] += 1
            check = self._check_damaged if job.damaged else self._check_deleted if job.deleted else self._check_job
            problems += [f"{job.response_id} {problem}" for problem in await check(job)]
        asked = {question: times for question, times in self._deployment.upstream.asked.items() if times > MAX_ATTEMPTS}
        problems += [f"{question} was asked {times} times" for question, times in asked.items()]
        problems += self.unfinished()

    async def _get(self, response_id: str, **params: str) -> httpx.Response:
        return await self._client.get(f"{self._deployment.replicas[0].url}/{response_id}", params=params)

    async def _check_job(self, job: Job) -> list[str]:
        events = events_of((await self._get(job.response_id, stream="true")).content)
        answer = await self._get(job.response_id)
        if answer.status_code != 200:
            return [f"answers GET with {answer.status_code}: {answer.text[:200]}"]
        document = answer.json()
        return _faults_of_job(job, events, document, self._deployment.upstream.asked[job.question])

    async def _check_deleted(self, job: Job) -> list[str]:
        events = [event(frame) for frame in job.events]
        problems = []
        if [one["sequence_number"] for one in events] != list(range(len(events))):
            problems.append("is deleted, but its follower read numbers that are not contiguous")
        if any(one["type"] in TERMINAL for one in events[:-1]):
            problems.append("is deleted, but its follower read events after the terminal event")
        if (await self._get(job.response_id)).status_code != 404:
            problems.append("is deleted, but GET still returns it")
        return problems

    async def _check_damaged(self, job: Job) -> list[str]:
        """Check that a job with a damaged key has ended, or that GET reports the damage. Return the problems."""
        answer = await self._get(job.response_id)
        if answer.status_code == 404 and job.deleted:
            return []
        content = answer.json()
        is_damaged = answer.status_code == 500 and content["error"]["code"] == "state_damaged"
        if is_damaged or (answer.status_code == 200 and content["status"] not in RUNNING):
            return []
        return [f"({job.damaged} is damaged) answers GET with {answer.status_code}: {answer.text[:200]}"]

    def unfinished(self) -> list[str]:
        """Return a problem for each unfinished job and leftover key, also for jobs whose creation failed for the client."""
        client = self._deployment.redis
        damaged = {job.damaged.encode() for job in self.jobs if job.damaged}
        records = list(client.scan_iter("rmw:*:r:*", count=1000, _type="HASH"))
        states = {record: client.hget(record, "status").decode() for record in records}  # type: ignore[union-attr]
        queued = [job.decode() for job in client.hkeys("rmw:{q2}:jobs")]  # type: ignore[union-attr]
        problems = [f"{record!r} is {status}" for record, status in states.items() if status in RUNNING]
        problems += [f"{job} is left in the queue" for job in queued]
        for key in set(client.scan_iter("rmw:*", count=1000)) - damaged:
            record = key.replace(b":k:", b":r:")
            if record != key:
                problems.append(f"{key!r} still exists, its response is {states.get(record, 'missing')}")
            if client.ttl(key) == -1 and not key.startswith(b"rmw:{q2}"):
                problems.append(f"{key!r} never expires")
        return problems + [f"the follower of {job.response_id} is still reading" for job in self.jobs if not job.followed]


def _faults_of_job(job: Job, log: list[dict[str, Any]], document: dict[str, Any], asked: int) -> list[str]:
    problems = []
    if [one["sequence_number"] for one in log] != list(range(len(log))):
        problems.append("has a log that is not contiguous")
    ends = [one["type"] for one in log if one["type"] in TERMINAL]
    if len(ends) != 1 or log[-1]["type"] != ends[0]:
        problems.append(f"has the terminal events {ends} in its log")
    elif log[-1]["response"] != document:
        problems.append("has a different document in its last event")
    if job.cancelled is not None and job.cancelled != document:
        problems.append(f"had a different document in the answer to its cancellation, with status {job.cancelled['status']}")
    if [event(frame) for frame in job.events] != log:
        problems.append("has different events in its log than its follower read")
    words = "".join(one["delta"] for one in log if one["type"] == "response.output_text.delta")
    text = "".join(part["text"] for item in document["output"] for part in item.get("content", []))
    if words != text or (document["status"] == "completed" and len(words.split()) != WORDS):
        problems.append(f"is {document['status']} with the text {text!r}, but its events have {words!r}")
    is_early = document["status"] == "failed" and not document["output"] and asked < MAX_ATTEMPTS
    if is_early and "lost" not in document["error"]["message"]:  # its workers were killed
        problems.append(f"failed without output, asked {asked} times: {document['error']}")
    return problems


# -- foreground ----------------------------------------------------------------------------------------------------------------


class Foreground:
    """Sends foreground requests, and repeats each request until it is served."""

    def __init__(self, deployment: Deployment, client: httpx.AsyncClient) -> None:
        self._deployment = deployment
        self._client = client
        self.stored: dict[str, dict[str, Any]] = {}
        """Responses that reported `store: true`."""
        self.unstored: set[str] = set()
        """Responses that reported `store: false`, and whose replica had enough time to undo a commit."""

    async def ask(self, number: int) -> None:
        """Send a foreground request, and repeat it until a replica serves it."""
        draw = self._deployment.draw(f"foreground {number}")
        for attempt in itertools.count():
            body = {"model": "tiny", "input": f"long {number}.{attempt}", "stream": number % 2 == 0}
            if await self._attempt(draw.choice(self._deployment.replicas), body):
                return
            await asyncio.sleep(0.5)

    async def _attempt(self, replica: Process, body: dict[str, Any]) -> bool:
        """Send the request once and check the answer. Return whether the request was served."""
        began, before = asyncio.get_running_loop().time(), self._faults(replica, "ended")
        status, data, whole = 0, b"", False
        try:
            async with self._client.stream("POST", replica.url, json=body) as answer:
                status = answer.status_code
                async for piece in answer.aiter_raw():
                    data += piece
                whole = True
        except httpx.ConnectError:
            return False
        except httpx.HTTPError as error:
            data += f" ({error!r})".encode()
        faults = set(self._faults(replica, "begun") - before) - {"damage_job", "damage_queue"}  # without effect on answers
        problems = _faults_of_answer(body, status, data, whole, faults, replica.drained - began)
        self._deployment.problems += [f"{body['input']} (stream: {body['stream']}): {problem}" for problem in problems]
        self._deployment.checked["drained foreground requests"] += "drain" in faults and began < replica.drained
        if status == 200 and whole and not problems:
            await self._remember(_document(data), replica)
        return status == 200

    def _faults(self, replica: Process, state: str) -> Counter[str]:
        """Return the number of faults in the given `state` (`begun` or `ended`) that may affect a request to the replica."""
        targets = (replica, self._deployment.valkey, self._deployment.upstream)
        return sum((getattr(target, state) for target in targets), Counter())

    async def _remember(self, document: dict[str, Any], replica: Process) -> None:
        if document["store"]:
            self.stored[document["id"]] = document
            return
        restarts = replica.restarts
        while self._deployment.valkey.begun != self._deployment.valkey.ended:
            await asyncio.sleep(0.2)
        if replica.restarts == restarts:  # after a restart, the pending undo is lost
            self.unstored.add(document["id"])

    async def check(self) -> None:
        url = self._deployment.replicas[0].url
        for response_id in [*self.stored, *self.unstored]:
            self._deployment.checked["store: true" if response_id in self.stored else "store: false"] += 1
            answer = await self._client.get(f"{url}/{response_id}")
            document = answer.json() if answer.status_code == 200 else None
            if answer.status_code not in (200, 404) or document != self.stored.get(response_id):
                told = "true" if response_id in self.stored else "false"
                self._deployment.problems.append(f"{response_id} reported store: {told}, but GET returns {answer.status_code}")


def _document(data: bytes) -> dict[str, Any]:
    """Return the response in a JSON answer or at the end of a stream."""
    if data.startswith(b"{"):
        whole: dict[str, Any] = orjson.loads(data)
        return whole
    last: dict[str, Any] = events_of(data)[-1]["response"]
    return last


def _faults_of_answer(
    body: dict[str, Any], status: int, data: bytes, whole: bool, faults: set[str], before_drain: float
) -> list[str]:
    """Return the problems of a foreground answer.

    `faults` are the faults that may have affected the answer. `before_drain` is the time from the request to the replica's last
    SIGTERM in seconds.
    """
    if not whole:
        is_young = "stall" in faults or before_drain < 2  # its connection may not have been accepted yet
        is_refused = "drain" in faults and is_young and not status
        return [] if "kill" in faults or is_refused else [f"the answer was interrupted ({faults}): {data[-200:]!r}"]
    if status != 200:
        error = orjson.loads(data).get("error", {})
        is_openai = error.keys() >= {"message", "type", "param", "code"}
        return [] if faults and status in RETRIED and is_openai else [f"status {status} ({faults}): {data[-200:]!r}"]
    if body["stream"] and [one["type"] in TERMINAL for one in events_of(data)[-1:]] != [True]:
        return [f"the stream has no terminal event ({faults}): {data[-200:]!r}"]
    document, problems = _document(data), []
    if document["status"] == "failed" and not faults & {"drain", "upstream_down"}:
        problems.append(f"it failed ({faults}): {document['error']}")
    text = "".join(part["text"] for item in document["output"] for part in item.get("content", []))
    if document["status"] == "completed" and len(text.split()) != LONG:
        problems.append(f"it is completed with {text!r}")
    if not document["store"] and not faults - {"kill", "drain"}:
        problems.append(f"it is {document['status']} and not stored ({faults})")
    return problems
