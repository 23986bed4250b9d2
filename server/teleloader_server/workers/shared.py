"""Fork server that several servers share: the datasets are constructed once on the machine.

Each server forks a fork server of its own from it, so that the workers of all servers share the memory of the datasets.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress

from teleloader_server.config import DatasetConfig
from teleloader_server.workers.channel import Channel
from teleloader_server.workers.forkserver import ForkServer
from teleloader_server.workers.isolation import Isolation
from teleloader_server.workers.messages import BuildFailed, Built, decode
from teleloader_server.workers.supervisor import Supervisor
from teleloader_shared.messages import DatasetInfo

logger = logging.getLogger("teleloader_server")


class SharedForkServer:
    """Fork server that belongs to the supervisor process of several servers.

    Its channel outlives the process, so that requests wait for the next one. Only the parent process receives
    from the channel, and all servers send to it.

    Args:
        configs: Datasets to construct.
        isolation: Restrictions of the process and its workers.
    """

    def __init__(self, configs: Sequence[DatasetConfig], isolation: Isolation) -> None:
        self.configs = configs
        self.isolation = isolation
        self._theirs: socket.socket
        """Other end of the channel, for the process and its successors."""
        self.process: ForkServer
        """Current process."""

    def build(self) -> list[DatasetInfo] | None:
        """Construct the datasets, and return their descriptions; return None if SIGTERM or SIGINT arrives first.

        Raises:
            ConfigError: If the datasets cannot be constructed.
            OSError: If a resource of the machine is exhausted.
        """
        return asyncio.run(self._build())

    async def _build(self) -> list[DatasetInfo] | None:
        supervisor = Supervisor(self._start, lambda _: None, lambda: None, lambda _: None)
        building = asyncio.create_task(supervisor.start())
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, building.cancel)
        with suppress(asyncio.CancelledError):
            infos = await building
            self.process = supervisor.current
            return infos
        return None

    def _start(self) -> ForkServer:
        channel, self._theirs = Channel.pair()
        return ForkServer.spawn_at(channel, self._theirs, self.configs, self.isolation)

    def restart(self) -> int:
        """Start another process, which constructs the datasets again, and return its PID.

        Raises:
            OSError: If a resource of the machine is exhausted.
        """
        if self.process.end != -1:
            os.close(self.process.end)
            self.process.end = -1
        self.process = ForkServer.spawn_at(self.process.channel, self._theirs, self.configs, self.isolation)
        return self.process.pid or 0

    def split(self) -> ForkServer:
        """Fork the fork server for a server, once the datasets are constructed; called in the server's process."""
        return self.process.split()

    def receive(self) -> None:
        """Receive pending messages, and log failures; must be called regularly, because the process waits otherwise."""
        with suppress(BlockingIOError):
            while True:
                for message in map(decode, self.process.channel.receive()):
                    match message:
                        case Built(pid=pid):
                            logger.info("the fork server restarted as pid %d", pid, extra={"pid": pid})
                        case BuildFailed(reason):
                            logger.error("cannot rebuild the datasets: %s", reason)
