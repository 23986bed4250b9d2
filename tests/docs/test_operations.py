"""Recommendations and metrics in docs/operations.md equal those of a server."""

from __future__ import annotations

import re

import httpx
import pytest

from teleloader_server.stats.bottleneck import diagnose
from tests.conftest import ROOT, StartServer, need
from tests.server.test_bottleneck import CASES, consumption, workforce

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"\*“(.+?)”\*", PAGE)


@pytest.mark.parametrize("quoted", QUOTED)
def test_the_advice_that_is_explained_is_given(quoted: str) -> None:
    """Each explained recommendation is in a case of the diagnosis tests, except for numbers."""
    need("sybil")
    from tests.docs.pages import same_but

    seen = [(consumption(**known), by) for known, by, *_ in CASES.values()]
    given = [diagnose(consumer, workforce(consumer, **by)).advice for consumer, by in seen]
    assert any(same_but(f"...{quoted}...", advice) for advice in given), given


def test_the_page_is_about_metrics_that_exist(start_server: StartServer) -> None:
    """The page uses names of metrics as a server exposes them."""
    watched = set(re.findall(r"`(teleloader_\w+)`", PAGE))
    server = start_server("--demo", "--num-workers", "1")
    exposed = set(re.findall(r"^\w+", httpx.get(f"{server.url}/metrics").text, re.MULTILINE))
    assert watched
    assert watched <= exposed
