"""The dashboard in a real browser: it shows the server's statistics."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from teleloader_shared.stats import Diagnosis, ErrorCount, Stats, VersionStats
from tests.conftest import StartServer, eventually
from tests.end_to_end import hosted
from tests.end_to_end.browser import Visit, violations
from tests.end_to_end.made_up import (
    BUSY,
    CONSUMER,
    DATASET,
    FINISHED,
    NETWORK,
    SERVER,
    TRAINER,
    UNKNOWN,
    WORKER,
    MadeUpServer,
    made_up,
    serving,
)
from tests.end_to_end.training import training

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

PHONE = {"width": 360, "height": 780}
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"

Open = Callable[..., "Page"]


@pytest.fixture
def open_page(browser: Browser, visits: list[Visit], servers: ExitStack) -> Iterator[Open]:
    """Open the page of a server at a URL and wait for its first figures; it must have no errors until the end."""
    opened = []

    def visit(url: str, **options: Any) -> Page:
        one = Visit(browser, **options)
        visits.append(one)
        opened.append((one, url))
        one.page.goto(url)
        until(one.page.locator("#facts"), "version")
        return one.page

    yield visit
    for one, url in opened:
        one.forgive("ERR_CONNECTION_REFUSED")  # a server of the test's own may have ended before its page
        one.end(url)


@pytest.fixture
def server() -> Iterator[MadeUpServer]:
    """Run a server with fabricated statistics."""
    with serving(MadeUpServer()) as made:
        yield made


def until(found: Locator, text: str) -> None:
    """Wait until an element contains a text."""
    from playwright.sync_api import expect

    expect(found).to_contain_text(text, timeout=20_000)


def row(page: Page, name: str) -> Locator:
    """Return the row of a table that begins with `name`."""
    return page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=name, exact=True))


def cells(page: Page, name: str) -> list[str]:
    """Return the cells of that row after its name."""
    return [" ".join(cell.split()) for cell in row(page, name).get_by_role("cell").all_inner_texts()]


# --- Content ------------------------------------------------------------------------------------------------------


def test_the_page_comes_whole_from_its_server(server: MadeUpServer, open_page: Open) -> None:
    """The page loads without errors and without requests to other hosts, as verified after each test."""
    page = open_page(server.url)
    assert page.get_by_role("heading", level=1).inner_text() == "teleloader"
    assert "cpu-box" in page.title()
    assert page.locator("#facts").inner_text() == "cpu-box · process 4242 · version 1.2.3 · up 2 h 3 min"
    assert page.locator("#state").inner_text() == "Ready"
    until(page.locator("#history"), "125")
    assert page.locator("#plots canvas").count() == 4


def test_the_numbers_are_those_of_the_server(server: MadeUpServer, open_page: Open) -> None:
    """The page shows the figures of server, consumer, worker and dataset with units."""
    page = open_page(server.url)
    figures = dict(
        zip(page.locator("#figures dt").all_inner_texts(), page.locator("#figures dd").all_inner_texts(), strict=True)
    )
    assert figures == {
        "Sent": "125 batches/s, 64.5 MiB/s",
        "CPUs": "6.5 of 16 in use",
        "Memory of all processes": "1.5 GiB (PSS)",
        "Responses in transit": "12 MiB",
        "Memory mapped for large batches": "640 MiB",
        "Memory lent to clients on this machine": "77 MiB",
        "Event loop lag": "400 µs",
        "Connections": "12",
        "Workers": "4",
        "Worker restarts": "1 restart",
    }
    assert page.get_by_role("meter", name="Memory").get_attribute("aria-valuetext") == "512 MiB of 2 GiB"
    assert cells(page, "trainer-0") == [
        *("train", "0 of 1", "2", "120 / 400", "12.5", "6.25 MiB", "62 %"),
        f"▲ workers {CONSUMER.diagnosis.advice}",
    ]
    assert row(page, "trainer-0").get_by_role("progressbar").get_attribute("aria-valuenow") == "30"
    assert cells(page, "0 process 5000") == [
        *("batch 12 of epoch 0 of train for 250 ms", "93 %", "", "1,234", "120 MiB", "none")
    ]
    assert cells(page, "fetch") == ["25 ms", "80 ms", "120 ms", "400 ms"]
    assert cells(page, "encode") == ["400 µs", "900 µs", "1 ms", "2 ms"]
    until(page.locator("#dataset-list"), "map-style, 50,000 samples. 4,000 samples/s.")
    until(page.locator("#dataset-list"), "4,000 batches computed, 4,100 sent, 3 failed, 1 restarted, 0 started early")
    until(page.locator("#plots"), "125")
    assert page.locator("#plots figcaption output").all_inner_texts() == ["125", "64.5", "50 %", "50 %"]


def test_versions_of_a_dataset_are_listed(server: MadeUpServer, open_page: Open) -> None:
    """The newest version is the first one; a single version is not shown."""
    page = open_page(server.url)
    until(page.locator("#dataset-list"), "map-style")
    assert "Versions" not in page.locator("#dataset-list").inner_text()
    versions = [
        VersionStats("2026-11", "f" * 32, 1, False, 1, 90.0),
        VersionStats("2026-12", "e" * 32, 2, True, 3, 0.0),
    ]
    server.stats = dataclasses.replace(server.stats, datasets=[dataclasses.replace(DATASET, versions=versions)])
    until(
        page.locator("#dataset-list"),
        "Versions: 2026-12 (newest, 3 loaders), 2026-11 (last used 1 min 30 s ago, 1 loader).",
    )


def test_new_figures_are_shown_as_they_come(server: MadeUpServer, open_page: Open) -> None:
    """Figures change without reloading the page."""
    page = open_page(server.url)
    server.stats = dataclasses.replace(server.stats, server=dataclasses.replace(SERVER, connections=77, draining=True))
    until(page.locator("#figures"), "77")
    until(page.locator("#state"), "Draining")


def shown_servers(page: Page) -> list[str]:
    """Return state and URL of each row of the table of servers."""
    states = page.locator("#server-list tbody td:nth-child(2)").all_inner_texts()
    urls = page.locator("#server-list tbody th").all_inner_texts()
    return [" ".join(f"{state} {url}".split()) for state, url in zip(states, urls, strict=True)]


def test_one_server_has_no_list_of_servers(server: MadeUpServer, open_page: Open) -> None:
    """Also if it announces itself to itself, at another name of its host."""
    server.listed = [{"url": "http://cpu-box:8000", "instance": "own"}]
    page = open_page(server.url)
    page.wait_for_timeout(1000)
    assert not page.locator("#servers").is_visible()


def test_announced_servers_are_listed_with_links(server: MadeUpServer, open_page: Open) -> None:
    """In the order of their numbers after this one, each once; those that join and leave are seen without a reload."""
    server.listed = [{"url": f"http://10.0.0.{n}:8000", "instance": f"{n}"} for n in (12, 3)]
    page = open_page(server.url)
    until(page.locator("#servers"), "3 servers")
    own = f"ready {server.url} this server"
    assert shown_servers(page) == [own, "ready http://10.0.0.3:8000", "ready http://10.0.0.12:8000"]
    links = page.locator("#server-list a")
    assert [link.get_attribute("href") for link in links.all()] == ["http://10.0.0.3:8000", "http://10.0.0.12:8000"]
    server.listed = server.listed[:1]
    server.stats = dataclasses.replace(server.stats, server=dataclasses.replace(SERVER, draining=True))
    until(page.locator("#servers"), "2 servers")
    assert shown_servers(page) == [f"draining {server.url} this server", "ready http://10.0.0.12:8000"]


def test_servers_of_the_same_supervisor_are_listed(server: MadeUpServer, open_page: Open) -> None:
    """Only their ports are known, unless they announce themselves, and no port of another machine."""
    port = int(server.url.rpartition(":")[2])
    ports = [port, port + 1]
    server.stats = dataclasses.replace(server.stats, server=dataclasses.replace(SERVER, ports=ports))
    page = open_page(server.url)
    until(page.locator("#servers"), "2 servers")
    assert shown_servers(page) == [f"ready {server.url} this server", f"unknown http://127.0.0.1:{port + 1}"]
    server.listed = [{"url": f"http://cpu-box:{each}", "instance": "own" if each == port else "b"} for each in ports]
    until(page.locator("#servers"), "cpu-box")
    assert shown_servers(page) == [f"ready {server.url} this server", f"ready http://cpu-box:{port + 1}"]
    server.listed = []
    server.stats = dataclasses.replace(server.stats, server=dataclasses.replace(SERVER, ports=[1, 2]))
    page.locator("#servers").wait_for(state="hidden")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_many_servers_with_hostile_urls_fit_on_a_phone(server: MadeUpServer, open_page: Open, scheme: str) -> None:
    """URLs are text; only web pages are linked, and following a link sends no referrer."""
    urls = [f"http://loader-{n}.{'a-long-name.' * 8}example:8000" for n in range(300)]
    hostile = ["javascript:alert(1)", f"http://cpu-box/{HOSTILE}", f"data:text/html,{HOSTILE}"]
    server.listed = [{"url": url, "instance": url} for url in hostile]
    page = open_page(server.url, viewport=PHONE, color_scheme=scheme)
    until(page.locator("#servers"), "4 servers")
    assert {f"ready {url}" for url in hostile} < set(shown_servers(page))
    assert page.locator("#server-list a").count() == 1
    server.listed += [{"url": url, "instance": url} for url in urls]
    until(page.locator("#servers"), "304 servers")
    until(page.locator("#more-servers"), "104 more servers are not shown.")
    assert page.locator("#server-list a[href^='http:']").count() == page.locator("#server-list a").count() == 198
    assert page.locator("#server-list :is(img, script)").count() == 0
    assert page.locator("#server-list a:not([rel=noreferrer])").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    box = page.locator("#servers").bounding_box()
    assert box is not None
    assert box["height"] < 600
    assert violations(page) == []


def fleet(server: MadeUpServer, count: int) -> list[dict[str, Any]]:
    """Return announcements of this number of servers with the loader of `server`; the first one is slow."""
    figures = {
        "version": "1.2.3", "uptime": 7384.0, "workers": 4, "batches_per_second": 125.0, "bytes_per_second": 1e6,
        "busy": 0.93, "data_wait": 0.1, "bottleneck": "training", "confidence": 0.5, "advice": "Train faster.",
        "loaders": [CONSUMER.loader],
    }  # fmt: skip
    slow = {
        "batches_per_second": 25.0,
        "bottleneck": "io",
        "confidence": 0.95,
        "advice": "Read less.",
        "data_wait": 0.4,
    }
    return [
        {"url": f"http://10.0.0.{n}:8000", "instance": f"{n}", "summary": figures | (slow if n == 0 else {})}
        for n in range(count)
    ]


def test_servers_are_compared_by_the_figures_that_they_announce(server: MadeUpServer, open_page: Open) -> None:
    """Servers without heartbeats and slow ones come first, with the reason; one diagnosis is for all servers."""
    down = {"url": "http://10.0.0.9:8000", "instance": "9", "lost_for": 75.0}
    server.listed = [*fleet(server, 3), down]
    page = open_page(server.url)
    until(page.locator("#servers"), "5 servers")
    assert [line.split(" No announcement since ")[0] for line in shown_servers(page)][:2] == [
        "down for 1 min 15 s http://10.0.0.9:8000",
        "slow http://10.0.0.0:8000 149 ms of a worker's time per batch, 5 times the median of 3 other servers "
        "(29.8 ms). "
        "25 batches/s, 0.2 times the median of 3 other servers.",
    ]
    slow = page.locator("#server-list tbody tr").nth(1).get_by_role("cell").all_inner_texts()
    assert slow[1:] == ["25", "6 %", "93 %", "40 %", "I/O", "5 \N{MULTIPLICATION SIGN}", "1.2.3", "2 h 3 min"]
    until(page.locator("#fleet-diagnosis"), "All servers: I/O (95 % confidence, http://10.0.0.0:8000). Read less.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_64_servers_are_readable(server: MadeUpServer, open_page: Open, scheme: str, width: int) -> None:
    """The table scrolls in itself, in one direction, and has enough contrast."""
    server.listed = fleet(server, 63)
    page = open_page(server.url, viewport={"width": width, "height": 900}, color_scheme=scheme)
    until(page.locator("#servers"), "64 servers")
    assert page.locator("#server-list tbody tr").count() == 64
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    scrolled = page.locator("#server-list")
    assert scrolled.evaluate("one => one.scrollWidth <= one.clientWidth")
    assert scrolled.evaluate("one => one.scrollHeight > one.clientHeight")
    assert violations(page) == []


def test_runs_have_names_and_finished_consumers_are_last(server: MadeUpServer, open_page: Open) -> None:
    """Names of runs are text, whatever they contain; the progress of a finished consumer is complete."""
    ended = Diagnosis("finished", None, "Epoch 2 is finished.", 1.0)
    first = dataclasses.replace(CONSUMER, consumer="one", run="<b>a.py", finished=True, position=400, diagnosis=ended)
    second = dataclasses.replace(CONSUMER, consumer="other", run="b.py", finished=False, diagnosis=BUSY)
    server.stats = dataclasses.replace(server.stats, consumers=[first, second], consumers_total=2)
    page = open_page(server.url)
    until(page.locator("#sentence"), f"● Training b.py, other of train: {BUSY.advice}")
    names = page.locator("#consumers").get_by_role("rowheader").all_inner_texts()
    assert names == ["b.py other", "<b>a.py one"]
    assert "✓ finished Epoch 2 is finished." in " ".join(cells(page, "<b>a.py one")[-1].split())
    assert "400 / 400" in " ".join(cells(page, "<b>a.py one"))
    until(page.locator("#counts"), "2 consumers: 1 training, 1 finished.")


def test_the_worst_diagnosis_is_the_first_sentence(server: MadeUpServer, open_page: Open) -> None:
    """Consumers that wait for data come first; below the sentence are the numbers of consumers by bottleneck."""
    diagnoses = [FINISHED, UNKNOWN, TRAINER, NETWORK, CONSUMER.diagnosis]
    consumers = [
        dataclasses.replace(CONSUMER, consumer=f"run-{n}", rank=n, world_size=5, diagnosis=diagnosis)
        for n, diagnosis in enumerate(diagnoses)
    ]
    server.stats = dataclasses.replace(server.stats, consumers=consumers, consumers_total=5)
    page = open_page(server.url)
    until(page.locator("#sentence"), f"▲ Workers run-4, rank 4 of train: {CONSUMER.diagnosis.advice}")
    until(
        page.locator("#counts"),
        "5 consumers: 1 workers, 1 network, 1 training, 1 unknown, 1 finished.",
    )
    names = page.locator("#consumers").get_by_role("rowheader").all_inner_texts()
    assert names == ["run-4", "run-3", "run-2", "run-1", "run-0"]
    server.stats = dataclasses.replace(server.stats, consumers=consumers[:3], consumers_total=3)
    until(page.locator("#sentence"), f"● Training run-2, rank 2 of train: {TRAINER.advice}")


def test_the_sentence_is_read_out_only_when_it_is_another(server: MadeUpServer, open_page: Open) -> None:
    """A screen reader announces another diagnosis, but not new figures of the same one."""
    page = open_page(server.url)
    told = page.get_by_role("status").filter(has_text="Workers")
    first = told.inner_text()
    same = dataclasses.replace(CONSUMER, diagnosis=dataclasses.replace(CONSUMER.diagnosis, advice="It waits 64 %."))
    server.stats = dataclasses.replace(server.stats, consumers=[same])
    until(page.locator("#sentence"), "It waits 64 %.")
    assert told.inner_text() == first
    server.stats = dataclasses.replace(server.stats, consumers=[dataclasses.replace(CONSUMER, diagnosis=NETWORK)])
    until(page.locator("#announced"), "Network")


def test_a_page_without_consumers_shows_client_code(server: MadeUpServer, open_page: Open) -> None:
    """Without consumers, the page shows code with its own URL and a hosted dataset."""
    server.stats = made_up(consumers=0)
    page = open_page(server.url)
    until(page.locator("#answer"), f'loader = DataLoader(RemoteDataset("{server.url}", "train"), batch_size=32)')
    assert not page.get_by_role("table", name="Consumers").is_visible()


def test_a_worker_that_died_is_shown_with_why(server: MadeUpServer, open_page: Open) -> None:
    """The page shows number, reason and duration of restarts, and marks their time in the last minute."""
    page = open_page(server.url)
    again = dataclasses.replace(
        WORKER, pid=6001, restarts=1, last_exit="worker 1 (pid 5001) was killed by signal SIGKILL (Killed)",
        last_restart=0.031, current_task=None, current_task_seconds=None, state="starting",
    )  # fmt: skip
    server.stats = dataclasses.replace(server.stats, workers=[again])
    until(
        row(page, "0 process 6001"),
        "1 restart; last exit: worker 1 (pid 5001) was killed by signal SIGKILL (Killed); restarted within 31 ms",
    )
    until(row(page, "0 process 6001"), "starting")
    until(page.locator("#state"), "Starting")
    label = row(page, "0 process 6001").get_by_role("img").get_attribute("aria-label")
    assert label is not None
    assert label.endswith("1 restart")


def test_an_error_is_shown_with_its_traceback(server: MadeUpServer, open_page: Open) -> None:
    """An error is one line, which expands to traceback and indices."""
    page = open_page(server.url)
    error = page.locator("#errors details")
    until(error.locator("summary"), "ValueError train, epoch 0, batch 1, 5 s ago sample 17 is damaged")
    error.locator("summary").click()
    until(error.locator("pre"), "Traceback ...\nValueError: ...")
    until(error, "Indices of the batch: 16, 17")


def test_names_and_messages_are_shown_as_text(server: MadeUpServer, open_page: Open) -> None:
    """HTML in names and error messages is shown as text and not interpreted."""
    error = ErrorCount(HOSTILE, 1, HOSTILE, HOSTILE, [], 0.0)
    server.stats = Stats(
        server=dataclasses.replace(SERVER, host=HOSTILE, version=HOSTILE),
        datasets=[dataclasses.replace(DATASET, dataset=HOSTILE, errors=[error])],
        workers=[dataclasses.replace(WORKER, current_task=HOSTILE, last_exit=HOSTILE, restarts=1)],
        consumers=[
            dataclasses.replace(
                CONSUMER, consumer=HOSTILE, dataset=HOSTILE, diagnosis=dataclasses.replace(BUSY, advice=HOSTILE)
            )
        ],
        consumers_total=1,
    )
    page = open_page(server.url)
    for place in ("#facts", "#sentence", "#consumers", "#workers", "#datasets", "#errors", "#look"):
        until(page.locator(place), HOSTILE)
    assert page.locator("main img, main script").count() == 0


# --- History ------------------------------------------------------------------------------------------------------


def shown_seconds(page: Page) -> int:
    """Return the length of the shown period in seconds."""
    first, last = page.locator("#period").inner_text().split(",")[0].split(" to ")
    hours, minutes, seconds = (
        int(late) - int(early) for early, late in zip(first.split(":"), last.split(":"), strict=True)
    )
    return (3600 * hours + 60 * minutes + seconds) % 86_400


def test_the_page_opens_with_the_last_minutes(server: MadeUpServer, open_page: Open) -> None:
    """The first view has five minutes of one-second values with a gap, the diagnosis over time and the events."""
    page = open_page(server.url)
    until(page.locator("#event-count"), "2 events")
    assert 299 <= shown_seconds(page) <= 301
    label = page.locator("#plots [role=img]").first.get_attribute("aria-label")
    assert label is not None
    assert label.startswith("Sent batches/s from ")
    assert label.endswith("between 125 and 125, last 125")
    assert page.locator("#lane span").all_inner_texts() == ["training", "workers"]
    page.locator("#events summary").click()
    events = [line.split(" ", 1)[1] for line in page.locator("#mark-list li").all_inner_texts()]
    assert events == ["worker restarted worker 1 (pid 5001) exited", "diagnosis training to workers"]


def test_an_hour_keeps_a_spike_of_one_second(server: MadeUpServer, open_page: Open) -> None:
    """Points of several seconds have the largest value of each, and another range can be selected."""
    page = open_page(server.url)
    page.get_by_role("button", name="1 h").click()
    hour = page.locator("#plots [role=img][aria-label*='between 125 and 1,000']")
    hour.wait_for()
    assert 3590 <= shown_seconds(page) <= 3610
    assert page.get_by_role("button", name="1 h").get_attribute("aria-pressed") == "true"
    page.get_by_role("button", name="1 min").click()
    hour.wait_for(state="detached")
    assert shown_seconds(page) == 60


def test_new_seconds_are_added_without_reading_the_others_again(server: MadeUpServer, open_page: Open) -> None:
    """After the first view, each request is for the seconds since the latest one."""
    page = open_page(server.url)
    until(page.locator("#plots"), "125")
    count = len(server.queries)
    newest = max(since for since, _ in server.queries)
    eventually(lambda: server.queries[-1][0] > newest + 1)
    assert min(since for since, _ in server.queries[count:]) >= newest
    assert page.locator("#plots [role=img][aria-label*='last 125']").count() == 1


def test_a_dragged_period_is_zoomed_until_it_is_reset(server: MadeUpServer, open_page: Open) -> None:
    """A zoomed view stands still, has the values of its seconds, and ends with a button, a double click or Escape."""
    page = open_page(server.url, viewport={"width": 1280, "height": 900})
    reset = page.get_by_role("button", name="Reset zoom")
    over = page.locator("#plots .u-over").first
    for end in (reset.click, over.dblclick, lambda: page.locator("#charts").press("Escape")):
        until(page.locator("#period"), " to ")
        assert reset.is_disabled()
        box = over.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 20)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 20, steps=4)
        page.mouse.up()
        page.mouse.move(0, 0)
        until(page.locator("#period"), ", zoomed")
        assert 70 <= shown_seconds(page) <= 80
        eventually(lambda: server.queries[-1][1] is not None)
        end()
        eventually(lambda: reset.is_disabled())
        page.mouse.move(0, 0)


def test_a_paused_view_stands_still(server: MadeUpServer, open_page: Open) -> None:
    """Pausing keeps the period; resuming shows the seconds since."""
    page = open_page(server.url)
    until(page.locator("#plots"), "125")
    page.get_by_role("button", name="Pause").click()
    until(page.locator("#period"), ", paused")
    before, count = page.locator("#period").inner_text(), len(server.queries)
    watched = server.watchers
    server.stats = dataclasses.replace(server.stats, server=dataclasses.replace(SERVER, connections=77))
    until(page.locator("#figures"), "77")
    assert (page.locator("#period").inner_text(), len(server.queries), server.watchers) == (before, count, watched)
    page.get_by_role("button", name="Resume").click()
    eventually(lambda: "paused" not in page.locator("#period").inner_text())


def test_plots_are_used_by_keyboard(server: MadeUpServer, open_page: Open) -> None:
    """Plus zooms in, arrows move, and minus zooms out."""
    page = open_page(server.url)
    until(page.locator("#plots"), "125")
    charts = page.locator("#charts")

    def press_and_load(key: str) -> None:
        count = len(server.queries)
        charts.press(key)
        eventually(lambda: any(until is not None for _, until in server.queries[count:]))

    press_and_load("+")
    until(page.locator("#period"), ", zoomed")
    assert 149 <= shown_seconds(page) <= 151
    first = page.locator("#period").inner_text()
    press_and_load("ArrowLeft")
    assert page.locator("#period").inner_text() != first
    assert 149 <= shown_seconds(page) <= 151
    page.wait_for_timeout(200)  # the response is shown
    press_and_load("ArrowRight")
    assert page.locator("#period").inner_text() == first
    charts.press("-")
    assert 299 <= shown_seconds(page) <= 301


def test_the_diagnosis_over_time_follows_the_view(server: MadeUpServer, open_page: Open) -> None:
    """A diagnosis that remains visible is drawn at its place in the new view."""
    page = open_page(server.url)
    workers = page.locator("#lane span", has_text="workers")
    left = "element => parseFloat(element.style.left)"
    until(page.locator("#lane"), "workers")
    assert 60 <= workers.evaluate(left) <= 70, "second 3,500 in the five minutes from second 3,300 on"
    page.locator("#charts").press("+")
    until(page.locator("#period"), ", zoomed")
    assert 75 <= workers.evaluate(left) <= 90, "second 3,500 in the 150 seconds from second 3,375 on"


def test_the_series_of_a_run_can_be_selected(server: MadeUpServer, open_page: Open) -> None:
    """A training loop is offered with its run, and has series of its own."""
    page = open_page(server.url)
    until(page.locator("#subject"), "resnet.py, trainer-0 of train")
    assert page.locator("#subject option").all_inner_texts() == [
        *("Server", "Dataset train", "resnet.py, trainer-0 of train")
    ]
    page.get_by_label("Series of").select_option("resnet.py, trainer-0 of train")
    until(page.locator("#plots"), "Consumed batches/s 12.5")
    page.get_by_text("More series").click()
    until(page.locator("#more-plots"), "Round-trip time 500 ms")


def test_a_restart_of_the_server_is_a_gap_with_an_event(server: MadeUpServer, open_page: Open) -> None:
    """The values of the process before remain, and those of the next one follow after a gap."""
    page = open_page(server.url)
    until(page.locator("#plots"), "125")
    server.pid = 5151
    page.locator("#mark-list").evaluate("list => list.parentElement.open = true")
    until(page.locator("#mark-list"), "server started")
    until(page.locator("#mark-list"), "worker 1 (pid 5001) exited")
    assert page.locator("#plots [role=img][aria-label*='between 125 and 125, last 125']").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_the_history_fits_and_stands_out(server: MadeUpServer, open_page: Open, scheme: str, width: int) -> None:
    """No horizontal scrolling and enough contrast, with all series and events open."""
    page = open_page(server.url, viewport={"width": width, "height": 900}, color_scheme=scheme)
    until(page.locator("#plots"), "125")
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    until(page.locator("#more-plots"), "Active consumers")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert violations(page) == []


# --- The connection -----------------------------------------------------------------------------------------------


def test_a_stream_that_ends_is_taken_up_again(server: MadeUpServer, open_page: Open) -> None:
    """The page reconnects by itself, and its figures change again."""
    page = open_page(server.url)
    server.cut()
    until(page.locator("#state"), "Disconnected, reconnecting")
    server.stats = dataclasses.replace(server.stats, server=dataclasses.replace(SERVER, connections=99))
    until(page.locator("#state"), "Ready")
    until(page.locator("#figures"), "99")
    assert server.watchers == 2


def test_a_rejected_stream_is_requested_again(server: MadeUpServer, open_page: Open, visits: list[Visit]) -> None:
    """The page retries after a status such as 503, at which browsers give up, and marks old figures meanwhile."""
    page = open_page(server.url)
    server.refusing = True
    with page.expect_response(lambda answer: answer.status == 503):
        server.cut()
    until(page.locator("#state"), "Disconnected, reconnecting; last update")
    assert "stale" in (page.locator("body").get_attribute("class") or "")
    server.refusing = False
    until(page.locator("#state"), "Ready")
    assert page.locator("body").get_attribute("class") == ""
    visits[0].forgive("503")


# --- Accessibility ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [200, 2000])
def test_many_consumers_can_be_used(server: MadeUpServer, open_page: Open, count: int) -> None:
    """The stream has a hundred consumers, the page requests the others, and shows them filtered and in parts."""
    server.stats = made_up(consumers=count)
    page = open_page(server.url)
    until(page.locator("#counts"), f"{count:,} consumers: 1 workers, {count - 1:,} training.")
    rows = page.locator("#consumers").get_by_role("rowheader")
    until(page.locator("#page"), f"1 to 25 of {count:,}")
    assert rows.count() == 25
    assert rows.first.inner_text() == "trainer-0"
    page.get_by_role("button", name="Next").click()
    until(page.locator("#page"), f"26 to 50 of {count:,}")
    page.get_by_role("searchbox", name="Filter").fill("trainer-150")
    until(page.locator("#consumers tbody"), "trainer-150")
    assert rows.first.inner_text() == "trainer-150"
    page.get_by_role("searchbox", name="Filter").fill("workers")
    until(page.locator("#consumers tbody"), "trainer-0")
    assert rows.all_inner_texts() == ["trainer-0"]


def test_a_disconnected_consumer_is_not_shown(server: MadeUpServer, open_page: Open) -> None:
    """Disconnected consumers disappear, those of the stream and those requested separately."""
    server.stats = made_up(consumers=200)
    page = open_page(server.url)
    until(page.locator("#page"), "of 200")
    server.stats = made_up(consumers=120)
    until(page.locator("#page"), "of 120")


def test_the_page_is_used_by_keyboard(server: MadeUpServer, open_page: Open) -> None:
    """The first key leads to the diagnosis; an expanded one keeps focus and state when figures change."""
    server.stats = made_up(consumers=3)
    page = open_page(server.url)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "answer"
    page.get_by_role("searchbox").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    opened = row(page, "trainer-0").locator("details")
    until(opened.locator("p"), "1 reconnect; 0 hedges; 8 workers would keep up. Loader 0f1e2d3c.")
    # the row would be the last one now, but a row with the focus keeps its position
    calm = dataclasses.replace(CONSUMER, batches_per_second=33.0, diagnosis=UNKNOWN)
    server.stats = dataclasses.replace(server.stats, consumers=[calm, *server.stats.consumers[1:]])
    until(row(page, "trainer-0"), "33")
    assert opened.get_attribute("open") is not None
    assert page.evaluate("document.activeElement.closest('tr').rowIndex") == 1
    page.evaluate("document.activeElement.blur()")
    until(page.locator("#consumers tbody tr").last, "trainer-0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_its_ground(server: MadeUpServer, open_page: Open, scheme: str) -> None:
    """Contrast is at least WCAG's ratio of 4.5 in light and dark mode, and each colored state has a text."""
    diagnoses = [CONSUMER.diagnosis, NETWORK, BUSY, UNKNOWN]
    consumers = [dataclasses.replace(CONSUMER, consumer=f"run-{n}", diagnosis=one) for n, one in enumerate(diagnoses)]
    workers = [dataclasses.replace(WORKER, restarts=1, current_task_seconds=60.0)]
    server.stats = dataclasses.replace(server.stats, consumers=consumers, workers=workers, consumers_total=4)
    page = open_page(server.url, color_scheme=scheme)
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    assert violations(page) == []
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (max(ground) < 64) == (scheme == "dark")
    tones = page.locator("[data-tone]:not(section)").all_inner_texts()
    assert all(any(letter.isalpha() for letter in text) for text in tones)


@pytest.mark.parametrize("width", [1280, 800, PHONE["width"]])
def test_a_diagnosis_has_its_own_line(server: MadeUpServer, open_page: Open, width: int) -> None:
    """The advice has the whole width of the table, below the figures, and is visible without expanding."""
    page = open_page(server.url, viewport={"width": width, "height": 800})
    figures, sentence = (row(page, "trainer-0").get_by_role("cell").nth(n).bounding_box() for n in (6, 7))
    table = page.get_by_role("table", name="Consumers").bounding_box()
    assert figures is not None
    assert sentence is not None
    assert table is not None
    assert sentence["width"] > 0.95 * table["width"]
    assert sentence["y"] >= figures["y"] + figures["height"]
    assert row(page, "trainer-0").get_by_text(CONSUMER.diagnosis.advice).is_visible()


def test_a_phone_scrolls_in_one_direction(server: MadeUpServer, open_page: Open) -> None:
    """Nothing is wider than 360 pixels, including long names and details; tables remain tables for screen readers."""
    long = dataclasses.replace(CONSUMER, consumer="a-very-long-name-of-a-run-without-any-space-" * 3)
    errors = [ErrorCount("ValueError", 1, "x" * 300, "y" * 300, list(range(20)), 0.0)]
    server.stats = dataclasses.replace(
        server.stats, consumers=[long], datasets=[dataclasses.replace(DATASET, errors=errors)]
    )
    page = open_page(server.url, viewport=PHONE)
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.get_by_role("table", name="Consumers").get_by_role("columnheader").count() == 9
    assert page.get_by_role("table", name="Consumers").get_by_role("cell").count() == 8


# --- A real server ------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_real_server_are_those_of_its_stats(servers: ExitStack, open_page: Open) -> None:
    """Counts and positions of a paused consumer equal those of /stats."""
    url = servers.enter_context(serve(hosted.Samples(lambda i: np.full(1000, i), 4000), num_workers=2))
    # without a name, the run has none where several processes share the tests: they have no script
    batches = iter(DataLoader(RemoteDataset(url), batch_size=10, output="numpy", seed=0, name="train.py"))
    for _ in range(60):
        next(batches)
    page = open_page(url)
    until(page.locator("#consumers tbody"), "400")

    def shown() -> bool:
        stats = httpx.get(f"{url}/stats").json()
        consumer, dataset = stats["consumers"][0], stats["datasets"][0]
        found = cells(page, f"train.py {consumer['consumer']}")
        totals = page.locator("#dataset-list").inner_text()
        made = [cells(page, f"{worker['worker']} process {worker['pid']}")[3] for worker in stats["workers"]]
        return (
            found[:4] == ["dataset", "0 of 1", "0", f"{consumer['position']} / 400"]
            and f"{dataset['batches_computed']} batches computed, {dataset['batches_sent']} sent" in totals
            and "map-style, 4,000 samples." in totals
            and made == [f"{worker['batches']}" for worker in stats["workers"]]
        )

    eventually(shown)
    del batches


def test_a_killed_worker_is_shown_as_restarted(start_server: StartServer, open_page: Open) -> None:
    """The page shows the signal that killed the worker, and the new process."""
    server = start_server("--demo", "--num-workers", "2")
    page = open_page(server.url)
    until(page.locator("#state"), "Ready")
    victim = server.worker_pids()[1]
    until(page.locator("#workers"), f"process {victim}")
    os.kill(victim, signal.SIGKILL)
    for part in ("1 restart; last exit: ", "killed by signal SIGKILL", "; restarted within"):
        until(page.locator("#workers tbody tr").nth(1), part)
    until(page.locator("#figures"), "1 restart")
    assert f"process {victim}" not in page.locator("#workers").inner_text()


def test_a_slow_dataset_is_called_loader_bound(servers: ExitStack, open_page: Open) -> None:
    """The page states the number of workers that would meet the demand."""
    url = servers.enter_context(serve(hosted.unhurried(), num_workers=1))
    servers.enter_context(training(RemoteDataset(url), step=0.01, batch_size=40, seed=0))
    page = open_page(url)
    until(page.locator("#sentence"), "▲ I/O ")
    until(page.locator("#consumers tbody"), "speed up the stage 'fetch'")


def test_a_slow_loop_is_called_training_bound(servers: ExitStack, open_page: Open) -> None:
    """The page states that the loader keeps up, and that no more workers are needed."""
    url = servers.enter_context(serve(hosted.Samples(int, 100_000), num_workers=1))
    servers.enter_context(training(RemoteDataset(url), step=0.05, batch_size=10, seed=0))
    page = open_page(url)
    until(page.locator("#sentence"), "● Training ")


def test_a_server_that_stops_is_lost_and_found_again(
    start_server: StartServer, free_port: int, open_page: Open, visits: list[Visit]
) -> None:
    """An open page reports an unavailable server, and shows another process at the same address."""
    server = start_server("--demo", "--num-workers", "1", port=free_port)
    page = open_page(server.url)
    server.end()
    until(page.locator("#state"), "Disconnected, reconnecting")
    another = start_server("--demo", "--num-workers", "1", port=free_port)
    until(page.locator("#state"), "Ready")
    until(page.locator("#facts"), f"process {another.pid} ")
    visits[0].forgive("net::ERR_")


# --- Batch preview ------------------------------------------------------------------------------------------------


def pictures(index: int) -> dict[str, Any]:
    """Return a red image, channels first, a grayscale one, and other values."""
    red = np.zeros((3, 12, 10), np.uint8)
    red[0] = 200
    grey = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    return {"image": red, "digit": grey, "label": index, "name": f"<b>{index}</b>", "weights": np.array([0.5, index])}


def look(page: Page, batch: int, size: int) -> None:
    """Request a batch, and wait for the response."""
    until(page.get_by_role("form").or_(page.locator("#look")), "dataset")
    page.get_by_label("Batch", exact=True).fill(f"{batch}")
    page.get_by_label("Samples", exact=True).fill(f"{size}")
    page.get_by_role("button", name="Show").click()


def test_a_batch_can_be_looked_at(servers: ExitStack, open_page: Open) -> None:
    """The page shows the tree with dtypes, shapes and values; it draws images and prints strings."""
    url = servers.enter_context(serve(hosted.Samples(pictures, 40), num_workers=1))
    page = open_page(url)
    look(page, batch=2, size=4)
    until(page.locator("#looked"), "Batch 2, ")
    tree = " ".join(page.locator("#content").inner_text().split())
    for part in (
        '"image" uint8 (4, 3, 12, 10) tensor, 1.41 KiB',
        '"digit" float32 (4, 8, 8) tensor, 1 KiB',
        '"label" int64 (4,) tensor, 32 B 8, 9, 10, 11',
        '"<b>8</b>"',
        '"weights" float64 (4, 2) tensor, 64 B 0.5, 8, 0.5, 9, 0.5, 10, 0.5, 11',
        "4 images of 12 \N{MULTIPLICATION SIGN} 10 pixels",
    ):
        assert part in tree
    assert page.get_by_role("img", name="Image 4 of 4, 12 \N{MULTIPLICATION SIGN} 10 pixels").is_visible()
    values = "canvas => [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data]"
    assert page.locator("#content canvas").first.evaluate(values) == [200, 0, 0, 255] * 120
    assert violations(page) == []
    grey = page.locator("#content canvas").last.evaluate(values)
    assert (grey[:4], grey[-4:]) == ([0, 0, 0, 255], [255] * 4)
    assert httpx.get(f"{url}/stats").json()["consumers"] == [], "who only looks trains nothing"


def test_a_batch_of_an_iterable_style_dataset_can_be_looked_at(servers: ExitStack, open_page: Open) -> None:
    """The page uses a temporary session; after the end it shows the number of samples."""
    url = servers.enter_context(serve(hosted.Stream(25), num_workers=1))
    page = open_page(url)
    look(page, batch=1, size=10)
    until(page.locator("#content"), "10, 11, 12, 13, 14, 15, 16, 17, …")
    look(page, batch=3, size=10)
    until(page.locator("#looked"), "No batch 3: the dataset yielded 25 samples.")
    eventually(lambda: all(worker["loader"] is None for worker in httpx.get(f"{url}/stats").json()["workers"]))


def test_a_batch_that_cannot_be_had_is_explained(servers: ExitStack, open_page: Open, visits: list[Visit]) -> None:
    """The page shows the dataset's error with traceback, and the server's reason for a rejection."""
    url = servers.enter_context(serve(hosted.failing(), num_workers=1))
    page = open_page(url)
    look(page, batch=4, size=4)
    until(page.locator("#looked"), "Batch 4 failed: ValueError: sample 17 is damaged")
    until(page.locator("#content pre"), "Traceback (most recent call last)")
    until(page.locator("#errors"), "sample 17 is damaged")
    look(page, batch=10, size=4)
    until(page.locator("#looked"), "Request failed: ")
    until(page.locator("#looked"), "10")
    visits[0].forgive("404")


def test_a_batch_that_is_too_large_for_a_page_is_not_loaded(servers: ExitStack, open_page: Open) -> None:
    """The page shows the size and what to do."""
    url = servers.enter_context(serve(hosted.heavy, num_workers=1))
    page = open_page(url)
    look(page, batch=0, size=16)
    until(page.locator("#looked"), "the limit of this page is 64 MiB: request fewer samples")
