"""``async for batch in loader``: batches for a program whose other work goes on while it waits for them.

    python examples/with_asyncio.py

It brings its own server, whose dataset is slow on purpose. Two loaders are read at once, and a clock ticks meanwhile.
"""

import asyncio
import time
from contextlib import suppress

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve

SAMPLES, SECONDS = 60, 0.02


class Slow:
    """Sample i is i, a little later."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        time.sleep(SECONDS)
        return index


async def total(name: str, loader: DataLoader) -> int:
    """The sum of all samples."""
    result, batches = 0, 0
    async for batch in loader:  # any other coroutine may run while this waits
        result += int(batch.sum())
        batches += 1
    print(f"{name}: {batches} batches, sum {result}")
    return result


async def longest_gap() -> float:
    """The longest time, in seconds, for which this coroutine did not get its turn; to be cancelled."""
    longest = 0.0
    with suppress(asyncio.CancelledError):
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0)
            longest = max(longest, time.perf_counter() - before)
    return longest


async def main(url: str) -> None:
    """Read two loaders at once."""
    clock = asyncio.create_task(longest_gap())
    # the client's constructors ask the server something, so they run beside the event loop as well
    loaders = [
        await asyncio.to_thread(lambda: DataLoader(RemoteDataset(url), batch_size=10, shuffle=True, output="numpy"))
        for _ in range(2)
    ]
    await asyncio.gather(total("one", loaders[0]), total("two", loaders[1]))
    clock.cancel()
    print(f"the event loop was never held up for longer than {await clock:.3f} s")


if __name__ == "__main__":
    with serve(Slow(), num_workers=2) as address:
        asyncio.run(main(address))
