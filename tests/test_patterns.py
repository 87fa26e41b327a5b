"""Regular expressions that every supported Python treats alike."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.paths import ROOT

MODULES = sorted((ROOT / "responses_mw").rglob("*.py"))
POSSESSIVE_GROUP = re.compile(r"(?<!\\)\)\s*(?:[*+?]|\{[0-9,]+\})\+")


def patterns(source: str) -> list[str]:
    """Return the texts of the patterns that a module compiles."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    compiled = [call.args[0] for call in calls if ast.unparse(call.func) == "re.compile" and call.args]
    texts = [node.value for pattern in compiled for node in ast.walk(pattern) if isinstance(node, ast.Constant)]
    return [text.decode("latin-1") if isinstance(text, bytes) else str(text) for text in texts]


def test_no_group_is_repeated_possessively() -> None:
    """Python before 3.11.5 skips the beginning of a repetition that fails: https://github.com/python/cpython/issues/106052."""
    found = {str(path): text for path in MODULES for text in patterns(path.read_text()) if POSSESSIVE_GROUP.search(text)}
    assert found == {}, "use an atomic group instead: (?>(?:...)*)"


@pytest.mark.parametrize("source", ["re.compile(r'(?:a|b)*+')", "re.compile(rb'x (?: a ) {2,3}+' % a)"])
def test_a_group_that_is_repeated_possessively_is_found(source: str) -> None:
    assert [text for text in patterns(source) if POSSESSIVE_GROUP.search(text)]
