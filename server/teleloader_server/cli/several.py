"""``teleloader-server --servers N``: several servers on one machine, on consecutive ports."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack

from teleloader_server.cli import banner
from teleloader_server.cli.fleet import advertised_url
from teleloader_server.cli.listener import Listener, bind_consecutive
from teleloader_server.fleet.supervisor import ServerSupervisor
from teleloader_server.limits import Limits
from teleloader_server.logs import set_server
from teleloader_server.web.app import url_of
from teleloader_server.workers.shared import SharedForkServer

logger = logging.getLogger("teleloader_server")


def run_several(
    count: int,
    limits: Limits,
    listener: Listener,
    grace: float,
    forkserver: SharedForkServer,
    run: Callable[[Limits, Listener, Callable[[], object]], int],
) -> int:
    """Run several servers until they are stopped; return the exit code.

    Args:
        count: Number of servers.
        limits: Limits of all servers together.
        listener: Settings of the first server; the others listen on the next ports.
        grace: Seconds for which a server completes pending requests.
        forkserver: Fork server of the datasets.
        run: Function that runs one server, given its limits, its settings, and a function to call when it listens.

    Raises:
        ConfigError: If the servers cannot listen, the limits cannot be divided, or a dataset cannot be constructed.
        OSError: If a resource of the machine is exhausted.
    """
    divided = limits.divided(count)
    with ExitStack() as stack:
        bound = [stack.enter_context(each) for each in bind_consecutive(listener.host, listener.port, count)]
        listener.check_protection(bound[0])
        ports = tuple(each.getsockname()[1] for each in bound)
        url = url_of(bound[0], "http" if listener.tls is None else "https")
        listeners = [listener.at_port(number, ports) for number in range(count)]
        advertised_url(listener.fleet, url, bound[0].getsockname()[0])
        banner.log_start(forkserver.configs)
        infos = forkserver.build()
        if infos is None:
            logger.info("stopped during start-up")
            return 0

        def serve(number: int, listens: Callable[[], object]) -> int:
            set_server(number)
            return run(divided[number], listeners[number], listens)

        def show_banner() -> None:
            servers = f"{count} on ports {ports[0]} to {ports[-1]}; clients find all of them at this URL"
            facts = banner.facts(infos, limits, forkserver.isolation, listener.authenticator, listener.host, url)
            banner.show(url, [("servers", servers), *facts])

        return ServerSupervisor(count, serve, forkserver, show_banner, grace).run()
