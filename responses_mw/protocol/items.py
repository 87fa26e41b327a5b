"""Input items: what a caller may send as ``input``, checked and brought into one form.

An item keeps the fields that are not known here (SDK objects come back with more than they were sent with); nulls go. The
content of a message is a list of parts afterwards. To accept another type of item, add a function and a line to ``ITEMS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import BadRequest
from . import checks
from .types import Item, Part

ItemCheck = Callable[[Item, str], Item]
PartCheck = Callable[[Part, str], Part]

CALL_ID_LENGTH = 64
FUNCTION_NAME = r"[a-zA-Z0-9_-]{1,64}"
DETAILS = frozenset({"low", "high", "auto", "original"})
STATUSES = frozenset({"in_progress", "completed", "incomplete"})
ROLES = frozenset({"user", "assistant", "system", "developer"})


ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def user_message(text: str) -> Item:
    """The item that a bare string stands for."""
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def parse_input(value: Any, path: str = "input", most: int | None = None) -> list[Item]:
    """``input`` as a list of items, at ``most`` so many."""
    if isinstance(value, str):
        return [user_message(value)]
    if not isinstance(value, list):
        checks.wrong_type(path, "a string or an array of objects", value)
    return [item(one, f"{path}[{index}]") for index, one in enumerate(checks.array(value, path, most=most))]


def item(value: Any, path: str) -> Item:
    """One input item. Without a type it is a message, if it has a role, or else a reference."""
    checked = checks.mapping(value, path)
    if "type" not in checked:
        if not checked.keys() & {"role", "id"}:
            checks.missing(f"{path}.type")
        checked["type"] = "message" if "role" in checked else "item_reference"
    kind = checks.string(checked["type"], f"{path}.type")
    if kind not in ITEMS:
        checks.wrong_value(f"{path}.type", kind, ITEMS.keys())
    if "id" in checked:
        checks.string(checked["id"], f"{path}.id", longest=256)
    if "status" in checked:
        checks.one_of(checked["status"], f"{path}.status", STATUSES)
    return ITEMS[kind](checked, path)


# -- one function for each type of item --------------------------------------------------------------------------------


def _message(value: Item, path: str) -> Item:
    role = checks.one_of(checks.required(value, "role", path, checks.string), f"{path}.role", ROLES)
    content = value.get("content")
    if content is None:
        checks.missing(f"{path}.content")
    if isinstance(content, str):
        return {**value, "content": [_text_part(role, content)]}
    if not isinstance(content, list):
        checks.wrong_type(f"{path}.content", "a string or an array of objects", content)
    parts = ASSISTANT_PARTS if role == "assistant" else INPUT_PARTS
    return {**value, "content": content_parts(content, f"{path}.content", parts)}


def _text_part(role: str, text: str) -> Part:
    return (
        {"type": "output_text", "text": text, "annotations": []}
        if role == "assistant"
        else {"type": "input_text", "text": text}
    )


def _function_call(value: Item, path: str) -> Item:
    _call_id(value, path)
    checks.required(value, "name", path, checks.string)
    checks.required(value, "arguments", path, checks.string)
    if "namespace" in value:
        checks.unsupported(f"{path}.namespace", "tools in namespaces are not served yet.")
    return value


def _function_call_output(value: Item, path: str) -> Item:
    _call_id(value, path)
    output = value.get("output")
    if output is None:
        checks.missing(f"{path}.output")
    if isinstance(output, str):
        return value
    if not isinstance(output, list):
        checks.wrong_type(f"{path}.output", "a string or an array of objects", output)
    return {**value, "output": content_parts(output, f"{path}.output", INPUT_PARTS)}


def _call_id(value: Item, path: str) -> None:
    checks.required(value, "call_id", path, lambda one, where: checks.string(one, where, longest=CALL_ID_LENGTH))


def _reasoning(value: Item, path: str) -> Item:
    for name, parts in (("summary", {"summary_text": _text}), ("content", {"reasoning_text": _text, "text": _text})):
        if name in value:
            listed = checks.array(value[name], f"{path}.{name}")
            value[name] = content_parts(listed, f"{path}.{name}", parts)
    if "encrypted_content" in value:
        checks.string(value["encrypted_content"], f"{path}.encrypted_content")
    return {**value, "summary": value.get("summary", [])}


def _item_reference(value: Item, path: str) -> Item:
    checks.required(value, "id", path, checks.string)
    return {"type": "item_reference", "id": value["id"]}


# -- one function for each type of content part ------------------------------------------------------------------------


def content_parts(values: list[Any], path: str, kinds: Mapping[str, PartCheck]) -> list[Part]:
    """The parts of a content list, of which ``kinds`` may occur."""
    parts = []
    for index, value in enumerate(values):
        where = f"{path}[{index}]"
        part = checks.mapping(value, where)
        kind = checks.required(part, "type", where, checks.string)
        if kind not in kinds:
            checks.wrong_value(f"{where}.type", kind, kinds.keys())
        parts.append(kinds[kind](part, where))
    return parts


def _text(part: Part, path: str) -> Part:
    checks.required(part, "text", path, checks.string)
    return part


def _refusal(part: Part, path: str) -> Part:
    checks.required(part, "refusal", path, checks.string)
    return part


def _image(part: Part, path: str) -> Part:
    if "detail" in part:
        checks.one_of(part["detail"], f"{path}.detail", DETAILS)
    if "file_id" in part:
        checks.unsupported(
            f"{path}.file_id", "there is no files API here; send the image as 'image_url' with a URL or a data URL."
        )
    url = checks.required(part, "image_url", path, checks.string)
    if not url.startswith(("http://", "https://", "data:image/")):
        message = "must be an http(s) URL or a data URL ('data:image/png;base64,...')."
        raise BadRequest(f"Invalid '{path}.image_url': {message}", param=f"{path}.image_url", code="invalid_image_url")
    return part


def _file(part: Part, path: str) -> Part:
    for name, instead in (("file_id", "there is no files API here"), ("file_url", "files are not fetched from URLs")):
        if name in part:
            checks.unsupported(f"{path}.{name}", f"{instead}; send the content as 'file_data'.")
    checks.required(part, "file_data", path, checks.string)
    if "filename" in part:
        checks.string(part["filename"], f"{path}.filename")
    return part


def _audio(part: Part, path: str) -> Part:
    audio = checks.required(part, "input_audio", path, checks.mapping)
    checks.required(audio, "data", f"{path}.input_audio", checks.string)
    checks.required(audio, "format", f"{path}.input_audio", checks.string)
    return {**part, "input_audio": audio}


def _video(part: Part, path: str) -> Part:
    checks.required(part, "video_url", path, checks.string)
    return part


INPUT_PARTS: dict[str, PartCheck] = {
    "input_text": _text,
    "text": _text,
    "output_text": _text,  # clients replay what they got under another role
    "input_image": _image,
    "input_file": _file,
    "input_audio": _audio,
    "input_video": _video,
}
ASSISTANT_PARTS: dict[str, PartCheck] = {"output_text": _text, "refusal": _refusal, "input_text": _text, "text": _text}

ITEMS: dict[str, ItemCheck] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "reasoning": _reasoning,
    "item_reference": _item_reference,
}
