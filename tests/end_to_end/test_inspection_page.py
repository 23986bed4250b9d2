"""The parts of the dashboard that show single events, in a real browser: errors, slow samples, workers, timeline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from teleloader_server.loading.stages import STAGES, Batch, Collate, Stage
from tests.conftest import StartServer
from tests.end_to_end import hosted, inspected
from tests.end_to_end.browser import Visit, violations
from tests.end_to_end.test_access import TokenTable

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

Open = Callable[..., "Page"]


@pytest.fixture
def open_page(browser: Browser, visits: list[Visit], servers: ExitStack) -> Iterator[Open]:
    """Open the page at a URL; it must have no errors until the end."""
    opened: list[tuple[Visit, str]] = []

    def visit(url: str, path: str = "/", **options: Any) -> Page:
        one = Visit(browser, **options)
        visits.append(one)
        opened.append((one, url))
        one.page.goto(f"{url}{path}")
        return one.page

    yield visit
    for one, url in opened:
        one.forgive("ERR_CONNECTION_REFUSED")
        one.end(url)


def until(found: Locator, text: str) -> None:
    """Wait until an element contains a text."""
    from playwright.sync_api import expect

    expect(found).to_contain_text(text, timeout=20_000)


def load(url: str, epoch: int = 3, **arguments: Any) -> None:
    """Iterate over an epoch that may fail."""
    loader = DataLoader(RemoteDataset(url), **arguments)
    loader.set_epoch(epoch)
    with suppress(ValueError):
        for _ in loader:
            pass


@contextmanager
def training(url: str) -> Iterator[None]:
    """Iterate over epochs in a thread, as a training loop does."""
    done = threading.Event()
    loader = DataLoader(RemoteDataset(url), batch_size=8, seed=0)

    def train() -> None:
        while not done.is_set():
            for _ in loader:
                if done.wait(0.005):
                    break

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


ORDERS: dict[str, dict[str, Any]] = {
    "seeded": {"batch_size": 8, "shuffle": True, "seed": 5},
    "listed": {"batch_sampler": [[1, 2, 3], [20, 7, 4, 1], [5]]},
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_links_of_an_error_open_its_batch_and_its_sample(servers: ExitStack, open_page: Open, order: str) -> None:
    """By click: the batch with all its indices in seeded order and for index lists; then the sample alone."""
    arguments = ORDERS[order]
    url = servers.enter_context(serve(inspected.Damaged(), num_workers=1))
    load(url, **arguments)
    (error,) = httpx.get(f"{url}/v1/errors", trust_env=False).json()["errors"]
    page = open_page(url)
    until(page.locator("#error-list"), "sample 7 is damaged")
    page.locator("#error-list summary").click()
    until(page.locator("#error-list"), "Traceback (most recent call last)")
    page.get_by_role("link", name="Preview batch").click()
    until(page.locator("#looked"), f"Error 1. Batch {error['batch']} failed: ValueError: sample 7 is damaged")
    until(page.locator("#content"), f"Its indices: {', '.join(map(str, error['indices']))}.")
    page.get_by_role("link", name="Preview sample 7 alone").click()
    until(page.locator("#content"), "Its indices: 7.")
    assert violations(page) == []
    assert httpx.get(f"{url}/v1/errors", trust_env=False).json()["total"] == 1


def test_a_link_to_an_error_can_be_opened_directly(servers: ExitStack, open_page: Open) -> None:
    """The URL of a link opens the preview; the URL of an error that is not listed says so."""
    url = servers.enter_context(serve(inspected.Damaged(), num_workers=1))
    load(url, batch_size=8)
    page = open_page(url, "/#error-1")
    until(page.locator("#looked"), "Error 1. Batch 0 failed: ValueError: sample 7 is damaged")
    page.evaluate("location.hash = 'error-2'")
    until(page.locator("#looked"), "does not list this error")


def test_slow_samples_have_their_time_and_a_link(servers: ExitStack, open_page: Open) -> None:
    """The row has the sample and how often it was slow; the link shows the batch that contained it."""
    url = servers.enter_context(serve(inspected.Slow(), num_workers=1))
    for epoch in (0, 1):
        load(url, epoch, batch_size=8, shuffle=True, seed=1)
    page = open_page(url)
    row = page.locator("#slow-list tr").filter(has=page.get_by_role("rowheader", name=str(inspected.SLOW), exact=True))
    until(row, "epoch 1")
    row.get_by_role("link", name="Preview sample").click()
    until(page.locator("#looked"), "Slow sample. Batch")
    until(page.locator("#content"), f"{inspected.SLOW}, {inspected.SLOW}")
    assert violations(page) == []


def test_the_page_of_a_worker_shows_its_stack(servers: ExitStack, open_page: Open) -> None:
    """A click on the worker's number opens its page; the button shows where a worker hangs."""
    url = servers.enter_context(serve(inspected.Stuck("sleep"), num_workers=1))
    threading.Thread(target=load, args=(url,), kwargs={"batch_size": 2}, daemon=True).start()
    page = open_page(url)
    until(page.locator("#worker-table"), "batch 0 of epoch 3")
    page.locator("#worker-table").get_by_role("link", name="0", exact=True).click()
    until(page.locator("#worker-state"), "batch 0 of epoch 3 of dataset for")
    page.get_by_role("button", name="Show the stack").click()
    until(page.locator("#worker-stack"), "hang_in_sleep")
    assert violations(page) == []
    page.get_by_role("button", name="Close").click()
    page.locator("#worker").wait_for(state="hidden")


def test_the_times_of_the_last_batches_are_relative_to_the_newest(servers: ExitStack, open_page: Open) -> None:
    """While the page is open, a batch that was the last one is shown with its distance to the new last one."""
    url = servers.enter_context(serve(hosted.Samples(int, 16), num_workers=1))
    load(url, 1, batch_size=8, seed=0)
    page = open_page(url, "/#worker-0")
    rows = page.locator("#worker-batches tbody tr")
    until(rows.first, "of epoch 1")
    until(rows.first, "last")
    load(url, 2, batch_size=8, seed=0)
    until(rows.first, "of epoch 2")
    earlier = rows.filter(has_text="of epoch 1").all_inner_texts()
    assert len(earlier) == 2
    assert all("before" in text and "last" not in text for text in earlier)


class Check(Stage):
    """Stage that is not built in."""

    name = "check"

    def run(self, batch: Batch) -> None:
        """Do nothing."""


def test_the_last_batches_of_a_worker_have_a_column_for_each_stage(servers: ExitStack, open_page: Open) -> None:
    """The columns are the stages of the server, in the order of execution; each row has a value in each column."""
    STAGES.insert(STAGES.index(Collate), Check)
    servers.callback(STAGES.remove, Check)
    url = servers.enter_context(serve(inspected.Slow(), num_workers=1))
    load(url, batch_size=8, seed=0)
    found = open_page(url, "/#worker-0").locator("#worker-batches table")
    until(found, "last")
    titles = found.locator("th[scope=col]").all_text_contents()
    assert titles == ["Batch", "Ended", "Queue", *(stage.name.capitalize() for stage in STAGES), "Samples"]
    assert found.locator("tbody tr").first.locator("th, td").count() == len(titles)
    assert found.locator("tbody tr").first.locator("td").last.text_content() == "8"


def test_without_admin_the_page_says_why_it_shows_no_stack(
    start_server: StartServer, tmp_path: Path, open_page: Open, visits: list[Visit]
) -> None:
    """The page names the missing scope; the other figures of the worker are shown."""
    table = TokenTable(tmp_path / "tokens.toml")
    token = table.add("viewer", "stats")
    server = start_server("tests.end_to_end.inspected:Damaged", "--num-workers", "1", "--tokens", table.write())
    page = open_page(server.url, "/#worker-0")
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    until(page.locator("#worker-state"), "idle")
    page.get_by_role("button", name="Show the stack").click()
    until(page.locator("#stack-status"), "insufficient scope")
    for refused in ("401", "403"):
        visits[0].forgive(refused)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_the_timeline_is_used_by_keyboard_and_fits(
    servers: ExitStack, open_page: Open, scheme: str, width: int
) -> None:
    """Arrow keys select batches, whose times are a sentence; a table has the slowest; no part exceeds the page."""
    url = servers.enter_context(serve(inspected.Slow(), num_workers=2))
    servers.enter_context(training(url))
    page = open_page(url, color_scheme=scheme, viewport={"width": width, "height": 900})
    page.locator("#timeline-details summary").click()
    until(page.locator("#timeline-status"), "since the server started")
    deadline = time.monotonic() + 20
    while "No client" in page.locator("#timeline-status").inner_text() and time.monotonic() < deadline:
        page.wait_for_timeout(100)
    page.locator("#timeline-canvas").focus()
    until(page.locator("#timeline-detail"), "worker 0: fetch")
    first = page.locator("#timeline-detail").inner_text()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#timeline-detail").inner_text() != first
    page.keyboard.press("ArrowDown")
    until(page.locator("#timeline-detail"), "worker 1: ")
    for _ in range(6):
        page.keyboard.press("ArrowDown")
    until(page.locator("#timeline-detail"), ": wait")
    page.locator("#timeline-table button").first.click()
    until(page.locator("#timeline-detail"), "encode")  # it may be from before the client reported its part
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert violations(page) == []
