"""Replace the files in a run's items with parts that the upstream accepts: texts, or images and PDF files as data URLs.

Stored items keep the file's id, its URL or its data. Each response that continues a history needs the texts again, so the most
recent ones are cached in memory. Otherwise, each response would parse documents and download URLs again.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from typing import Any

import orjson

from ..auth import Gate
from ..errors import BadRequest, NotSupported, TooLarge
from ..files import FileLibrary
from ..files.extraction import ExtractionFailed, Extractor, kind_of
from ..protocol.dialects import Dialect
from ..protocol.parts import decode_file, named_text
from ..protocol.types import Item, Part
from ..state import Missing
from ..tasks import by_size
from .text_cache import TextCache

MAX_FILES = 100
"""Maximum number of files that a run reads, including those of its history."""
MAX_CACHED = 32 * 1024 * 1024
"""Maximum total number of characters of the cached texts."""
_SUFFIX = 16  # characters of the suffix of a name, in the keys of the cache
_LISTS = ("content", "output")  # members of items that can contain parts
_IMAGES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)


@dataclass(frozen=True, slots=True)
class _Place:
    """A part that names or contains a file. `path` is its path in the request, or "" if it belongs to the history."""

    part: Part
    item: int
    member: str
    index: int
    path: str


@dataclass(eq=False)
class InputFiles:
    """Reads the files of all runs. `library` is None if this server has no files.

    Each run reads files of up to `max_bytes` in total.
    """

    library: FileLibrary | None
    max_bytes: int
    allow_private: bool = False
    """Whether files may be downloaded from private addresses."""
    texts: TextCache = field(default_factory=lambda: TextCache(MAX_CACHED), init=False)
    _extractor: Extractor = field(default_factory=Extractor, init=False)

    async def replace(
        self,
        earlier: Sequence[Item],
        own: Sequence[Item],
        owner: str,
        gate: Gate,
        dialect: Callable[[], Awaitable[Dialect]],
        *,
        only_stored: bool = False,
    ) -> tuple[Sequence[Item], Sequence[Item]]:
        """Return the items of the history and of the request with their files replaced.

        With `only_stored`, replace only the files that `owner` has stored on this server, for an upstream that reads all other
        files itself.

        `gate` is awaited before a file is read. Raises `BadRequest` if a file of the request is missing or cannot be read. A
        file of the history that can no longer be read is replaced with a note.
        """
        places = list(_places(chain(earlier, own), len(earlier)))
        if only_stored:
            places = await self._stored(places, owner, gate)
        if not places:
            return earlier, own
        if len(places) > MAX_FILES:
            raise TooLarge(f"The request and its history have more than {MAX_FILES} files.", param="input")
        await gate()
        reader, items = _Reader(self, owner, await dialect(), self.max_bytes), [*earlier, *own]
        for place in places:
            part = await reader.read(place)
            if part is not place.part:
                parts = [*items[place.item][place.member]]
                parts[place.index] = part
                items[place.item] = {**items[place.item], place.member: parts}
        return items[: len(earlier)], items[len(earlier) :]

    async def _stored(self, places: Sequence[_Place], owner: str, gate: Gate) -> list[_Place]:
        """Return the places of files that `owner` has stored on this server."""
        named = [place for place in places if isinstance(place.part.get("file_id"), str)]
        if self.library is None or not named:
            return []
        await gate()
        known = await self.library.records.known([place.part["file_id"] for place in named], owner)
        return [place for place in named if place.part["file_id"] in known]

    async def text(self, data: bytes, filename: str, owner: str = "") -> str:
        """Return the text of a document, perhaps from the cache. Raises `ExtractionFailed`."""
        key = (await by_size(len(data), sha256, data)).digest() + filename.rpartition(".")[2].lower()[:_SUFFIX].encode()
        text = self.texts.get(key)
        if text is None:
            text = await self._extractor.extract(data, filename, owner)
            self.texts.put(key, text)
        return text


def _places(items: Iterable[Item], own: int) -> Iterator[_Place]:
    """Yield the parts with files. The items of the request start at index `own`."""
    for number, item in enumerate(items):
        for member in _LISTS:
            parts = item.get(member)
            if isinstance(parts, list):
                for index, part in enumerate(parts):
                    if _has_file(part):
                        path = f"input[{number - own}].{member}[{index}]" if number >= own else ""
                        yield _Place(part, number, member, index, path)


def _has_file(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind == "input_file" or (kind == "input_image" and part.get("file_id") is not None)


@dataclass(eq=False)
class _Reader:
    """Reads the files of one run."""

    files: InputFiles
    owner: str
    dialect: Dialect
    left: int

    async def read(self, place: _Place) -> Part:
        """Return the part that replaces the one at `place`, which may be the same.

        A file of the history that is missing or cannot be read is replaced with a note, so that the history can be continued.
        """
        try:
            is_file = place.part["type"] == "input_file"
            return await (self._file(place) if is_file else self._image(place))
        except Missing as error:
            if not place.path:
                return _text(f"(The file {error.object_id} is no longer available.)")
            raise BadRequest(error.message, param=f"{place.path}.file_id", code="invalid_value") from None
        except BadRequest:
            if place.path:
                raise
            return _text("(A file can no longer be read.)")

    async def _file(self, place: _Place) -> Part:
        """Return the part that replaces a file. For a URL in the history, use the cached text of its last download, if any."""
        part, path = place.part, place.path or "input"
        at_url = self._key(part) if part.get("file_url") is not None else b""
        if not place.path and (known := self.files.texts.get(at_url)) is not None:
            return _text(known)
        if part.get("file_id") is not None:
            source = f"{path}.file_id"
            data, name = await self._read_stored(part["file_id"], source)
        elif part.get("file_url") is not None:
            source = f"{path}.file_url"
            data, name = await self._fetch(part["file_url"], source)
            name = part.get("filename") or name
        else:
            source, name = f"{path}.file_data", part.get("filename") or ""
            data = await by_size(len(part["file_data"]), decode_file, part["file_data"], source)
        try:
            kind = kind_of(data, name)
            if kind == "pdf" and self.dialect.pdf:
                return part if "file_data" in part else await by_size(len(data), _pdf, data, name)
            text = await self.files.text(data, name, self.owner)
        except ExtractionFailed as error:
            raise NotSupported(f"'{source}' cannot be read. {error}", param=source) from None
        shown = named_text(name, text)
        if part.get("file_url") is not None:
            self.files.texts.put(at_url, shown)
        return _text(shown)

    def _key(self, part: Part) -> bytes:
        """Return the key of the cached download of a part: a hash, because a URL may be long."""
        names = [self.owner, part.get("file_url"), part.get("filename")]
        return sha256(orjson.dumps(names)).digest()

    async def _fetch(self, url: str, path: str) -> tuple[bytes, str]:
        """Return the bytes and the name of the file at `url`."""
        try:
            from ..tools.guarded_fetch import FetchFailed, fetch
        except ModuleNotFoundError:
            message = f"'{path}' is not supported: to download files, this server needs the extra 'mcp'."
            raise NotSupported(message, param=path) from None
        try:
            file = await fetch(url, self.left, allow_private=self.files.allow_private)
        except FetchFailed as error:
            message = f"The file at '{path}' cannot be downloaded: {error}."
            raise BadRequest(message, param=path, code="failed_to_download_file") from None
        self.left -= len(file.data)
        return file

    async def _image(self, place: _Place) -> Part:
        path = f"{place.path or 'input'}.file_id"
        data, _ = await self._read_stored(place.part["file_id"], path)
        kind = next((kind for magic, kind in _IMAGES if data.startswith(magic)), None)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            kind = "image/webp"
        if kind is None:
            raise BadRequest(f"Invalid '{path}': the file is not an image.", param=path, code="invalid_image_format")
        others = {name: value for name, value in place.part.items() if name != "file_id"}
        return {**others, "image_url": await by_size(len(data), _data_url, kind, data)}

    async def _read_stored(self, file_id: str, path: str) -> tuple[bytes, str]:
        """Return the bytes and the name of a stored file."""
        library = self.files.library
        if library is None:
            raise NotSupported(f"'{path}' is not supported: this server has no files.", param=path)
        file = await library.records.get(file_id, self.owner)
        self.left -= file.size
        if self.left < 0:
            raise TooLarge(f"The files are larger than {self.files.max_bytes} bytes in total.", param=path)
        return b"".join([chunk async for chunk in await library.read(file, self.owner)]), file.filename


def _text(text: str) -> Part:
    return {"type": "input_text", "text": text}


def _pdf(data: bytes, name: str) -> Part:
    return {"type": "input_file", "filename": name, "file_data": _data_url("application/pdf", data)}


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
