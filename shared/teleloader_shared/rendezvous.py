"""Assignment of the blocks of an epoch to servers: weighted rendezvous hashing with bounded loads.

A block is a number of consecutive batches. All clients of an epoch request a block from the same server, which computes
it once for all of them. They agree without communication, because the assignment is a pure function of the epoch, the
servers and their weights.

Each pair of a block and a server has a pseudo-random score, and a block prefers servers in the order of their scores
(`Assignment.ranking`). The score is an exponential variate whose rate is the server's weight: so each server is the
first choice for its weight's share of the blocks, and a server that joins or leaves changes no other server's score.

The first choice alone would load servers like balls that are thrown into bins. A client keeps a window of a few blocks
per server, and receives them in order, so it would wait for the server with the most blocks in the window while others
are idle: in a simulation with 3 to 8 servers, 25 to 40 % of the throughput was lost. Therefore blocks are assigned in
stripes (`Assignment.owner`). Within a stripe, no server is assigned more than its share of the blocks so far plus
`SLACK`: a block goes to the first server of its ranking that is below this limit. The simulation then lost 1 to 4 %.
The price: a server that joins or leaves also moves blocks between other servers, at most within a stripe. That costs
work only for blocks that one client has received already and another has not.

Platforms may compute logarithms that differ in the last bit. A block whose two best scores are that close may have
different owners on different machines, and would be computed twice; batches are the same on every server.

Sources: Thaler & Ravishankar, "Using name-based mappings to increase hit rates" (IEEE/ACM ToN 6, 1998); Schindelhauer &
Schomaker, "Weighted distributed hash tables" (SPAA 2005); Mirrokni, Thorup & Zadimoghaddam, "Consistent hashing with
bounded loads" (SODA 2018).
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

STRIPE: Final = 64
"""Blocks in a stripe, for up to 32 servers. Longer stripes balance better, shorter ones move fewer blocks."""
SLACK: Final = 1.0
"""Blocks that a server may be assigned above its share of a stripe; below 1 a block could have no server."""
MAX_KEPT: Final = 4
"""Stripes whose owners are kept."""

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)


class Capacity(NamedTuple):
    """Capacity of a server, as it states it: clients that measured it themselves would disagree."""

    num_workers: int
    """Worker processes; 0 if the server's own process loads."""
    batch_rate: float | None = None
    """Batches/s that all workers together can compute; None if it is not known yet."""


def weights_of(servers: Mapping[str, Capacity]) -> dict[str, float]:
    """Return the weight of each server: its batch rate.

    For a server of unknown rate, the median rate per worker of the other servers is assumed.
    """
    known = [capacity.batch_rate / max(1, capacity.num_workers) for capacity in servers.values() if capacity.batch_rate]
    of_worker = statistics.median_low(known) if known else 1.0
    return {name: capacity.batch_rate or of_worker * max(1, capacity.num_workers) for name, capacity in servers.items()}


class Assignment:
    """Assignment of the blocks of one epoch to servers, see the module.

    Args:
        loader: Key of the loader.
        epoch: Number of the epoch.
        weights: Positive weight of each server, by a name that is the same for all clients; at least one.
    """

    def __init__(self, loader: str, epoch: int, weights: Mapping[str, float]) -> None:
        if not weights:
            raise ValueError("weights must contain at least one server")
        self._names = sorted(weights)  # the sum of the weights depends on their order, in its last bit
        self._seed = _digest(f"{loader}/{epoch}")
        self._servers = np.array([_digest(name) for name in self._names], np.uint64)
        self._weights = np.array([weights[name] for name in self._names], np.float64)
        if not (np.isfinite(self._weights).all() and (self._weights > 0).all()):
            raise ValueError(f"weights must be positive and finite, got {dict(weights)}")
        self._shares = self._weights / self._weights.sum()
        self._length = max(STRIPE, 1 << (2 * len(self._names) - 1).bit_length())
        self._stripes: dict[int, list[str]] = {}

    def ranking(self, block: int) -> list[str]:
        """Return all servers in the order in which a block prefers them."""
        return [self._names[place] for place in np.argsort(self._scores(np.array([block]))[0], kind="stable")]

    def owner(self, block: int) -> str:
        """Return the server that computes a block."""
        stripe, place = divmod(block, self._length)
        owners = self._stripes.get(stripe)
        if owners is None:
            if len(self._stripes) == MAX_KEPT:
                del self._stripes[next(iter(self._stripes))]
            owners = self._stripes[stripe] = self._owners(stripe)
        return owners[place]

    def _owners(self, stripe: int) -> list[str]:
        """Return the server of each block of a stripe."""
        shares = self._shares.tolist()
        counts = [0] * len(shares)
        owners = []
        first = stripe * self._length
        rankings = np.argsort(self._scores(np.arange(first, first + self._length)), kind="stable")
        for place, ranking in enumerate(rankings.tolist(), start=1):
            server = next(other for other in ranking if counts[other] + 1 <= shares[other] * place + SLACK)
            counts[server] += 1
            owners.append(self._names[server])
        return owners

    def _scores(self, blocks: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the score of each pair, of shape (blocks, servers); a block prefers low scores."""
        seeds = _mixed(np.uint64(self._seed) + (blocks.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
        bits = _mixed(seeds[:, np.newaxis] ^ self._servers)
        uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return -np.log(uniform) / self._weights


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the splitmix64 finalizer of each word."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))
