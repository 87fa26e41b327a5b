"""Read files that are made to harm the parsers: each must fail with a sentence, or give a text, within its limits.

    .venv/bin/python -m tests.chaos.hostile_files --files 1000 --seed 7

The kinds are zip bombs, deep and broken XML, broken PDF, huge images, path names, macros, and random damage of sound documents.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import random
import resource
import struct
import sys
import time
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from responses_mw.files.extraction import MAX_TEXT_BYTES, ExtractionFailed, Extractor

DOCUMENTS = Path(__file__).parents[1] / "data" / "documents"
WORD = b"<w:document xmlns:w='http://schemas.openxmlformats.org/wordprocessingml/2006/main'><w:body>"
PARTS = ("word/document.xml", "xl/workbook.xml", "ppt/presentation.xml")
READ = ("word/document.xml", "word/footnotes.xml", "xl/sharedStrings.xml", "xl/worksheets/sheet1.xml", "ppt/slides/slide1.xml")

Draw = random.Random
Maker = Callable[[Draw], bytes]


def archive(members: list[tuple[str, bytes]], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(file, "w", method) as made:  # names are repeated
        for name, data in members:
            made.writestr(zipfile.ZipInfo(name), data, compress_type=method, compresslevel=1)
    return file.getvalue()


def office(draw: Draw, hostile: bytes) -> bytes:
    """Return an archive with `hostile` as one of the parts that are read."""
    part = draw.choice(READ)
    main = {"w": PARTS[0], "x": PARTS[1], "p": PARTS[2]}[part[0]]
    members = {main: b"<x/>", part: hostile}
    return archive([*members.items()])


# -- kinds ---------------------------------------------------------------------------------------------------------------


def zip_bomb(draw: Draw) -> bytes:
    size = draw.choice([1, 1, 30, 300]) << 20
    filler = draw.choice([b" ", b"\0", b"<a/>", b"<a>", b"<c r='A1'><v>1</v></c>", b"<si><t>a</t></si>", b"<w:t>x</w:t>"])
    return office(draw, draw.choice([b"", WORD, b"<a>"]) + filler * (size // len(filler)))


def other_compression(draw: Draw) -> bytes:
    method = draw.choice([zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    return archive([(PARTS[0], WORD + b" " * (draw.choice([1, 200]) << 20))], method)


def false_sizes(draw: Draw) -> bytes:
    """Change sizes and offsets in the directory of an archive."""
    data = bytearray((DOCUMENTS / draw.choice(["a.docx", "a.xlsx", "a.pptx"])).read_bytes())
    place = data.rfind(b"PK\x01\x02")
    for _ in range(draw.randrange(1, 4)):
        struct.pack_into("<I", data, place + draw.choice([16, 20, 24, 42]), draw.choice([0, 1, 2**31, 2**32 - 1]))
    return bytes(data)


def overlapping(draw: Draw) -> bytes:
    """Return an archive in which many members share the same data."""
    inner = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = inner.compress(b" " * (10 << 20)) + inner.flush()
    name = PARTS[0].encode()
    head = struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 0, 8, 0, 0, 0, len(packed), 10 << 20, len(name), 0) + name + packed
    count = draw.choice([100, 9_000, 20_000])
    entries = b"".join(
        struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 20, 20, 0, 8, 0, 0, 0, len(packed), 10 << 20, len(one), 0, 0, 0, 0, 0, 0)
        + one
        for one in (b"ppt/slides/slide%d.xml" % number if number else name for number in range(count))
    )
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count & 0xFFFF, count & 0xFFFF, len(entries), len(head), 0)
    return head + entries + end


def deep_xml(draw: Draw) -> bytes:
    name = draw.choice([b"a", b"w:p", b"si", b"row", b"c", b"tc", b"rPh"])
    depth = draw.choice([999, 1_001, 100_000, 3_000_000])
    return office(draw, draw.choice([b"", WORD]) + b"<%s>" % name * depth)


def odd_xml(draw: Draw) -> bytes:
    name = b"n" * (draw.choice([1, 30]) << 20)
    return office(
        draw,
        draw.choice(
            [
                b"<a " + b" ".join(b"b%d='c'" % number for number in range(300_000)) + b"/>",
                b"<" + name + b"/>",
                b"<a b='" + name + b"'/>",
                b"<?xml version='1.0' encoding='%s'?><a/>" % draw.choice([b"utf-7", b"utf-16", b"x", b"utf-32", b"cp037"]),
                b"<a>" + b"".join(b"<b xmlns:n%d='u'>" % number for number in range(900)) + b"</a>",
                b"<!--" + b"-" * 1_000_000,
                b"<a><![CDATA[" + b"]" * 10_000_000,
                b"<?" + b"p " * 10_000_000,
                b"<a>&#x110000;&#xd800;</a>",
                b"\xff\xfe<\0a\0",
                b"<row>" * 2 + b"<c r='ZZZZZZ99999999999999999999'><v>1</v></c>" * 100_000,
                b"<c t='s'><v>" + b"9" * 10_000_000 + b"</v></c>",
            ]
        ),
    )


def entities(draw: Draw) -> bytes:
    laughs = b"".join(b"<!ENTITY e%d '%s'>" % (n, b"&e%d;" % (n - 1) * 10 if n else b"ha") for n in range(12))
    target = draw.choice([b"file:///etc/passwd", b"http://127.0.0.1:9/", b"file:///dev/zero", b"php://filter"])
    declared = draw.choice(
        [
            laughs,
            b"<!ENTITY e11 SYSTEM '%s'>" % target,
            b"<!ENTITY %% p SYSTEM '%s'> %%p;" % target,
            b"<!ENTITY e11 '" + b"a" * 1_000_000 + b"'>",
        ]
    )
    return office(draw, b"<!DOCTYPE x [" + declared + b"]><x>" + b"&e11;" * draw.choice([1, 10_000]) + b"</x>")


def path_names(draw: Draw) -> bytes:
    names = [
        "../../../../etc/passwd",
        "/etc/passwd",
        "C:\\Windows\\win.ini",
        "word/../../x",
        "a" * 60_000,
        "con",
        "\u202e",
        "-rf",
        " ",
    ]
    members = [(draw.choice(names), b"x") for _ in range(5)] + [(draw.choice(PARTS), b"<a/>") for _ in range(3)]
    draw.shuffle(members)
    return archive(members)


def macros(draw: Draw) -> bytes:
    ole = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + draw.randbytes(5_000)
    if draw.random() < 0.3:
        return ole
    return archive([("word/vbaProject.bin", ole), ("xl/vbaProject.bin", ole), (draw.choice(PARTS), b"<a/>")])


def many_parts(draw: Draw) -> bytes:
    count = draw.choice([9_000, 70_000])
    kind = draw.choice(["xl/worksheets/sheet%d.xml", "ppt/slides/slide%d.xml", "m%d"])
    return archive([(PARTS[1 if kind[0] == "x" else 2], b"<a/>"), *((kind % number, b"<a/>") for number in range(count))])


def pdf(objects: list[bytes], draw: Draw) -> bytes:
    body, places = b"%PDF-1.7\n", []
    for number, one in enumerate(objects, 1):
        places.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, one)
    rows = b"".join(b"%010d 00000 n \n" % place for place in places)
    table = b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, rows)
    start = draw.choice([len(body)] * 3 + [0, 2**40])
    return body + table + b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, start)


def stream(data: bytes, extra: bytes = b"") -> bytes:
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(data), extra, data)


PAGE = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << /Font << /F 5 0 R >> >> >>"
TEXT = b"BT /F 12 Tf (x) Tj ET"
FORM = b"/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << /XObject << /X 6 0 R >> >>"
FONT = b"<< /Type /Font /Subtype /TrueType /FontDescriptor << /FontFile2 6 0 R >> /ToUnicode 6 0 R >>"
SCRIPT = b"<< /Type /Catalog /Pages 2 0 R /OpenAction << /S /Launch /F (/bin/sh) >> /Names << /JavaScript 6 0 R >> >>"
FILTERS = (b"/Filter /JBIG2Decode", b"/Filter /CCITTFaxDecode", b"/Filter /LZWDecode", b"/Filter /Crypt")
# Objects of a PDF to replace, by their numbers: 1 catalog, 2 pages, 3 page, 4 content, 5 font, 6 another one.
PDFS: list[Callable[[Draw], dict[int, bytes]]] = [
    lambda _: {2: b"<< /Type /Pages /Kids [2 0 R 2 0 R] /Count 1000000000 >>"},  # a tree without end
    lambda _: {2: b"<< /Type /Pages /Kids [" + b"3 0 R " * 500_000 + b"] /Count 500000 >>"},
    lambda _: {4: stream(zlib.compress(b"(xxxxxxxx) Tj " * 20_000_000, 9), b"/Filter /FlateDecode")},
    lambda _: {4: stream(zlib.compress(zlib.compress(b"\0" * (200 << 20), 9), 9), b"/Filter [/FlateDecode /FlateDecode]")},
    lambda _: {4: stream(b"[" * 5_000_000)},
    lambda _: {4: stream(b"q " * 2_000_000 + TEXT)},
    lambda _: {
        3: PAGE.replace(b"/Font <<", b"/XObject << /X 6 0 R >> /Font <<"),
        4: stream(b"/X Do"),
        6: stream(b"/X Do /X Do", FORM),
    },
    lambda _: {3: PAGE.replace(b"[0 0 612 792]", b"[-1e38 -1e38 1e38 1e38]")},
    lambda draw: {5: FONT, 6: stream(draw.randbytes(100_000))},
    lambda _: {1: SCRIPT, 4: stream(b"")},
    lambda draw: {4: stream(draw.randbytes(50_000), draw.choice(FILTERS))},
    lambda _: {4: stream(b"BT /F 1 Tf " + b"(%s) Tj " % (b"A" * 30_000) * 1_000 + b"ET")},
    lambda _: {4: b"6 0 R", 6: b"4 0 R"},
]


def hostile_pdf(draw: Draw) -> bytes:
    pages, font = b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>", b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
    sound = {1: b"<< /Type /Catalog /Pages 2 0 R >>", 2: pages, 3: PAGE, 4: stream(TEXT), 5: font, 6: b"null"}
    return pdf([*(sound | draw.choice(PDFS)(draw)).values()], draw)


def image(draw: Draw) -> bytes:
    size = struct.pack(">II", 2**31 - 1, 2**31 - 1)
    return draw.choice(
        [
            b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + size + b"\x08\x06\0\0\0" + draw.randbytes(1_000),
            b"\xff\xd8\xff\xc0\0\x11\x08\xff\xff\xff\xff" + draw.randbytes(1_000),
            b"GIF89a\xff\xff\xff\xff" + draw.randbytes(1_000),
            b"BM" + draw.randbytes(1_000),
            b"II*\0" + draw.randbytes(1_000),
            b"RIFF\xff\xff\xff\xffWEBP" + draw.randbytes(1_000),
            b"\0\0\0\x20ftypavif" + draw.randbytes(1_000),
        ]
    )


def html(draw: Draw) -> bytes:
    piece = draw.choice(
        [
            b"<div>",
            b"<script>",
            b"<!--",
            b"<",
            b"<!",
            b'<a b="',
            b"&#x110000;",
            b"&amp",
            b"</p",
            b"<![CDATA[",
            b"<?x ",
            b"<a " + b"b " * 9,
        ]
    )
    return b"<!DOCTYPE html><html>" + piece * (draw.choice([10_000, 5_000_000]) // len(piece))


def text(draw: Draw) -> bytes:
    return draw.choice(
        [
            b"",
            b"\xef\xbb\xbf",
            b"\xff\xfe",
            b"\xff\xfea",
            b"a\0" * 1_000,
            b"\xed\xa0\x80" * 100,
            b"\xc0\x80" * 100,
            b" \n" * 1_000_000,
            b"x" * (MAX_TEXT_BYTES + 1),
            "\u200b".encode() * 10 + b"\xff",
            draw.randbytes(10_000),
            b"\x1f\x8b" + draw.randbytes(100),
            b"7z\xbc\xaf\x27\x1c" + draw.randbytes(100),
            b"Rar!\x1a\x07" + draw.randbytes(100),
            b"\x7fELF" + draw.randbytes(100),
        ]
    )


def damaged(draw: Draw) -> bytes:
    """Damage a sound document at random places."""
    sound = [(DOCUMENTS / name).read_bytes() for name in ("a.docx", "a.xlsx", "a.pptx")]
    page = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R >>"
    sound.append(
        pdf([b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>", page, stream(b"BT ET")], draw)
    )
    data = bytearray(draw.choice(sound))
    for _ in range(draw.choice([1, 10, 200])):
        data[draw.randrange(8, len(data))] = draw.randrange(256)
    return bytes(data[: draw.choice([len(data), draw.randrange(8, len(data))])])


KINDS: dict[str, Maker] = {
    made.__name__: made
    for made in (
        zip_bomb, other_compression, false_sizes, overlapping, deep_xml, odd_xml, entities, path_names, macros, many_parts, hostile_pdf,
        image, html, text, damaged,
    )
}  # fmt: skip


# -- the program ---------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    sentences: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")


async def attack(kinds: list[str], seed: int) -> Result:
    """Read one file of each of the `kinds`, two at a time."""
    extractor, result, numbers = Extractor(), Result(), iter(range(len(kinds)))

    async def read() -> None:
        for number in numbers:
            name = f"{kinds[number]} {seed}.{number}"
            data = await asyncio.to_thread(KINDS[kinds[number]], random.Random(f"{seed}.{number}"))
            began = time.monotonic()
            outcome = await _read(extractor, data, name, result)
            result.slowest = max(result.slowest, (time.monotonic() - began, name))
            result.outcomes[kinds[number], outcome] += 1
            if result.outcomes.total() % 100 == 0:
                print(f"{result.outcomes.total()} files, {len(result.problems)} problems", flush=True)

    await asyncio.gather(read(), read())
    return result


async def _read(extractor: Extractor, data: bytes, name: str, result: Result) -> str:
    try:
        found = await extractor.extract(data, "a.html" if name.startswith("html") else "a")
    except ExtractionFailed as error:
        if not str(error).endswith(".") or error.code == "server_error":
            result.problems.append(f"{name}: {error.code}: {error}")
        result.sentences[str(error)] += 1
        return error.code
    except Exception as error:  # noqa: BLE001 (this is what the program looks for)
        result.problems.append(f"{name}: {error!r}")
        return "raised"
    if len(found) > MAX_TEXT_BYTES or not found.strip():
        result.problems.append(f"{name}: a text of {len(found)} characters")
    return "text"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    arguments = parser.parse_args()
    kinds = [arguments.kinds[number % len(arguments.kinds)] for number in range(arguments.files)]
    result = asyncio.run(attack(kinds, arguments.seed))
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024  # Linux counts this process before the exec, too
    for (kind, outcome), count in sorted(result.outcomes.items()):
        print(f"{kind:20} {outcome:18} {count}")
    print(*(f"{count:5} {sentence}" for sentence, count in result.sentences.most_common()), sep="\n")
    slowest, where = result.slowest
    print(f"seed {arguments.seed}; slowest: {slowest:.1f} s ({where}); largest parser (or this process): {memory} MiB")
    print(f"problems: {len(result.problems)}", *result.problems, sep="\n  ")
    sys.exit(bool(result.problems))


if __name__ == "__main__":
    main()
