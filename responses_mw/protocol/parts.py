"""Check the content parts of a request and convert them for chat messages.

`PART_KINDS` has one row for each type of part in input messages and in the outputs of tools.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from . import checks
from .dialects import Dialect
from .types import Item, Message, Part

ChatPart = dict[str, Any]
Content = str | list[ChatPart]  # the content of a chat message


class PartKind(NamedTuple):
    check: checks.Check
    to_chat: Callable[[Part, Dialect, str], ChatPart]


def to_chat_content(parts: list[Part], dialect: Dialect, path: str, *, flat: bool = False) -> Content:
    """Convert content parts to the content of a chat message.

    A single text becomes a string, and other content a list. With `flat`, several texts are joined to one string as well.
    `path` is the path of `parts` in the request, for error messages. Raises `BadRequest` if a file cannot be decoded, or if the
    dialect does not support a part.
    """
    content = _to_chat(parts, dialect, path)
    is_text = all(part["type"] == "text" for part in content) and (flat or len(content) <= 1)
    return "\n".join(texts_of(content)) if is_text else content


def to_tool_content(call_id: str, output: str | list[Part], dialect: Dialect, path: str) -> tuple[Message, list[ChatPart]]:
    """Return a tool message with the text of a call's output, and the output's other parts after a text that names the call.

    A tool message holds only text, so the caller must put the other parts into a user message. Raises `BadRequest` if a file
    cannot be decoded, or if the dialect does not support a part.
    """
    content = [{"type": "text", "text": output}] if isinstance(output, str) else _to_chat(output, dialect, path)
    others = [part for part in content if part["type"] != "text"]
    if others:
        others.insert(0, {"type": "text", "text": f"Returned by the tool call {call_id}:"})
    return {"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts_of(content))}, others


def _to_chat(parts: list[Part], dialect: Dialect, path: str) -> list[ChatPart]:
    return [PART_KINDS[part["type"]].to_chat(part, dialect, f"{path}[{index}]") for index, part in enumerate(parts)]


def texts_of(parts: Any) -> list[str]:
    """Return the texts of content parts. Skip parts without text and malformed parts."""
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return [text for text in texts if isinstance(text, str)]


def message_text(item: Item) -> str:
    """Return the text of a message, with its refusals."""
    return "".join(part.get("text") or part.get("refusal") or "" for part in item.get("content") or ())


def is_unfinished(item: Item) -> bool:
    """Return whether `item` is a message that the model continues if it is the last item."""
    return item.get("role") == "assistant" and item.get("status") in ("incomplete", "in_progress")


def reasoning_text(item: Item) -> str:
    """Return the text of a reasoning item's `content`, or of its `summary` if the content has no text. Skip malformed parts."""
    for name in ("content", "summary"):
        if text := "\n".join(texts_of(item.get(name))):
            return text
    return ""


# -- images, audio, video ----------------------------------------------------------------------------------------------


_MAX_FILE_ID = 128


def _check_image(part: Part, path: str) -> Part:
    if "detail" in part:
        checks.one_of(part["detail"], f"{path}.detail", {"low", "high", "auto", "original"})
    if part.get("file_id") is not None and part.get("image_url") is None:
        checks.string(part["file_id"], f"{path}.file_id", max_length=_MAX_FILE_ID)
        return part
    url = checks.required(part, "image_url", path, checks.string)
    if not url.startswith(("http://", "https://", "data:image/")):
        why = "must be an http(s) URL or a data URL ('data:image/png;base64,...')."
        checks.invalid(f"{path}.image_url", why, "invalid_image_url")
    return part


def _chat_image(part: Part, dialect: Dialect, path: str) -> ChatPart:
    if "image_url" not in part:
        checks.unsupported(f"{path}.file_id", "send the image as 'image_url' with a URL or a data URL.")
    image = {"url": part["image_url"]}
    if not dialect.image_urls and not image["url"].startswith("data:"):
        dialect.unsupported(f"{path}.image_url", "accepts images only as data URLs")
    if "detail" in part:
        image["detail"] = part["detail"]
    return {"type": "image_url", "image_url": image}


def _chat_audio(part: Part, dialect: Dialect, path: str) -> ChatPart:
    if not dialect.audio:
        dialect.unsupported(f"{path}.type", "does not accept audio")
    return {"type": "input_audio", "input_audio": part["input_audio"]}


def _chat_video(part: Part, dialect: Dialect, path: str) -> ChatPart:
    if not dialect.video:
        dialect.unsupported(f"{path}.type", "does not accept video")
    return {"type": "video_url", "video_url": {"url": part["video_url"]}}


# -- files -------------------------------------------------------------------------------------------------------------

_MAX_URL = 8192


def _http_url(value: Any, path: str) -> str:
    url = checks.string(value, path, max_length=_MAX_URL)
    if not url.startswith(("http://", "https://")):
        checks.invalid(path, "must be an http(s) URL.")
    return url


_FILE_SOURCES = ("file_id", "file_url", "file_data")
_file_members = checks.fields(
    file_data=checks.string, file_url=_http_url, file_id=partial(checks.string, max_length=_MAX_FILE_ID), filename=checks.string
)


def _check_file(part: Part, path: str) -> Part:
    sources = [name for name in _FILE_SOURCES if part.get(name) is not None]
    if not sources:
        checks.missing(f"{path}.file_data")
    if len(sources) > 1:
        checks.invalid(f"{path}.{sources[0]}", f"it cannot be combined with '{sources[1]}'.")
    return _file_members(part, path)


def _chat_file(part: Part, dialect: Dialect, path: str) -> ChatPart:
    """Convert a PDF to a file part, and UTF-8 text to a text part that begins with the file's name. Refuse other files."""
    if "file_data" not in part:
        source = "file_url" if part.get("file_url") is not None else "file_id"
        checks.unsupported(f"{path}.{source}", "send the content as 'file_data'.")
    path = f"{path}.file_data"
    data = decode_file(part["file_data"], path)
    name = part.get("filename")
    if data.startswith(b"%PDF-"):
        if not dialect.pdf:
            dialect.unsupported(path, "does not accept PDF; send its text")
        return {"type": "file", "file": {"file_data": part["file_data"], **({"filename": name} if name else {})}}
    try:
        text = data.decode()
    except UnicodeDecodeError:
        checks.unsupported(path, "it is neither UTF-8 text nor PDF.")
    return {"type": "text", "text": named_text(name, text)}


def named_text(name: str | None, text: str) -> str:
    """Return the text of a file as the model sees it."""
    return f"{name}:\n{text}" if name else text


def decode_file(data: str, path: str) -> bytes:
    """Decode a data URL or bare base64 (OpenAI reference, "File inputs"). Raises `BadRequest`, which names `path`."""
    if data.startswith("data:"):
        head, _, data = data.partition(",")
        if not head.endswith(";base64"):
            checks.invalid(path, "expected a base64 data URL.")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        checks.invalid(path, "expected base64.")


# -- all parts -----------------------------------------------------------------------------------------------------------

_text_part = checks.fields({"text": checks.string})
_audio_part = checks.fields({"input_audio": checks.open_object({"data": checks.string, "format": checks.string})})
_text_kind = PartKind(_text_part, lambda part, _dialect, _path: {"type": "text", "text": part["text"]})

PART_KINDS: dict[str, PartKind] = {
    **dict.fromkeys(("input_text", "text", "output_text"), _text_kind),  # clients send output back
    "input_image": PartKind(_check_image, _chat_image),
    "input_file": PartKind(_check_file, _chat_file),
    "input_audio": PartKind(_audio_part, _chat_audio),
    "input_video": PartKind(checks.fields({"video_url": checks.string}), _chat_video),
}


def _each_of(**kinds: checks.Check) -> checks.Check:
    return checks.each(checks.by_type(kinds))


INPUT_PARTS = _each_of(**{type_: kind.check for type_, kind in PART_KINDS.items()})
ASSISTANT_PARTS = _each_of(
    refusal=checks.fields({"refusal": checks.string}), output_text=_text_part, input_text=_text_part, text=_text_part
)
SUMMARY_PARTS = _each_of(summary_text=_text_part)
REASONING_PARTS = _each_of(reasoning_text=_text_part, text=_text_part)
