"""Command ``teleloader top``: sorted table of consumers, workers or datasets, refreshed in place."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Final, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from teleloader.cli.showing import print_json, results_console
from teleloader.cli.stats import Reading, Source, error_json, every, total, unavailable
from teleloader.cli.views import VIEWS, Order, View, chosen_order, problems
from teleloader_shared.errors import ServerUnavailable, TeleloaderError
from teleloader_shared.units import counted, number, size

MAX_CONSUMERS: Final = 1000
"""Maximum number of consumers to request from a server: the one that waits most may not be the latest active one."""
KEY_TIMEOUT_S: Final = 0.1
"""Time between checks for new statistics while no key is pressed, in seconds."""
OTHER_LINES: Final = 7
"""Lines of the screen that are not rows of the table: headings, hints and the last line."""

_ARROWS: Final = {"\x1b[C": ">", "\x1b[D": "<", "\x1bOC": ">", "\x1bOD": "<"}
_VIEW_KEYS: Final = {view.name[0]: view for view in VIEWS}
_HELP: Final = "c consumers  w workers  d datasets  s servers   < > sort column  r reverse  q quit"


class State(NamedTuple):
    """Selected table and order."""

    view: View
    order: Order

    def after(self, key: str, readings: Sequence[Reading]) -> State:
        """Return the state after a key was pressed.

        Args:
            key: The key: a letter, ``<`` or ``>``.
            readings: Responses of the servers.
        """
        if key in _VIEW_KEYS:
            return State(_VIEW_KEYS[key], _VIEW_KEYS[key].order)
        if key == "r":
            return self._replace(order=self.order._replace(descending=not self.order.descending))
        if key in ("<", ">"):
            titles = self.view.titles(readings)
            selected = titles.index(self.order.column) if self.order.column in titles else 0
            title = titles[(selected + (1 if key == ">" else -1)) % len(titles)]
            return self._replace(order=chosen_order(self.view, title, readings, reverse=False))
        return self


def top(source: Source, view: View, sort: str | None, interval: float, *, reverse: bool, as_json: bool) -> None:
    """Show a sorted table until Ctrl-C or the key q; without a terminal, append a table every `interval` seconds.

    Args:
        source: Servers whose statistics are shown.
        view: Table that is shown first.
        sort: Title of the column that determines the order; None for the default of the table.
        interval: Seconds between refreshes.
        reverse: Whether to reverse the order.
        as_json: Whether to print one line of JSON per refresh.
    """
    console = results_console()
    if not as_json and console.is_interactive:
        _interactive(console, source, view, sort, interval, reverse=reverse)
        return
    for found in every(interval, source):
        if isinstance(found, ServerUnavailable):
            print_json(error_json(found)) if as_json else console.print(unavailable(found), Text())
            continue
        order = chosen_order(view, sort, found, reverse=reverse)
        if as_json:
            print_json([view.as_json(row) for row in view.rows(found, order)])
        else:
            console.print(_headline(found), view.shown(found, order, console.width), Text())
        sys.stdout.flush()


def _interactive(
    console: Console, source: Source, view: View, sort: str | None, interval: float, *, reverse: bool
) -> None:
    arrived: SimpleQueue[list[Reading] | Exception] = SimpleQueue()
    # a daemon: Ctrl-C must not wait for the response of a server
    threading.Thread(target=_read, args=(source, interval, arrived), daemon=True).start()
    state: State | None = None
    readings: list[Reading] = []
    with (
        Live(
            Text("connecting ..."), console=console, screen=True, auto_refresh=False, vertical_overflow="crop"
        ) as live,
        _keys() as next_keys,
    ):
        drawn = console.size
        while "q" not in (keys := next_keys()):
            found = None if arrived.empty() else arrived.get()
            if isinstance(found, ServerUnavailable):
                live.update(unavailable(found), refresh=True)
                continue
            if isinstance(found, Exception):
                raise found
            if (found is None and not keys and console.size == drawn) or not (readings := found or readings):
                continue
            state = state or State(view, chosen_order(view, sort, readings, reverse=reverse))
            for key in keys:
                state = state.after(key, readings)
            live.update(_screen(console, source, readings, state), refresh=True)
            drawn = console.size


def _read(source: Source, interval: float, arrived: SimpleQueue[list[Reading] | Exception]) -> None:
    try:
        for found in every(interval, source):
            arrived.put(found)
    except (TeleloaderError, ValueError) as error:
        arrived.put(error)


def _screen(console: Console, source: Source, readings: Sequence[Reading], state: State) -> Group:
    errors = problems(readings, source)
    rows = max(1, console.height - OTHER_LINES - len(errors))
    return Group(
        _headline(readings),
        *(Text(error, style="bold red", no_wrap=True, overflow="ellipsis") for error in errors),
        Text(_HELP, style="dim", no_wrap=True, overflow="ellipsis"),
        Text(),
        Text(state.view.name, style="bold underline"),
        state.view.shown(readings, state.order, console.width, rows),
    )


def _headline(readings: Sequence[Reading]) -> Text:
    found = total(readings)
    parts = (
        time.strftime("%H:%M:%S"),
        *([counted(len(readings), "server")] if len(readings) > 1 else []),
        counted(found.server.num_workers, "worker"),
        counted(found.consumers_total, "consumer"),
        f"{number(found.server.batches_per_second)} batches/s",
        f"{size(found.server.bytes_per_second)}/s",
        f"{found.server.cpu:.1f} of {counted(found.server.cpus, 'CPU')}",
    )
    return Text(", ".join(parts), style="bold", no_wrap=True, overflow="ellipsis")


@contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """Yield a function that returns the next keys, or "" if none is pressed within `KEY_TIMEOUT_S`."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield _no_keys
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield _next_keys
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _no_keys() -> str:
    time.sleep(KEY_TIMEOUT_S)
    return ""


def _next_keys() -> str:
    if not select.select([sys.stdin], [], [], KEY_TIMEOUT_S)[0]:
        return ""
    text = os.read(sys.stdin.fileno(), 64).decode(errors="replace")
    for sequence, key in _ARROWS.items():
        text = text.replace(sequence, key)
    return text
