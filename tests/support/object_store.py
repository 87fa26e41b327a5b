"""A small object store with the API of S3, in memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support.scripted import Answer, play, read_body

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

XML = '<?xml version="1.0" encoding="UTF-8"?>\n'


@dataclass
class ObjectStore:
    """Stores small objects by path, the first part of which is the bucket. `error` is the status and code of all answers."""

    error: tuple[int, str] | None = None
    objects: dict[str, bytes] = field(default_factory=dict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        await play(self._answer(scope["method"], scope["path"], body), receive, send)

    def _answer(self, method: str, path: str, body: bytes) -> Answer:
        headers = {"etag": '"1"', "last-modified": "Sat, 28 Nov 2026 00:00:00 GMT"}
        if self.error is not None:
            return _failure(*self.error)
        if method == "PUT":
            self.objects[path] = body
            return Answer([b""], headers=headers)
        if method == "POST":  # deletes several objects
            keys = re.findall(r"<Key>([^<]+)</Key>", body.decode())
            for key in keys:
                self.objects.pop(f"{path.rstrip('/')}/{key}", None)
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            return Answer([f"{XML}<DeleteResult>{deleted}</DeleteResult>".encode()])
        if path not in self.objects:
            return _failure(404, "NoSuchKey")
        found = self.objects[path]
        return Answer([found], headers={**headers, "content-length": str(len(found))})


def _failure(status: int, code: str) -> Answer:
    return Answer([f"{XML}<Error><Code>{code}</Code><Message>No.</Message></Error>".encode()], status)
