"""Asynchronous iteration: ``async for batch in loader`` lets other coroutines run while it waits.

    python examples/with_asyncio.py

The script starts its own server with a slow dataset, iterates two loaders concurrently, and measures how long the event
loop is blocked.
"""

import asyncio
import time
from contextlib import suppress

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve

SAMPLES, SECONDS = 60, 0.02


class Slow:
    """A dataset whose samples take 20 ms; sample i is i."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        time.sleep(SECONDS)
        return index


async def total(name: str, loader: DataLoader) -> int:
    """Print and return the sum of all samples."""
    result, batches = 0, 0
    async for batch in loader:  # other coroutines run while this one waits
        result += int(batch.sum())
        batches += 1
    print(f"{name}: {batches} batches, sum {result}")
    return result


async def longest_gap() -> float:
    """Return the longest delay of this coroutine in seconds, when it is cancelled."""
    longest = 0.0
    with suppress(asyncio.CancelledError):
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0)
            longest = max(longest, time.perf_counter() - before)
    return longest


async def main(url: str) -> None:
    """Iterate two loaders concurrently."""
    clock = asyncio.create_task(longest_gap())
    # constructors send requests and block, so they run in threads
    loaders = [
        await asyncio.to_thread(lambda: DataLoader(RemoteDataset(url), batch_size=10, shuffle=True, output="numpy"))
        for _ in range(2)
    ]
    await asyncio.gather(total("one", loaders[0]), total("two", loaders[1]))
    clock.cancel()
    print(f"the event loop was blocked for at most {await clock:.3f} s")


if __name__ == "__main__":
    with serve(Slow(), num_workers=2) as address:
        asyncio.run(main(address))
