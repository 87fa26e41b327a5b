"""A process that converts one document to text, without access to files, network or other processes.

It reads the document from its standard input, and writes the text to its standard output. If the document cannot be converted,
it writes a sentence for the user instead, and exits with `FAILED` or `UNSUPPORTED`. Any other end means that the process
exceeded a limit.

PDF needs pypdfium2. On 16 manuals from Debian, PDFium finds the words of all of them, at 0.1 to 0.5 s each. pypdf takes ten
times as long, and loses most spaces of three of them, as pdfminer (markitdown) does. kreuzberg is PDFium in 76 MB. PDFium is
not memory-safe, which is one reason for this process.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any, NoReturn

from . import isolation, seccomp
from .errors import Unreadable, Unsupported
from .office import read_office

FAILED, UNSUPPORTED = 3, 4
_FORBIDDEN = {"script", "style", "template", "noscript", "head"}
_BLOCKS = frozenset(
    ["p", "div", "br", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "section", "article", "table", "pre", "hr", "dt", "dd"]
)
_HYPHENS = re.compile("[\x02\ufffe]")  # PDFium's marks for a word that continues in the next line


def main(kind: str, limits: dict[str, int], packages: list[str]) -> NoReturn:
    """Convert the document on standard input to text. `limits` maps the names in `isolation.LIMITS` to values."""
    parse = _PARSERS[kind]
    prepared = _prepare_pdf() if kind == "pdf" else None  # imports are no longer possible in the jail
    _confine(limits, packages)
    data = sys.stdin.buffer.read()
    output = io.TextIOWrapper(sys.stdout.buffer, "utf-8", errors="replace", newline="\n")
    try:
        for text in parse(data, prepared):
            output.write(text)
    except Unsupported as error:
        _fail(str(error), UNSUPPORTED)
    except Unreadable as error:
        _fail(str(error))
    except MemoryError:
        _fail("The document takes too much memory.")
    except RecursionError:
        _fail("The document is nested too deep.")
    except Exception as error:  # noqa: BLE001 (the outer edge of the process; parsers raise anything for malformed documents)
        _fail(f"The document is malformed ({type(error).__name__}).")
    output.flush()
    sys.exit(0)


def _fail(message: str, status: int = FAILED) -> NoReturn:
    sys.stderr.write(message)
    sys.stderr.flush()
    sys.exit(status)


def _confine(limits: dict[str, int], packages: list[str]) -> None:
    """Give up all rights that this process has and does not need, as far as the kernel supports it."""
    isolation.limit(limits, own_count=False, own_user=False)
    if sys.platform != "linux":
        return
    isolation.drop_privileges(None)
    try:
        isolation.landlock_version()
    except OSError:  # the kernel lacks Landlock; the process can still read files, but not send or write anything
        pass
    else:
        isolation.restrict_files("/dev/null", packages)
    seccomp.install(alone=True)


# -- PDF -----------------------------------------------------------------------------------------------------------------


def _prepare_pdf() -> Any:
    try:
        import pypdfium2
    except ModuleNotFoundError:
        return None
    return pypdfium2


def _pdf(data: bytes, pdfium: Any) -> Iterator[str]:
    if pdfium is None:
        raise Unsupported("PDF needs pypdfium2: install responses-mw with the extra 'files'.")
    try:
        document = pdfium.PdfDocument(data)
    except pdfium.PdfiumError as error:
        reason = "is protected by a password" if "password" in str(error).lower() else "is malformed"
        raise Unreadable(f"The PDF {reason}.") from None
    for number in range(len(document)):
        page = document[number]
        text = page.get_textpage().get_text_bounded()
        page.close()
        yield _HYPHENS.sub("", text.replace("\r\n", "\n")) + "\n\n"


# -- HTML ----------------------------------------------------------------------------------------------------------------


class _HTML(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._hidden: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _FORBIDDEN:
            self._hidden.append(tag)
        elif tag == "body":
            self._hidden.clear()
        elif tag in _BLOCKS:
            self.pieces.append("\n")
        elif tag in ("td", "th"):
            self.pieces.append("\t")

    def handle_endtag(self, tag: str) -> None:
        if self._hidden and self._hidden[-1] == tag:
            self._hidden.pop()
        elif tag in _BLOCKS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.pieces.append(data)


def _html(data: bytes, _: Any) -> Iterator[str]:
    parser = _HTML()
    parser.feed(data.decode("utf-8", "replace"))
    parser.close()
    text = re.sub(r"[^\S\n]+", " ", "".join(parser.pieces))
    yield re.sub(r" ?\n ?(?:\n ?)+", "\n\n", text).strip()


_PARSERS: dict[str, Callable[[bytes, Any], Iterator[str]]] = {
    "pdf": _pdf,
    "office": lambda data, _: read_office(data),
    "html": _html,
}
