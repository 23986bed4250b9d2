"""Supervision of a fork server: state after it could not be started."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

from teleloader_server.config import ConfigError
from teleloader_server.loading.source_files import UNKNOWN
from teleloader_server.workers.channel import Channel
from teleloader_server.workers.forkserver import ForkServer
from teleloader_server.workers.messages import Built, encode
from teleloader_server.workers.supervisor import Supervisor


def supervisor(make: Callable[[], ForkServer]) -> Supervisor:
    """Return a supervisor whose callbacks must not be called."""

    def unexpected(*_: Any) -> None:
        pytest.fail("a callback was called")

    return Supervisor(make, unexpected, unexpected, unexpected)


async def test_a_fork_server_that_cannot_be_split_off_is_a_configuration_error() -> None:
    """The shared fork server is being restarted: the session's start is refused, and can be tried again."""

    def make() -> ForkServer:
        raise ConfigError("the fork server is restarting")

    with pytest.raises(ConfigError, match="the fork server is restarting"):
        await supervisor(make).start()


async def test_a_fork_server_whose_process_cannot_be_watched_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor is left for it: its channel is closed, so that it ends, and the event loop forgets the channel."""
    ours, socket = Channel.pair()
    theirs = Channel(socket)
    theirs.send(encode(Built(os.getpid(), [], UNKNOWN)))

    def too_many(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", too_many)
    with pytest.raises(OSError, match="Too many open files"):
        await supervisor(lambda: ForkServer(ours)).start()
    assert ours.fileno() == -1
    with pytest.raises(EOFError):
        theirs.receive()
    theirs.hang_up()


async def test_a_fork_server_that_exits_before_it_is_split_is_no_configuration_error() -> None:
    """The exit of a shared fork server is a temporary error, because the supervisor restarts the fork server."""
    ours, theirs = Channel.pair()
    theirs.close()
    with pytest.raises(OSError, match="the fork server of the datasets exited: the supervisor restarts it"):
        await supervisor(lambda: ForkServer(ours)).start()
