"""Function ``serve``: runs a server for a dataset object in a thread of this process, for notebooks and tests."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from teleloader_server.auth.origins import refuse_unprotected
from teleloader_server.auth.tokens import Tokens, single_token
from teleloader_server.config import ConfigError
from teleloader_server.limits import DEFAULT_BATCH_TIMEOUT, DEFAULT_LIMITS, ClientLimits, Limits, default_memory_budget
from teleloader_server.loading.datasets import HostedDataset, host, is_factory
from teleloader_server.workers.factory import ObjectPools
from teleloader_server.workers.procfs import shortage
from teleloader_shared import local
from teleloader_shared.codec import DEFAULT_MAX_BATCH_BYTES
from teleloader_shared.secret import Secret
from teleloader_shared.spec import DEFAULT_COLLATE
from teleloader_shared.text import missing_package

DEFAULT_NAME: Final = "dataset"


@contextmanager
def serve(
    dataset: Any,
    *,
    name: str = DEFAULT_NAME,
    num_workers: int = 2,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    version: str = "",
    seeding: Literal["batch", "sample"] = "batch",
    memory_budget: int | None = None,
    max_batch_bytes: int = DEFAULT_MAX_BATCH_BYTES,
    batch_timeout: float = DEFAULT_BATCH_TIMEOUT,
    max_replay: int = 0,
    host_address: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    insecure: bool = False,
    limits: ClientLimits = DEFAULT_LIMITS,
) -> Iterator[str]:
    """Start a server in this process that hosts a dataset object.

    Workers are forked from this process, so the dataset may contain lambdas and closures.

    A loader in this process has private workers, forked when an epoch starts, as in torch: they get the object's state
    at that time (with ``persistent_workers=True``, its state in the first epoch). Loaders with a `seed` and loaders in
    other processes share workers, which get the object's state at the registration of the first of these loaders.

        with serve(my_dataset, num_workers=2) as url:
            loader = DataLoader(RemoteDataset(url), batch_size=32)

    Args:
        dataset: A map-style or iterable-style dataset, a function or class that returns one, or a mapping from names
            to datasets.
        name: Name of the dataset for clients; ignored for a mapping.
        num_workers: Number of worker processes; 0 loads in a thread of this process, for debugging. This thread shares
            the global random generators with a training loop in this process: to train without workers, pass the
            dataset to `DataLoader` instead.
        collate_fn: Function that collates a list of samples to a batch, called in the workers; None for torch's
            default_collate.
        worker_init_fn: Function that each worker calls with its worker ID before its first batch.
        version: Version of the data; see `DatasetConfig.version`.
        seeding: See `DatasetConfig.seeding`.
        memory_budget: Memory for computed batches, in bytes; None for 2 GiB, or a quarter of the machine's memory if
            that is less.
        max_batch_bytes: Maximum size of an encoded batch, in bytes.
        batch_timeout: Timeout in seconds for computing a batch, and for starting a worker. A worker that exceeds the
            timeout is killed, and its batch fails. 0 disables the timeout; ``num_workers=0`` has no timeout.
        max_replay: Maximum number of batches that a worker iterates again to restore its shard of an iterable-style
            dataset without a state; beyond it, the shard fails. 0 for no limit.
        host_address: IP address to listen on.
        port: Port to listen on; 0 selects a free one.
        token: Token with which clients authenticate (``RemoteDataset(url, token=...)``), at least 16 characters, such
            as ``secrets.token_urlsafe()``. None disables authentication and requires a loopback address.
        insecure: True to permit a non-loopback `host_address` without a token.
        limits: Resource limits for clients.

    Yields:
        The server's URL.

    Raises:
        ConfigError: If the object is not a dataset, or `host_address` is non-loopback without `token` and `insecure`.
        OSError: If the address is in use or not available.
    """
    token = None if token is None else Secret(token)  # first: tracebacks that show local variables must not show it
    worker_limits = Limits(
        num_workers=num_workers,
        memory_budget=default_memory_budget() if memory_budget is None else memory_budget,
        max_batch_bytes=max_batch_bytes,
        batch_timeout=batch_timeout,
        max_replay=max_replay,
        debug=True,
    )
    named = dataset if isinstance(dataset, Mapping) else {name: dataset}
    objects = {key: found() if is_factory(found) else found for key, found in named.items()}
    make_hosted = partial(
        host,
        collate=collate_fn,
        collate_name=DEFAULT_COLLATE if collate_fn is None else getattr(collate_fn, "__qualname__", repr(collate_fn)),
        worker_init=worker_init_fn,
        version=version,
        seeding=seeding,
    )

    def hosted_now() -> dict[str, HostedDataset]:
        return {key: make_hosted(found, name=key) for key, found in objects.items()}

    hosted_now()  # raise here if an object cannot be hosted
    pools = ObjectPools(hosted_now, worker_limits)
    tokens = None if token is None else single_token(token, "serve()")
    server = _LocalServer(pools, worker_limits, limits, host_address, port, tokens, insecure=insecure)
    with _served(server, objects) as url:
        yield url


@contextmanager
def _served(server: _LocalServer, objects: dict[str, Any]) -> Iterator[str]:
    url = server.start()
    local.begin_serving(url, server.thread)
    # if the with block never ends, the server stops at interpreter exit, while its thread can still be joined
    ending = weakref.finalize(server, server.stop)
    try:
        yield url
    finally:
        local.end_serving(url)
        ending()
        objects.clear()  # reference cycles of the server would keep the datasets until the next garbage collection


@dataclass(eq=False, repr=False)
class _LocalServer:
    """A server in a thread of this process."""

    pools: ObjectPools
    limits: Limits
    client_limits: ClientLimits
    address: str
    port: int
    tokens: Tokens | None
    insecure: bool

    def __post_init__(self) -> None:
        self._pid = os.getpid()
        self._started: Future[str] = Future()
        self._stop: Callable[[], object]
        self.thread = threading.Thread(target=self._run, name="teleloader-server", daemon=True)

    def start(self) -> str:
        """Start the server thread, wait until the server listens, and return the server's URL."""
        self.thread.start()
        try:
            return self._started.result()
        except BaseException:
            self.thread.join()
            raise

    def stop(self) -> None:
        """Stop the server, and wait for the server thread to exit."""
        if os.getpid() != self._pid:
            return  # this is a forked child, and the server belongs to its parent
        self._stop()
        self.thread.join()

    def _run(self) -> None:
        try:
            import uvloop

            import teleloader_server.web.app  # noqa: F401 - fails here if a package that `_serve` needs is missing

            loop = uvloop.new_event_loop()
        except ModuleNotFoundError as error:
            self._started.set_exception(ConfigError(missing_package("serve()", error, "server")))
            return
        except OSError as error:
            self._started.set_exception(OSError(error.errno, shortage(error)))
            return
        try:
            loop.run_until_complete(self._serve())
            loop.run_until_complete(_cancel_others())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            # not asyncio.Runner: it starts a thread to shut down the executor, which fails at interpreter exit
            loop.close()

    async def _serve(self) -> None:
        # imported here, so that a process that only defines datasets does not import fastapi
        from teleloader_server.auth.authenticator import Authenticator
        from teleloader_server.dispatch.service import LoaderService
        from teleloader_server.web.app import Server, bind, url_of

        service = LoaderService(self.pools, self.limits, self.client_limits)
        try:
            authenticator = Authenticator(fixed=self.tokens, host=self.address)
            server = Server(service, self.address, self.port, grace=1, authenticator=authenticator)
            listening = bind(self.address, self.port)
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
            self._started.set_exception(error)
            return
        try:
            address = listening.getsockname()[0]
            refuse_unprotected(address, has_tokens=authenticator.has_tokens, insecure=self.insecure)
            await service.start()
        except BaseException as error:  # noqa: BLE001 - as above
            listening.close()
            self._started.set_exception(error)
            return
        serving = asyncio.create_task(server.serve([listening]))
        await server.listening.wait()
        loop = asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(setattr, server, "should_exit", True)
        self._started.set_result(url_of(listening))
        try:
            await serving
        finally:
            await service.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
