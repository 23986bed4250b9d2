"""A real browser for tests of pages, and checks after each visit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")


def violations(page: Page) -> list[str]:
    """Return the elements of a page that violate a rule of axe: WCAG 2.1 AA, such as contrast, names and roles."""
    from axe_playwright_python.sync_playwright import Axe

    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
    found = Axe().run(page, options={"runOnly": {"type": "tag", "values": tags}}).response["violations"]
    return [
        f"{rule['id']} ({rule['help']}): {node['html'][:120]}; {node.get('failureSummary', '')}"
        for rule in found
        for node in rule["nodes"]
    ]


@contextmanager
def a_browser() -> Iterator[Browser]:
    """Yield a headless Chromium: the machine's own, or the one that playwright installed."""
    pytest.importorskip("playwright")
    pytest.importorskip("axe_playwright_python")
    from playwright.sync_api import Error, sync_playwright

    found = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    with sync_playwright() as playwright:
        try:
            # most containers support no sandbox, and the pages are teleloader's own
            arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
            browser = playwright.chromium.launch(executable_path=found, args=arguments)
        except Error as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"needs Chromium: {error}")
        yield browser
        browser.close()


class Visit:
    """One page in its own browser, and its errors."""

    def __init__(self, browser: Browser, **options: Any) -> None:
        self._context = browser.new_context(**options)
        self.page: Page = self._context.new_page()
        self.complaints: list[str] = []
        """Messages of the console, and exceptions of scripts."""
        self.hosts: set[str] = set()
        """Hosts to which the page sent requests."""
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))

    def forgive(self, cause: str) -> None:
        """Drop errors that the test itself caused: those that contain `cause`."""
        self.complaints = [complaint for complaint in self.complaints if cause not in complaint]

    def end(self, url: str) -> None:
        """Close the page; check that it had no errors, and sent requests only to the server."""
        self._context.close()
        assert not self.complaints, self.complaints
        assert self.hosts == {urlsplit(url).netloc}, self.hosts
