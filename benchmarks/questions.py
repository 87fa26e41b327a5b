"""Questions with known answers, from Debian's packages of documentation: `python -m benchmarks.questions DIRECTORY`.

The questions are those of the frequently asked questions of Perl, Python, Debian and Git. The answer to each one is a document
without the question. The other documents are the sections of the manuals, in which some questions are answered, too. Nothing of
this is part of the project: the packages are downloaded by apt into the directory.
"""

from __future__ import annotations

import argparse
import gzip
import html
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("perl-doc", "python3.11-doc", "debian-faq", "git-doc")
_MIN_ANSWER = 40  # characters
_MIN_SECTION = 200
_TEXTS = (".html", ".txt", ".rst", ".pod", ".md")
_MAX_TEXT = 3_000_000  # bytes
_UNSEEN = re.compile(r"<(script|style|nav|head)\b.*?</\1>", re.DOTALL)
_BREAK = re.compile(r"</?(?:p|div|br|li|h\d|tr|pre|table|ul|ol|dt|dd)\b[^>]*>\s*")
_MARKUP = re.compile(r"<[^>]*>")


class Section(NamedTuple):
    title: str
    text: str


class Question(NamedTuple):
    text: str
    document: int


class Questions(NamedTuple):
    """Questions, and the documents of which one is the answer to each."""

    questions: list[Question]
    documents: list[str]


def load(directory: Path) -> Questions:
    """Return the questions and documents of the packages, which are downloaded if they are not in the directory."""
    root = directory / "files"
    for package in PACKAGES:
        if not (root / package).exists():
            directory.mkdir(parents=True, exist_ok=True)
            subprocess.run(["apt-get", "download", "-qq", package], cwd=directory, check=True)
            archive = max(directory.glob(f"{package}_*.deb"))
            (root / package).mkdir(parents=True)
            subprocess.run(["dpkg-deb", "-x", archive, root / package], check=True)
    return _questions(_answers(root), _manuals(root))


def texts(directory: Path) -> Iterator[str]:
    """Yield the texts of the documents of all packages below `directory/files`, without the markup of HTML."""
    seen = set[int]()
    for path in sorted((directory / "files").rglob("*")):
        if path.suffix not in _TEXTS or path.is_symlink() or path.stat().st_size > _MAX_TEXT:
            continue
        text = path.read_text(errors="replace")
        if hash(text) not in seen:
            seen.add(hash(text))
            yield html.unescape(_MARKUP.sub("", _BREAK.sub("\n", _UNSEEN.sub(" ", text)))) if path.suffix == ".html" else text


def _questions(answers: Iterable[Section], manuals: Iterable[Section]) -> Questions:
    questions, documents = dict[str, int](), list[str]()
    for title, text in answers:
        if title.endswith("?") and len(text) >= _MIN_ANSWER and title not in questions:
            questions[title] = len(documents)
            documents.append(text)
    documents += (f"{title}\n\n{text}" for title, text in manuals if len(text) >= _MIN_SECTION)
    return Questions([Question(*one) for one in questions.items()], documents)


def _answers(root: Path) -> Iterator[Section]:
    for path in sorted((root / "perl-doc").rglob("perlfaq[1-9].pod")):
        yield from _pod(path)
    for path in sorted((root / "python3.11-doc").rglob("_sources/faq/*.rst.txt")):
        yield from _rst(path)
    for path in (root / "debian-faq").rglob("debian-faq.en.txt.gz"):
        yield from _debian(gzip.decompress(path.read_bytes()).decode())
    for path in (root / "git-doc").rglob("gitfaq.txt"):
        yield from _git(path.read_text())


def _manuals(root: Path) -> Iterator[Section]:
    for path in sorted((root / "perl-doc").rglob("*.pod")):
        if not path.stem.startswith("perlfaq"):
            yield from _pod(path)
    for path in sorted((root / "python3.11-doc").rglob("_sources/*/*.rst.txt")):
        if path.parent.name not in ("faq", "whatsnew"):
            yield from _rst(path)
    for path in sorted((root / "git-doc").rglob("*.txt")):
        if path.stem != "gitfaq" and "RelNotes" not in path.parts:
            yield Section(path.stem, path.read_text(errors="replace"))


def _pod(path: Path) -> Iterator[Section]:
    text = re.sub(r"X<[^>]*>", "", path.read_text(errors="replace"))
    text = re.sub(r"[A-Z]<<* ?([^<>]*?) ?>>*", r"\1", text)
    parts = re.split(r"^=head[123] (.*)$", re.sub(r"^=(?!head)\S+.*$", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
    yield from (Section(title.strip(), body.strip()) for title, body in zip(parts[1::2], parts[2::2], strict=True))


def _rst(path: Path) -> Iterator[Section]:
    text = re.sub(r":[\w:]+:`([^`<]*)(?: <[^`]*>)?`", r"\1", path.read_text(errors="replace"))
    parts = re.split(r"^(\S.*)\n([-=~^*]){4,}\n", text, flags=re.MULTILINE)
    yield from (Section(title.strip(), body.strip()) for title, body in zip(parts[1::3], parts[3::3], strict=True))


def _debian(text: str) -> Iterator[Section]:
    parts = re.split(r"^\d+\.\d+\. (.*(?:\n[^\n]+)*)\n\n", re.split(r"\nChapter\s1\.", text, maxsplit=1)[1], flags=re.MULTILINE)
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        yield Section(" ".join(title.split()), re.sub(r"^    ", "", body, flags=re.MULTILINE).strip())


def _git(text: str) -> Iterator[Section]:
    parts = re.split(r"^(.*\?)::$", text, flags=re.MULTILINE)
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        yield Section(title.strip(), re.sub(r"\[\[.*\]\]\s*$", "", body).strip())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.questions", description="Build the questions.")
    parser.add_argument("directory", type=Path)
    found = load(parser.parse_args().directory)
    sizes = sorted(map(len, found.documents))
    print(f"{len(found.questions)} questions, {len(sizes)} documents, median {sizes[len(sizes) // 2]} characters")
    for question in found.questions[:: max(1, len(found.questions) // 20)]:
        print(f"  {question.text}  ->  {found.documents[question.document][:80]!r}")


if __name__ == "__main__":
    main()
