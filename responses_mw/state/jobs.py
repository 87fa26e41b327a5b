"""Store the records, leases and event logs of background responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import orjson

from ..ids import random_part
from ..lua import load
from ..protocol.types import Item
from ..tasks import by_size
from ..telemetry.metrics import LEASES_LOST
from .client import Args, Call, Client
from .errors import Damaged, Deleted, Missing, NewerRecord, OverBound, Reply
from .models import Batch, Job, JobVerdict, Requeued, StateOptions, Taken, TakeReason
from .queue import FOREIGN
from .responses import TOMBSTONE_SECONDS
from .schema import (
    COMPRESS_FROM,
    QUEUE,
    compress,
    decompress,
    json_size,
    milliseconds,
    pack,
    reading,
    response_address,
    stop_channel,
    unpack,
)
from .temporary import KEPT_SECONDS, Vault, is_temporary
from .writes import Write, Writer

_CREATE, _TAKE, _RENEW, _RELEASE, _REQUEUE = load(
    "state", *(f"job_{name}" for name in ("create", "take", "renew", "release", "requeue"))
)
_APPEND, _COMPRESS = load("state", "log_append", "log_compress")

MAX_ATTEMPTS = 3
"""Maximum attempts without new output for a job whose workers are lost, because the request itself may crash them."""
PAGE = 100  # maximum number of entries that are read at a time from a log
PAGE_BYTES = 256 * 1024  # bytes of decompressed events after which a page ends, because every reader has a page in memory
PLAIN_PAGE = 500  # maximum number of entries that are read at a time from a log that is being compressed
CHUNK = 64 * 1024  # bytes of events after which a compressed chunk ends
COMPRESS_TO = 32 * 1024 * 1024  # maximum size of a compressed log in bytes
TOGETHER = 200  # maximum number of logs that one script call appends to
_DAMAGED = 2  # the script's result for a damaged record or log

Entry = tuple[bytes, dict[bytes, bytes]]


class Jobs:
    """The records and event logs of background responses.

    A process leases a job before it runs or finalizes the job. Each lease has a token, and writes with an older token are
    refused. All methods except `renew`, `append` and `count_log` raise StateUnavailable if Redis fails.
    """

    def __init__(self, client: Client, writer: Writer, options: StateOptions, vault: Vault) -> None:
        self._client = client
        self._writer = writer
        self._vault = vault
        self._temporary_ttl = min(options.ttl_seconds, KEPT_SECONDS) * 1000
        self._ttl = max(options.ttl_seconds, TOMBSTONE_SECONDS) * 1000
        self._max_bytes = options.response_bytes

    async def create(
        self, document: dict[str, Any], body: dict[str, Any], items: list[Item], owner: str, credential: str, start: Batch
    ) -> None:
        """Write a background response and `start`, the first batch of its log.

        Raises OverBound if the request is too large, or OverQuota if the owner would exceed the storage quota. Raises Deleted
        if the job's reservation in the queue expired during the write and a worker has discarded the job.
        """
        address = response_address(document["id"])
        head, job = orjson.dumps({**document, "output": None}), orjson.dumps({"body": body, "input": items})
        size = len(head) + len(job)
        if size > self._max_bytes:
            raise OverBound(f"The request takes {size} bytes to store; the maximum is {self._max_bytes}.")
        keys, packed = [address.record, address.tombstone], await by_size(len(job), pack, job)
        ttl, mark, values = self._ttl, "", [pack(head), packed, start.data]
        if is_temporary(document):
            ttl, mark, values = self._temporary_ttl, "1", [self._vault.seal(document["id"], value) for value in values]
        head, packed, events = values
        args: Args = [owner, random_part(), ttl, head, packed, credential, events, start.last + 1, mark]
        size += len(credential) + len(start.data)
        write = Write(_CREATE, address, keys, args, owner, f"r{address.random}", size)
        if await self._writer.write(write) == Reply.DELETED:  # by a worker that claimed the job too early
            raise Deleted("Response", document["id"])

    async def count_log(self, job: Job, size: int) -> None:
        """Set the charge for a running job's event log to `size` bytes. Raises OverQuota if that exceeds the quota."""
        ttl = self._temporary_ttl if is_temporary(job.document) else self._ttl
        await self._writer.quota.log(job.owner, response_address(job.response_id), size, ttl)

    async def take(
        self, response_id: str, why: TakeReason, *, worker: str, lease: float, max_attempts: int = MAX_ATTEMPTS, owner: str = ""
    ) -> Taken:
        """Lease the job to `worker` for `lease` seconds if its state permits that, and return the verdict.

        After `max_attempts` attempts that added no output, the verdict is LOST or FAILED. If `owner` is not empty, the verdict
        on a job of another owner is MISSING.

        Raises NewerRecord if a newer release wrote the job, or Damaged for a foreign `response_id`.
        """
        token = random_part()
        try:
            address = response_address(response_id)
        except Missing:
            raise self._client.damage(QUEUE, FOREIGN) from None
        args: Args = [token, worker, milliseconds(lease), max_attempts, why.value, owner, TOMBSTONE_SECONDS * 1000]
        answer, *facts = await self._client.script(_TAKE, [address.record, address.tombstone], args)
        verdict = JobVerdict(answer)
        if verdict is JobVerdict.NEWER:
            raise NewerRecord
        if verdict is JobVerdict.HELD:
            return Taken(verdict, left=facts[0] / 1000)
        if verdict is JobVerdict.WAITING:
            return Taken(verdict, unseen=facts[0].decode())
        with reading("job"):
            taken = Taken(verdict, *_job(response_id, token, facts, self._vault)) if facts else Taken(verdict)
        if taken.worker and verdict is not JobVerdict.CANCELLED:
            LEASES_LOST.add()
        return taken

    async def renew(self, holds: Sequence[tuple[str, str]], lease: float) -> list[bool | None]:
        """Extend each lease in `holds` (response id and token) to `lease` seconds from now. Return a result for each lease.

        True means that the lease was extended. False means that another process has leased the job, or that the job has ended,
        was deleted or is damaged. None means that the Redis server of the job is unavailable.
        """
        calls: list[Call] = [([response_address(job).record], [token, milliseconds(lease)]) for job, token in holds]
        replies = await self._client.scripts(_RENEW, calls, contained=True)
        return [reply == Reply.RENEWED if isinstance(reply, bytes | Damaged) else None for reply in replies]

    async def release(self, job: Job) -> None:
        """Release the job without counting an attempt, and store `job.continuations`. Do nothing if the lease is lost."""
        await self._client.script(_RELEASE, [response_address(job.response_id).record], [job.token, job.continuations])

    async def requeue(self, response_id: str) -> Requeued | None:
        """Take the job from its worker, or end its wait for a retry. Return None if it has ended or is being cancelled.

        The worker's writes are refused from now on, and its attempt is not counted. Raises Missing if there is no such job, or
        NewerRecord if a newer release wrote it.
        """
        answer, *facts = await self._client.script(_REQUEUE, [response_address(response_id).record], [])
        if answer == b"missing":
            raise Missing("Response", response_id)
        if answer == b"newer":
            raise NewerRecord
        return Requeued(*(fact.decode() for fact in facts)) if facts else None

    async def abandon(self, response_id: str) -> None:
        """Delete the credential of a job that can be neither run nor finalized, because its record is damaged."""
        await self._client.command("DEL", response_address(response_id).credential)

    async def retry(self, job: Job, error: dict[str, str], *, seconds: float, is_attempt: bool) -> bool:
        """Release the job for a retry after an upstream `error`. Return False if another worker holds the job or it has ended.

        The job fails if it makes no progress for `seconds` after its first error. If `is_attempt` is true, the run counts
        towards the maximum number of attempts.
        """
        text = self._protected(job, orjson.dumps(error))
        args: Args = [job.token, job.continuations, text, milliseconds(seconds), "1" if is_attempt else ""]
        reply = await self._client.script(_RELEASE, [response_address(job.response_id).record], args)
        return bool(reply == Reply.RELEASED)

    async def tell(self, worker: str, response_id: str) -> None:
        """Notify `worker` that another process has leased one of its jobs."""
        await self._client.command("SPUBLISH", stop_channel(worker), response_id)

    def protected(self, job: Job, batch: Batch) -> Batch:
        """Return the batch in the form in which it is stored: sealed if the job's response is temporary."""
        return replace(batch, data=self._protected(job, batch.data)) if is_temporary(job.document) else batch

    def _protected(self, job: Job, value: bytes) -> bytes:
        return self._vault.seal(job.response_id, value) if is_temporary(job.document) else value

    def announced(self, response_id: str, message: bytes) -> Batch | None:
        """Return the batch in a message on a log's channel. None means that the log may have grown and must be read."""
        head, _, data = message.partition(b"\n")
        last, _, final = head.partition(b" ")
        if not data or not last.isdigit():
            return None
        return _batch(int(last), self._vault.open(response_id, data), final=bool(final))

    async def append(self, batches: Sequence[tuple[str, str, Batch]], lease: float) -> list[bool | None]:
        """Append a batch to the log of each job, and extend the leases of these jobs to `lease` seconds from now.

        `batches` contains the response id, the token and the `protected` batch of each job. Return for each job whether its
        batch is in the log, or None if the job's server is unavailable. A batch is refused in these cases: another process has
        leased the job, the job has ended or was deleted, the record or log is damaged, or the batch does not continue the log.
        A repeated call appends nothing, but extends the leases again.
        """
        # One call for all logs costs a third of separate calls. In a cluster, each log has its own slot.
        together = 1 if self._client.is_cluster else TOGETHER
        calls = [_append(batches[at : at + together], lease) for at in range(0, len(batches), together)]
        answers: list[int | None] = []
        for (keys, _), reply in zip(calls, await self._client.scripts(_APPEND, calls, contained=True), strict=True):
            answers += reply if isinstance(reply, list) else [None] * len(keys)
        for (job, _, _), answer in zip(batches, answers, strict=True):
            if answer == _DAMAGED:
                self._client.damage(response_address(job).log, "no batch can be appended to it")
        return [None if answer is None else answer == 1 for answer in answers]

    async def log(self, response_id: str, number: int) -> list[Batch]:
        """Return the next page of batches after event `number`, or an empty list if the log has none or has expired.

        The first batch may also contain earlier events. Raises Damaged if an entry of the log is not a batch of events.
        """
        return await self._read_page(response_id, number, PAGE)

    async def compress(self, response_id: str) -> bool:
        """Compress the log of an ended response to about a twentieth of its size, and return True.

        Return False if the response has not ended, or if its log has expired or is incomplete, too small or too large. Raises
        Damaged if an entry of the log is not a batch of events.
        """
        chunks: list[tuple[int, bytes]] = []
        number, size, is_final = -1, 0, False
        while not is_final:
            batches = await self._read_page(response_id, number, PLAIN_PAGE)
            if not batches or sum(batch.last + 1 - batch.first for batch in batches) != batches[-1].last - number:
                return False  # the log has expired or has a gap
            length = sum(len(batch.data) for batch in batches)
            chunks += await by_size(length, _chunks, batches)
            number, is_final, size = batches[-1].last, batches[-1].final, size + length
        if size < COMPRESS_FROM or sum(len(data) for _, data in chunks) > COMPRESS_TO:
            return False
        args = [arg for last, data in chunks for arg in (last + 1, data)]
        return bool(await self._client.script(_COMPRESS, [response_address(response_id).record], args) == 1)

    async def _read_page(self, response_id: str, number: int, count: int) -> list[Batch]:
        log, batches, size = response_address(response_id).log, list[Batch](), 0
        for entry in await self._client.command("XRANGE", log, f"({number + 1}-0", "+", "COUNT", count):
            try:
                batches.append(_batch_of(entry, partial(self._vault.open, response_id)))
            except (LookupError, ValueError):
                raise self._client.damage(log, "an entry is not a batch of events") from None
            if b"z" in entry[1]:  # all entries that are not compressed are returned, because Redis has sent them
                size += len(batches[-1].data)
            if size >= PAGE_BYTES:
                break
        return batches

    async def progress(self, response_id: str) -> tuple[int, bool]:
        """Return the number of the last event, and whether the response has ended. Raises Missing if it does not exist."""
        job, number = await self._client.command("HMGET", response_address(response_id).record, "job", "next_seq")
        if number is None:
            raise Missing("Response", response_id)
        with reading("job"):
            return int(number) - 1, job is None


def _job(response_id: str, token: str, facts: Sequence[Any], vault: Vault) -> tuple[Job, str]:
    """Return the job that `_TAKE` has leased, and the name of the worker that held its lease, or ""."""
    number, head, packed, owner, credential, worker, retries, error, retry_ms, attempts, continuations = facts
    head, packed = vault.open(response_id, head), vault.open(response_id, packed)
    request = unpack(packed)
    job = Job(
        response_id=response_id,
        owner=owner.decode(),
        token=token,
        next_number=int(number),
        document={**unpack(head), "output": []},
        body=request["body"],
        input=request["input"],
        credential=credential.decode() if credential is not None else None,
        size=json_size(packed),
        retries=int(retries or 0),
        error=orjson.loads(vault.open(response_id, error)) if error is not None else None,
        retry_seconds=retry_ms / 1000,
        attempts=attempts,
        continuations=continuations,
    )
    return job, (worker or b"").decode()


def fills_page(batches: Sequence[Batch]) -> bool:
    """Return whether a page of a log is full. If so, the log may have further batches."""
    return len(batches) == PAGE or sum(len(batch.data) for batch in batches) >= PAGE_BYTES


def _batch_of(entry: Entry, opened: Callable[[bytes], bytes]) -> Batch:
    """Decode an entry of a log. Raises LookupError or ValueError if the entry is damaged."""
    entry_id, fields = entry
    data = decompress(fields[b"z"]) if b"z" in fields else opened(fields[b"b"])
    return _batch(int(entry_id.partition(b"-")[0]) - 1, data, final=b"final" in fields)


def _batch(last: int, data: bytes, *, final: bool) -> Batch:
    return Batch(last + 1 - data.count(b"\n\n"), last, data, final)


def _append(batches: Sequence[tuple[str, str, Batch]], lease: float) -> Call:
    keys: list[str] = []
    args: Args = [milliseconds(lease)]
    for job, token, batch in batches:
        keys.append(response_address(job).record)
        args += (token, batch.first, batch.last, batch.data)
    return keys, args


def _chunks(batches: Sequence[Batch]) -> list[tuple[int, bytes]]:
    """Join batches into chunks. Return the number of the last event and the compressed events of each chunk."""
    chunks, parts, size = [], [], 0
    for batch in batches:
        parts.append(batch.data)
        size += len(batch.data)
        if size >= CHUNK or batch is batches[-1]:
            chunks.append((batch.last, compress(b"".join(parts))))
            parts, size = [], 0
    return chunks
