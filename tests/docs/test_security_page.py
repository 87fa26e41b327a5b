"""The tests that the security page names exist, and the policy and the page link to each other."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "inside" / "security.md").read_text()


def test_every_threat_is_covered_by_tests_that_exist() -> None:
    rows = re.findall(r"^\| (?!threat|---)[^|]+\|[^|]+\|([^|]+)\|$", PAGE.partition("## Threats")[2], re.MULTILINE)
    assert len(rows) > 30
    for cited in rows:
        tests = re.findall(r"`([\w/]+\.py)::(test_\w+)`", cited)
        assert tests, cited
        for file, name in tests:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), f"{file}::{name}"


def test_the_policy_describes_how_to_report_and_its_links_exist() -> None:
    policy = (ROOT / "SECURITY.md").read_text()
    assert "Report a vulnerability" in policy
    for folder, text in ((ROOT, policy), (ROOT / "docs" / "inside", PAGE)):
        for target, anchor in re.findall(r"\]\((?!https:)([^)#]*)(?:#([\w-]+))?\)", text):
            linked = (folder / target).read_text() if target else text
            headings = re.findall(r"^#+ (.+)$", linked, re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert not anchor or anchor in slugs, f"{target}#{anchor}"
