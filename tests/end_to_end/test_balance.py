"""Length-balanced batches of hosted datasets and of objects of the training process, with real servers and workers."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.nn.utils.rnn import pad_sequence

from teleloader import (
    DataLoader,
    DatasetChanged,
    InvalidSpec,
    LengthBalance,
    Mixture,
    RemoteDataset,
    StateMismatch,
    TooManyErrors,
)
from teleloader.testing import FakeServer
from teleloader_server import serve
from teleloader_shared.lengths import padding_fraction
from tests.conftest import StartServer
from tests.end_to_end.terminal import SERVER, TOOLS, piped

LENGTH = 300
LENGTHS = np.random.default_rng(0).lognormal(3, 1, LENGTH).astype(np.int64).clip(1, 200)


class Texts:
    """Dataset of tensors of various lengths, filled with their index."""

    def __init__(self, lengths: Any = LENGTHS) -> None:
        self.sample_lengths = lengths

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        return torch.full((int(LENGTHS[index]),), index)


class Fragile(Texts):
    """Dataset that fails for every tenth sample."""

    def __getitem__(self, index: int) -> Any:
        """Return a sample, or raise."""
        if index % 10 == 3:
            raise ValueError("damaged")
        return super().__getitem__(index)


class OnDisk(Texts):
    """Dataset whose lengths are in a file, or in this array if there is none."""

    def __init__(self, path: str | None = None) -> None:
        super().__init__(LENGTHS if path is None else path)


class Computed(Texts):
    """Dataset with a method that returns the lengths."""

    def sample_lengths(self) -> Any:
        """Return the lengths as a list."""
        return LENGTHS.tolist()

    def __init__(self) -> None:
        pass


def padded(samples: list[Any]) -> Any:
    """Collate samples of various lengths."""
    return pad_sequence(samples, batch_first=True, padding_value=-1)


@contextmanager
def hosted(dataset: Any = None, **options: Any) -> Iterator[RemoteDataset]:
    """Host a dataset with two workers, as on another machine."""
    given = {"num_workers": 2, "collate_fn": padded, **options}
    with serve({"text": Texts() if dataset is None else dataset}, **given) as url:
        yield RemoteDataset(url, "text")


def received(loader: DataLoader) -> list[list[int]]:
    """Return the indices in the batches of an epoch; check that each sample is complete."""
    found = []
    for batch in loader:
        assert ((batch >= 0).sum(1) == torch.from_numpy(LENGTHS[batch[:, 0].numpy()])).all()
        found.append(batch[:, 0].tolist())
    return found


def joined(batches: list[list[int]]) -> list[int]:
    """Return the items of all batches."""
    return list(itertools.chain.from_iterable(batches))


def listed(loader: DataLoader, epoch: int) -> list[list[int]]:
    """Return the indices of the plan of an epoch."""
    return [batch.tolist() for batch in loader.plan(epoch)]


MODES: list[dict[str, Any]] = [
    {"batch_size": 4, "balance": LengthBalance(window=40)},
    {"balance": LengthBalance(max_tokens=256, window=48, group=2)},
]
RANKED: list[dict[str, Any]] = [
    {"batch_size": 4, "balance": LengthBalance(window=24)},
    {"balance": LengthBalance(max_tokens=256, window=48)},
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_are_those_of_the_plan(mode: dict[str, Any], shuffle: bool) -> None:
    """Two workers, two ranks, two epochs: received batches are those of the plan, and each sample occurs once."""
    with hosted() as text:
        for epoch in range(2):
            seen: list[int] = []
            for rank in range(2):
                loader = DataLoader(
                    text, seed=7, shuffle=shuffle, rank=rank, world_size=2, tail="uneven", output="torch", **mode
                )
                loader.set_epoch(epoch)
                assert len(loader) == len(loader.plan(epoch))
                found = received(loader)
                assert found == listed(loader, epoch)
                assert len(loader) == len(found)
                seen += joined(found)
                assert np.bincount(joined(found), minlength=LENGTH).tolist() == loader.visits().tolist()
            assert sorted(seen) == list(range(LENGTH))


def test_no_batch_exceeds_the_limit() -> None:
    """The padded size of each received batch is at most max_tokens."""
    with hosted() as text:
        loader = DataLoader(text, seed=7, shuffle=True, balance=LengthBalance(max_tokens=256))
        assert loader.batch_size is None
        assert max(batch.numel() for batch in loader) <= 256


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_objects_of_the_training_process_are_balanced_as_on_a_server(mode: dict[str, Any], num_workers: int) -> None:
    """Without a server, and with workers of the loader, all batches are equal."""
    options: dict[str, Any] = {"seed": 7, "shuffle": True, **mode}
    with hosted() as text:
        expected = received(DataLoader(text, **options))
    assert received(DataLoader(Texts(), num_workers=num_workers, collate_fn=padded, **options)) == expected


@pytest.mark.parametrize("mode", MODES)
def test_training_resumes_at_any_batch(mode: dict[str, Any]) -> None:
    """A restored loader continues with the next batch, at random places, and its state has a constant size."""
    options: dict[str, Any] = {"seed": 7, "shuffle": True, **mode}
    with hosted() as text:
        loader = DataLoader(text, **options)
        expected = received(loader)
        for place in random.Random(0).sample(range(len(expected)), 8):
            loader.set_epoch(0)
            batches = iter(loader)
            for _ in range(place):
                next(batches)
            state = loader.state_dict()
            assert len(repr(state)) < 300
            resumed = DataLoader(text, **options)
            resumed.load_state_dict(state)
            assert received(resumed) == expected[place:]


@pytest.mark.parametrize("place", range(0, 12, 3))
def test_limited_batches_resume_on_another_world_size(place: int) -> None:
    """With a common group, four ranks continue an epoch of two ranks, and each sample is visited once."""
    with hosted() as text:

        def loaders(ranks: int) -> list[DataLoader]:
            balance = LengthBalance(max_tokens=256, window=48, group=4)
            return [
                DataLoader(text, seed=7, shuffle=True, rank=rank, world_size=ranks, balance=balance, tail="uneven")
                for rank in range(ranks)
            ]

        seen: list[int] = []
        states = []
        for loader in loaders(2):
            batches = iter(loader)
            for _ in range(2 * place):
                seen += next(batches)[:, 0].tolist()
            states.append(loader.state_dict())
        assert states[0] == states[1]
        assert states[0]["batches"] == 4 * place
        for loader in loaders(4):
            loader.load_state_dict(states[0])
            seen += joined(received(loader))
        assert sorted(seen) == list(range(LENGTH))


def test_batches_of_a_fixed_size_resume_on_another_world_size() -> None:
    """If batch_size * world_size is equal, the steps are, and each sample is visited once."""
    with hosted() as text:

        def loaders(ranks: int) -> list[DataLoader]:
            return [
                DataLoader(text, batch_size=12 // ranks, seed=7, shuffle=True, rank=rank, world_size=ranks,
                           balance=LengthBalance(window=48), tail="uneven")
                for rank in range(ranks)
            ]  # fmt: skip

        seen: list[int] = []
        for loader in loaders(2):
            batches = iter(loader)
            for _ in range(11):
                seen += next(batches)[:, 0].tolist()
            state = loader.state_dict()
        for loader in loaders(3):
            loader.load_state_dict(state)
            seen += joined(received(loader))
        assert sorted(seen) == list(range(LENGTH))


def test_states_of_other_parameters_are_refused() -> None:
    """The position is valid only for the same windows, groups, limit and lengths."""
    with hosted() as text:
        states = [DataLoader(text, seed=7, shuffle=True, **mode).state_dict() for mode in (*MODES, *RANKED)]
        assert len({str(state) for state in states}) == 4
        for place, mode in enumerate((*MODES, *RANKED)):
            for other, state in enumerate(states):
                loader = DataLoader(text, seed=7, shuffle=True, **mode)
                if place == other:
                    loader.load_state_dict(state)
                else:
                    with pytest.raises(StateMismatch, match="the state was saved with balance = 'window="):
                        loader.load_state_dict(state)
        loader = DataLoader(text, seed=7, shuffle=True, **MODES[1])
        state = {**loader.state_dict(), "batches": 3}
        balance = MODES[1]["balance"]
        with pytest.raises(StateMismatch, match="after 3 batches of all ranks, which is not a multiple of this"):
            DataLoader(text, seed=7, shuffle=True, balance=balance, rank=0, world_size=2).load_state_dict(state)


def test_two_servers_share_an_epoch_and_refuse_other_lengths() -> None:
    """Servers with the same lengths compute the same batches; one with other lengths hosts another dataset."""
    other = LENGTHS.copy()
    other[0] += 1
    with hosted() as text, hosted() as same, hosted(Texts(other)) as different:
        both = RemoteDataset([text.url, same.url], "text")
        for mode in MODES:
            expected = received(DataLoader(text, seed=7, shuffle=True, **mode))
            assert received(DataLoader(both, seed=7, shuffle=True, **mode)) == expected
        with pytest.raises(DatasetChanged):
            RemoteDataset([text.url, different.url], "text", reconnect_timeout=0)
        spec = DataLoader(text, seed=7, shuffle=True, **MODES[0]).spec
        with pytest.raises(DatasetChanged, match="all servers must have the same sample_lengths"):
            different.batch(spec, 0, 0)


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_configured_datasets_read_lengths_from_a_file(
    start_server: StartServer, tmp_path: Path, start_method: str
) -> None:
    """The path of a .npy file is mapped by the server and by workers that construct the dataset themselves."""
    np.save(tmp_path / "lengths.npy", LENGTHS.astype(np.uint16))
    (tmp_path / "server.toml").write_text(
        '[datasets.text]\nfactory = "tests.end_to_end.test_balance:OnDisk"\n'
        f'kwargs = {{ path = "{tmp_path}/lengths.npy" }}\n'
        f'collate = "tests.end_to_end.test_balance:padded"\nstart_method = "{start_method}"\n'
    )
    server = start_server("--config", str(tmp_path / "server.toml"), "--num-workers", "2")
    text = RemoteDataset(server.url, "text")
    for mode in MODES:
        loader = DataLoader(text, seed=7, shuffle=True, **mode)
        assert received(loader) == received(DataLoader(Texts(), seed=7, shuffle=True, collate_fn=padded, **mode))


def test_statistics_show_the_padding_of_computed_batches() -> None:
    """/stats and metrics count the lengths and the padded size, also for a client-side sampler."""
    with hosted() as text:
        loader = DataLoader(text, seed=7, shuffle=True, **MODES[0])
        found = received(loader)
        (stats,) = httpx.get(f"{text.url}/stats").json()["datasets"]
        sums = sum(int(LENGTHS[batch].sum()) for batch in found)
        sizes = sum(len(batch) * int(LENGTHS[batch].max()) for batch in found)
        assert (stats["tokens"], stats["tokens_padded"]) == (sums, sizes)
        assert stats["padding_fraction"] == padding_fraction(sums, sizes)
        assert (
            f'teleloader_tokens_padded_total{{dataset="text"}} {float(sizes)}' in httpx.get(f"{text.url}/metrics").text
        )
        list(DataLoader(text, batch_sampler=[[0, 1], [2]]))
        (after,) = httpx.get(f"{text.url}/stats").json()["datasets"]
        assert after["tokens"] - sums == LENGTHS[:3].sum()


@pytest.mark.parametrize("mode", MODES)
def test_failed_samples_are_replaced_by_samples_of_their_batch(mode: dict[str, Any]) -> None:
    """Replacements have similar lengths, and no batch exceeds the limit; skipped samples are omitted."""
    with hosted(Fragile()) as text:
        options: dict[str, Any] = {"seed": 7, "shuffle": True, "error_retries": 0, "max_errors": 1.0, **mode}
        loader = DataLoader(text, on_error="skip", **options)
        assert received(loader) == [[index for index in batch if index % 10 != 3] for batch in listed(loader, 0)]
        loader = DataLoader(text, on_error="replace", **options)
        for found, planned in zip(received(loader), listed(loader, 0), strict=True):
            assert len(found) == len(planned)
            assert set(found) == {index for index in planned if index % 10 != 3}


def test_copies_and_pickles_have_the_same_order() -> None:
    """A copy of a loader is a new loader with the same balance."""
    with hosted() as text:
        for mode in MODES:
            loader = DataLoader(text, seed=7, shuffle=True, **mode)
            for other in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
                assert other.balance == loader.balance
                assert received(other) == listed(loader, 0)
            with pytest.raises(ValueError, match="balance attribute should not be set"):
                loader.balance = None


def test_methods_and_lists_state_lengths() -> None:
    """`sample_lengths` may be a method, and its result a list."""
    loaders = [
        DataLoader(dataset, seed=7, shuffle=True, collate_fn=padded, **MODES[0]) for dataset in (Computed(), Texts())
    ]
    assert received(loaders[0]) == received(loaders[1])


def test_invalid_lengths_are_reported_when_the_dataset_is_hosted() -> None:
    """A server with invalid lengths does not start."""
    message = "invalid sample_lengths of dataset 'text': lengths must have one number per"
    with pytest.raises(Exception, match=message), hosted(Texts([1, 2])):
        pass


def test_arguments_that_exclude_each_other_are_named() -> None:
    """Errors state which arguments to remove, in the constructor."""
    balance = LengthBalance(max_tokens=256)
    with hosted() as text:
        for options, message in (
            ({"shuffle": True}, "balance requires seed="),
            ({"seed": 7, "batch_size": 4}, "max_tokens excludes batch_size=4"),
            ({"seed": 7, "drop_last": True}, "max_tokens excludes .*drop_last=True"),
            ({"sampler": [1, 2]}, "balance excludes sampler and batch_sampler"),
        ):
            with pytest.raises(ValueError, match=message):
                DataLoader(text, balance=balance, **options)
        with pytest.raises(ValueError, match="balance excludes a Mixture"):
            DataLoader(Mixture({"text": text}, {"text": 1}), seed=7, balance=balance)
        with pytest.raises(InvalidSpec, match=rf"sample {LENGTHS.argmax()} has length 200, more than max_tokens=100"):
            DataLoader(text, seed=7, balance=LengthBalance(max_tokens=100))
        with pytest.raises(InvalidSpec, match="window of balance must be a multiple of batch_size"):
            DataLoader(text, seed=7, batch_size=32, balance=LengthBalance(window=100))
        with pytest.raises(InvalidSpec, match="group requires max_tokens"):
            LengthBalance(group=4)
    with pytest.raises(InvalidSpec, match="dataset 'dataset' states none: define its attribute sample_lengths"):
        DataLoader([1, 2, 3], seed=7, balance=balance)


def test_the_fake_server_balances() -> None:
    """Tests without a server have the same batches."""
    with hosted() as text, FakeServer({"text": Texts()}, functions=[padded]) as fake:
        for mode in MODES:
            expected = received(DataLoader(text, seed=7, shuffle=True, **mode))
            loader = DataLoader(RemoteDataset(fake.url, "text"), seed=7, shuffle=True, collate_fn=padded, **mode)
            assert received(loader) == expected


def test_frameworks_that_need_a_sampler_raise_an_error() -> None:
    """No sampler of torch has the order of a loader with balance."""
    import teleloader.torch

    with pytest.raises(ValueError, match=r"teleloader.torch.DataLoader does not support balance"):
        teleloader.torch.DataLoader(Texts(), batch_size=4, seed=7, balance=LengthBalance())


def test_a_batch_beyond_the_epoch_is_refused() -> None:
    """With max_tokens, the worker knows the number of batches, and its error reaches the client.

    The server does not count the error, because it may prefetch such batches itself.
    """
    with hosted() as text:
        loader = DataLoader(text, seed=7, shuffle=True, **MODES[1])
        frame = text.batch(loader.spec, 0, len(loader))
        assert "BatchOutOfRange" in frame.content.type
        (stats,) = httpx.get(f"{text.url}/stats").json()["datasets"]
        assert (stats["batches_failed"], stats["errors"]) == (0, [])


def output_of(program: str, *arguments: str) -> str:
    """Return the output of a successful command."""
    done = piped(program, *arguments)
    assert done.code == 0, done.err
    return done.out


# --- Commands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [["--window", "48", "--batch-size", "4"], ["--max-tokens", "256", "--group", "4"]])
def test_the_audit_counts_balanced_batches(options: list[str]) -> None:
    """``teleloader audit`` downloads the lengths, and each sample is visited exactly once by two ranks."""
    with hosted() as text:
        command = [
            "audit",
            text.url,
            "--seed",
            "7",
            "--shuffle",
            "--world-size",
            "2",
            "--tail",
            "uneven",
            "--output",
            "json",
        ]
        report = json.loads(output_of(TOOLS, *command, *options))
        assert report["exact"] is True
        assert report["visits"] == LENGTH


def test_the_benchmark_reports_the_padding() -> None:
    """Balanced batches have less padding than random ones."""
    with hosted() as text:
        command = ["bench", text.url, "--seconds", "0.2", "--shuffle", "--batch-size", "8", "--output", "json"]
        found = [
            json.loads(output_of(TOOLS, *command, *options))["padding_fraction"]
            for options in ([], ["--window", "96"], ["--max-tokens", "400"])
        ]
    assert max(found[1:]) < 0.7 * found[0]


def test_check_compares_the_padding_of_both_orders(tmp_path: Path) -> None:
    """``teleloader-server check`` reports the padding of random and of balanced batches."""
    (tmp_path / "server.toml").write_text(
        '[datasets.text]\nfactory = "tests.end_to_end.test_balance:Texts"\n'
        'collate = "tests.end_to_end.test_balance:padded"\n'
    )
    (report,) = json.loads(output_of(SERVER, "check", "--config", str(tmp_path / "server.toml"), "--output", "json"))[
        "datasets"
    ]
    assert report["balanced_padding"] < 0.5 * report["padding"]


def test_peek_shows_a_balanced_batch() -> None:
    """``teleloader peek`` loads the batch that a loader with the same arguments gets."""
    with hosted() as text:
        loader = DataLoader(text, seed=7, shuffle=True, balance=LengthBalance(max_tokens=256))
        command = ["peek", text.url, "text", "3", "--seed", "7", "--shuffle", "--max-tokens", "256", "--output", "json"]
        (part,) = json.loads(output_of(TOOLS, *command))["parts"]
        indices = loader.plan(0)[3]
        assert part["shape"] == [len(indices), LENGTHS[indices].max()]


def test_the_limit_of_failed_samples_counts_the_samples_of_the_epoch() -> None:
    """With max_tokens, a failure in a batch of few samples does not reduce the number of permitted failures."""
    with hosted(Fragile()) as text:
        options: dict[str, Any] = {"seed": 7, "shuffle": True, "on_error": "skip", "error_retries": 0}
        balance = LengthBalance(max_tokens=256)
        assert len(joined(received(DataLoader(text, max_errors=0.1, balance=balance, **options)))) == LENGTH * 9 // 10
        with pytest.raises(TooManyErrors, match="of 300 samples"):
            list(DataLoader(text, max_errors=0.09, balance=balance, **options))
