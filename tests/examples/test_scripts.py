"""Training scripts in which only the line that creates the loader differs from torch."""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import runpy

import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from tests.conftest import ROOT, StartServer, need
from tests.end_to_end.terminal import terminal
from tests.examples.running import figure, need_framework, run_example


def test_a_plain_pytorch_loop(start_server: StartServer) -> None:
    """The loop processes every sample in each epoch, and the model learns."""
    need("torch")
    server = start_server("--demo", "--num-workers", "2")
    printed = run_example("examples/plain_pytorch.py", "--url", server.url)
    assert printed.count(": 1541 samples") == 10
    assert figure("test accuracy", printed) > 0.93
    assert "on 256 images" in printed


@pytest.mark.parametrize("bar", ["rich", "tqdm"])
def test_a_progress_bar_in_the_terminal(bar: str, start_server: StartServer) -> None:
    """The bar shows the steps of all epochs, the data wait and the remaining time."""
    need("torch")
    if bar == "tqdm":
        need_framework("tqdm")
    server = start_server("--demo", "--num-workers", "2")
    script = "import runpy; runpy.run_path('examples/with_progress.py', run_name='__main__')"
    with terminal(script, "--url", server.url, "--epochs", "4", "--bar", bar, columns=100) as screen:
        assert screen.wait() == 0
    found = {
        "rich": r"training \S+ +100/100 wait \d+ %, [\d.]+ MB/s, ETA \d+:\d\d:\d\d",
        "tqdm": r"training: 100%.* 100/100 \[\d+:\d+<\d+:\d+, .*, wait_pct=[\d.e-]+, mb_s=[\d.e-]+\]",
    }
    assert re.search(found[bar], screen.text), screen.text
    first, last = map(float, re.findall(r"loss ([\d.]+) to ([\d.]+)", screen.text)[0])
    assert last < first
    assert re.search(r"last epoch: 25 steps in [\d.]+ s, data wait \d+% of the time", screen.text)


def test_a_mixture_of_two_sources() -> None:
    """Each half of the epoch has the proportions of its stage, across an interruption."""
    need("torch")
    printed = run_example("examples/mixture.py")
    assert "interrupted after 60 batches" in printed
    assert "batches 0 to 79: 800 of 4000 samples are code, 10 to 10 per batch" in printed
    assert "batches 80 to 159: 2000 of 4000 samples are code, 25 to 25 per batch" in printed


def test_batches_of_similar_length() -> None:
    """Balanced batches have little padding, no batch exceeds the limit, and a resumed epoch has the remaining texts."""
    need("torch")
    printed = run_example("examples/length_balancing.py")
    padding = [int(share) for share in re.findall(r"(\d+)% padding", printed)]
    assert padding[0] > 70
    assert max(padding[1:]) < 10
    assert int(re.findall(r"at most (\d+) tokens", printed)[2]) <= 8192
    before, after = re.findall(r"(\d+) texts before the interruption, (\d+) after", printed)[0]
    assert int(before) + int(after) == 4000


def test_packed_sequences() -> None:
    """Packed sequences have little padding, the model learns, and a resumed epoch has the remaining sequences."""
    need("torch")
    printed = run_example("examples/packing.py")
    padding, first, last = map(float, re.findall(r"([\d.]+)% padding, loss ([\d.]+) to ([\d.]+)", printed)[0])
    assert padding < 2
    assert last < first / 2
    assert "epoch 1: 4 of " in printed


def test_torch_decides_the_order_of_a_plain_loop(start_server: StartServer) -> None:
    """The same ``torch.manual_seed`` gives the same output with any number of the server's workers."""
    need("torch")
    printed = {
        run_example("examples/plain_pytorch.py", "--url", server.url, "--epochs", "2")
        for server in (start_server("--demo", "--num-workers", str(workers)) for workers in (0, 2))
    }
    assert len(printed) == 1


@pytest.mark.parametrize("arguments", [(), ("--sampler",)], ids=["default", "DistributedSampler"])
def test_two_ranks_see_each_sample_exactly_once(arguments: tuple[str, ...], free_port: int) -> None:
    """Both ranks have equal shards in a new order each epoch, and their common model learns."""
    need("torch")
    printed = run_example("examples/ddp_gloo.py", *arguments, MASTER_PORT=str(free_port))
    epochs = [line for line in printed.splitlines() if line.startswith("epoch")]
    assert [line.split(", first")[0] for line in epochs] == [
        f"epoch {epoch}: [500, 500] samples, each once: True" for epoch in range(4)
    ]
    assert len({line.split("first")[1] for line in epochs}) == 4
    assert figure("error", printed) < 1e-3


@pytest.mark.timeout(300)  # four processes import torch
def test_tensor_parallel_ranks_get_the_same_batches(free_port: int) -> None:
    """The tensor-parallel ranks of each data-parallel rank agree, and the data-parallel ranks divide each epoch."""
    need("torch")
    printed = run_example("examples/with_device_mesh.py", MASTER_PORT=str(free_port))
    assert printed.count("tensor-parallel ranks agree: True, each sample once: True") == 4
    assert figure("loss", printed) < 0.3


def test_native_decoding_of_jpeg_files() -> None:
    """With simplejpeg and OpenCV, a dataset returns almost the same pixels as with Pillow."""
    need_framework("simplejpeg")
    need_framework("cv2")
    printed = run_example("examples/native_jpeg.py")
    assert figure("PillowImages", printed) > 0
    assert figure("NativeImages", printed) > 0
    assert figure("mean difference", printed) < 1
    assert figure("maximum difference", printed) < 16


def test_asyncio() -> None:
    """Two loaders are read concurrently, each to its end."""
    printed = run_example("examples/with_asyncio.py")
    assert "one: 6 batches, sum 1770" in printed
    assert "two: 6 batches, sum 1770" in printed
    assert figure("blocked for at most", printed) > 0


class Held:
    """Dataset in which sample i is i; the third one waits until it is released."""

    def __init__(self) -> None:
        self.begun, self.let_go = multiprocessing.Event(), multiprocessing.Event()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == 2:
            self.begun.set()
            self.let_go.wait()
        return index


def test_a_cancelled_coroutine_takes_no_batch() -> None:
    """A batch that a cancelled coroutine did not receive comes first when the loop is resumed.

    The coroutine that cancels it runs while a batch is held back: nothing blocks the event loop.
    """
    held, got = Held(), list[int]()

    async def read(loader: DataLoader, twice: asyncio.Event) -> None:
        async for batch in loader:
            got.append(int(batch[0]))
            if len(got) == 2:
                twice.set()

    async def interrupt(loader: DataLoader) -> None:
        twice = asyncio.Event()
        reading = asyncio.create_task(read(loader, twice))
        await twice.wait()
        await asyncio.to_thread(held.begun.wait)
        reading.cancel()
        await asyncio.wait([reading])
        held.let_go.set()

    with serve(held, num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), seed=0, output="numpy")
        asyncio.run(interrupt(loader))  # waits for its threads in the end
        assert got == [0, 1]
        assert loader.state_dict()["samples"] == 2


def test_the_demos_tables_fit_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No heading, name or number is truncated."""
    monkeypatch.setenv("COLUMNS", "80")
    demo = runpy.run_path(str(ROOT / "examples" / "demo.py"))
    latency = {"p95": 0.01234}
    stats = {
        "workers": [{"worker": 0, "batches": 12345, "busy": 12.3, "restarts": 0}],
        "datasets": [
            {"dataset": "digits-train", "batches_computed": 1234, "batches_sent": 1234, "samples_computed": 12345,
             "stages": {"fetch": latency, "collate": latency, "encode": latency}},
        ],
        "consumers": [
            {"dataset": "digits-train", "rank": 0, "epoch": 10, "batches_sent": 1234, "bytes_sent": 12345678,
             "waiting": 1.5}
        ],
    }  # fmt: skip
    demo["show_stats"](stats)
    shown = capsys.readouterr().out
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    for fields in demo["SHOWN"].values():
        assert all(heading in shown for heading in fields.values())
