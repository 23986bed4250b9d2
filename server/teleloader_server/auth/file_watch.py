"""Changes of files that a server reads again while it runs."""

from __future__ import annotations

from pathlib import Path


class FileWatch:
    """Report files that changed and are complete.

    A file counts as complete when two looks in a row find it alike, so that a file that is being written is not read.
    The caller looks at intervals, reads the files after `look` returned True, and discards what it read if
    `has_changed` then returns True: a later look reports the files again.

    Args:
        paths: The files; the caller reads them for the first time after this.
    """

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._reported = self._seen = self._states()

    def look(self) -> bool:
        """Return True once for each change of the files, when they have not changed since the look before."""
        before, self._seen = self._seen, self._states()
        if self._seen != before or self._seen == self._reported:
            return False
        self._reported = self._seen
        return True

    def has_changed(self) -> bool:
        """Return True if the files changed since the last look."""
        return self._states() != self._seen

    def _states(self) -> list[tuple[int, int, int] | None]:
        return [_state(path) for path in self._paths]


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
