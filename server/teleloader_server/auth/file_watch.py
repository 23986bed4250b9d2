"""Detection of file changes by polling, for token files and certificates that a running server reloads."""

from __future__ import annotations

from pathlib import Path


class FileWatch:
    """File change detector that reports a change only once the files are completely written.

    Files count as completely written when two consecutive polls find them equal. The caller polls at intervals and
    reads the files after `poll` returned True. If `has_changed` then returns True, the caller discards the content: a
    later poll reports the files again.

    Args:
        paths: Files to watch. The caller must create this object before it reads the files for the first time.
    """

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._reported = self._seen = self._states()

    def poll(self) -> bool:
        """Return True, once per change, if the files changed and have been stable since the previous poll."""
        before, self._seen = self._seen, self._states()
        if self._seen != before or self._seen == self._reported:
            return False
        self._reported = self._seen
        return True

    def has_changed(self) -> bool:
        """Return True if the files changed since the last poll."""
        return self._states() != self._seen

    def _states(self) -> list[tuple[int, int, int] | None]:
        return [_state(path) for path in self._paths]


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
