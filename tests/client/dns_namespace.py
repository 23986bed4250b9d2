"""Program that resolves names with a DNS server of its own; run it in new mount and network namespaces.

Prints the listings of `DnsDirectory` as JSON: all addresses, after a change, of an unknown name, and without a DNS
server.
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from typing import Final

from teleloader.api.control import Server
from teleloader.fleet.directory import directory_of

A, AAAA = 1, 28
UNKNOWN: Final = 3
"""Response code of a name that does not exist."""
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


class Responder(threading.Thread):
    """UDP server for the addresses of ``loaders.test``."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.addresses: list[str] = []
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 53))

    def run(self) -> None:
        """Respond to queries until the socket is shut down."""
        while True:
            query, client = self.socket.recvfrom(512)
            self.socket.sendto(self.response(query), client)

    def response(self, query: bytes) -> bytes:
        """Return the response to a query with one question."""
        end = query.index(b"\0", 12)
        kind = struct.unpack(">H", query[end + 1 : end + 3])[0]
        is_known = query[12:end] == b"\7loaders\4test"
        family = {A: socket.AF_INET, AAAA: socket.AF_INET6}[kind]
        packed = [
            socket.inet_pton(family, each) for each in self.addresses if is_known and (":" in each) == (kind == AAAA)
        ]
        header = query[:2] + struct.pack(">HHHHH", 0x8180 | (0 if is_known else UNKNOWN), 1, len(packed), 0, 0)
        records = b"".join(struct.pack(">HHHIH", 0xC00C, kind, 1, 0, len(each)) + each for each in packed)
        return header + query[12 : end + 5] + records


def start_loopback() -> None:
    """Start the loopback interface, which a new network namespace does not have."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16sh22x", b"lo", 0))
        flags = struct.unpack("16sh22x", request)[1]
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | IFF_UP))


def use_own_dns_server() -> None:
    """Replace the configuration of the resolver in this mount namespace."""
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        file.flush()
        subprocess.run(["mount", "--bind", file.name, "/etc/resolv.conf"], check=True)


def main() -> None:
    """Print the listings."""
    start_loopback()
    use_own_dns_server()
    responder = Responder()
    responder.start()

    def listed(host: str) -> list[str]:
        directory = directory_of(f"dns+http://{host}:8000", Server)
        assert directory is not None
        found = directory.read()
        return [*(entry.url for entry in found.entries), *(f"problem: {each}" for each in found.problems)]

    responder.addresses = ["10.0.0.2", "10.0.0.1", "fd00::1"]
    first = listed("loaders.test")
    responder.addresses = ["10.0.0.3"]
    changed, unknown = listed("loaders.test"), listed("other.test")
    responder.response = lambda query: b""  # type: ignore[method-assign]
    json.dump([first, changed, unknown, listed("loaders.test")], sys.stdout)


if __name__ == "__main__":
    main()
