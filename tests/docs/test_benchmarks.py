"""Publication of benchmark results, and the minimal clients of the benchmarks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rich.table import Table

from benchmarks import publishing
from benchmarks.clients import Consumer
from teleloader_server import serve


def test_publish_replaces_the_results_between_the_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text around the results is unchanged, and the table becomes Markdown."""
    page = tmp_path / "README.md"
    before, rest = publishing.README.read_text().split(publishing.START)
    after = rest.split(publishing.END)[1]
    page.write_text(f"{before}{publishing.START}old\n{publishing.END}{after}")
    monkeypatch.setattr(publishing, "README", page)
    monkeypatch.setattr(publishing, "draw", lambda *_: None)
    table = Table(title="wire - large batches")
    table.add_column("contender")
    table.add_column("MB/s", justify="right")
    table.add_row("floor", "2,000")
    publishing.publish([table], {"command": "python -m benchmarks", "machine": {"cpu": "2 x example"}})
    text = page.read_text()
    assert text.startswith(before)
    assert text.endswith(after)
    results = text.removeprefix(before).removesuffix(after)
    assert "old" not in results
    assert "**wire** - large batches\n\n| contender | MB/s |\n| --- | ---: |\n| floor | 2,000 |\n" in results


async def test_a_minimal_client_counts_all_batches_of_a_response() -> None:
    """The server sends computed batches together in one response."""
    with serve(np.zeros((100, 8), np.float32), name="small", num_workers=0) as url:
        consumer = Consumer(0)
        await consumer.open(url)
        received = 0
        while received < 8:
            received += await consumer.take(8 - received)
        consumer.restart()
        assert await consumer.take(8) == 8
        consumer.close()
