"""Fixtures of the tests of pages in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.end_to_end.browser import Visit, a_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start a browser for all tests of this module."""
    with a_browser() as found:
        yield found


@pytest.fixture
def visits() -> list[Visit]:
    """Return the visits of the test, for tests that cause errors."""
    return []


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    """Yield a stack of servers that stop after pages are closed, since an open page would reconnect."""
    with ExitStack() as stack:
        yield stack
