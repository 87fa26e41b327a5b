"""A browser for the tests of the pages: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.servers import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
try:
    from playwright import sync_api as playwright
except ModuleNotFoundError:
    CHROMIUM, playwright = "", None  # type: ignore[assignment, unused-ignore]
expect: Any = playwright.expect if CHROMIUM else None
if CHROMIUM:
    expect.set_options(timeout=PATIENCE * 1000)  # by default 5 s, which a busy machine exceeds
needs_browser = pytest.mark.skipif(
    not CHROMIUM, reason="the inspector's pages are NOT tested: there is no chromium, or no playwright (run scripts/browser)"
)

FLAGS = ["--no-sandbox", "--headless", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]


@pytest.fixture(scope="session")
def look() -> Iterator[Any]:
    """Return a function that calls another one with a page of the browser, and checks that the console stayed empty.

    `expected` is part of the faults that the page must log, such as a status, because the browser logs all refusals.

    The browser has a thread of its own, because Playwright's interface does not work in a thread with an event loop.
    """
    with ThreadPoolExecutor(1) as thread:
        driver = thread.submit(lambda: playwright.sync_playwright().start()).result()
        browser = thread.submit(lambda: driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)).result()

        def run(visit: Callable[[Page], Any], expected: str | None = None, **options: Any) -> Any:
            faults: list[str] = []
            with browser.new_context(**options) as context:
                context.set_default_timeout(PATIENCE * 1000)
                page = context.new_page()
                page.on("console", lambda message: faults.append(message.text))
                page.on("pageerror", lambda error: faults.append(str(error)))
                result = visit(page)
            assert [fault for fault in faults if expected is None or expected not in fault] == []
            return result

        yield lambda visit, **options: thread.submit(run, visit, **options).result()
        thread.submit(browser.close).result()
        thread.submit(driver.stop).result()


def violations(page: Page) -> list[Any]:
    """Return what axe-core finds on a page, with the elements."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    results = axe.Axe().run(page)
    return [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in results.response["violations"]]
