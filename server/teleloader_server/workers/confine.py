"""Restrictions that the kernel enforces on a process; also a program that restricts itself, and executes another one.

    python -I -S confine.py SETTINGS PROGRAM [ARGUMENT]...

SETTINGS are the fields of `Restrictions` as JSON. The kernel keeps the restrictions across fork and exec, so they hold
for the executed program, which is the fork server, and for all workers.

The program runs with the privileges of the server. It therefore imports only the standard library, and the isolated
mode of Python (``-I -S``) ignores the environment, the current folder and installed packages. Rejected: `preexec_fn` of
`subprocess`, because it runs Python code in a fork of the server, in which other threads may have held locks.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

_PR_SET_DUMPABLE: Final = 4
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
_CLONE_NEWUSER: Final = 0x1000_0000
_CLONE_NEWNET: Final = 0x4000_0000
_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1
_INTERFACE: Final = struct.Struct("16sH22x")
"""``struct ifreq`` with the flags of a network interface."""


class Restrictions(NamedTuple):
    """Restrictions of a process and its children."""

    uid: int | None
    """User ID; None keeps the user and the groups."""
    gid: int
    groups: Sequence[int]
    """Supplementary groups, which replace those of the server."""
    has_network: bool
    """False for a network namespace of its own, which has a loopback interface only."""
    max_data_bytes: int
    """Maximum private writable memory of each process in bytes (``RLIMIT_DATA``); 0 for no limit.

    Rejected: ``RLIMIT_AS``, because it includes address space without memory (after the import of torch, 640 MB instead
    of 220 MB); a control group, because containers and systemd units do not permit servers to create one.
    """
    max_processes: int
    """Maximum number of the user's processes and threads (``RLIMIT_NPROC``); 0 for no limit."""


class Refused(Exception):
    """Exception for a restriction that the system does not permit."""


def forbid_new_privileges() -> None:
    """Disable set-user-ID programs and file capabilities for this process and its children (``no_new_privs``)."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def forbid_inspection() -> None:
    """Prevent unprivileged processes of the same user from reading this process by ptrace and procfs.

    They can read neither memory, environment and descriptors, nor a core dump. A program that this process executes is
    not protected.
    """
    _prctl(_PR_SET_DUMPABLE, 0)


def apply(restrictions: Restrictions) -> None:
    """Apply restrictions to this process, which must not have threads.

    Raises:
        Refused: If the system does not permit a restriction.
    """
    has_namespace = restrictions.has_network or _try_leave_network()
    if restrictions.uid is not None:
        try:
            os.setgroups(restrictions.groups)
            os.setresgid(restrictions.gid, restrictions.gid, restrictions.gid)
            os.setresuid(restrictions.uid, restrictions.uid, restrictions.uid)
            # a server that is not root has its capabilities from this set, and `setresuid` keeps them
            _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
        except OSError as error:
            raise Refused(f"cannot run as user ID {restrictions.uid}: {error.strerror}") from None
        # without a controlling terminal, in which the process could enter commands (TIOCSTI) for the server's user
        os.setsid()
        _leave_closed_folder()
    if not has_namespace:
        _leave_network_unprivileged()
    for kind, limit in (
        (resource.RLIMIT_DATA, restrictions.max_data_bytes),
        (resource.RLIMIT_NPROC, restrictions.max_processes),
    ):
        if limit:
            _, hard = resource.getrlimit(kind)
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (limit, limit))
    forbid_new_privileges()


def _leave_closed_folder() -> None:
    """Leave the current folder if the user cannot access its path: relative paths would bypass the permissions."""
    try:
        os.chdir(os.getcwd())  # noqa: PTH109 - pathlib is not faster or clearer
    except OSError:
        os.chdir("/")


def _try_leave_network() -> bool:
    """Move this process to a new network namespace; return False if it lacks a capability."""
    try:
        _call("unshare", _CLONE_NEWNET)
        _enable_loopback()
    except OSError:
        return False
    return True


def _leave_network_unprivileged() -> None:
    """Move this process to a new network namespace that belongs to a new user namespace, with unchanged IDs.

    Raises:
        Refused: If the system permits neither.
    """
    uid, gid = os.geteuid(), os.getegid()
    # after a change of the user, the files below belong to root
    _prctl(_PR_SET_DUMPABLE, 1)
    try:
        _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNET)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path("/proc/self", name).write_text(text)
        _enable_loopback()
    except OSError as error:
        raise Refused(
            f"cannot create a network namespace: {error.strerror}. It requires CAP_SYS_ADMIN, or a system that permits "
            "user namespaces to unprivileged users"
        ) from None


def _enable_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        found = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, _INTERFACE.pack(b"lo", 0))
        _, flags = _INTERFACE.unpack(found)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _INTERFACE.pack(b"lo", flags | _IFF_UP))


def _prctl(option: int, value: int) -> None:
    _call("prctl", option, value, 0, 0, 0)


def _call(name: str, *arguments: int) -> None:
    """Call a function of the C library.

    Raises:
        OSError: If it fails.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*map(ctypes.c_ulong, arguments)) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def main() -> None:
    """Apply the restrictions of the first command-line argument, and execute the program of the others."""
    settings, program, *arguments = sys.argv[1:]
    try:
        apply(Restrictions(**json.loads(settings)))
    except Refused as refusal:
        sys.exit(str(refusal))
    try:
        os.execv(program, [program, *arguments])  # noqa: S606 - the command of the server
    except OSError as error:
        sys.exit(
            f"cannot execute {program}: {error.strerror}. Install Python and teleloader in a folder that the user of "
            "the workers can read"
        )


if __name__ == "__main__":
    main()
