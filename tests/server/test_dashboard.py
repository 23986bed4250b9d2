"""Files of the dashboard, their delivery, and the JavaScript that needs no browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from teleloader_server.web.dashboard import STATIC, add_dashboard
from teleloader_server.web.problem_responses import handle_problems
from tests.shared.vectors.generate import HERE as VECTORS

NAMES = sorted(path.stem for path in VECTORS.glob("*.tlf") if path.stem != "zstd")
FILES = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file())

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def client() -> httpx.AsyncClient:
    """Yield a client of an application that has only a dashboard."""
    app = FastAPI()
    add_dashboard(app)
    handle_problems(app)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


@pytest.fixture
def run_javascript(tmp_path: Path) -> Run:
    """Run the page's modules with node: see run_dashboard.mjs."""
    node = shutil.which("node")
    if node is None:
        if os.environ.get("CI"):
            pytest.fail("node must be installed in CI")
        pytest.skip("needs node")
    for script in STATIC.glob("*.js"):
        shutil.copy(script, tmp_path)
    shutil.copy(Path(__file__).with_name("run_dashboard.mjs"), tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')

    def run(**asked: Any) -> dict[str, Any]:
        command = [node, "run_dashboard.mjs"]
        done = subprocess.run(
            command, cwd=tmp_path, input=json.dumps(asked), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    return run


# --- The files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/dashboard/main.js", "text/javascript; charset=utf-8"),
        ("/dashboard/style.css", "text/css; charset=utf-8"),
        ("/dashboard/icon.svg", "image/svg+xml"),
        ("/dashboard/uplot/uPlot.esm.js", "text/javascript; charset=utf-8"),
        ("/dashboard/uplot/LICENSE", "text/plain; charset=utf-8"),
    ],
)
async def test_files_have_the_types_that_browsers_want(client: httpx.AsyncClient, path: str, media_type: str) -> None:
    """Media types do not depend on the machine's table; the page runs only scripts of its server."""
    answer = await client.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, media_type)
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]


async def test_a_file_that_the_browser_has_is_not_sent_again(client: httpx.AsyncClient) -> None:
    """Browsers revalidate each file, so that page and server have the same version."""
    first = await client.get("/")
    assert first.headers["cache-control"] == "no-cache"
    again = await client.get("/", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path", ["/dashboard/", "/dashboard/no.js", "/dashboard/../__init__.py", "/dashboard/%2e%2e/x"]
)
async def test_nothing_but_the_files_is_served(client: httpx.AsyncClient, path: str) -> None:
    """Other paths result in 404, even if such files exist."""
    assert (await client.get(path)).status_code == 404


def test_the_page_names_files_that_are_there_and_nothing_from_elsewhere() -> None:
    """All links are relative and exist, so that the page works offline and behind a proxy's path prefix."""
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    loaded = re.findall(r'(?:src|href)="(?!#)([^"]+)"', page)
    assert {name.removeprefix("dashboard/") for name in loaded if name.startswith("dashboard/")} <= set(FILES)
    assert {name for name in loaded if not name.startswith("dashboard/")} == {"stats", "metrics", "docs"}
    for name in FILES:
        if name.endswith(".js"):
            imported = re.findall(r'from "\./([^"]+)"', (STATIC / name).read_text(encoding="utf-8"))
            assert set(imported) <= set(FILES), name


def test_the_chart_library_is_shipped_with_its_licence() -> None:
    """The MIT license requires its text to accompany every copy."""
    assert "Leon Sorokin" in (STATIC / "uplot" / "LICENSE").read_text(encoding="utf-8")


# --- Frames -------------------------------------------------------------------------------------------------------


def simplified(node: Any, arrays: list[dict[str, Any]]) -> Any:
    """The page's node for a node of a frame's tree; each array takes the next of `arrays`."""
    if isinstance(node, list):
        return {"kind": "list", "items": [simplified(item, arrays) for item in node]}
    if not isinstance(node, dict) or next(iter(node)).startswith("$"):
        return {"kind": "value", "value": node}
    ((kind, content),) = node.items()
    if kind == "array":
        dtype, shape, how = content
        found = arrays.pop(0)
        values = flat(found["values"], len(shape)) if "complex" not in dtype else None
        segment = {"$bytes": found["segment"]}
        return {"kind": kind, "dtype": dtype, "shape": shape, "as": how, "bytes": segment, "values": values}
    if kind == "int":
        return {"kind": "value", "value": {"$int": content}}
    if kind == "complex":
        return {"kind": kind, "value": content}
    if kind in ("namedtuple", "dataclass"):
        _, name, fields, items = content
        entries = [[field, simplified(item, arrays)] for field, item in zip(fields, items, strict=True)]
        return {"kind": kind, "name": name, "entries": entries}
    if kind in ("dict", "ordereddict", "defaultdict", "counter"):
        return {"kind": kind, "entries": [[simplified(part, arrays) for part in pair] for pair in content]}
    items = content[1] if kind == "deque" else content
    return {"kind": kind, "items": [simplified(item, arrays) for item in items]}


def flat(values: Any, depth: int) -> list[Any]:
    """Return nested lists as one list."""
    if depth == 0:
        return [values]
    return [item for part in values for item in flat(part, depth - 1)]


def test_the_page_reads_each_vector(run_javascript: Run) -> None:
    """Batch IDs, trees, arrays, failures and ends equal those of the vectors."""
    found = run_javascript(frames=[str(VECTORS / f"{name}.tlf") for name in NAMES])["frames"]
    for name, frame in zip(NAMES, found, strict=True):
        record = json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))
        header = record["header"]
        assert frame == {
            "address": {"loader": header["loader"], "epoch": header["epoch"], "batch": header["batch"]},
            "padding": header.get("padding", 0),
            "failure": header.get("failure"),
            "end": header.get("end"),
            "tree": simplified(header["tree"], record["arrays"]) if "tree" in header else None,
        }, name


@pytest.mark.parametrize(
    ("at", "wrong", "complaint"),
    [
        (6, b"TLF2", "unsupported protocol version"),
        (11, (384).to_bytes(8), "expected 384 bytes, got 320"),
        (30, (400).to_bytes(4), "the header exceeds the frame"),
        (4, b"\x0d", "number of arrays"),
        (34, b"\xc1", "unknown msgpack type 0xc1"),
        (188, (11).to_bytes(4), "got 11"),
        (187, b"\xc5", "an array of the tree is missing"),
    ],
)
def test_the_page_refuses_a_damaged_frame(
    run_javascript: Run, tmp_path: Path, at: int, wrong: bytes, complaint: str
) -> None:
    """The page shows the reason why a damaged frame is rejected."""
    frame = bytearray((VECTORS / "plain.tlf").read_bytes())
    frame[at : at + len(wrong)] = wrong
    (tmp_path / "damaged.tlf").write_bytes(frame)
    (found,) = run_javascript(frames=["damaged.tlf"])["frames"]
    assert complaint in found["error"]


def test_the_page_says_that_it_reads_no_compressed_frame(run_javascript: Run) -> None:
    """The page requests no compression, because browsers offer no zstd to scripts."""
    (found,) = run_javascript(frames=[str(VECTORS / "zstd.tlf")])["frames"]
    assert "compressed frame (zstd)" in found["error"]


# --- Images and numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "shape", "layout"),
    [
        ("uint8", [16, 224, 200, 3], (16, 224, 200, 3, False)),
        ("uint8", [16, 3, 224, 200], (16, 224, 200, 3, True)),
        ("uint8", [16, 1, 28, 28], (16, 28, 28, 1, True)),
        ("uint8", [28, 30, 1], (1, 28, 30, 1, False)),
        ("uint8", [3, 28, 30], (1, 28, 30, 3, True)),
        ("float32", [8, 3, 32, 32], (8, 32, 32, 3, True)),
        ("float32", [8, 8, 8], (8, 8, 8, 1, True)),
        ("uint8", [40, 50], (1, 40, 50, 1, True)),
        ("float32", [32, 512, 768], None),
        ("float32", [128, 10], None),
        ("uint8", [16, 4], None),
        ("int64", [16, 3, 32, 32], None),
        ("uint8", [0, 3, 32, 32], None),
        ("uint8", [16, 5, 32, 32], None),
        ("uint8", [784], None),
    ],
)
def test_what_looks_like_images_is_shown_as_images(
    run_javascript: Run, dtype: str, shape: list[int], layout: tuple[int, int, int, int, bool] | None
) -> None:
    """Images have one or three channels, or are bytes or squares without channels; tokens and features are none."""
    (found,) = run_javascript(shapes=[[dtype, shape]])["shapes"]
    names = ("images", "height", "width", "channels", "planar")
    assert found == (None if layout is None else dict(zip(names, layout, strict=True)))


def test_numbers_are_written_for_people(run_javascript: Run) -> None:
    """Numbers have about three digits and units; an unknown value is a dash."""
    written = {
        ("number", 1234.4): "1,234",
        ("number", 99.96): "100",
        ("number", 12.34): "12.3",
        ("number", 0.456): "0.46",
        ("number", 0): "0",
        ("number", None): "\N{EN DASH}",
        ("count", 1234567): "1,234,567",
        ("bytes", 1023): "1,023 B",
        ("bytes", 1536): "1.5 KiB",
        ("bytes", 64 * 2**20): "64 MiB",
        ("bytes", 3 * 2**40): "3 TiB",
        ("percent", 0.004): "<1 %",
        ("percent", 0): "0 %",
        ("percent", 0.625): "63 %",
        ("percent", None): "\N{EN DASH}",
        ("duration", 0): "0 s",
        ("duration", 0.00025): "250 µs",
        ("duration", 0.25): "250 ms",
        ("duration", 2.5): "2.5 s",
        ("duration", 59.999): "60 s",
        ("duration", 3599.9): "59 min 59 s",
        ("duration", 7384.2): "2 h 3 min",
        ("duration", 200_000): "2 d 7 h",
        ("ago", 0.4): "now",
        ("ago", 5.9): "5 s ago",
        ("plural", 1, "batch", "batches"): "1 batch",
        ("plural", 2, "batch", "batches"): "2 batches",
    }
    assert run_javascript(numbers=list(written))["numbers"] == list(written.values())


# --- History ------------------------------------------------------------------------------------------------------


def response(pid: int, started: float, since: int, values: list[float | None], **more: Any) -> dict[str, Any]:
    """Return a response of /stats/history with one series."""
    series = {"rate": {"mean": values, "min": None, "max": None}}
    now = since + len(values)
    return {"pid": pid, "started": started, "now": now, "since": since, "step": 1, "series": series, "marks": [],
            "diagnoses": []} | more  # fmt: skip


def test_seconds_are_appended_with_their_gaps(run_javascript: Run) -> None:
    """Later responses add their seconds, events once, and changes of the diagnosis."""
    mark = {"second": 1, "kind": "error", "text": "ValueError"}
    first = response(1, 1000.0, 0, [1, None], marks=[mark], diagnoses=[{"second": 0, "bottleneck": "io"}])
    same = [{"second": 2, "bottleneck": "io"}, {"second": 3, "bottleneck": "training"}]
    second = response(1, 1000.0, 2, [3, 4], marks=[mark], diagnoses=same)
    (found,) = run_javascript(timelines=[[first, second]])["timelines"]
    assert found["times"] == [1000, 1001, 1002, 1003]
    assert found["columns"]["rate"] == {kind: [1, None, 3, 4] for kind in ("mean", "min", "max")}
    assert found["marks"] == [{"at": 1001, "kind": "error", "text": "ValueError"}]
    assert [(label["at"], label["until"], label["bottleneck"]) for label in found["labels"]] == [
        (1000, 1003, "io"), (1003, 1004, "training"),
    ]  # fmt: skip
    assert found["next"] == 4


@pytest.mark.parametrize("started", [1010.0, 900.0], ids=["later", "clock set back"])
def test_another_process_follows_after_a_gap(run_javascript: Run, started: float) -> None:
    """Times ascend although the clock was set back, and no line leads from one process to the next."""
    (found,) = run_javascript(timelines=[[response(1, 1000.0, 0, [1, 2]), response(2, started, 0, [5])]])["timelines"]
    assert found["columns"]["rate"]["mean"] == [1, 2, None, 5]
    assert found["times"] == [1000, 1001, 1002, max(started, 1003)]
    assert found["next"] == 1


def test_the_last_point_may_cover_seconds_that_have_not_ended(run_javascript: Run) -> None:
    """The next request begins with the current second, not after the last point."""
    (found,) = run_javascript(timelines=[[response(1, 1000.0, 0, [1, 2, 3], step=6, now=15)]])["timelines"]
    assert (found["times"], found["next"]) == ([1000, 1006, 1012], 15)
