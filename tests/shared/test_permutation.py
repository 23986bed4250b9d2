"""The shuffle: an exact, stable bijection with random access, statistically like a random permutation.

The statistical tests use fixed keys, so their results never change. Each of their checks is also shown to fail for a
bad shuffle of the kind that the check detects (`BAD_SHUFFLES`).
"""

import hashlib
import itertools
import math
import pickle
import random
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from teleloader_shared.orders import permutation
from teleloader_shared.orders.permutation import KEY_BITS, MAX_LENGTH, ROUNDS, SORTED_UP_TO, Permutation
from tests.conftest import examples

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Shuffle = Callable[[int, int], Ints]  # (length, key) -> the whole order

# A random shuffle exceeds this many standard deviations once in 150,000 checks; these tests run about 300.
THRESHOLD = 4.5

keys = st.integers(0, 2**KEY_BITS - 1)
lengths = st.integers(0, 5000) | st.sampled_from([2**n + d for n in range(1, 13) for d in (-1, 0, 1)])
huge_lengths = st.integers(SORTED_UP_TO + 1, MAX_LENGTH) | st.sampled_from(
    [2**n + d for n in range(11, 62) for d in (-1, 0, 1)] + [MAX_LENGTH]
)
fixed = settings(max_examples=examples(100))


def listing(length: int, key: int) -> Ints:
    """Return the whole order."""
    return Permutation(length, key)(np.arange(length, dtype=np.int64))


def int64(numbers: Iterable[int]) -> Ints:
    """Return an int64 array: NumPy alone would convert huge numbers to unsigned ones, and empty lists to floats."""
    return np.array(list(numbers), dtype=np.int64)


# --- Guarantees ---------------------------------------------------------------------------------------------------


@fixed
@given(lengths, keys)
def test_each_number_comes_exactly_once(length: int, key: int) -> None:
    """The listing of any length under any key holds each of 0 .. length - 1 once."""
    assert np.array_equal(np.sort(listing(length, key)), np.arange(length))


@pytest.mark.parametrize("length", [SORTED_UP_TO + 1, 33 * 32, 2**17, 300_007])
def test_each_number_comes_exactly_once_in_a_long_listing(length: int) -> None:
    """The network is a bijection with and without cycle walking."""
    assert np.array_equal(np.sort(listing(length, 1)), np.arange(length))


@fixed
@given(lengths.filter(bool), keys, st.data())
def test_an_index_depends_on_its_position_alone(length: int, key: int, data: st.DataObject) -> None:
    """A position gives the same index as in the full listing, in any selection, order and repetition."""
    positions = int64(data.draw(st.lists(st.integers(0, length - 1), max_size=40)))
    assert np.array_equal(Permutation(length, key)(positions), listing(length, key)[positions])


@fixed
@given(huge_lengths, keys, st.data())
def test_huge_lengths_stay_in_range_and_distinct(length: int, key: int, data: st.DataObject) -> None:
    """At any length up to 2**62, different positions give different indices, all in range."""
    some = data.draw(st.lists(st.integers(0, length - 1), max_size=60))
    positions = int64({*some, *range(20), *range(length - 20, length)})
    answers = Permutation(length, key)(positions)
    assert answers.min() >= 0
    assert answers.max() < length
    assert len(np.unique(answers)) == len(positions)


@fixed
@given(lengths.filter(bool) | huge_lengths, keys, st.data())
def test_it_computes_what_its_documentation_says(length: int, key: int, data: st.DataObject) -> None:
    """NumPy's wrapping 64-bit arithmetic agrees with the formulas of the docstring in Python's exact integers."""
    positions = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=10))
    assert Permutation(length, key)(int64(positions)).tolist() == by_the_formulas(length, key, positions)


def by_the_formulas(length: int, key: int, positions: list[int]) -> list[int]:
    """Evaluate the formulas of the module's docstring, one position at a time."""
    message = b"teleloader permutation 1" + key.to_bytes(16, "little") + length.to_bytes(8, "little")
    stream = hashlib.shake_128(message).digest(8 * max(SORTED_UP_TO, 2 * ROUNDS))
    words = [int.from_bytes(stream[i : i + 8], "little") for i in range(0, len(stream), 8)]
    if length <= SORTED_UP_TO:
        order = sorted(range(length), key=words.__getitem__)
        return [order[position] for position in positions]
    return [walk_of_the_network(length, words, position) for position in positions]


def walk_of_the_network(length: int, words: list[int], position: int) -> int:
    """Evaluate the part of the formulas for lengths above `SORTED_UP_TO`."""
    k = (length - 1).bit_length() // 2
    b = 2**k
    a = -(-length // b)
    w = a.bit_length()

    def hashed(number: int, j: int) -> int:
        t = (number * (words[2 * j] | 1) + words[2 * j + 1]) % 2**64
        return (t ^ (t >> 32)) * 0xBF58476D1CE4E5B9 % 2**64

    while True:
        high, low = divmod(position, b)
        for j in range(0, ROUNDS, 2):
            high = (high + (((hashed(low, j) >> w) * a) >> (64 - w))) % a
            low = (low + (hashed(high, j + 1) >> (64 - k))) % b
        position = high * b + low
        if position < length:
            return position


GOLDEN = {
    (1, 0): [0],
    (2, 0): [1, 0],
    (2, 3): [0, 1],
    (3, 0): [2, 0, 1],
    (10, 0): [5, 7, 2, 9, 1, 8, 4, 6],
    (10, 1): [7, 1, 8, 2, 5, 6, 3, 0],
    (1000, 2**128 - 1): [348, 519, 700, 136, 170, 141, 372, 268],
    (1024, 7): [414, 197, 753, 312, 537, 100, 822, 184],
    (1025, 7): [940, 471, 533, 831, 871, 80, 14, 911],
    (8192, 1): [4439, 4648, 2508, 5723, 3278, 3400, 5049, 2663],
    (65_536, 2**64): [19517, 61687, 7033, 45960, 6038, 2422, 39689, 4757],
    (10**6, 0): [793317, 211929, 1306, 238311, 420724, 153836, 232941, 604070],
    (10**6, 1): [184376, 981655, 127176, 728328, 956718, 827382, 205666, 427656],
    (10**12, 12345): [
        405683142075,
        417920732210,
        134105287674,
        858683145185,
        108511267971,
        925837673912,
        686895832241,
        896828699809,
    ],
    (2**61 + 1, 2**64 - 1): [
        311468966918119394,
        1767864256716443117,
        1924067302860632905,
        1361487508712059742,
        906890383448709909,
        491495276740651932,
        928334447337978117,
        765924521283532699,
    ],
    (2**62, 0): [
        1370455313774100175,
        4157569763573929023,
        1626851727738985167,
        3869840172270712030,
        4143249752403820547,
        2473943295677649050,
        322033968303640124,
        2506255415771209045,
    ],
    (2**62, 2**128 - 1): [
        200291235810321850,
        297556797099766218,
        2596277108095724997,
        1855470476386568170,
        454598968527706976,
        565825028781418826,
        2345350329847721260,
        3248817107317928785,
    ],
}


@pytest.mark.parametrize(("length", "key"), GOLDEN)
def test_the_order_never_changes(length: int, key: int) -> None:
    """The indices at the first and last positions never change, because resumed runs depend on them."""
    count = min(length, 8)
    positions = int64([*range(count // 2), *range(length - (count - count // 2), length)])
    assert Permutation(length, key)(positions).tolist() == GOLDEN[length, key]


@pytest.mark.parametrize("length", [0, 1, 2, 3, SORTED_UP_TO, SORTED_UP_TO + 1, MAX_LENGTH])
def test_no_positions_give_no_indices(length: int) -> None:
    """An empty array of positions gives an empty array, even for length 0."""
    answer = Permutation(length, 0)(int64([]))
    assert answer.shape == (0,)
    assert answer.dtype == np.int64


@pytest.mark.parametrize("length", [100, 10**6])
def test_the_result_is_a_new_array_of_the_same_shape(length: int) -> None:
    """The positions are not modified, whatever their shape and strides."""
    grid = np.arange(100, dtype=np.int64).reshape(10, 10)[:, ::3]
    before = grid.copy()
    order = Permutation(length, 5)
    answer = order(grid)
    assert np.array_equal(grid, before)
    assert not np.shares_memory(answer, grid)
    assert np.array_equal(answer, [[int(order(int64([p]))[0]) for p in row] for row in before])
    assert order(np.array(7, dtype=np.int64)).shape == ()


def test_wrapping_arithmetic_is_not_reported_as_an_overflow() -> None:
    """The shuffle works in a program in which NumPy raises on every floating-point and integer error."""
    with np.errstate(all="raise"):
        Permutation(MAX_LENGTH, 2**KEY_BITS - 1)(int64([0, MAX_LENGTH - 1]))


@pytest.mark.parametrize("length", [100, 10**6])
def test_a_copy_made_by_pickle_gives_the_same_order(length: int) -> None:
    """A worker that gets the permutation from its parent agrees with it."""
    order = Permutation(length, 3)
    positions = np.arange(100, dtype=np.int64)
    assert np.array_equal(pickle.loads(pickle.dumps(order))(positions), order(positions))


def test_it_says_what_it_is() -> None:
    """The repr contains length and key."""
    order = Permutation(10, 255)
    assert repr(order) == "Permutation(length=10, key=0xff)"


@pytest.mark.parametrize(
    ("length", "key", "message"),
    [
        (-1, 0, r"length must be in \[0, 2\*\*62\], got -1"),
        (2**62 + 1, 0, r"length must be in \[0, 2\*\*62\], got 4611686018427387905"),
        (10, -1, r"key must be in \[0, 2\*\*128\), got -1"),
        (10, 2**128, r"key must be in \[0, 2\*\*128\), got 340282366920938463463374607431768211456"),
    ],
)
def test_a_length_or_key_out_of_range_is_refused(length: int, key: int, message: str) -> None:
    """The error has the value and its bounds."""
    with pytest.raises(ValueError, match=message):
        Permutation(length, key)


@pytest.mark.parametrize("length", [0, 1, 1000, 10**6, MAX_LENGTH])
@pytest.mark.parametrize("wrong", ["negative", "too large", "far too large"])
def test_a_position_out_of_range_is_refused(length: int, wrong: str) -> None:
    """The error names the one invalid position among valid ones, with the bounds."""
    position = {"negative": -1, "too large": length, "far too large": 2**63 - 1}[wrong]
    positions = int64([*range(min(length, 5)), position])
    with pytest.raises(ValueError, match=rf"positions must be in \[0, {length}\), got {position}"):
        Permutation(length, 0)(positions)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint64])
def test_positions_of_another_type_are_refused(dtype: type[np.generic]) -> None:
    """Other dtypes are not converted silently: a float would be rounded, a uint64 could wrap."""
    with pytest.raises(TypeError, match=f"int64 array, got {np.dtype(dtype)}"):
        Permutation(10, 0)(np.zeros(3, dtype=dtype))


# --- That it passes for random ------------------------------------------------------------------------------------


def normal_score(chi_square: float, degrees: float) -> float:
    """Return a chi-square value in standard deviations of a normal variable (Wilson & Hilferty)."""
    variance = 2 / (9 * degrees)
    return (math.cbrt(chi_square / degrees) - (1 - variance)) / math.sqrt(variance)


def score_of_counts(observed: NDArray[np.integer] | Floats, expected: float | Floats, degrees: float) -> float:
    """Return the deviation of counts from their expectations, in standard deviations."""
    return normal_score(float(((observed - expected) ** 2 / expected).sum()), degrees)


def consecutive_keys(count: int) -> Sequence[int]:
    """Return the keys 0, 1, 2 ..."""
    return range(count)


def random_keys(count: int) -> Sequence[int]:
    """Return random 64-bit keys, the same ones in each run."""
    source = random.Random(count)
    return [source.getrandbits(KEY_BITS) for _ in range(count)]


@pytest.mark.parametrize("some_keys", [consecutive_keys, random_keys])
@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_every_order_of_a_tiny_length_is_equally_likely(length: int, some_keys: Callable[[int], Sequence[int]]) -> None:
    """Over many keys, all N! orders come equally often."""
    drawn = some_keys(120 * math.factorial(length))
    assert abs(score_of_orders(np.array([listing(length, key) for key in drawn]))) < THRESHOLD


def score_of_orders(listings: Ints) -> float:
    """Return the deviation of the frequencies of all N! orders among these listings from equal ones."""
    count, length = listings.shape
    digits = length ** np.arange(length)
    orders = np.array(list(itertools.permutations(range(length)))) @ digits
    seen = np.array([(listings @ digits == order).sum() for order in orders])
    return score_of_counts(seen, count / len(orders), len(orders) - 1)


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6, 7, 8, 100])
def test_every_number_is_equally_likely_at_every_position(length: int) -> None:
    """Over many keys, each number stands at each position equally often."""
    count = 4000
    listings = np.array([listing(length, key) for key in consecutive_keys(count)])
    seen = np.array([np.bincount(column, minlength=length) for column in listings.T])
    # Rows and columns of the table have fixed sums, which leaves (N - 1)**2 degrees, each wider by N / (N - 1).
    spread = math.sqrt((length - 1) / length)
    expected = count / length
    assert abs(score_of_counts((seen - expected) * spread + expected, expected, (length - 1) ** 2)) < THRESHOLD


BATCH = 64
CELLS = 32


def scores(listings: Ints) -> dict[str, float]:
    """Return deviations of listings (one per row) from random orders in several statistics, in standard deviations."""
    result = {}
    for name, (values, mean, variance) in statistics(listings).items():
        deviations = (values - mean) / math.sqrt(variance)
        result[name] = float(deviations.sum()) / math.sqrt(len(values))
        result[f"{name}, spread"] = normal_score(float((deviations**2).sum()), len(values))
    result["parity"] = parity(listings)
    result["batch means"] = batch_means(listings)
    result["marginals"] = marginals(listings)
    return result


def statistics(listings: Ints) -> dict[str, tuple[Floats, float, float]]:
    """Return statistics of each listing, with their mean and variance over all N! orders."""
    n = listings.shape[1]
    centred = (listings - (n - 1) / 2) / math.sqrt((n * n - 1) / 12)
    stride = 2 ** ((n - 1).bit_length() // 2)  # positions this far apart share one half of the network's input
    harmonic, harmonic_of_squares = (float((1.0 / np.arange(1, n + 1) ** power).sum()) for power in (1, 2))
    return {
        "fixed points": ((listings == np.arange(n)).sum(axis=1).astype(float), 1, 1),
        "cycles": (cycle_counts(listings), harmonic, harmonic - harmonic_of_squares),
        "ascents": ((np.diff(listings) > 0).sum(axis=1).astype(float), (n - 1) / 2, (n + 1) / 12),
        "displacement": (
            np.abs(listings - np.arange(n)).sum(axis=1).astype(float),
            (n * n - 1) / 3,
            (n + 1) * (2 * n * n + 7) / 45,
        ),
        "neighbours": ((centred[:, 1:] * centred[:, :-1]).sum(axis=1), -1, n),
        "stride": ((centred[:, stride:] * centred[:, :-stride]).sum(axis=1), -(n - stride) / (n - 1), n - stride),
        "keys": ((centred[1:] * centred[:-1]).sum(axis=1), 0, n * n / (n - 1)),
    }


def cycle_counts(listings: Ints) -> Floats:
    """Return each listing's number of cycles: every number learns the smallest one of its cycle, in doubling steps."""
    places = np.broadcast_to(np.arange(listings.shape[1]), listings.shape)
    smallest, jump = places, listings
    for _ in range(listings.shape[1].bit_length()):
        smallest = np.minimum(smallest, np.take_along_axis(smallest, jump, axis=1))
        jump = np.take_along_axis(jump, jump, axis=1)
    return np.asarray((smallest == places).sum(axis=1), dtype=np.float64)


def parity(listings: Ints) -> float:
    """Compare the share of odd permutations with one half."""
    odd = (listings.shape[1] - cycle_counts(listings)) % 2
    return float((odd - 0.5).sum()) / math.sqrt(len(listings) / 4)


def batch_means(listings: Ints) -> float:
    """Compare the spread of means of consecutive batches with that of samples drawn without replacement."""
    count, n = listings.shape
    batches = n // BATCH
    means = listings[:, : batches * BATCH].reshape(count, batches, BATCH).mean(axis=2)
    squares = (means - (n - 1) / 2) ** 2 / ((n + 1) * (n - BATCH) / (12 * BATCH))
    # The batches of a listing cover it except for a remainder, which removes one degree of freedom per listing.
    return normal_score(float(squares.sum()) * (batches - 1) / batches, count * (batches - 1))


def marginals(listings: Ints) -> float:
    """Compare coarse positions with coarse values, which must be independent."""
    count, n = listings.shape
    coarse = np.arange(n) * CELLS // n
    sizes = np.bincount(coarse).astype(float)
    cells = np.bincount((coarse * CELLS + coarse[listings]).ravel(), minlength=CELLS * CELLS)
    expected = count * np.outer(sizes, sizes).ravel() / n
    return score_of_counts(cells, expected, (CELLS - 1) ** 2 * n / (n - 1))


def suspicious(shuffle: Shuffle, length: int, some_keys: Sequence[int]) -> set[str]:
    """Return the names of the checks that distinguish this shuffle from a random one."""
    listings = np.array([shuffle(length, key) for key in some_keys])
    return {name for name, score in scores(listings).items() if not abs(score) < THRESHOLD}


@pytest.mark.parametrize("some_keys", [consecutive_keys, random_keys])
@pytest.mark.parametrize(
    ("length", "count"),
    [
        (1000, 300),  # sorted
        (1025, 300),  # the network at its smallest, with the most walks
        (1056, 300),  # no walks, and an odd number of highs: where a network of XORs has a parity
        (4096, 150),  # a power of two: the same
        (10_000, 80),
        (100_000, 8),
    ],
)
def test_the_order_passes_for_random(length: int, count: int, some_keys: Callable[[int], Sequence[int]]) -> None:
    """No check distinguishes the order from a random one, neither for consecutive nor for random keys."""
    assert not suspicious(listing, length, some_keys(count))


def flipped_bits(length: int, key: int) -> float:
    """Return the deviation of the frequency with which each input bit flips each output bit from one half."""
    order = Permutation(length, key)
    bits = np.arange(length.bit_length() - 1)
    positions = np.random.default_rng(0).integers(0, length, 2000)
    answers = order(positions)
    changed = np.array([answers ^ order(positions ^ (1 << int(bit))) for bit in bits])
    flips = ((changed[:, None, :] >> bits[None, :, None]) & 1).sum(axis=2)
    return normal_score(float(((flips - 1000) ** 2 / 500).sum()), flips.size)


@pytest.mark.parametrize("exponent", [20, 41, 62])
def test_each_bit_of_a_position_affects_each_bit_of_the_index(exponent: int) -> None:
    """Flipping one bit of the position flips each bit of the index in half of all cases, also for huge lengths."""
    assert abs(flipped_bits(2**exponent, 11)) < THRESHOLD


def unevenness(step: int) -> float:
    """Return the deviation from an even spread of the indices at positions `step` apart, or of their gaps."""
    length = 2**41
    answers = Permutation(length, 4)(np.arange(2**16, dtype=np.int64) * step)
    gaps = np.diff(answers) % length
    cells = (answers >> 33, answers % 256, gaps >> 33, gaps % 256)
    return max(abs(score_of_counts(np.bincount(c, minlength=256), len(c) / 256, 255)) for c in cells)


@pytest.mark.parametrize("step", [1, 2**20])
def test_a_stretch_of_a_huge_order_is_spread_evenly(step: int) -> None:
    """Indices of consecutive positions, and of those that share half of their bits, are spread evenly, with gaps."""
    assert unevenness(step) < THRESHOLD


# --- That the checks can fail -------------------------------------------------------------------------------------


def unshuffled(length: int, key: int) -> Ints:
    """Return the numbers without shuffling."""
    return np.arange(length, dtype=np.int64)


def affine(length: int, key: int) -> Ints:
    """Return position * factor + shift: a cheap shuffle that is often used."""
    source = random.Random(key)
    factor = next(f for f in iter(lambda: source.randrange(1, length), 0) if math.gcd(f, length) == 1)
    return (np.arange(length, dtype=np.int64) * factor + source.randrange(length)) % length


def same_for_all_keys(length: int, key: int) -> Ints:
    """Return a good order that is the same in each epoch."""
    return listing(length, 0)


def related_keys(length: int, key: int) -> Ints:
    """Return one shuffled order, shifted by the key, as if the epoch were added to it."""
    return (listing(length, 0) + key) % length


def one_cycle(length: int, key: int) -> Ints:
    """Return Sattolo's variant of the Fisher-Yates shuffle: no index stays in place, so that all are in one cycle."""
    walk = np.random.default_rng(key).permutation(length)
    order = np.empty(length, dtype=np.int64)
    order[walk] = np.roll(walk, -1)
    return order


def shuffle_buffer(length: int, key: int) -> Ints:
    """Shuffle within a window, as streaming loaders do."""
    return np.argsort(np.arange(length) + np.random.default_rng(key).random(length) * 256).astype(np.int64)


def even_orders(length: int, key: int) -> Ints:
    """Return a random order, corrected to an even permutation, as a network of XORs gives for a power of two."""
    order = np.random.default_rng(key).permutation(length)
    if (length - int(cycle_counts(order[None])[0])) % 2:
        order[:2] = order[1::-1]
    return order


def evenly_dealt(length: int, key: int) -> Ints:
    """Return batches that are more alike than random ones: each has an equal part of every range."""
    rng = np.random.default_rng(key)
    order = np.arange(length).reshape(BATCH, -1)
    return rng.permuted(rng.permuted(order, axis=1).T, axis=1).ravel()


def with_rounds(rounds: int) -> Shuffle:
    """Return teleloader's shuffle with another number of rounds."""

    def shuffle(length: int, key: int) -> Ints:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(permutation, "ROUNDS", rounds)
            return listing(length, key)

    return shuffle


LENGTH, KEYS = 4096, 150
BAD_SHUFFLES: list[tuple[Shuffle, set[str]]] = [
    (unshuffled, {"fixed points", "cycles", "ascents", "displacement", "neighbours", "stride", "keys", "marginals"}),
    (affine, {"ascents, spread", "neighbours, spread", "stride, spread", "batch means"}),
    (same_for_all_keys, {"keys", "fixed points, spread", "cycles, spread"}),
    (related_keys, {"keys", "keys, spread"}),
    (one_cycle, {"fixed points", "cycles", "parity"}),
    (shuffle_buffer, {"displacement", "displacement, spread", "batch means", "marginals"}),
    (even_orders, {"parity"}),
    (evenly_dealt, {"batch means", "marginals"}),
    (with_rounds(2), {"ascents", "displacement, spread", "neighbours, spread", "stride"}),
    (with_rounds(4), {"stride", "stride, spread"}),
]


@pytest.mark.parametrize(("shuffle", "caught_by"), BAD_SHUFFLES)
def test_a_bad_shuffle_differs_from_a_random_one(shuffle: Shuffle, caught_by: set[str]) -> None:
    """The checks for each known kind of bad shuffle detect it."""
    assert caught_by <= suspicious(shuffle, LENGTH, consecutive_keys(KEYS))


def test_every_check_can_fail() -> None:
    """Each check detects at least one of the bad shuffles."""
    caught = set().union(*(names for _, names in BAD_SHUFFLES))
    assert caught == set(scores(np.array([listing(LENGTH, key) for key in range(2)])))


def test_numpys_own_shuffle_passes() -> None:
    """An exact Fisher-Yates shuffle passes all checks."""
    assert not suspicious(lambda n, key: np.random.default_rng(key).permutation(n), LENGTH, consecutive_keys(KEYS))


def test_unequal_orders_of_a_tiny_length_are_noticed() -> None:
    """The check over all N! orders sees that an affine map reaches 20 of the 120 orders of 5."""
    assert score_of_orders(np.array([affine(5, key) for key in range(14_400)])) > THRESHOLD


def test_too_few_rounds_leave_bits_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of flipped bits and of huge orders detect a network with too few rounds."""
    monkeypatch.setattr(permutation, "ROUNDS", 2)
    assert flipped_bits(2**62, 11) > THRESHOLD
    assert unevenness(2**20) > THRESHOLD
