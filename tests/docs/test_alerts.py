"""What docs/operations.md has Prometheus watch is there."""

from __future__ import annotations

import re

import httpx

from tests.conftest import ROOT, StartServer


def test_the_alerts_are_about_metrics_that_exist(start_server: StartServer) -> None:
    """By the names under which a server exposes them."""
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    watched = set(re.findall(r"teleloader_\w+(?=[{\[ ])", page))
    server = start_server("--demo", "--num-workers", "1")
    exposed = set(re.findall(r"^\w+", httpx.get(f"{server.url}/metrics").text, re.MULTILINE))
    assert watched
    assert watched <= exposed
