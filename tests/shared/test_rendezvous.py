"""Properties of the assignment of blocks to servers."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teleloader_shared.rendezvous import SLACK, STRIPE, Assignment, Capacity, weights_of
from tests.conftest import ROOT, examples

LOADER = "0123456789abcdef" * 2

fixed = settings(max_examples=examples(60))
names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)
weights = st.floats(0.01, 100)
fleets = st.dictionaries(names, weights, min_size=1, max_size=12)
epochs = st.integers(0, 2**62)


def first_choices(fleet: dict[str, float], blocks: int, epoch: int = 0) -> list[str]:
    """Return the first server of the ranking of each block."""
    assignment = Assignment(LOADER, epoch, fleet)
    return [assignment.ranking(block)[0] for block in range(blocks)]


def owners(fleet: dict[str, float], blocks: int, epoch: int = 0) -> list[str]:
    """Return the server of each block."""
    assignment = Assignment(LOADER, epoch, fleet)
    return [assignment.owner(block) for block in range(blocks)]


@fixed
@given(fleets, epochs, st.integers(0, 2**50))
def test_a_ranking_lists_each_server_once(fleet: dict[str, float], epoch: int, block: int) -> None:
    """A ranking lists each server once, also for the last blocks of the longest epochs."""
    assert sorted(Assignment(LOADER, epoch, fleet).ranking(block)) == sorted(fleet)


@fixed
@given(fleets, names, weights, epochs)
def test_a_join_moves_first_choices_to_the_joining_server_only(
    fleet: dict[str, float], joining: str, weight: float, epoch: int
) -> None:
    """A joining server does not change the order of the other servers in a ranking."""
    others = {name: other for name, other in fleet.items() if name != joining}
    if not others:
        return
    before, after = Assignment(LOADER, epoch, others), Assignment(LOADER, epoch, {**others, joining: weight})
    for block in range(50):
        assert before.ranking(block) == [name for name in after.ranking(block) if name != joining]


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_changed_weight_moves_first_choices_of_that_server_only(factor: float) -> None:
    """First choices move only to a server whose weight grows, or only from a server whose weight shrinks."""
    fleet = {f"server-{i}": 1.0 for i in range(5)}
    before, after = first_choices(fleet, 500), first_choices({**fleet, "server-3": factor}, 500)
    moved = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    assert moved
    assert all(pair[factor > 1] == "server-3" for pair in moved)


def test_first_choices_are_in_proportion_to_weights() -> None:
    """Counts of first choices are within four standard deviations of a multinomial distribution."""
    fleet = {"a": 1.0, "b": 2.0, "c": 5.0}
    blocks = 8000
    counts = Counter(first_choices(fleet, blocks))
    for name, weight in fleet.items():
        share = weight / 8
        assert abs(counts[name] - blocks * share) < 4 * (blocks * share * (1 - share)) ** 0.5


@fixed
@given(fleets, epochs)
def test_no_prefix_of_a_stripe_exceeds_a_servers_share(fleet: dict[str, float], epoch: int) -> None:
    """A server is assigned at most its share of each prefix of a stripe, plus the slack."""
    total, counts = sum(fleet.values()), Counter[str]()
    for number, owner in enumerate(owners(fleet, STRIPE, epoch), 1):
        counts[owner] += 1
        assert counts[owner] <= fleet[owner] / total * number + SLACK + 1e-6


@pytest.mark.parametrize("servers", [2, 3, 8, 32])
def test_every_window_of_four_blocks_per_server_occupies_almost_all_servers(servers: int) -> None:
    """Few servers are idle in a window; with first choices alone, 1 of 50 would be idle and one have 9 blocks."""
    fleet = {f"server-{i}": 1.0 for i in range(servers)}
    found = owners(fleet, 1024)
    used = [len(set(found[start : start + 4 * servers])) for start in range(1024 - 4 * servers)]
    assert sum(used) / len(used) > 0.98 * servers
    most = max(max(Counter(found[start : start + 4 * servers]).values()) for start in range(1024 - 4 * servers))
    assert most <= 8


@pytest.mark.parametrize("servers", [1, 2, 3, 8, 31])
def test_a_join_moves_less_than_half_of_the_blocks(servers: int) -> None:
    """A server that joins or leaves moves at least its share and at most 55 % of the blocks."""
    fleet = {f"server-{i}": 1.0 for i in range(servers)}
    before, after = owners(fleet, 2048), owners({**fleet, "joining": 1.0}, 2048)
    moved = sum(a != b for a, b in zip(before, after, strict=True))
    assert 2048 / (servers + 1) * 0.8 < moved < 0.55 * 2048


def test_epochs_and_loaders_have_unrelated_assignments() -> None:
    """Assignments of epochs are unrelated, so that a slow server computes a different part of each epoch."""
    fleet = {f"server-{i}": 1.0 for i in range(4)}
    for other in (Assignment(LOADER, 1, fleet), Assignment(LOADER[::-1], 0, fleet)):
        equal = sum(a == other.owner(block) for block, a in enumerate(owners(fleet, 1024)))
        assert 150 < equal < 360


@fixed
@given(fleets, epochs, st.randoms())
def test_the_order_in_which_servers_are_known_does_not_matter(
    fleet: dict[str, float], epoch: int, random: st.DataObject
) -> None:
    """Neither the order of the servers nor that of the look-ups changes the owner of a block."""
    shuffled = list(fleet.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined] # random.Random
    one, other = Assignment(LOADER, epoch, fleet), Assignment(LOADER, epoch, dict(shuffled))
    blocks = list(range(0, 1000, 77))
    assert [one.owner(block) for block in blocks] == [other.owner(block) for block in blocks[::-1]][::-1]


def test_other_processes_compute_the_same() -> None:
    """All releases compute the same owners, which are part of the protocol."""
    program = (
        "from teleloader_shared.rendezvous import Assignment\n"
        "assignment = Assignment('key', 3, {'a': 1.0, 'b': 2.0, 'c': 1.5})\n"
        "print(''.join(assignment.owner(block) for block in range(48)))"
    )
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT}/shared"}
        found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
        assert found.stdout.decode().strip() == "bcbababcabcbcabcbbacbcccbabbccabbbccbabcbcaacabb"


def test_a_thousand_servers_are_all_used() -> None:
    """Stripes of large fleets are longer, so that a thousand servers get blocks."""
    fleet = {f"server-{i}": 1.0 for i in range(1000)}
    assert len(set(owners(fleet, 2048))) > 900


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_weights_are_positive_numbers(weight: float) -> None:
    """Weights that are not positive and finite, and empty fleets, are refused."""
    with pytest.raises(ValueError, match="positive and finite"):
        Assignment(LOADER, 0, {"a": 1.0, "b": weight})
    with pytest.raises(ValueError, match="at least one server"):
        Assignment(LOADER, 0, {})


# --- Weights ------------------------------------------------------------------------------------------------------


def test_weights_follow_the_stated_rates() -> None:
    """Known rates are the weights, whatever the numbers of workers."""
    assert weights_of({"fast": Capacity(4, 100.0), "slow": Capacity(8, 50.0)}) == {"fast": 100.0, "slow": 50.0}


def test_a_server_of_unknown_rate_has_workers_like_the_others() -> None:
    """A server of unknown rate has the median rate per worker; if no rate is known, the numbers of workers count."""
    weights = weights_of({"known": Capacity(4, 100.0), "joining": Capacity(8), "debugging": Capacity(0)})
    assert weights["joining"] == 2 * weights["known"]
    assert weights["debugging"] == weights["known"] / 4
    assert weights_of({"a": Capacity(4), "b": Capacity(8), "c": Capacity(0)}) == {"a": 4.0, "b": 8.0, "c": 1.0}
