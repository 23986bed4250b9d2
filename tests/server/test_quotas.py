"""Sharing of workers, memory and event loop between principals: no principal can use another one's share."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teleloader_server.auth.rate_limit import TOGETHER, FairQueue
from teleloader_server.auth.tokens import PRIORITIES
from teleloader_server.dispatch.dispatcher import FORGET_AFTER
from teleloader_server.dispatch.quotas import MIN_SENDING, PATIENCE, BodyBudget, Quota, Quotas
from teleloader_server.dispatch.records import Epoch
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.limits import ClientLimits, Limits
from teleloader_server.loading.datasets import host
from teleloader_server.permissions import ALL_SCOPES, Principal
from teleloader_server.workers.factory import ObjectPools
from teleloader_server.workers.health import CHECK_INTERVAL
from teleloader_shared.codec import BatchId
from teleloader_shared.errors import ServerUnavailable, UnknownLoader
from teleloader_shared.spec import LoaderSpec
from tests.conftest import examples
from tests.server.dispatching import OTHER, SLOW, TRAIN, Service, numbers

pytestmark = pytest.mark.usefixtures("dispatcher_figures")


def someone(name: str, memory_share: float = 1.0) -> Principal:
    """Return a principal with this name."""
    return Principal(name, ALL_SCOPES, memory_share)


# --- Workers ------------------------------------------------------------------------------------------------------


def work(service: Service, rounds: int, seconds: dict[str, float] | None = None) -> Counter[str]:
    """Compute and send batches, and return the worker time of each loader in seconds."""
    spent: Counter[str] = Counter()
    for _ in range(rounds):
        service.decide()
        for worker, queue in service.queues.items():
            if queue:
                loader = queue[0].loader
                took = (seconds or {}).get(loader, SLOW)
                spent[loader] += took  # type: ignore[assignment]
                if took > CHECK_INTERVAL:
                    service.stall(worker, queue[1:])
                service.finish(worker, seconds=took)
                service.resume(worker)
        for consumer in service.dispatcher.consumers():
            for request in consumer.requests:
                service.send_ready(request)
    return spent


def test_the_share_of_a_principal_does_not_depend_on_its_number_of_clients() -> None:
    """A hundred consumers with several connections get as much as the single consumer of another principal."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    for number in range(100):
        for start in (0, 1000):
            service.request(f"greedy {number}", TRAIN, start + number, start + 900 + number, ahead=100, of="greedy")
    service.request("modest", OTHER, 0, 1000, of="modest")
    spent = work(service, 60)
    assert abs(spent["train"] - spent["other"]) <= 2 * SLOW


def test_prefetching_of_one_principal_equals_awaited_batches_of_another() -> None:
    """Otherwise a principal that always waits would leave no worker time for others' prefetching."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    for number in range(50):
        service.request("greedy", TRAIN, 10 * number, 10 * number + 1, of="greedy")
    done = service.request("modest", OTHER, 0, 1, ahead=50, of="modest")
    work(service, 1)
    if done.next == 1:
        service.dispatcher.close(done)
    spent = work(service, 40)
    assert abs(spent["train"] - spent["other"]) <= 3 * SLOW


def test_a_single_principal_may_use_all_workers() -> None:
    """Unused shares are not reserved."""
    service = Service(workers=4)
    service.warm_up(TRAIN)
    service.request("a", TRAIN, 0, 100, of="alone")
    service.decide()
    assert [len(queue) for queue in service.queues.values()] == [1] * 4


@settings(max_examples=examples(60))
@given(
    clients=st.lists(
        st.tuples(
            st.integers(1, 6), st.sampled_from([0.02, 0.1, 0.5]), st.integers(0, 20), st.sampled_from([0.1, 1, 3, 10])
        ),
        min_size=2,
        max_size=4,
    ),
    workers=st.integers(1, 3),
)
def test_principals_with_high_demand_get_worker_time_by_weight(
    clients: list[tuple[int, float, int, float]], workers: int
) -> None:
    """The worker time depends on the weight only, not on the number of consumers, batch duration and prefetch window.

    A principal of a low weight gets its share, too: the difference is bounded, however long the others wait.
    """
    service = Service(workers=workers)
    seconds = {f"loader {number}": took for number, (_, took, _, _) in enumerate(clients)}
    for loader, took in seconds.items():
        service.warm_up((loader, 0), seconds=took)
    for number, (consumers, _, ahead, weight) in enumerate(clients):
        loader = f"loader {number}"
        service.quota(f"principal {number}").weight = weight
        for consumer in range(consumers):
            start = consumer * 10_000
            service.request(f"c{consumer}", (loader, 0), start, start + 9000, ahead, of=f"principal {number}")
    busy: dict[int, float] = dict.fromkeys(range(workers), 0.0)
    spent = dict.fromkeys(seconds, 0.0)
    while min(busy.values()) < 30:
        service.decide()
        worker = min(busy, key=lambda worker: busy[worker])
        loader = service.queues[worker][0].loader
        busy[worker] += seconds[loader]
        spent[loader] += seconds[loader]
        service.finish(worker, seconds=seconds[loader])
        for known in service.dispatcher.consumers():
            for request in known.requests:
                service.send_ready(request)
    weights = [weight for *_, weight in clients]
    received = [time / weight for time, weight in zip(spent.values(), weights, strict=True)]
    assert max(received) - min(received) <= (workers + 2) * max(seconds.values()) / min(weights)


def test_a_class_gets_ten_times_the_worker_time_of_the_next() -> None:
    """As long as both wait; otherwise the other one gets all."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    service.quota("trainer").weight, service.quota("notebook").weight = PRIORITIES["high"], PRIORITIES["normal"]
    service.request("a", TRAIN, 0, 1000, of="trainer")
    service.request("b", OTHER, 0, 1000, of="notebook")
    spent = work(service, 110)
    assert spent["train"] == pytest.approx(10, abs=0.3)
    assert spent["other"] == pytest.approx(1, abs=0.3)


def test_batches_slower_than_estimated_are_charged_with_their_real_time() -> None:
    """The other principal gets the difference."""
    service = Service()
    service.warm_up(TRAIN, seconds=0.001)
    service.warm_up(OTHER, seconds=SLOW)
    service.request("slow", TRAIN, 0, 1000, of="slow")
    service.request("steady", OTHER, 0, 1000, of="steady")
    spent = work(service, 200, {"train": 10.0, "other": SLOW})
    assert spent["train"] <= spent["other"] + 11


def test_the_death_of_a_worker_is_charged_to_the_principal() -> None:
    """Replacing a worker costs time."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    service.request("deadly", TRAIN, 0, 1000, of="deadly")
    service.request("steady", OTHER, 0, 1000, of="steady")
    made: Counter[str] = Counter()
    for _ in range(40):
        service.decide()
        loader = service.queues[0][0].loader
        made[loader] += 1
        if loader == "train":
            service.lose_worker()
            service.worker_ready(0)
        else:
            service.finish(seconds=SLOW)
            for consumer in service.dispatcher.consumers():
                for request in consumer.requests:
                    service.send_ready(request)
    assert made["other"] >= 18


# --- Workers that do not come back --------------------------------------------------------------------------------


def hanging(service: Service) -> dict[int, tuple[BatchId, float]]:
    """Return the batches in progress, all of them slow."""
    return {worker: (queue[0], 6.0) for worker, queue in service.queues.items() if queue}


def stolen(service: Service) -> int | None:
    """Preempt and replace a worker, and return its ID."""
    worker = service.dispatcher.preempt(hanging(service))
    if worker is not None:
        assert service.lose_worker(worker, "nobody") == []
        service.worker_ready(worker)
    return worker


@pytest.mark.parametrize("same", [False, True])
def test_a_worker_with_a_slow_batch_is_preempted_for_a_waiting_client(same: bool) -> None:
    """Afterwards one worker is reserved for other principals, or other consumers of the same principal."""
    service = Service(workers=3)
    service.warm_up(TRAIN, OTHER)
    service.request("hangs", TRAIN, 0, 100, of="hangs")
    service.decide()
    assert stolen(service) is None, "nobody waits"
    victim = service.request("victim", OTHER, 0, 4, of="hangs" if same else "victim")
    assert service.decide() == []
    taken = stolen(service)
    assert taken is not None
    for k in range(4):
        assert numbers(service.decide(), OTHER) == [k]
        assert service.dispatcher.preempt(hanging(service)) is None, "somebody works for it"
        service.finish(taken, seconds=SLOW)
        assert service.send_ready(victim) == [k]
    service.dispatcher.close(victim)
    assert service.decide() == [], "nothing is made on the last worker for the one that had them all"
    hung = [batch_id for batch_id in service.running() if batch_id.loader == "train"]
    assert len(hung) == 2


@pytest.mark.parametrize(("weight", "is_preempted"), [(0.1, False), (1, True), (10, True)])
def test_no_worker_is_preempted_for_a_lower_weight(weight: float, is_preempted: bool) -> None:
    """A principal that waits with a lower weight gets its share once a batch is completed."""
    service = Service(workers=3)
    service.warm_up(TRAIN, OTHER)
    service.request("hangs", TRAIN, 0, 100, of="hangs")
    service.decide()
    service.quota("victim").weight = weight
    service.request("victim", OTHER, 0, 4, of="victim")
    assert service.decide() == []
    assert (stolen(service) is not None) is is_preempted


def test_a_worker_whose_result_is_not_needed_is_preempted_first() -> None:
    """Its batch was computed by a backup, so that nobody loses anything."""
    service = Service(workers=3)
    service.warm_up(TRAIN, OTHER)
    service.request("hangs", TRAIN, 0, 100, of="hangs")
    service.decide()
    (withdrawn,) = service.queues[1]
    service.stall(1, [])
    service.queues[1].clear()
    service.dispatcher.finished(None, withdrawn, service.frame(withdrawn, 1))
    assert service.dispatcher.preempt(hanging(service)) is None, "nobody waits"
    service.request("victim", OTHER, 0, 4, of="victim")
    assert service.decide() == []
    assert stolen(service) == 1
    assert numbers(service.decide(), OTHER) == [0]


def test_a_removed_worker_does_not_count() -> None:
    """A removed worker does not count as free, so that the fair share of a waiting client preempts another worker."""
    service = Service(workers=3)
    service.warm_up(TRAIN, OTHER)
    service.dispatcher.worker_removed(2)
    service.request("hangs", TRAIN, 0, 100, of="hangs")
    assert len(service.decide()) == 2
    service.request("victim", OTHER, 0, 4, of="victim")
    assert service.decide() == []
    assert stolen(service) is not None


def test_without_workers_nothing_is_preempted() -> None:
    """All workers may have died at the same time."""
    service = Service(workers=0)
    service.request("a", TRAIN, 0, 1)
    assert stolen(service) is None


def test_the_only_worker_of_a_consumer_is_not_preempted() -> None:
    """Otherwise its slow batch would be restarted again and again, and never complete."""
    service = Service(workers=2)
    service.request("a", TRAIN, 0, 1, of="a")
    service.request("b", OTHER, 0, 1, of="b")
    service.decide()
    service.request("c", ("third", 0), 0, 1, of="c")
    assert stolen(service) is None


def test_a_capped_consumer_may_use_all_workers_after_its_removal() -> None:
    """The cap ends with the consumer's removal a minute after its last request."""
    service = Service(workers=2)
    request = service.request("hangs", TRAIN, 0, 100, of="hangs")
    service.decide()
    victim = service.request("victim", OTHER, 0, 1, of="victim")
    assert stolen(service) is not None
    service.dispatcher.close(request)
    service.decide()
    service.finish_all()
    service.send_ready(victim)
    service.dispatcher.close(victim)
    service.pass_time(FORGET_AFTER + 1)
    service.request("hangs", TRAIN, 0, 100, of="hangs")
    service.decide()
    assert len(service.running()) == 2


# --- Memory -------------------------------------------------------------------------------------------------------


def fill(service: Service, rounds: int = 50) -> None:
    """Compute batches until none is started; no batch is sent."""
    for _ in range(rounds):
        if not service.decide():
            return
        service.finish_all()


def test_prefetching_of_a_principal_is_limited_to_its_memory_share() -> None:
    """Batches of other principals are not evicted for it."""
    service = Service(budget=100, workers=2)
    service.warm_up(TRAIN, OTHER)
    service.quota("small", memory=10)
    service.request("greedy", TRAIN, 0, 90, ahead=4000, of="small")
    fill(service)
    assert service.quota("small").frames == 10
    service.request("other", OTHER, 0, 90, of="large")
    fill(service)
    assert service.quota("large").frames == 90
    assert service.quota("small").frames == 10
    assert service.memory.used == 100


def test_awaited_batches_are_computed_even_if_the_memory_share_is_full() -> None:
    """Batches of the same principal are evicted, or the share is exceeded."""
    service = Service(budget=100, workers=1)
    service.warm_up(TRAIN)
    service.quota("small", memory=3)
    first = service.request("a", TRAIN, 0, 50, of="small")
    fill(service)
    second = service.request("b", TRAIN, 1000, 1050, of="small")
    for _ in range(40):
        service.decide()
        service.finish_all()
        service.send_ready(first, 1)
        service.send_ready(second, 1)
    assert first.next >= 15
    assert second.next >= 1015
    assert service.quota("small").frames <= 5


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30), st.integers(1, 20), st.integers(0, 3)), max_size=30)
)
def test_the_memory_of_each_principal_is_counted(steps: list[tuple[str, int, int, int]]) -> None:
    """The sum is the used memory; each principal exceeds its share only by awaited batches."""
    service = Service(budget=40, workers=2)
    service.warm_up(TRAIN, OTHER)
    for name, memory in (("a", 5), ("b", 20), ("c", 40)):
        service.quota(name, memory=memory)
    for name, start, length, taken in steps:
        run: Epoch = TRAIN if start % 2 else OTHER
        request = service.request(name, run, start, start + length, ahead=length, of=name)
        for _ in range(taken):
            service.decide()
            service.finish_all()
            service.send_ready(request, 2)
        service.dispatcher.close(request)
        quotas = service.quotas.values()
        assert sum(quota.frames for quota in quotas) == service.memory.used == service.dispatcher.store.used
        assert all(quota.frames >= 0 for quota in quotas)
        for quota in quotas:
            assert quota.frames <= quota.memory + 2
    service.dispatcher.release()
    assert service.memory.used == 0
    assert all(quota.has_nothing for quota in service.quotas.values())


def test_a_client_that_does_not_read_gets_no_further_batches() -> None:
    """Above twice the limit of unread bytes, this applies to all consumers of the principal."""
    service = Service(workers=2)
    service.warm_up(TRAIN, OTHER)
    quota = service.quota("p")
    lazy = service.request("lazy", TRAIN, 0, 5, of="p").consumer
    service.request("reads", OTHER, 0, 5, of="p")
    lazy.sending = quota.sending = int(1.5 * max(quota.memory, MIN_SENDING))
    assert numbers(service.decide(), OTHER) != []
    assert numbers(service.running(), TRAIN) == []
    service.finish_all()
    quota.sending *= 2
    assert service.decide() == []
    quota.sending = lazy.sending = 0
    assert numbers(service.decide(), TRAIN) != []


def test_the_consumers_of_a_principal_are_limited() -> None:
    """Idle consumers are removed first; if all have open requests, the next one is rejected."""
    service = Service()
    service.quota("p", max_consumers=3)
    for number in range(10):
        service.dispatcher.close(service.request(f"idle {number}", TRAIN, 0, 1, of="p"))
        assert len(service.quota("p").consumers) <= 3
    for number in range(3):
        service.request(f"busy {number}", TRAIN, 0, 1, of="p")
    with pytest.raises(ServerUnavailable, match=r"'p' has reached the limit of 3 consumers .* max_consumers"):
        service.request("one more", TRAIN, 0, 1, of="p")
    service.request("another's", TRAIN, 0, 1, of="q")


# --- Requests -----------------------------------------------------------------------------------------------------


@settings(max_examples=examples(200))
@given(gaps=st.lists(st.floats(0, 0.5), max_size=100), rate=st.sampled_from([1.0, 5.0, 100.0]))
def test_the_request_rate_is_limited_to_rate_and_burst(gaps: list[float], rate: float) -> None:
    """Requests below the rate are never delayed."""
    quota, now, passed = Quota("p", 1, 1), 0.0, []
    for gap in gaps:
        now += gap
        held = quota.delay(now, rate)
        if held <= PATIENCE:
            passed.append(now + held)
    for start in passed:
        assert sum(start <= at < start + 1 for at in passed) <= 2 * rate + 2
    steady = Quota("p", 1, 1)
    assert all(steady.delay(k / rate, rate) < 1e-6 for k in range(50))


async def test_delayed_requests_of_principals_take_turns() -> None:
    """However many requests of one principal wait, those of another wait for at most one round."""
    turns, order = FairQueue(), []

    async def come(name: str) -> None:
        await turns.wait_turn(name, 0.0)
        order.append(name)

    many = [asyncio.create_task(come("many")) for _ in range(20 * TOGETHER)]
    for _ in range(3):
        await asyncio.sleep(0)
    few = asyncio.create_task(come("few"))
    await few
    assert order.count("many") <= 8 * TOGETHER
    await asyncio.gather(*many)
    assert order.count("many") == 20 * TOGETHER
    for _ in range(3):
        await asyncio.sleep(0)
    assert not turns._waiting
    assert not turns._started


async def test_a_request_that_waits_for_its_turn_can_be_cancelled() -> None:
    """Other requests continue."""
    turns = FairQueue()
    tasks = [asyncio.create_task(turns.wait_turn("p", 0.0)) for _ in range(3 * TOGETHER)]
    await asyncio.sleep(0)
    for task in tasks[TOGETHER::2]:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(one, asyncio.CancelledError) for one in done) == TOGETHER


def test_quotas_without_resources_in_use_are_removed() -> None:
    """Otherwise memory would grow with the number of names."""
    quotas = Quotas(ClientLimits(), 100)
    for number in range(100):
        quotas.of(someone(f"p{number}", 0.5)).delay(0.0, 10.0)
    busy = quotas.of(someone("busy"))
    busy.frames = 1
    quotas.forget_idle(now=10.0)
    assert list(quotas._quotas.values()) == [busy]


# --- Requests of clients ------------------------------------------------------------------------------------------


def test_response_memory_is_left_for_other_principals() -> None:
    """Each principal leaves as much as it uses; released memory is available again."""
    body_budget, owners = BodyBudget(1000, lambda: True), {name: ExitStack() for name in "abc"}
    for name, most in (("a", 500), ("b", 250), ("c", 125)):
        assert not body_budget.has_room(name, most + 1)
        with pytest.raises(
            ServerUnavailable,
            match=rf"of '{name}': {most + 1} bytes requested, 0 held, .* limit is 1,000 \(max_buffered_request_bytes\)",
        ):
            owners[name].enter_context(body_budget.hold(name, most + 1))
        owners[name].enter_context(body_budget.hold(name, most))
        assert not body_budget.has_room(name, 1)
    owners["a"].close()
    assert body_budget.has_room("b", 180)
    assert not body_budget.has_room("b", 190)


def test_a_single_principal_may_use_all_response_memory() -> None:
    """No other principal needs it."""
    body_budget = BodyBudget(1000, lambda: False)
    with body_budget.hold("anyone") as count:
        count(1000)
        with pytest.raises(ServerUnavailable):
            count(1)
    with body_budget.hold("anyone", 1000):
        assert not body_budget.has_room("anyone", 1)


# --- Sessions -----------------------------------------------------------------------------------------------------


async def test_a_session_belongs_to_the_principal_that_started_it() -> None:
    """Other principals can neither use nor end it."""
    limits = Limits(num_workers=0)
    hosted = host([1, 2, 3], name="data", collate=lambda samples: samples)
    service = LoaderService(ObjectPools(lambda: {"data": hosted}, limits), limits)
    await service.start()
    mine, other = someone("mine"), someone("other")
    try:
        spec = LoaderSpec(dataset="data", session="s", num_workers=1)
        key = (await service.register(spec, mine)).key
        shared = (await service.register(LoaderSpec(dataset="data"), mine)).key
        with pytest.raises(UnknownLoader):
            service.registration(key, other)
        with pytest.raises(UnknownLoader):
            await service.register(spec, other)
        with pytest.raises(UnknownLoader):
            await service.end_session_of(key, other)
        with pytest.raises(UnknownLoader):
            service.loader(other, key, 0, 0)
        assert service.registration(key, mine).key == key
        assert service.registration(shared, other).key == shared, "what is a function of its batch ID is everybody's"
    finally:
        await service.close()
