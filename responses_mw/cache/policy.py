"""Parse the cache options of a request, apply the operator's limits, and describe the result of the lookup.

    {"cache": "off" | "exact" | "semantic"}
    {"cache": {"mode": ..., "ttl": seconds, "threshold": 0 to 1, "no_store": true, "refresh": true}}
    X-Responses-Cache: semantic; ttl=600; threshold=0.98; no-store; refresh

An option in the body overrides the same option in the header. The operator sets the highest mode (`cache.max_mode`, or
`cache.mode` if that is higher), the longest lifetime (`cache.ttl`) and the lowest threshold (`cache.threshold`).
docs/guides/cache.md lists the reasons for misses.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from ..protocol import checks
from ..protocol.types import Item
from ..settings.groups import CacheSettings
from .entry import Entry, Key

if TYPE_CHECKING:
    from ..embeddings.vector import Vector

BODY, HEADER = "cache", "X-Responses-Cache"
MODES = ("off", "exact", "semantic")
_ZEROS = re.compile(r"^0+(?=[0-9])")


@dataclass(frozen=True, slots=True)
class Policy:
    """The cache options that apply to a request.

    `mode` is one of `MODES`. `ttl` is in seconds. `threshold` is the minimum similarity of a semantic hit. `read` is whether
    the answer is looked up, and `write` is whether it is stored.
    """

    mode: str
    ttl: int
    threshold: float
    read: bool = True
    write: bool = True

    @property
    def is_off(self) -> bool:
        return self.mode == "off" or not (self.read or self.write)


_mode = checks.among(*MODES)
_options = checks.closed_object(
    mode=_mode,
    ttl=partial(checks.integer, minimum=1),
    threshold=partial(checks.number, minimum=0, maximum=1),
    no_store=checks.boolean,
    refresh=checks.boolean,
)


def policy_of(body: Any, header: str | None, settings: CacheSettings, *, stored: bool) -> Policy:
    """Return the policy of a request. Raises `BadRequest` if an option is unknown or a value is invalid.

    `body` is the request's `cache` field, and `header` its `X-Responses-Cache` header. Each is None if the request does not
    contain it. `stored` is the request's `store`. An answer to a request with `store: false` is cached only if the request
    itself selects the mode `exact` or `semantic`.
    """
    asked = _parse_header(header)
    if isinstance(body, str):
        asked["mode"] = _mode(body, BODY)
    elif body is not None:
        asked |= _options(body, BODY)
    highest = max(settings.mode, settings.max_mode, key=MODES.index)
    return Policy(
        mode=min(asked.get("mode", settings.mode), highest, key=MODES.index),
        ttl=min(asked.get("ttl", settings.ttl), settings.ttl),
        threshold=max(asked.get("threshold", settings.threshold), settings.threshold),
        read=not asked.get("refresh", False),
        write=not asked.get("no_store", False) and (stored or asked.get("mode", "off") != "off"),
    )


def _parse_header(value: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if not value:
        return options
    for directive in value.split(";"):
        name, equals, text = (piece.strip().lower() for piece in directive.partition("="))
        if name in MODES and not equals:
            options["mode"] = name
        elif name:
            options[name.replace("-", "_")] = _decoded(text) if equals else True
    return _options(options, HEADER)


def _decoded(text: str) -> Any:
    """Return `text` decoded as JSON, or `text` itself if it is not JSON, such as `nan`. Numbers may be `007` or `.9`."""
    with suppress(orjson.JSONDecodeError):
        return orjson.loads(_ZEROS.sub("", "0" + text if text.startswith(".") else text))
    return text


# -- results -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hit:
    """A cached answer. `items` have no ids. `kind` is `exact`, `alias` or `semantic`. `age` is in seconds.

    `usage` is the usage of the original answer, or None if it is unknown. Its additional member `"cache": kind` shows that
    these tokens were not used again.
    """

    kind: str
    similarity: float
    age: int
    items: list[Item]
    usage: dict[str, Any] | None
    source: Candidate | None = field(default=None, compare=False)
    """The entry, if it has the answer to another question."""

    @property
    def header(self) -> str:
        """Value of the `x-responses-cache` header."""
        return f"{self.kind}; similarity={self.similarity:.4f}; age={self.age}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry that may have the answer to the question of `key`. It expires in `left` seconds.

    Its question is similar, and the guard finds no difference.
    """

    key: Key
    entry: Entry
    similarity: float
    left: float

    def hit(self, kind: str = "semantic") -> Hit:
        entry = self.entry
        usage = None if entry.usage is None else {**entry.usage, "cache": kind}
        source = None if kind == "exact" else self
        return Hit(kind, min(self.similarity, 1.0), max(0, round(entry.ttl - self.left)), entry.items, usage, source)


@dataclass(slots=True)
class Miss:
    """A lookup without a hit. Its members are needed to store the new answer, and to release requests that wait for it."""

    key: Key
    policy: Policy
    generation: str | None = None
    """The cache's generation at the lookup. None means that the lookup failed. The answer is then not stored."""
    token: str | None = None  # set while this request holds the flight, so that identical requests wait for it
    vector: Vector | None = None  # the embedding of the text, or None if the text was not embedded
    candidates: list[Candidate] = field(default_factory=list)  # the nearest first
    judging: asyncio.Task[Hit | None] | None = None
    """The judgement of a candidate in progress. Its result is a hit if the candidate is approved."""
    reason: str = "not_found"
    nearest: float | None = None  # similarity of the nearest text, if the reason concerns that text

    @property
    def approved(self) -> Hit | None:
        """The hit, if the judge has approved a candidate by now."""
        task = self.judging
        is_over = task is not None and task.done() and not task.cancelled() and task.exception() is None
        return task.result() if task is not None and is_over else None

    @property
    def header(self) -> str:
        similarity = "" if self.nearest is None else f"; similarity={self.nearest:.4f}"
        if self.judging is not None:  # the judge and the upstream have begun
            return f"race{similarity}"
        threshold = f"; threshold={self.policy.threshold:.4f}" if self.reason == "below_threshold" else ""
        return f"miss; reason={self.reason}{similarity}{threshold}"

    def because(self, reason: str, nearest: float | None = None) -> None:
        """Record the reason for the miss, unless a reason has already been recorded."""
        if self.reason == "not_found":
            self.reason, self.nearest = reason, nearest
