"""From the content parts of items to those of chat messages. A line of ``PARTS`` for each type."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Any

from ...errors import BadRequest
from ..request import checks
from ..types import Message, Part
from .dialects import Dialect

Content = str | list[dict[str, Any]]


def to_chat_content(parts: list[Part], dialect: Dialect, path: str, *, flat: bool = False) -> Content:
    """A message's content: a string where it is one text (or, if ``flat``, only text), else a list of chat parts."""
    content = [PARTS[part["type"]](part, dialect, f"{path}[{index}]") for index, part in enumerate(parts)]
    texts = [part["text"] for part in content if part["type"] == "text"]
    if len(texts) == len(content) and (flat or len(texts) <= 1):
        return "\n".join(texts)
    return content


def to_tool_content(
    call_id: str, output: str | list[Part], dialect: Dialect, path: str
) -> tuple[Message, list[dict[str, Any]]]:
    """The message that gives the model the output of a call; and what does not go there, as the chat form has only text in it:
    the parts of a user's message that is to follow."""
    if isinstance(output, str):
        return {"role": "tool", "tool_call_id": call_id, "content": output}, []
    content = [PARTS[part["type"]](part, dialect, f"{path}[{index}]") for index, part in enumerate(output)]
    texts = [part["text"] for part in content if part["type"] == "text"]
    others = [part for part in content if part["type"] != "text"]
    if others:
        others.insert(0, {"type": "text", "text": f"Returned by the tool call {call_id}:"})
    return {"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)}, others


def _text(part: Part, _dialect: Dialect, _path: str) -> dict[str, Any]:
    return {"type": "text", "text": part["text"]}


def _image(part: Part, dialect: Dialect, path: str) -> dict[str, Any]:
    url = part["image_url"]
    if not dialect.image_urls and not url.startswith("data:"):
        checks.unsupported(f"{path}.image_url", f"the upstream ({dialect.name}) takes images only as data URLs.")
    detail = {"detail": part["detail"]} if "detail" in part else {}
    return {"type": "image_url", "image_url": {"url": url, **detail}}


def _audio(part: Part, dialect: Dialect, path: str) -> dict[str, Any]:
    if not dialect.audio:
        checks.unsupported(f"{path}.type", f"the upstream ({dialect.name}) takes no audio.")
    return {"type": "input_audio", "input_audio": part["input_audio"]}


def _video(part: Part, dialect: Dialect, path: str) -> dict[str, Any]:
    if not dialect.video:
        checks.unsupported(f"{path}.type", f"the upstream ({dialect.name}) takes no video.")
    return {"type": "video_url", "video_url": {"url": part["video_url"]}}


def _file(part: Part, dialect: Dialect, path: str) -> dict[str, Any]:
    """Text is inlined under its name; PDF goes where the dialect can take it."""
    where = f"{path}.file_data"
    data = _decoded(part["file_data"], where)
    name = part.get("filename")
    if data.startswith(b"%PDF-"):
        if not dialect.pdf:
            checks.unsupported(where, f"the upstream ({dialect.name}) takes no PDF; send its text.")
        return {"type": "file", "file": {"file_data": part["file_data"], **({"filename": name} if name else {})}}
    try:
        text = data.decode()
    except UnicodeDecodeError:
        checks.unsupported(where, "it is neither UTF-8 text nor PDF.")
    return {"type": "text", "text": f"{name}:\n{text}" if name else text}


def _decoded(data: str, path: str) -> bytes:
    """``data`` is a data URL, or bare base64 (OpenAI reference, "File inputs")."""
    if data.startswith("data:"):
        head, _, data = data.partition(",")
        if not head.endswith(";base64"):
            raise BadRequest(f"Invalid '{path}': expected a base64 data URL.", param=path, code="invalid_value")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest(f"Invalid '{path}': expected base64.", param=path, code="invalid_value") from None


PARTS: dict[str, Callable[[Part, Dialect, str], dict[str, Any]]] = {
    "input_text": _text,
    "output_text": _text,
    "text": _text,
    "input_image": _image,
    "input_file": _file,
    "input_audio": _audio,
    "input_video": _video,
}
