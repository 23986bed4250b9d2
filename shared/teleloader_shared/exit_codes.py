"""Exit codes of both commands, and quiet exits after Ctrl-C and at the end of a pipe."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

EXIT_FAILED: Final = 1
"""Exit code of a command that failed, or whose result is negative."""
EXIT_USAGE: Final = 2
"""Exit code for invalid arguments; of a server, also for an invalid configuration, which a restart does not fix."""
EXIT_INTERRUPTED: Final = 128 + signal.SIGINT
"""Exit code that shells report after Ctrl-C."""
EXIT_BROKEN_PIPE: Final = 141  # 128 + SIGPIPE, which Windows lacks
"""Exit code that shells report for a program whose output is not read to its end: ``teleloader stats | head -1``."""


@contextmanager
def quiet_exits() -> Iterator[None]:
    """Context manager of a whole command: exit without a traceback after Ctrl-C, or if the reader of stdout exits.

    Python ignores SIGPIPE, because the default action would also end the process when a server closes a connection.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here rather than by the interpreter, which reports errors
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter, which flushes it again
        sys.exit(EXIT_BROKEN_PIPE)
