"""Simulation of training processes and loader servers in virtual time, with the client's real scheduler.

Real: the scheduler of each training process (`RangeScheduler`, with the assignment of batches to servers and hedging),
and the choice of the servers of a loader (`nearest`). Simulated: servers, network, training loops and the reading of
the directory. A simulated server starts the first missing batch of each request before other batches, and within both
classes the batch of the client that was served least, like the server's dispatcher. It keeps all batches.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, cast

from teleloader.fetch.scheduler import HEDGE_LEAST, HEDGE_UNKNOWN, RangeScheduler
from teleloader.fleet.servers import nearest
from teleloader.transport.interface import BatchServer
from teleloader.transport.request import BatchRequest
from teleloader_shared.messages import READY_BYTES

GRACE_S: Final = 3.0
"""Seconds for which a server that does not respond stays listed."""
READ_INTERVAL_S: Final = 0.5
"""Maximum seconds until a client reads a change of the directory."""
SILENCE_S: Final = 10.0
"""Seconds without data after which a client disconnects from a server that does not respond."""
LOADER: Final = "0123456789abcdef" * 2


@dataclass(frozen=True, kw_only=True)
class Model:
    """Distributions of the simulated latencies. Log-normal distributions are given by median and sigma."""

    round_trip: float = 0.001
    """Median seconds from a request to the response, without the computation of the batch."""
    round_trip_sigma: float = 0.0
    compute_sigma: float = 0.17
    """Sigma of the seconds per batch of a worker, relative to the mean of the server."""
    stall_interval: float = math.inf
    """Mean seconds between two stalls of a server, during which the server neither computes nor sends batches."""
    stall: float = 1.0
    """Median seconds of a stall."""
    stall_sigma: float = 1.0
    rate_sigma: float = 0.0
    """Sigma of the batch rate that a server reports to the clients of a loader, relative to its true rate."""
    frame_bytes: int = 10**6
    """Size of a batch, in bytes."""
    hedging: bool = True


class SchedulerWithoutHedging(RangeScheduler):
    """Scheduler that waits for each response, however long it takes."""

    def _patience(self, holder: int) -> float:
        return math.inf


class _Listed(NamedTuple):
    """Server in a directory, with the attributes that `nearest` reads."""

    url: str
    has_recently_failed: bool


@lru_cache(maxsize=50_000)
def chosen(
    names: tuple[str, ...], key: str, used: frozenset[str] = frozenset(), failed: frozenset[str] = frozenset()
) -> tuple[str, ...]:
    """Return the names of the servers that a loader uses; clients with the same view compute it once."""
    listed: list[Any] = [_Listed(name, name in failed) for name in names]
    return tuple(server.url for server in nearest(cast("list[BatchServer]", listed), key, used))


@dataclass(eq=False)
class Server:
    """Server that computes each batch once, as long as it runs."""

    name: str
    num_workers: int
    seconds: float
    """Mean seconds of a worker per batch."""
    ready: dict[tuple[str, int], bool] = field(default_factory=dict)
    """Started batches, by loader and number; True if they are ready."""
    queue: list[tuple[bool, float, int, Connection, int]] = field(default_factory=list)
    """Requested batches: whether the client waits for an earlier batch, service of the client, tie-breaker, connection,
    number."""
    level: float = 0.0
    """Service of the client whose batch was started last; new clients start at this level."""
    busy: int = 0
    waiting: dict[tuple[str, int], list[Connection]] = field(default_factory=dict)
    """Connections whose request waits for its first batch, by this batch."""
    is_alive: bool = True
    is_stuck: bool = False
    """True if the server keeps its connections, and computes and sends nothing."""
    stalled_until: float = 0.0
    reports: bool = True
    """True if the server reports its rate to clients."""
    requests: int = 0
    sent: int = 0
    """Number of sent batches."""
    busy_seconds: float = 0.0
    """Time in which workers computed, or were stalled while they did, up to `measured_at`; of all workers."""
    measured_at: float = 0.0

    @property
    def rate(self) -> float:
        """Batches/s of all workers."""
        return self.num_workers / self.seconds

    def measure(self, now: float) -> None:
        """Add the time since the last call to `busy_seconds`."""
        self.busy_seconds += self.busy * (now - self.measured_at)
        self.measured_at = now


@dataclass(eq=False)
class Loader:
    """Epoch of a loader, which one or more consumers iterate."""

    key: str = LOADER
    kind: str = ""
    """Name of a group of loaders in the results."""
    batches: int = 400
    """Batches in the epoch."""
    rank: int = 0
    computed: Counter[int] = field(default_factory=Counter)
    """Times that each batch was computed."""

    @property
    def work(self) -> float:
        """Number of computed batches, divided by the number of distinct ones."""
        return self.computed.total() / max(1, len(self.computed))


@dataclass(eq=False)
class Connection:
    """Requests of a consumer to a server."""

    consumer: Consumer
    server: Server
    number: int
    """Number of the server in the scheduler."""
    served: float
    """Number of batches that the server has started for the consumer, at least the level of the server at the start."""
    in_flight: deque[BatchRequest] = field(default_factory=deque)
    is_open: bool = True
    """False after the connection broke, until the loader is registered again."""


class Job:
    """Training job: its processes compute their steps together, after each of them has received its batch.

    Args:
        simulation: The simulation.
        step: Seconds of a training step.
        size: Number of processes.
    """

    def __init__(self, simulation: Simulation, step: float, size: int = 1) -> None:
        self._simulation = simulation
        self._step = step
        self.consumers: list[Consumer] = []
        self._missing = size
        self._began: float | None = None
        """Start of the current step; None before the first one."""

    def took(self) -> None:
        """Record that a process has received its batch; the step begins when it was the last one."""
        self._missing -= 1
        if self._missing:
            return
        if self._began is not None:
            wait = self._simulation.now - self._began
            self._simulation.job_waits.append((self._began, wait))
            self._simulation.job_seconds += wait + self._step
        self._simulation.later(self._step, self._request)

    def _request(self) -> None:
        self._began = self._simulation.now
        running = [consumer for consumer in self.consumers if consumer.ended is None]
        self._missing = len(running)
        for consumer in running:
            consumer.request_batch()


class Consumer:
    """Training process with the scheduler and the receiving threads of its iterator.

    Args:
        simulation: The simulation.
        loader: The loader, which other consumers may share.
        job: The job, whose steps wait for all its processes.
        start: Number of the first batch.
    """

    def __init__(self, simulation: Simulation, loader: Loader, job: Job, start: int = 0) -> None:
        self.simulation = simulation
        self.loader = loader
        self.job = job
        self.ended: float | None = None
        self.started = simulation.now
        self.longest_wait = 0.0
        self.most_buffered = 0
        self.arrived: set[int] = set()
        """Received batches that the training loop has not taken."""
        self.failed: set[str] = set()
        """Names of servers that do not respond."""
        self.unreachable: set[str] = set()
        self._waits_since: float | None = None
        self._had_batch = False
        self._polls = False
        names = self._nearest()
        place = loader.rank % len(names)
        found = map(simulation.by_name.__getitem__, names[place:] + names[:place])
        first = next(server for server in found if server.is_alive and not server.is_stuck)
        make = RangeScheduler if simulation.model.hedging else SchedulerWithoutHedging
        self.scheduler = make(
            start, loader.batches, 2, first.num_workers,
            name=first.name, batch_rate=simulation.reported_rate(first, loader), loader=loader.key, epoch=0,
        )  # fmt: skip
        self.connections = {first.name: Connection(self, first, 0, first.level)}
        self._retired: list[Connection] = []
        """Connections to servers that left, with pending responses."""
        job.consumers.append(self)
        self._update(names)
        self._wake()
        self.request_batch()

    # -- servers

    def _nearest(self, used: Collection[str] = ()) -> tuple[str, ...]:
        return chosen(self.simulation.listed, self.loader.key, frozenset(used), frozenset(self.failed))

    def read_directory(self) -> None:
        """Use the servers that the directory lists, as `Receiver.follow` does."""
        if self.ended is None:
            self._update(self._nearest(self.connections))

    def _update(self, names: Collection[str]) -> None:
        for name in names:
            if name not in self.connections:
                server = self.simulation.by_name[name]
                connection = Connection(self, server, self.scheduler.add_server(), server.level)
                self.connections[name] = connection
                self.simulation.later(self.simulation.round_trip(), partial(self._register, connection))
        left = self.connections.keys() - set(names)
        for name in left:
            self._retired.append(self.connections.pop(name))
            self.scheduler.remove_server(self._retired[-1].number, self.simulation.now)
        if left:
            self._wake()

    def _register(self, connection: Connection) -> None:
        """Receive the response to a registration, unless the server does not respond."""
        server, now = connection.server, self.simulation.now
        if self.connections.get(server.name) is not connection or server.is_stuck or server.name in self.unreachable:
            return
        if not server.is_alive:
            self._fail(server)
            return
        if now < server.stalled_until:
            self.simulation.later(server.stalled_until - now, partial(self._register, connection))
            return
        self.failed.discard(server.name)
        connection.is_open = True
        rate = self.simulation.reported_rate(server, self.loader)
        self.scheduler.joined(connection.number, server.num_workers, server.name, rate, now)
        self._wake()

    def lose(self, server: Server) -> None:
        """Notice that the connections to a server broke."""
        for connection in (*self._retired, *self.connections.values()):
            if connection.server is server and connection.is_open:
                connection.in_flight.clear()
                connection.is_open = False
                self.scheduler.disconnected(connection.number, self.simulation.now)
                self._fail(server)
                self._wake()

    def _fail(self, server: Server) -> None:
        self.failed.add(server.name)
        self.simulation.later(self.simulation.read_delay(), self.read_directory)

    # -- requests

    def _wake(self) -> None:
        """Let the idle receiving threads send requests; threads that would find none are skipped, to save time."""
        scheduler, now = self.scheduler, self.simulation.now
        assigns = scheduler.has_room or not scheduler.shared
        may_hedge = self._waits_since is not None and now - self._waits_since >= HEDGE_LEAST
        for connection in list(self.connections.values()):
            if not connection.in_flight and (assigns or may_hedge or scheduler._blocks.queue(connection.number)):
                self._pull(connection)
                assigns = assigns and not scheduler.shared

    def _poll(self) -> None:
        """Look for overdue requests, as idle receiving threads do."""
        self._polls = self._waits_since is not None
        if self._polls:
            self._wake()
            self.simulation.later(HEDGE_LEAST, self._poll)

    def _pull(self, connection: Connection) -> None:
        """Send requests while the scheduler has some for the server."""
        scheduler, in_flight = self.scheduler, connection.in_flight
        while connection.is_open and connection.server.is_alive and len(in_flight) < scheduler.connections:
            wanted = scheduler.next_request(connection.number, self.simulation.now)
            if wanted is None:
                return
            in_flight.append(wanted)
            self.simulation.request(connection, wanted)
            if len(in_flight) == 1:
                self.simulation.await_response(connection)

    def receive(self, connection: Connection) -> None:
        """Receive the batches at the beginning of the first pending request that are ready."""
        in_flight, server, scheduler = connection.in_flight, connection.server, self.scheduler
        if not in_flight:
            return
        model, now, key = self.simulation.model, self.simulation.now, self.loader.key
        limit = -(-READY_BYTES // model.frame_bytes)
        ready = itertools.takewhile(lambda k: server.ready.get((key, k)), in_flight[0].batches)
        batches = list(itertools.islice(ready, limit))
        if not batches:
            return
        server.sent += len(batches)
        self.arrived.update(filter(scheduler.is_missing, batches))
        self.most_buffered = max(self.most_buffered, len(self.arrived))
        rest = scheduler.arrived(len(batches), model.frame_bytes * len(batches), connection.number, now)
        scheduler.paced(now)
        if rest is None:
            in_flight.popleft()
        else:
            in_flight[0] = rest
            self.simulation.request(connection, rest)
        if in_flight:
            self.simulation.await_response(connection)
        self._pull(connection)
        if scheduler.has_room:
            self._wake()
        if self._waits_since is not None and scheduler.received > scheduler.taken:
            self._take()

    # -- the training loop

    def request_batch(self) -> None:
        """Take the next batch, or wait for it."""
        self._waits_since = self.simulation.now
        if self.scheduler.taken == self.scheduler.stop:
            self._waits_since, self.ended = None, self.simulation.now
            self.job.took()
        elif self.scheduler.received > self.scheduler.taken:
            self._take()
        elif not self._polls:
            self._polls = True
            self.simulation.later(HEDGE_LEAST if self._had_batch else HEDGE_UNKNOWN, self._poll)

    def _take(self) -> None:
        """Take the next batch.

        Raises:
            KeyError: If the batch did not arrive, or was taken already.
        """
        simulation, scheduler = self.simulation, self.scheduler
        assert self._waits_since is not None
        wait, self._waits_since = simulation.now - self._waits_since, None
        self.longest_wait = max(self.longest_wait, wait)
        if self._had_batch:
            simulation.waits.append((simulation.now - wait, wait))
        else:
            simulation.first_waits.append(wait)
            self._had_batch = True
        self.arrived.remove(scheduler.taken)
        scheduler.taken += 1
        if scheduler.has_room:
            self._wake()
        self.job.took()


class Simulation:
    """Servers and consumers in virtual time.

    Args:
        servers: The servers at the beginning.
        model: Distributions of the latencies.
        seed: Selects the durations.
    """

    def __init__(self, servers: Sequence[Server], model: Model | None = None, seed: int = 0) -> None:
        self.servers = list(servers)
        self.by_name = {server.name: server for server in servers}
        self.listed = tuple(self.by_name)
        """Names of the servers in the directory."""
        self.model = model or Model()
        self.now = 0.0
        self.jobs: list[Job] = []
        self.consumers: list[Consumer] = []
        self.waits: list[tuple[float, float]] = []
        """Start and seconds of the wait for each batch of each consumer, except its first one."""
        self.job_waits: list[tuple[float, float]] = []
        """The same of the waits for the last process of each job at each step."""
        self.job_seconds = 0.0
        """Time of all jobs from their first step on."""
        self.first_waits: list[float] = []
        """Seconds until the first batch of each consumer."""
        self.computed_at = Counter[int]()
        """Number of batches whose computation began, by second."""
        self.repeated_at = Counter[int]()
        """Number of these that another server had begun or completed before."""
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._random = random.Random(seed)
        self._stall_random = random.Random(f"stalls/{seed}")
        """Independent of the other events, so that runs with different settings have the same stalls."""
        self._rates: dict[tuple[str, str], float] = {}
        for server in servers:
            self._schedule_stall(server)

    # -- events of the fleet

    def later(self, seconds: float, event: Callable[[], object]) -> None:
        """Call `event` after a time."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def consume(self, at: float, loader: Loader, job: Job, start: int = 0) -> None:
        """Add a consumer."""
        self.later(at, lambda: self.consumers.append(Consumer(self, loader, job, start)))

    def join(self, at: float, *servers: Server) -> None:
        """Add servers, which each client finds within `READ_INTERVAL_S`."""

        def begin() -> None:
            self.servers.extend(servers)
            self.by_name.update({server.name: server for server in servers})
            for server in servers:
                self._schedule_stall(server)
            self._list((*self.listed, *(server.name for server in servers)))

        self.later(at, begin)

    def kill(self, at: float, *servers: Server) -> None:
        """Kill servers: their connections break at once, and they are not listed after a time."""

        def end() -> None:
            for server in servers:
                server.is_alive = False
                for consumer in self.consumers:
                    consumer.lose(server)

        self.later(at, end)
        self._unlist(at + GRACE_S, servers)

    def power_off(self, at: float, *servers: Server) -> None:
        """Switch servers off: connections break only after `SILENCE_S`, and they are not listed after a time."""
        for server in servers:
            self.stop(at, server)

        def break_connections() -> None:
            for server in servers:
                server.is_alive = False
                for consumer in self.consumers:
                    consumer.lose(server)

        self._unlist(at + GRACE_S, servers)
        self.later(at + SILENCE_S, break_connections)

    def stop(self, at: float, server: Server) -> None:
        """Let a server compute and send nothing from now on."""
        self.later(at, lambda: setattr(server, "is_stuck", True))

    def part(self, at: float, consumer: int, server: Server) -> None:
        """Break the connections between a consumer and a server, which stays unreachable."""

        def end() -> None:
            self.consumers[consumer].unreachable.add(server.name)
            self.consumers[consumer].lose(server)

        self.later(at, end)

    def _list(self, names: tuple[str, ...]) -> None:
        self.listed = names
        for consumer in self.consumers:
            self.later(self.read_delay(), consumer.read_directory)

    def _unlist(self, at: float, servers: Sequence[Server]) -> None:
        gone = {server.name for server in servers}
        self.later(at, lambda: self._list(tuple(name for name in self.listed if name not in gone)))

    def _schedule_stall(self, server: Server) -> None:
        if math.isfinite(self.model.stall_interval):
            self.later(self._stall_random.expovariate(1 / self.model.stall_interval), partial(self._stall, server))

    def _stall(self, server: Server) -> None:
        server.stalled_until = self.now + self._stall_random.lognormvariate(
            math.log(self.model.stall), self.model.stall_sigma
        )
        self._schedule_stall(server)

    # -- latencies

    def read_delay(self) -> float:
        """Return the seconds until a client reads the directory again."""
        return self._random.uniform(0, READ_INTERVAL_S)

    def round_trip(self) -> float:
        """Return the seconds from a request to the response."""
        return self._lognormal(self.model.round_trip, self.model.round_trip_sigma)

    def reported_rate(self, server: Server, loader: Loader) -> float | None:
        """Return the batches/s that a server reports to all clients of a loader; None if it reports none."""
        if not server.reports:
            return None
        pair = server.name, loader.key
        if pair not in self._rates:
            self._rates[pair] = self._lognormal(server.rate, self.model.rate_sigma)
        return self._rates[pair]

    def _lognormal(self, median: float, sigma: float) -> float:
        return median * math.exp(sigma * self._random.gauss(0, 1)) if sigma else median

    # -- execution

    def run(self, until: float = math.inf, progress: Callable[[float], object] | None = None) -> float:
        """Run until all consumers have ended, or until a time; return the time.

        Args:
            until: The time in virtual seconds.
            progress: Function that is called with the time each virtual second.
        """
        told = 0.0
        while not self.consumers or until < math.inf or any(consumer.ended is None for consumer in self.consumers):
            if not self._events or self._events[0][0] > until:
                assert until < math.inf, "no consumer receives a batch any more"
                break
            self.now, _, event = heapq.heappop(self._events)
            if progress is not None and self.now >= told:
                progress(self.now)
                told += 1
            event()
        return self.now

    # -- servers

    def request(self, connection: Connection, wanted: BatchRequest) -> None:
        """Queue the batches of a request that the server has not started."""
        server, key = connection.server, connection.consumer.loader.key
        server.requests += 1
        served = connection.served
        for place, k in enumerate(wanted.batches):
            if (key, k) not in server.ready:
                entry = place > 0, served + place, next(self._numbers), connection, k
                heapq.heappush(server.queue, entry)
        self._begin(server)

    def await_response(self, connection: Connection) -> None:
        """Let the consumer receive when the first batch of its first pending request is ready."""
        server, first = connection.server, (connection.consumer.loader.key, connection.in_flight[0].batches.start)
        if server.ready.get(first):
            self._respond(connection)
        else:
            server.waiting.setdefault(first, []).append(connection)

    def _respond(self, connection: Connection) -> None:
        server = connection.server
        if not server.is_stuck:
            stalled = max(0.0, server.stalled_until - self.now)
            self.later(stalled + self.round_trip(), partial(connection.consumer.receive, connection))

    def _begin(self, server: Server) -> None:
        while server.queue and server.busy < server.num_workers and server.is_alive and not server.is_stuck:
            _, _, _, connection, k = heapq.heappop(server.queue)
            loader = connection.consumer.loader
            if (loader.key, k) in server.ready:
                continue
            connection.served = max(connection.served, server.level) + 1
            server.level = max(server.level, connection.served - 1)
            server.ready[loader.key, k] = False
            self.computed_at[int(self.now)] += 1
            self.repeated_at[int(self.now)] += k in loader.computed
            loader.computed[k] += 1
            server.measure(self.now)
            server.busy += 1
            seconds = self._lognormal(server.seconds, self.model.compute_sigma)
            self.later(seconds, partial(self._finish, server, loader.key, k))

    def _finish(self, server: Server, key: str, k: int) -> None:
        if server.is_stuck:
            return
        if self.now < server.stalled_until:
            self.later(server.stalled_until - self.now, partial(self._finish, server, key, k))
            return
        server.measure(self.now)
        server.busy -= 1
        server.ready[key, k] = True
        for connection in server.waiting.pop((key, k), []):
            self._respond(connection)
        self._begin(server)
