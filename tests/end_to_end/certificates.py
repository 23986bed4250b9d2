"""Certificates of a test CA, in files."""

from __future__ import annotations

import datetime
from pathlib import Path

import trustme


class Files:
    """Certificates of a test CA, in files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.authority = trustme.CA()
        self.ca = str(folder / "ca.pem")
        self.authority.cert_pem.write_to_path(self.ca)

    def make(self, name: str, *hosts: str, until: datetime.datetime | None = None) -> tuple[str, str]:
        """Create a certificate and its key; return their paths."""
        since = None if until is None else until - datetime.timedelta(days=9)
        made = self.authority.issue_cert(*hosts, not_before=since, not_after=until)
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        for path, content in ((cert, b"".join(blob.bytes() for blob in made.cert_chain_pems)),
                              (key, made.private_key_pem.bytes())):  # fmt: skip
            new = path.with_suffix(".new")
            new.write_bytes(content)
            new.replace(path)
        return str(cert), str(key)
