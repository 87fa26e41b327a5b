"""The text of documents is extracted, and malformed and hostile documents fail."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from responses_mw.files import extraction
from responses_mw.files.extraction import ExtractionFailed, Extractor

DOCUMENTS = Path(__file__).parents[1] / "data" / "documents"
_HEADER = "xmlns:w='http://schemas.openxmlformats.org/wordprocessingml/2006/main'"


def pdf(*lines: str) -> bytes:
    """Return a PDF of one page with these lines."""
    text = "".join(f"({line}) Tj 0 -20 Td " for line in lines)
    content = f"BT /F1 12 Tf 50 700 Td {text}ET"
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
        f"<< /Length {len(content)} >>\nstream\n{content}\nendstream",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    body, places = "%PDF-1.4\n", []
    for number, one in enumerate(objects, 1):
        places.append(len(body))
        body += f"{number} 0 obj\n{one}\nendobj\n"
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    end = f"trailer << /Size 6 /Root 1 0 R >>\nstartxref\n{len(body)}\n%%EOF"
    return f"{body}xref\n0 6\n0000000000 65535 f \n{table}{end}".encode()


def archive(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in members.items():
            made.writestr(name.replace("__", "/").replace("_xml", ".xml"), data)
    return file.getvalue()


def docx(document: bytes) -> bytes:
    return archive(word__document_xml=document)


async def failure(data: bytes, name: str = "a") -> str:
    with pytest.raises(ExtractionFailed) as raised:
        await Extractor().extract(data, name)
    return str(raised.value)


@pytest.mark.parametrize(
    ("data", "name", "text"),
    [
        (b"Hello", "a.txt", "Hello"),
        ("# Überschrift".encode(), "a.md", "# Überschrift"),
        (b"\xef\xbb\xbfa,b\n1,2", "a.csv", "a,b\n1,2"),
        ("naïve".encode("utf-16"), "a.json", "naïve"),
        (b"<!DOCTYPE html><title>T</title><script>x</script><body><p>a &amp; b<p>c", "a", "T\na & b\nc"),
        (b"<p>one<style>x</style>two</p>", "a.HTM", "onetwo"),
        (pdf("Hello world", "Second line"), "a.txt", "Hello world\nSecond line"),
        ((DOCUMENTS / "a.docx").read_bytes(), "a", "Leave policy\nEmployees have 28 days of leave.\ncell 00"),
        ((DOCUMENTS / "a.pptx").read_bytes(), "a", "Slide 1\nRoadmap\nFirst\nSecond\n\nNotes\nSay hello"),
        ((DOCUMENTS / "a.xlsx").read_bytes(), "a", "Prices\nname\tprice\napple\t1.5\n\nTwo\nb\t\t1"),
    ],
    ids=["text", "markdown", "csv", "utf-16", "html", "htm", "pdf", "docx", "pptx", "xlsx"],
)
async def test_the_text_of_a_document_is_extracted(data: bytes, name: str, text: str) -> None:
    assert (await Extractor().extract(data, name)).strip().startswith(text)


ENTITIES = b"<!DOCTYPE x [<!ENTITY a 'aaaaaaaaaa'><!ENTITY b '&a;&a;&a;&a;'>]><x>&b;</x>"
HOSTILE: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    "nothing": (b"", "no text"),
    "blank": (b" \n\t ", "no text"),
    "binary": (bytes(range(256)), "neither"),
    "null": (b"a\0b", "neither"),
    "image": (b"\x89PNG\r\n\x1a\n123", "image"),
    "old office": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1123", "old Office format"),
    "an archive": (archive(a_xml=b"<a/>"), "archive"),
    "a broken archive": (b"PK\x03\x04 nonsense", "malformed"),
    "a damaged archive": (docx(b"<a/>")[:-30], "malformed"),
    "entities": (docx(ENTITIES), "entities"),
    "an external entity": (docx(b"<!DOCTYPE x [<!ENTITY a SYSTEM 'file:///etc/passwd'>]><x>&a;</x>"), "entities"),
    "deep XML": (docx(b"<a>" * 100_000), "nested too deep"),
    "broken XML": (docx(b"<a>"), "malformed XML"),
    "a zip bomb": (lambda: docx(b"<w:p " + _HEADER.encode() + b">" + b" " * (300 * 1024 * 1024)), "too large"),
    "many members": (lambda: archive(word__document_xml=b"<a/>", **{f"m{n}": b"" for n in range(11_000)}), "too many parts"),
    "an empty PDF": (b"%PDF-1.7\n", "malformed"),
    "a damaged PDF": (pdf("Hello")[:60], "malformed"),
    "a PDF without text": (pdf(), "scanned"),
    "deep HTML": (b"<html>" + b"<div>" * 200_000, "no text"),
    "wrong macros": (archive(word__vbaProject_bin=b"x", word__document_xml=b"<a/>"), "no text"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_document_fails_with_a_readable_reason(name: str) -> None:
    data, reason = HOSTILE[name]
    message = await failure(data if isinstance(data, bytes) else data())
    assert reason in message
    assert message.endswith(".")


@pytest.mark.parametrize(
    ("style", "value", "text"),
    [
        ("0", "45000", "45000"),
        ("1", "45000", "2023-03-15"),
        ("1", "45000.75", "2023-03-15 18:00:00"),
        ("2", "0.5", "12:00:00"),
        ("3", "46354", "2026-11-28"),
        ("4", "45000", "45000"),
        ("5", "1.25", "30:00:00"),
        ("1", "59", "1900-02-28"),
        ("1", "61", "1900-03-01"),
        ("1", "-1", "-1"),
        ("1", "1e300", "1e300"),
        ("1", "nan", "nan"),
        ("1", "unknown", "unknown"),
        ("99", "45000", "45000"),
        ("9" * 5000, "45000", "45000"),
    ],
)
async def test_only_cells_with_a_date_format_become_dates(style: str, value: str, text: str) -> None:
    formats = [0, 14, 21, 164, 165, 166]
    codes = {164: "[$-407]d\\. mmmm yyyy;@", 165: "0.00 &quot;dd&quot;", 166: "[h]:mm"}
    declared = "".join(f"<numFmt numFmtId='{number}' formatCode='{code}'/>" for number, code in codes.items())
    cells = "".join(f"<xf numFmtId='{number}'/>" for number in formats)
    styles = f"<styleSheet>{declared}<cellStyleXfs><xf numFmtId='14'/></cellStyleXfs><cellXfs>{cells}</cellXfs></styleSheet>"
    sheet = f"<worksheet><row><c r='A1' s='{style}'><v>{value}</v></c></row></worksheet>"
    assert await sheet_of(styles, sheet) == text


async def test_dates_of_a_workbook_with_the_1904_epoch_are_correct() -> None:
    styles = "<styleSheet><cellXfs><xf numFmtId='14'/></cellXfs></styleSheet>"
    sheet = "<worksheet><row><c r='A1' s='0'><v>1</v></c><c r='B1' s='0' t='str'><v>2</v></c></row></worksheet>"
    assert await sheet_of(styles, sheet, "<workbookPr date1904='1'/>") == "1904-01-02\t2"


async def sheet_of(styles: str, sheet: str, properties: str = "") -> str:
    workbook = f"<workbook>{properties}<sheets><sheet name='S'/></sheets></workbook>"
    parts = {"xl__workbook_xml": workbook, "xl__styles_xml": styles, "xl__worksheets__sheet1_xml": sheet}
    text = await Extractor().extract(archive(**{name: part.encode() for name, part in parts.items()}))
    return text.strip().removeprefix("S\n")


async def test_a_document_or_text_over_the_maximum_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "MAX_TEXT_BYTES", 100_000)
    body = b"".join(b"<w:p><w:r><w:t>%d</w:t></w:r></w:p>" % n for n in range(50_000))
    assert "longer than" in await failure(docx(b"<w:b " + _HEADER.encode() + b">" + body + b"</w:b>"))
    assert "longer than" in await failure(b"x" * 100_001)
    monkeypatch.setattr(extraction, "MAX_DOCUMENT_BYTES", 10)
    assert "larger than" in await failure(b"x" * 11)


async def test_a_parser_process_that_does_not_start_is_logged_and_fails_the_file(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(extraction, "_LIMITS", {})
    assert await failure(pdf("Hello")) == "This server cannot read documents."
    assert "KeyError" in caplog.text


async def test_a_parser_imports_packages_that_only_the_server_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    # In a virtual environment, the base interpreter does not find the packages, as if PYTHONPATH named them.
    monkeypatch.setattr(sys, "executable", str(Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")))
    assert "Hello" in await Extractor().extract(pdf("Hello"))


async def test_a_parser_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "_TIMEOUT", 0.0)
    assert "too long" in await failure(pdf("Hello"))


async def test_a_parser_that_takes_too_much_memory_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "_LIMITS", extraction._LIMITS | {"memory_bytes": 120 * 1024 * 1024})
    document = b"<w:p " + _HEADER.encode() + b">" + b" " * (200 * 1024 * 1024) + b"</w:p>"
    assert "memory" in await failure(docx(document))


@pytest.mark.skipif(sys.platform != "linux", reason="needs seccomp and Landlock")
@pytest.mark.parametrize(
    "attempt",
    [
        "open('/etc/passwd')",
        "open('/tmp/x', 'w')",
        "__import__('socket').socket()",
        "__import__('os').fork()",
        "__import__('os').execv('/bin/true', ['true'])",
        "__import__('os').kill(__import__('os').getppid(), 0)",
    ],
)
def test_a_parser_cannot_open_files_use_the_network_or_start_processes(attempt: str) -> None:
    program = (
        f"import sys, os, socket; sys.path.insert(0, {extraction._JAIL!r}); from jail import parse\n"
        f"parse._confine({extraction._LIMITS!r}, [])\n"
        f"try: {attempt}\nexcept OSError as error: print('refused')\nelse: print('permitted')"
    )
    result = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
    assert "permitted" not in result.stdout
    assert result.stdout == "refused\n" or result.returncode < 0, result.stderr


async def test_more_documents_than_parsers_are_all_read() -> None:
    extract = Extractor().extract
    texts = await asyncio.gather(*(extract(pdf(f"Document {number}")) for number in range(5)))
    assert [text.strip() for text in texts] == [f"Document {number}" for number in range(5)]
