"""Fixtures of the server's tests."""

from __future__ import annotations

import pytest

from teleloader_server.dispatch import dispatcher, store


@pytest.fixture
def dispatcher_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set fixed figures for the dispatcher's rules, because those of the modules may be tuned."""
    monkeypatch.setattr(store, "CACHE_SHARE", 0.5)
    monkeypatch.setattr(dispatcher, "QUEUE_SECONDS", 0.004)
    monkeypatch.setattr(dispatcher, "MAX_QUEUE", 64)
