"""The text of Office documents, which are ZIP archives of XML. The standard library is enough to read them."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator
from xml.parsers import expat

from .dates import format_days, format_kind
from .errors import Unreadable, Unsupported

_MAX_MEMBERS = 10_000
_MAX_UNPACKED = 256 * 1024 * 1024
_MAX_DEPTH = 1_000
_MAX_DIGITS = 9  # of a place; a longer number would be slow to read
_MAX_COLUMNS = 1_000  # of a sheet in which cells are aligned


class _Archive:
    """The members of a ZIP archive. The total size of the members that are read is limited."""

    def __init__(self, data: bytes) -> None:
        self._zip = zipfile.ZipFile(io.BytesIO(data))
        self._left = _MAX_UNPACKED
        members = self._zip.infolist()
        if len(members) > _MAX_MEMBERS:
            raise Unreadable("The document has too many parts.")
        self.names = {member.filename for member in members}

    def read(self, name: str) -> bytes:
        """Return a member. The stated size is not trusted."""
        with self._zip.open(name) as member:
            data = member.read(self._left + 1)
        if len(data) > self._left:
            raise Unreadable("The document is too large when it is unpacked.")
        self._left -= len(data)
        return data

    def numbered(self, pattern: str) -> list[str]:
        """Return the names that match `pattern`, sorted by the number in its group."""
        found = [(int(match[1]), name) for name in self.names if (match := re.fullmatch(pattern, name))]
        return [name for _, name in sorted(found)]


class _XMLReader:
    """Calls `start` and `end` with the local names of elements, and `text` with texts. Refuses entities and deep nesting."""

    def __init__(self) -> None:
        self._depth = 0
        self._parser = expat.ParserCreate(namespace_separator=" ")
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self.text
        self._parser.EntityDeclHandler = self._refuse_entity

    def feed(self, data: bytes) -> None:
        try:
            self._parser.Parse(data, True)
        except expat.ExpatError:
            raise Unreadable("The document contains malformed XML.") from None

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise Unreadable("The document is nested too deep.")
        self.start(_local(name), {_local(key): value for key, value in attributes.items()})

    def _end(self, name: str) -> None:
        self._depth -= 1
        self.end(_local(name))

    def _refuse_entity(self, *_: object) -> None:
        raise Unreadable("The document declares XML entities.")

    def start(self, name: str, attributes: dict[str, str]) -> None:
        """Begin an element."""

    def end(self, name: str) -> None:
        """End an element."""

    def text(self, text: str) -> None:
        """Add a text."""


def _local(name: str) -> str:
    return name.rpartition(" ")[2]


class _Paragraphs(_XMLReader):
    """The text of WordprocessingML and DrawingML: runs (`t`) in paragraphs (`p`), and table cells (`tc`) in rows (`tr`)."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._is_text = False
        self._cells = 0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "t":
            self._is_text = True
        elif name == "tab":
            self.pieces.append("\t")
        elif name in ("br", "cr"):
            self.pieces.append("\n")
        elif name == "tc":
            self._cells += 1

    def end(self, name: str) -> None:
        if name == "t":
            self._is_text = False
        elif name == "p":
            self.pieces.append(" " if self._cells else "\n")
        elif name == "tc":
            self._cells -= 1
            self.pieces.append("\t")
        elif name == "tr":
            self.pieces.append("\n")

    def text(self, text: str) -> None:
        if self._is_text:
            self.pieces.append(text)


def _paragraphs(data: bytes) -> str:
    reader = _Paragraphs()
    reader.feed(data)
    return "".join(reader.pieces)


def _docx(archive: _Archive) -> Iterator[str]:
    yield _paragraphs(archive.read("word/document.xml"))
    for name in ("word/footnotes.xml", "word/endnotes.xml"):
        if name in archive.names:
            yield "\n" + _paragraphs(archive.read(name))


def _pptx(archive: _Archive) -> Iterator[str]:
    for number, name in enumerate(archive.numbered(r"ppt/slides/slide(\d{1,6})\.xml"), 1):
        yield f"Slide {number}\n{_paragraphs(archive.read(name))}\n"
        notes = name.replace("slides/slide", "notesSlides/notesSlide")
        if notes in archive.names:
            yield f"Notes\n{_paragraphs(archive.read(notes))}\n"


class _Strings(_XMLReader):
    """The shared strings (`si`) of a workbook."""

    def __init__(self) -> None:
        super().__init__()
        self.strings: list[str] = []
        self._is_text, self._phonetic = False, 0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "si":
            self.strings.append("")
        elif name == "rPh":
            self._phonetic += 1
        self._is_text = name == "t" and not self._phonetic

    def end(self, name: str) -> None:
        self._is_text = False
        if name == "rPh":
            self._phonetic -= 1

    def text(self, text: str) -> None:
        if self._is_text and self.strings:
            self.strings[-1] += text


class _Styles(_XMLReader):
    """The kinds of the formats of cells: `date`, `time` or "". A cell names one by its place."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []
        self._codes: dict[str, str] = {}
        self._is_of_cells = False

    def start(self, name: str, attributes: dict[str, str]) -> None:
        number = attributes.get("numFmtId", "")
        if name == "numFmt":
            self._codes[number] = attributes.get("formatCode", "")
        elif name == "cellXfs":
            self._is_of_cells = True
        elif name == "xf" and self._is_of_cells:
            known = int(number) if number.isdecimal() and len(number) < _MAX_DIGITS else 0
            self.kinds.append(format_kind(known, self._codes.get(number, "")))

    def end(self, name: str) -> None:
        if name == "cellXfs":
            self._is_of_cells = False


class _Workbook(_XMLReader):
    """The names of the sheets of a workbook, and whether its dates begin in 1904."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.is_1904 = False

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "sheet":
            self.names.append(attributes.get("name", ""))
        elif name == "workbookPr":
            self.is_1904 = attributes.get("date1904", "") in ("1", "true")


class _Sheet(_XMLReader):
    """The cells (`c`) of a sheet, one line for each row."""

    def __init__(self, strings: list[str], kinds: list[str], *, is_1904: bool) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._strings = strings
        self._kinds = kinds
        self._is_1904 = is_1904
        self._row: list[str] = []
        self._type, self._style, self._value, self._is_value = "", "", "", False

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "c":
            self._type, self._style, self._value = attributes.get("t", ""), attributes.get("s", ""), ""
            self._row += [""] * (_column(attributes.get("r", "")) - len(self._row))  # empty cells are not stored
        self._is_value = name in ("v", "t")

    def end(self, name: str) -> None:
        self._is_value = False
        if name == "c":
            self._row.append(self._cell())
        elif name == "row":
            if any(self._row):
                self.lines.append("\t".join(self._row).rstrip("\t"))
            self._row = []

    def text(self, text: str) -> None:
        if self._is_value:
            self._value += text

    def _cell(self) -> str:
        if self._type == "s":
            return _at(self._strings, self._value)
        kind = _at(self._kinds, self._style) if self._type in ("", "n") else ""
        return format_days(self._value, kind, is_1904=self._is_1904) if kind else self._value


def _at(values: list[str], index: str) -> str:
    """Return the value at a place, or "" if there is none."""
    place = int(index) if index.isdecimal() and len(index) < _MAX_DIGITS else len(values)
    return values[place] if place < len(values) else ""


def _column(reference: str) -> int:
    """Return the index of the column of a cell such as `AB7`, or 0 if it is unknown or too large."""
    number = 0
    for letter in reference.rstrip("0123456789")[:4]:
        if not "A" <= letter <= "Z":
            return 0
        number = number * 26 + ord(letter) - ord("A") + 1
    return number - 1 if 0 < number <= _MAX_COLUMNS else 0


def _xlsx(archive: _Archive) -> Iterator[str]:
    strings, styles, workbook = _Strings(), _Styles(), _Workbook()
    for reader, path in ((strings, "xl/sharedStrings.xml"), (styles, "xl/styles.xml")):
        if path in archive.names:
            reader.feed(archive.read(path))
    workbook.feed(archive.read("xl/workbook.xml"))
    for number, path in enumerate(archive.numbered(r"xl/worksheets/sheet(\d{1,6})\.xml")):
        sheet = _Sheet(strings.strings, styles.kinds, is_1904=workbook.is_1904)
        sheet.feed(archive.read(path))
        title = workbook.names[number] if number < len(workbook.names) else f"Sheet {number + 1}"
        yield f"{title}\n" + "\n".join(sheet.lines) + "\n\n"


_OFFICE = {"word/document.xml": _docx, "ppt/presentation.xml": _pptx, "xl/workbook.xml": _xlsx}


def read_office(data: bytes) -> Iterator[str]:
    """Yield the text of a DOCX, PPTX or XLSX document. Raises `Unreadable`, and errors of `zipfile` for a malformed archive."""
    archive = _Archive(data)
    for name, parse in _OFFICE.items():
        if name in archive.names:
            yield from parse(archive)
            return
    raise Unsupported("It is an archive, but not a DOCX, PPTX or XLSX document.")
