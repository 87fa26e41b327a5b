"""The documentation agrees with the code: settings, routes, links and examples of commands."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from responses_mw import Settings
from responses_mw.asgi.routes import ROUTES
from responses_mw.sandbox.jail.isolation import LEVELS
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from tests.support.servers import Start

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
REPOSITORY = "https://github.com/responses-mw/responses-mw"


@pytest.mark.parametrize("name", ["settings", "openapi"])
def test_generated_files_are_up_to_date(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--check"])
    script = runpy.run_path(str(ROOT / "scripts" / name))
    assert script["main"]() == 0, f"run scripts/{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_existing_targets(page: Path) -> None:
    text = page.read_text()
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked.read_text()), f"{target}#{anchor}"


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_is_wrapped(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    long = [
        line for line in prose.splitlines() if len(line) > 100 and not line.startswith(("|", "  |", "    ")) and " " in line
    ]
    assert not long, "wrap these lines at 100 characters"


_SETTINGS = re.compile(r"Settings\(((?:[^()]|\([^()]*\))+)\)")


@pytest.mark.parametrize(
    "arguments", [found for page in PAGES for found in _SETTINGS.findall(page.read_text()) if found != "..."]
)
def test_settings_in_examples_are_valid(arguments: str) -> None:
    Settings(**eval(f"dict({arguments})"))


def test_the_sandbox_page_shows_the_isolation_as_the_sandbox_prints_it() -> None:
    assert f", isolation: {LEVELS[0].name}\n" in (ROOT / "docs" / "guides" / "sandbox.md").read_text()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


async def test_the_reference_lists_the_methods_of_every_path(start_at: Start) -> None:
    """A method that no path has is refused with those that it has."""
    listed: dict[str, set[str]] = {}
    for method, path in re.findall(
        r"^\| `(GET|POST|DELETE) (/v1/[\w/{}]+)`", (ROOT / "docs" / "reference" / "api.md").read_text(), re.MULTILINE
    ):
        listed.setdefault(path, set()).add(method)
    assert listed.keys() == ROUTES.keys()
    http = start_at("proxy").http
    for path, methods in listed.items():
        concrete = re.sub(r"{\w+}", "id", path)
        answer = await http.request("PUT", concrete)
        assert set(answer.headers["allow"].split(", ")) == methods, path


def test_every_setting_that_a_page_names_as_a_variable_exists() -> None:
    from responses_mw.cli import COMMANDS
    from responses_mw.settings import variables

    known = {name for command in COMMANDS.values() for name in variables(command)}
    for page in PAGES:
        for name in re.findall(r"\bRESPONSES_MW_[A-Z_]+[A-Z]\b", page.read_text()):
            assert name in known or name in ("RESPONSES_MW_SANDBOX", "RESPONSES_MW_DEMO"), f"{page.name}: {name}"


def test_the_recipes_name_classes_and_methods_that_exist() -> None:
    modules = [path.read_text() for folder in ("responses_mw", "tests/support") for path in (ROOT / folder).rglob("*.py")]
    named = {
        (kind, member)
        for page in (ROOT / "docs" / "recipes").glob("*.md")
        for kind, member in re.findall(r"`([A-Z]\w+)\.(\w+)`", page.read_text())
    }
    assert len(named) > 5
    unknown = [
        f"{kind}.{member}"
        for kind, member in named
        if not any(
            re.search(rf"^class {kind}\b", text, re.MULTILINE) and re.search(rf"\b(def )?{member}\b", text) for text in modules
        )
    ]
    assert unknown == []
