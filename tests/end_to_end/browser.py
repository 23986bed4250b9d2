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

CONTRAST = """
() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const [r, g, b, alpha = 1] = channels(getComputedStyle(one).backgroundColor);
      if (alpha > 0) return [r, g, b];
    }
  };
  const holdsText = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const pale = [];
  for (const element of document.querySelectorAll("body *")) {
    if (!holdsText(element) || !element.checkVisibility() || element.closest(".unseen, :disabled")) continue;
    const [one, other] = [luminance(channels(getComputedStyle(element).color)), luminance(ground(element))];
    const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (contrast < 4.5) pale.push(`${contrast.toFixed(1)}: ${element.textContent.trim().slice(0, 60)}`);
  }
  return pale;
}
"""
"""Script that returns visible texts with a contrast below the 4.5 that WCAG requires."""


@contextmanager
def a_browser() -> Iterator[Browser]:
    """Yield a headless Chromium: the machine's own, or the one that playwright installed."""
    pytest.importorskip("playwright")
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
