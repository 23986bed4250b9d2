"""What tests of the server share."""

from __future__ import annotations

import pytest

from teleloader_server import dispatcher as module


@pytest.fixture
def dispatcher_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules are tested with figures of their own: those of the module may be tuned."""
    monkeypatch.setattr(module, "CACHE_SHARE", 0.5)
    monkeypatch.setattr(module, "QUEUE_SECONDS", 0.004)
    monkeypatch.setattr(module, "MAX_QUEUE", 64)
