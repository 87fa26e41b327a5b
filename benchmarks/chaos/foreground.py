"""The clients of foreground responses, and the checks of what they see."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any

import httpx
import orjson

from .deployment import LONG, TERMINAL, Deployment, Process, events_of

RETRIED = {429, 502, 503}


class Foreground:
    """Foreground requests. Each is retried until it is served."""

    def __init__(self, deployment: Deployment, client: httpx.AsyncClient) -> None:
        self._deployment = deployment
        self._client = client
        self.stored: dict[str, dict[str, Any]] = {}
        """Responses that reported `store: true`."""
        self.unstored: set[str] = set()
        """Responses that reported `store: false`, and whose replica had enough time to undo a commit."""

    async def ask(self, number: int) -> None:
        """Send a foreground request until it is served."""
        draw = self._deployment.draw(f"foreground {number}")
        for attempt in itertools.count():
            body = {"model": "tiny", "input": f"long {number}.{attempt}", "stream": number % 2 == 0}
            if await self._attempt(draw.choice(self._deployment.replicas), body):
                return
            await asyncio.sleep(0.5)

    async def _attempt(self, replica: Process, body: dict[str, Any]) -> bool:
        """Return whether the request was served."""
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
        faults = set(self._faults(replica, "begun") - before) - {"damage_job", "damage_queue"}  # these must not affect it
        problems = _faults_of_answer(body, status, data, whole, faults, replica.drained - began)
        self._deployment.problems += [f"{body['input']} (stream: {body['stream']}): {problem}" for problem in problems]
        self._deployment.checked["drained foreground requests"] += "drain" in faults and began < replica.drained
        if status == 200 and whole and not problems:
            await self._remember(_document(data), replica)
        return status == 200

    def _faults(self, replica: Process, state: str) -> Counter[str]:
        """Count the faults that have `begun` or `ended` and may affect a request to the replica."""
        targets = (replica, self._deployment.valkey, self._deployment.upstream)
        return sum((getattr(target, state) for target in targets), Counter())

    async def _remember(self, document: dict[str, Any], replica: Process) -> None:
        if document["store"]:
            self.stored[document["id"]] = document
            return
        restarts = replica.restarts
        while self._deployment.valkey.begun != self._deployment.valkey.ended:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        if replica.restarts == restarts:  # otherwise, its pending undo is lost
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

    `faults` happened during it. `before_drain` is the time from its request to a SIGTERM in seconds.
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
