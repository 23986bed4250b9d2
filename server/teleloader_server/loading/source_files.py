"""Source files of imported modules, to detect that the code of a dataset has changed since it was imported.

A process that is started later would import the changed code, and its batches would differ from those of its
predecessors, although the version of the dataset is the same.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final, NamedTuple

_PATHS: Final = sysconfig.get_paths()
_PACKAGES: Final = (_PATHS["purelib"], _PATHS["platlib"])


class SourceFiles(NamedTuple):
    """Python files, and the digest of their content at import."""

    paths: list[str]
    digest: str

    @classmethod
    def imported_after(cls, before: Collection[str]) -> SourceFiles:
        """Return the files of the modules that were imported after those with the names `before`.

        The files of the standard library are not included.
        """
        loaded = [module for name, module in list(sys.modules.items()) if name not in before]
        paths = {getattr(module, "__file__", None) or "" for module in loaded}
        found = sorted(path for path in paths if path.endswith(".py") and not _is_standard(path))
        return cls(found, _digest(found))

    @property
    def changed(self) -> bool:
        """True if the content of a file is different now, or a file cannot be read."""
        return _digest(self.paths) != self.digest


UNKNOWN: Final = SourceFiles([], hashlib.blake2b(digest_size=16).hexdigest())
"""No files, for dataset objects, which no process imports again."""


def _is_standard(path: str) -> bool:
    return path.startswith(_PATHS["stdlib"]) and not path.startswith(_PACKAGES)


def _digest(paths: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        try:
            content = hashlib.blake2b(Path(path).read_bytes(), digest_size=16).digest()
        except OSError:
            content = b""
        digest.update(content)
    return digest.hexdigest()
