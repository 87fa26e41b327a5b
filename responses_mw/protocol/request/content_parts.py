"""Content parts of input items, checked. To accept another type of part, add a function and a line to ``INPUT_PARTS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import BadRequest
from ..types import Part
from . import checks

PartCheck = Callable[[Part, str], Part]

DETAILS = frozenset({"low", "high", "auto", "original"})


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
SUMMARY_PARTS: dict[str, PartCheck] = {"summary_text": _text}
REASONING_PARTS: dict[str, PartCheck] = {"reasoning_text": _text, "text": _text}
