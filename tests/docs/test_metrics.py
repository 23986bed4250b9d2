"""docs/metrics.md, the rules and the Grafana dashboard name the metrics that are exported, and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client import CollectorRegistry, generate_latest

from teleloader.metrics import LoaderCollector
from tests.conftest import ROOT, ServerProcess, need

PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
GROUPS = yaml.safe_load((ROOT / "docs" / "deploy" / "prometheus-rules.yml").read_text())["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
DASHBOARD = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [
    *(target["expr"] for panel in PANELS for target in panel["targets"]),
    *(variable["query"]["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"),
]
OF_PROMETHEUS = {"job", "instance"}
"""Labels that Prometheus adds."""


def names_of(text: str) -> set[str]:
    """Return the names of the series of a scrape, including those of metrics that have no sample yet."""
    found = set()
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE):
        found |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return found


def metrics_of(text: str) -> set[str]:
    """Return the names of the metrics of a scrape."""
    return set(re.findall(r"^# TYPE (\w+) \w+$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def scrape() -> Iterator[str]:
    """Yield the metrics of a server."""
    server = ServerProcess("--port", "0", "--demo", "--num-workers", "1")
    httpx.get(f"{server.url}/stats").raise_for_status()  # a counted request
    yield httpx.get(f"{server.url}/metrics").raise_for_status().text
    server.end()


def used(expression: str) -> set[str]:
    """Return the names of metrics in an expression of Prometheus, without recorded ones."""
    return set(re.findall(r"(?<![:\w])(?:teleloader|process)_\w+(?![:\w])", expression))


def test_the_page_lists_each_metric(scrape: str) -> None:
    """The page lists all metrics of servers and of training processes, and no others."""
    listed = set(re.findall(r"`(teleloader_\w+)`", PAGE))
    registry = CollectorRegistry()
    registry.register(LoaderCollector())
    of_clients = metrics_of(generate_latest(registry).decode())
    exported = {name for name in metrics_of(scrape) if not name.startswith("process_")}
    assert listed == exported | of_clients


def test_rules_use_existing_metrics(scrape: str) -> None:
    """Rules use exported metrics, and records that are defined."""
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    for rule in RULES:
        assert used(rule["expr"]) <= names_of(scrape), rule
        assert set(re.findall(r"\w+:\w+:\w+", rule["expr"])) <= recorded, rule


def test_there_is_one_set_of_alerts() -> None:
    """The page describes the alerts of the rules; no other page has a threshold of its own."""
    alerts = {rule["alert"] for rule in RULES if "alert" in rule}
    assert set(re.findall(r"`(Teleloader\w+)` \|", PAGE)) == alerts
    for page in (ROOT / "docs").glob("*.md"):
        assert not re.search(r"teleloader_\w+(?:\{[^}]*\})?\)? [<>=]=? ?\d", page.read_text(encoding="utf-8")), page


def test_records_have_conventional_names() -> None:
    """The name of a record is level:metric:operations."""
    for rule in RULES:
        assert "alert" in rule or re.fullmatch(r"[a-z_]+:teleloader_[a-z_]+:[a-z0-9_]+", rule["record"])


def test_the_dashboard_uses_existing_metrics(scrape: str) -> None:
    """Metrics and labels of all queries are exported."""
    labels = set(re.findall(r"[{,](\w+)=\"", scrape)) | OF_PROMETHEUS
    labels |= {"type", "reason", "token"}  # nothing has failed yet, and the server has no tokens
    assert len(QUERIES) > 30
    for query in QUERIES:
        assert used(query) <= names_of(scrape), query
        grouped = re.findall(r"(?:by|on) \(([^)]*)\)", query)
        assert {label.strip() for group in grouped for label in group.split(",")} <= labels, query


def test_the_dashboard_is_complete() -> None:
    """Panels have a title, a description and a unit, and do not overlap; the first row are stats with thresholds."""
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        x, y, w, h = (panel["gridPos"][side] for side in "xywh")
        covered = {(column, line) for column in range(x, x + w) for line in range(y, y + h)}
        assert x + w <= 24
        assert not covered & cells, panel["title"]
        cells |= covered
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
    stats = [panel for panel in PANELS if panel["type"] == "stat"]
    assert stats == PANELS[: len(stats)]
    assert sum(len(panel["fieldConfig"]["defaults"]["thresholds"]["steps"]) > 1 for panel in stats) >= 5
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    links = [panel["fieldConfig"]["defaults"].get("links") for panel in PANELS]
    assert {link["url"] for found in links if found for link in found} == {"${scheme}://${__field.labels.instance}/"}


def test_the_dashboard_conforms_to_grafanas_schema() -> None:
    """Grafana's SDK, generated from the schema of dashboards, reads all fields and writes them unchanged."""
    need("grafana_foundation_sdk")
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    written = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(DASHBOARD)))
    assert lost(DASHBOARD, written, "dashboard") == []


def lost(before: Any, after: Any, where: str) -> list[str]:
    """Return the places at which a value is missing or different in `after`."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [each for key, value in before.items() for each in lost(value, after.get(key), f"{where}.{key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = zip(before, after, strict=True)
        return [each for k, (one, other) in enumerate(pairs) for each in lost(one, other, f"{where}[{k}]")]
    return [] if before == after else [where]
