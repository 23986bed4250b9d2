"""Everything in one command: start a loader server on the demo's data, train on it, show its statistics, stop it.

    python examples/demo.py [the options of train_digits.py]

It is what `make demo` runs. The exit status is the trainer's. Ctrl-C stops the server too, at any moment.
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

# Only the standard library up here: what takes long to import is imported in main(), where Ctrl-C is expected.

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
"""Which records of /stats are shown, which of their fields, and under what heading."""

ROWS = 4
"""At most so many rows of a kind."""


def main() -> int:
    """Run the demo; the trainer's exit status."""
    # Who ends this program in another way than Ctrl-C wants the server stopped as well.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with demo_server(num_workers=2) as url:
            import train_digits

            print(f"a loader server with 2 workers runs at {url}\n")
            status = train_digits.main(["--url", url, *sys.argv[1:]])
            show_stats(fetch_stats(url))
    except KeyboardInterrupt:
        return 130  # what a shell reports of a program that Ctrl-C ended
    except ServerFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    return status


class ServerFailed(Exception):
    """The server ended by itself. The message is the last that it said."""


@contextmanager
def demo_server(num_workers: int) -> Iterator[str]:
    """A server of its own on a free loopback port; gives its URL when it is ready and stops it at the end.

    The server stays in this program's process group: a Ctrl-C that comes before `Popen` has returned reaches it all
    the same.
    """
    command = [str(SERVER), "--demo", "--num-workers", str(num_workers), "--host", "127.0.0.1", "--port", "0"]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        url: Future[str] = Future()
        # Read to the end, or the server would come to a halt when the pipe is full.
        Thread(target=_listen, args=(server.stderr, url), daemon=True).start()
        yield url.result(START_TIMEOUT)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # impatience must not leave the server behind
        server.terminate()
        try:
            server.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _listen(log: Iterable[str], url: Future[str]) -> None:
    """Read the server's log; the address in it becomes the result of ``url``."""
    last: deque[str] = deque(maxlen=20)
    for line in log:
        last.append(line)
        if not url.done() and (found := re.search(r"http://127\.0\.0\.1:\d+", line)):
            url.set_result(found[0])
    if not url.done():
        url.set_exception(ServerFailed(f"{SERVER.name} ended before it was ready:\n{''.join(last)}"))


def fetch_stats(url: str) -> dict[str, Any]:
    """What the server says of itself."""
    straight = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy the environment names
    with straight.open(f"{url}/stats", timeout=10) as answer:
        stats: dict[str, Any] = json.load(answer)
    return stats


def show_stats(stats: dict[str, Any]) -> None:
    """Print a short table for each kind of record."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print("\nWhat the server's /stats said in the end:")
    for section, fields in SHOWN.items():
        records = stats[section]
        title = section if len(records) <= ROWS else f"{section}, the last {ROWS} of {len(records)}"
        table = Table(*fields.values(), title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
        for column in table.columns:
            column.no_wrap = True  # a name that is cut names nothing
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
