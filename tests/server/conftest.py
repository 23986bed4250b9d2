"""What tests of the server share."""

from __future__ import annotations

import pytest

from teleloader_server.dispatch import dispatcher, store


@pytest.fixture
def dispatcher_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules are tested with figures of their own: those of the modules may be tuned."""
    monkeypatch.setattr(store, "CACHE_SHARE", 0.5)
    monkeypatch.setattr(dispatcher, "QUEUE_SECONDS", 0.004)
    monkeypatch.setattr(dispatcher, "MAX_QUEUE", 64)
