"""From what an MCP tool returned to what the model reads and the call's item shows."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Any

import orjson
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from ..protocol.types import Part
from .result import Result

_IMAGE_TYPE = re.compile(r"image/[a-z0-9.+-]{1,64}")


def to_result(returned: CallToolResult, most_bytes: int) -> Result:
    """What the tool ``returned``, cut at ``most_bytes`` of text and images together. The item's ``output`` describes images."""
    parts = list(_bounded(_parts(returned), most_bytes))
    text = "\n".join(part["text"] if part["type"] == "input_text" else _described(part) for part in parts)
    if returned.is_error:
        error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]}
        return Result(f"The tool failed: {text}" if text else "The tool failed.", {"error": error}, failed=True)
    pictured = any(part["type"] == "input_image" for part in parts)
    return Result(parts if pictured else text, {"output": text})


def _parts(returned: CallToolResult) -> Iterator[Part]:
    parts = [_part(block) for block in returned.content]
    if returned.structured_content is not None and not any(isinstance(block, TextContent) for block in returned.content):
        parts.append(_text(orjson.dumps(returned.structured_content).decode()))
    yield from parts


def _part(block: ContentBlock) -> Part:
    match block:
        case TextContent(text=text):
            return _text(text)
        case ImageContent(data=data, mime_type=kind):
            return _image(data, kind) or _text(f"[an image of type {kind[:64]} that cannot be shown]")
        case AudioContent(data=data, mime_type=kind):
            return _text(f"[audio of type {kind[:64]}, {_size(data)} bytes: it cannot be played to you]")
        case ResourceLink(uri=uri, name=name, description=description):
            return _text(f"[resource {name}: {uri}]" + (f" {description}" if description else ""))
    return _resource(block.resource)


def _resource(resource: TextResourceContents | BlobResourceContents) -> Part:
    if isinstance(resource, TextResourceContents):
        return _text(f"[resource {resource.uri}]\n{resource.text}")
    kind = resource.mime_type or "unknown"
    told = f"[resource {resource.uri} of type {kind[:64]}, {_size(resource.blob)} bytes: it is not text]"
    return _image(resource.blob, kind) or _text(told)


def _text(text: str) -> Part:
    return {"type": "input_text", "text": text}


def _image(data: str, kind: str) -> Part | None:
    kind = kind.lower()
    try:
        base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return None
    return {"type": "input_image", "image_url": f"data:{kind};base64,{data}"} if _IMAGE_TYPE.fullmatch(kind) else None


def _size(data: str) -> int:
    return len(data) * 3 // 4 - data[-2:].count("=")


def _bounded(parts: Iterator[Part], most_bytes: int) -> Iterator[Part]:
    left = most_bytes
    for part in parts:
        if part["type"] == "input_image":
            size = len(part["image_url"])
            fits = size <= left
            yield part if fits else _text(f"{_described(part)} left out: it is too large")
            left -= size if fits else 0
        else:
            text = cut(part["text"], left)
            yield _text(text)
            left = max(left - len(text.encode()), 0)


def cut(text: str, most_bytes: int) -> str:
    """``text``, or what of it fits in ``most_bytes``, with a remark."""
    encoded = text.encode()
    if len(encoded) <= most_bytes:
        return text
    return f"{encoded[:most_bytes].decode(errors='ignore')}\n... ({len(encoded)} bytes in all)"


def _described(part: Part) -> str:
    head, _, data = part["image_url"].partition(";base64,")
    return f"[{head.removeprefix('data:')}, {_size(data)} bytes]"


def failure(message: str, *, kind: str = "http_error", code: int = 502) -> Result:
    """The result of a call that gave none; ``kind`` and ``code`` as OpenAI's ``mcp_call.error`` has them."""
    error: dict[str, Any] = {"type": kind, "code": code, "message": message}
    return Result(f"The tool failed: {message}", {"error": error}, failed=True)
