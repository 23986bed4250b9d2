"""Publication of a run: the tables in benchmarks/README.md and the plot in docs/throughput.svg."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from rich.console import RenderableType
from rich.table import Table

from benchmarks.plot import draw
from benchmarks.processes import ROOT

README: Final = ROOT / "benchmarks" / "README.md"
PICTURE: Final = ROOT / "docs" / "throughput.svg"
START: Final = "<!-- results: written by python -m benchmarks --publish -->\n"
END: Final = "<!-- end of results -->\n"


def publish(tables: Iterable[RenderableType], content: Mapping[str, Any]) -> None:
    """Replace the results in benchmarks/README.md, and draw the plot."""
    facts = ", ".join(f"{name} {fact}" for name, fact in content["machine"].items())
    lines = [f"    $ {content['command']}", f"    {facts}", ""]
    for table in tables:
        lines += [markdown(table) if isinstance(table, Table) else str(table), ""]
    before, _, rest = README.read_text().partition(START)
    _, _, after = rest.partition(END)
    README.write_text(before + START + "\n" + "\n".join(lines) + "\n" + END + after)
    draw(content, PICTURE)


def markdown(table: Table) -> str:
    """Return a table in Markdown, with its title as a heading in bold."""
    name, separator, about = str(table.title).partition(" - ")
    headings = [str(column.header) for column in table.columns]
    marks = ["---:" if column.justify == "right" else "---" for column in table.columns]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    lines = [headings, marks, *([str(cell) for cell in row] for row in rows)]
    return "\n".join([f"**{name}**{separator}{about}", "", *(f"| {' | '.join(line)} |" for line in lines)])
