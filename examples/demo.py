"""Demonstration: start a loader server with demo data, train on it, print its statistics and stop it.

    python examples/demo.py [the options of train_digits.py]

`make demo` runs this script. The exit status is that of train_digits.py. Ctrl-C also stops the server.
"""

import json
import re
import signal
import subprocess
import sys
import sysconfig
import urllib.request
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any

# Only the standard library is imported here. main() imports slow modules, where it handles Ctrl-C.

SERVER = Path(sysconfig.get_path("scripts"), "teleloader-server")
START_TIMEOUT, STOP_TIMEOUT = 60.0, 15.0

SHOWN = {
    "workers": {"worker": "worker", "batches": "batches", "busy": "busy s", "restarts": "restarts"},
    "datasets": {
        "dataset": "dataset",
        "batches_computed": "computed",
        "batches_sent": "sent",
        "samples_computed": "samples",
        "fetch": "fetch p95",
        "collate": "collate p95",
        "encode": "encode p95",
    },
    "consumers": {
        "dataset": "dataset",
        "rank": "rank",
        "epoch": "epoch",
        "batches_sent": "batches",
        "bytes_sent": "bytes",
        "waiting": "waited s",
    },
}
"""Printed fields of /stats and their column headings, by record."""

ROWS = 4
"""Maximum number of rows per table."""


def main() -> int:
    """Run the demo and return the exit status of the training script."""
    # These signals stop the server as well.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with demo_server(num_workers=2) as url:
            import train_digits

            print(f"a loader server with 2 workers runs at {url}\n")
            status = train_digits.main(["--url", url, *sys.argv[1:]])
            show_stats(fetch_stats(url))
    except KeyboardInterrupt:
        return 130  # the exit status that shells report after Ctrl-C
    except ServerFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    return status


class ServerFailed(Exception):
    """The server exited before it was ready; the message contains its last log lines."""


@contextmanager
def demo_server(num_workers: int) -> Iterator[str]:
    """Run a server on a free loopback port; yield its URL when it is ready.

    The server stays in this program's process group, so that Ctrl-C reaches it even before `Popen` has returned.
    """
    command = [str(SERVER), "--demo", "--num-workers", str(num_workers), "--host", "127.0.0.1", "--port", "0"]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        url: Future[str] = Future()
        # Read until the end: the server would block on a full pipe.
        Thread(target=_listen, args=(server.stderr, url), daemon=True).start()
        yield url.result(START_TIMEOUT)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # further signals must not interrupt the shutdown
        server.terminate()
        try:
            server.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _listen(log: Iterable[str], url: Future[str]) -> None:
    """Read the server's log and set the URL that it contains as the result of ``url``."""
    last: deque[str] = deque(maxlen=20)
    for line in log:
        last.append(line)
        if not url.done() and (found := re.search(r"http://127\.0\.0\.1:\d+", line)):
            url.set_result(found[0])
    if not url.done():
        url.set_exception(ServerFailed(f"{SERVER.name} ended before it was ready:\n{''.join(last)}"))


def fetch_stats(url: str) -> dict[str, Any]:
    """Return the server's statistics."""
    straight = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # ignores proxies of the environment
    with straight.open(f"{url}/stats", timeout=10) as response:
        stats: dict[str, Any] = json.load(response)
    return stats


def show_stats(stats: dict[str, Any]) -> None:
    """Print a table for each type of record."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print("\nStatistics of the server (/stats):")
    for section, fields in SHOWN.items():
        records = stats[section]
        title = section if len(records) <= ROWS else f"{section}, {ROWS} of {len(records)}"
        table = Table(*fields.values(), title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
        for column in table.columns:
            column.no_wrap = True  # a truncated name would be ambiguous
        for record in records[:ROWS]:
            values = {**record, **record.get("stages", {})}
            table.add_row(*(_text(values[field]) for field in fields))
        console.print(table)


def _text(value: Any) -> str:
    match value:
        case {"p95": seconds}:
            return f"{1000 * seconds:.2f} ms"
        case float():
            return f"{value:.2f}"
        case int():
            return f"{value:,}"
        case _:
            return str(value)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
