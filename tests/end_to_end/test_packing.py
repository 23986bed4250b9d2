"""Packed sequences of hosted datasets and of objects of the training process, with real servers and workers."""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from teleloader import (
    BatchTooLarge,
    DataLoader,
    DatasetChanged,
    InvalidSpec,
    LengthBalance,
    Mixture,
    Packing,
    RemoteDataset,
    StateMismatch,
)
from teleloader.testing import FakeServer
from teleloader_server import serve
from teleloader_server.loading.datasets import host
from tests.conftest import StartServer
from tests.end_to_end.terminal import TOOLS
from tests.end_to_end.test_balance import output_of

DOCUMENTS = 200
LENGTHS = np.random.default_rng(0).integers(1, 60, DOCUMENTS)
LENGTHS[:8] = (1, 31, 32, 33, 64, 65, 160, 200)
L = 32
PACKING = Packing(sequence_length=L, window=60, pad_token_id=-1)
OPTIONS: dict[str, Any] = {"batch_size": 3, "shuffle": True, "seed": 7, "packing": PACKING}
ANY_OTHER = 10**6
"""Token t of document d is 1000 d + t, so that each token identifies its place."""


def tokens_of(document: int) -> np.ndarray:
    """Return the tokens of a document."""
    return 1000 * document + np.arange(LENGTHS[document])


class Texts:
    """Dataset of documents."""

    sample_lengths: Any = LENGTHS

    def __len__(self) -> int:
        return DOCUMENTS

    def __getitem__(self, index: int) -> Any:
        """Return a document."""
        return tokens_of(index).astype(np.int32)


class Fields(Texts):
    """Dataset of mappings, as of Hugging Face's tokenizers, which are fetched together."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return documents."""
        assert len(set(indices)) == len(indices), "each document is fetched once per batch"
        return [
            {
                "input_ids": tokens_of(index).tolist(),
                "attention_mask": [1] * int(LENGTHS[index]),
                "labels": torch.from_numpy(tokens_of(index) + ANY_OTHER),
                "weights": np.full(LENGTHS[index], index + 0.5, np.float32),
            }
            for index in indices
        ]


class Augmented(Texts):
    """Dataset that draws random numbers."""

    def __getitem__(self, index: int) -> Any:
        """Return a document of random tokens."""
        return np.random.randint(0, 1000, LENGTHS[index])


@contextmanager
def hosted(dataset: Any = None, **options: Any) -> Iterator[RemoteDataset]:
    """Host a dataset with two workers, as on another machine."""
    with serve({"text": Texts() if dataset is None else dataset}, num_workers=2, **options) as url:
        yield RemoteDataset(url, "text")


def statistics(text: RemoteDataset) -> Any:
    """Return the statistics of the hosted dataset."""
    (found,) = httpx.get(f"{text.url}/stats").json()["datasets"]
    return found


def sequences(batch: dict[str, Any]) -> list[list[list[int]]]:
    """Return the tokens of each piece of each sequence, and check all other entries of the batch."""
    shape = batch["input_ids"].shape
    assert shape[1] == L
    types = {name: (values.dtype, values.shape) for name, values in batch.items() if name != "max_seqlen"}
    boundaries = batch["cu_seqlens"]
    assert types == {
        "input_ids": (torch.int64, shape),
        "labels": (torch.int64, shape),
        "position_ids": (torch.int64, shape),
        "document_ids": (torch.int32, shape),
        "cu_seqlens": (torch.int32, boundaries.shape),
    }
    flat = {name: values.flatten().tolist() for name, values in batch.items() if name in types}
    assert (boundaries[0], boundaries[-1]) == (0, shape.numel())
    assert batch["max_seqlen"] == max(boundaries.diff()) <= L
    found: list[list[list[int]]] = [[] for _ in range(shape[0])]
    for start, stop in zip(boundaries.tolist(), boundaries.tolist()[1:], strict=False):
        place = range(start, stop)
        tokens, numbers, labels = ([flat[name][k] for k in place] for name in ("input_ids", "document_ids", "labels"))
        own = found[start // L]
        assert start // L == (stop - 1) // L, "no piece continues in the next sequence"
        assert [flat["position_ids"][k] for k in place] == list(range(stop - start))
        if numbers[0] == 0:
            assert stop % L == 0, "padding is at the end of a sequence"
            assert set(tokens) == {-1}
            assert set(numbers) == {0}
            assert set(labels) == {-100}
            continue
        own.append(tokens)
        assert set(numbers) == {len(own)}
        assert labels == [-100, *tokens[1:]]
    return found


def received(loader: DataLoader) -> list[list[list[list[int]]]]:
    """Return the tokens of each piece of each sequence of each batch."""
    return [sequences(batch) for batch in loader]


def planned(loader: DataLoader, epoch: int) -> list[list[list[list[int]]]]:
    """Return what a loader must receive, computed from its plan."""
    plan, batches = loader.plan(epoch), []
    for k in range(len(plan)):
        pieces = plan.pieces(k)
        batch: list[list[list[int]]] = [[] for _ in range(int(pieces.sequences[-1]) + 1)]
        for sequence, document, start, stop in zip(*(each.tolist() for each in pieces), strict=True):
            batch[sequence].append(tokens_of(document)[start:stop].tolist())
        batches.append(batch)
    return batches


def flattened(batches: list[list[list[list[int]]]]) -> list[int]:
    """Return all tokens."""
    return [token for batch in batches for sequence in batch for piece in sequence for token in piece]


ALL_TOKENS = [int(token) for document in range(DOCUMENTS) for token in tokens_of(document)]


# --- Batches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_token_is_received_once(shuffle: bool) -> None:
    """Two workers, two ranks, two epochs: no token is lost or doubled, and batches are those of the plan."""
    options = {**OPTIONS, "shuffle": shuffle, "tail": "uneven"}
    with hosted() as text:
        ranks = [DataLoader(text, rank=rank, world_size=2, **options) for rank in range(2)]
        for epoch in range(2):
            seen: list[int] = []
            for loader in ranks:
                loader.set_epoch(epoch)
                found = received(loader)
                assert found == planned(loader, epoch)
                assert len(found) == len(loader)
                seen += flattened(found)
            assert sorted(seen) == ALL_TOKENS


def test_mappings_are_packed_entry_by_entry() -> None:
    """Labels and other entries are aligned with the tokens; a mask of attention is omitted; each type is kept."""
    with hosted(Fields()) as text:
        for batch in DataLoader(text, **OPTIONS):
            assert list(batch)[:3] == ["input_ids", "labels", "weights"]
            tokens, labels, weights = batch["input_ids"], batch["labels"], batch["weights"]
            has_label = (batch["document_ids"] > 0) & (batch["position_ids"] > 0)
            assert torch.equal(labels, torch.where(has_label, tokens + ANY_OTHER, -100))
            assert weights.dtype == torch.float32
            assert torch.equal(weights, torch.where(batch["document_ids"] > 0, tokens // 1000 + 0.5, 0.0))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("output", ["torch", "numpy"])
def test_objects_of_the_training_process_are_packed_as_on_a_server(num_workers: int, output: Any) -> None:
    """Without a server, and with workers of the loader, all batches are equal."""
    with hosted(Augmented()) as text:
        expected = list(DataLoader(text, output=output, **OPTIONS))
        found = list(DataLoader(Augmented(), num_workers=num_workers, output=output, **OPTIONS))
        for one, other in zip(found, expected, strict=True):
            kind = torch.Tensor if output == "torch" else np.ndarray
            assert all(isinstance(values, kind) for name, values in one.items() if name != "max_seqlen")
            assert all(np.array_equal(one[name], other[name]) for name in one)


def test_attention_of_a_piece_is_that_of_the_document_alone() -> None:
    """With the block-diagonal mask of `document_ids`, attention yields the same values as for each piece alone."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(1000 * DOCUMENTS + 1, 8, generator=generator)
    with hosted() as text:
        batch = next(iter(DataLoader(text, **OPTIONS)))
    numbers, values = batch["document_ids"], table[batch["input_ids"]]
    mask = (numbers[:, :, None] == numbers[:, None, :]).tril()
    attention = torch.nn.functional.scaled_dot_product_attention
    found = attention(values, values, values, attn_mask=mask).reshape(-1, 8)
    flat = values.reshape(-1, 8)
    for start, stop in zip(batch["cu_seqlens"].tolist(), batch["cu_seqlens"].tolist()[1:], strict=False):
        piece = flat[None, start:stop]
        torch.testing.assert_close(found[start:stop], attention(piece, piece, piece, is_causal=True)[0])


def test_entries_are_those_of_hugging_faces_collator() -> None:
    """Each sequence has the tokens, labels, positions and boundaries of transformers' `DataCollatorWithFlattening`."""
    transformers = pytest.importorskip("transformers")
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    for batch in DataLoader(Texts(), **OPTIONS):
        for row, pieces in enumerate(sequences(batch)):
            expected = collator([{"input_ids": piece} for piece in pieces])
            size = expected["input_ids"].shape[1]
            for name in ("input_ids", "labels", "position_ids"):
                assert torch.equal(batch[name][row, :size], expected[name][0])
            assert torch.equal(batch["document_ids"][row, :size], expected["seq_idx"][0] + 1)
            boundaries = batch["cu_seqlens"][(batch["cu_seqlens"] >= row * L) & (batch["cu_seqlens"] <= row * L + size)]
            assert torch.equal(boundaries - row * L, expected["cu_seq_lens_q"])


def test_a_batch_that_is_too_large_is_named_before_it_is_allocated() -> None:
    """The error of a sequence length beyond all memory says what to change."""
    packing = Packing(sequence_length=2**30, window=60)
    with hosted() as text, pytest.raises(BatchTooLarge, match="use a smaller batch_size or sequence_length"):
        next(iter(DataLoader(text, 1, seed=0, packing=packing)))


# --- Resuming, several servers ------------------------------------------------------------------------------------


def test_training_resumes_at_any_batch() -> None:
    """A restored loader continues with the next batch, at random places, and its state has a constant size."""
    with hosted() as text:
        loader = DataLoader(text, **OPTIONS)
        expected = received(loader)
        for place in random.Random(0).sample(range(len(expected)), 8):
            loader.set_epoch(0)
            batches = iter(loader)
            for _ in range(place):
                next(batches)
            state = loader.state_dict()
            assert state["sequences"] == 3 * place
            assert len(repr(state)) < 250
            resumed = DataLoader(text, **OPTIONS)
            resumed.load_state_dict(json.loads(json.dumps(state)))
            assert received(resumed) == expected[place:]


def test_training_resumes_on_another_world_size() -> None:
    """If batch_size * world_size is equal, three ranks continue an epoch of two, and each token is received once."""
    with hosted() as text:

        def loaders(ranks: int) -> list[DataLoader]:
            options = {**OPTIONS, "batch_size": 6 // ranks, "tail": "uneven"}
            return [DataLoader(text, rank=rank, world_size=ranks, **options) for rank in range(ranks)]

        seen: list[int] = []
        for loader in loaders(2):
            batches = iter(loader)
            seen += flattened([sequences(next(batches)) for _ in range(11)])
            state = loader.state_dict()
        for loader in loaders(3):
            loader.load_state_dict(state)
            seen += flattened(received(loader))
        assert sorted(seen) == ALL_TOKENS
        (other,) = loaders(1)
        with pytest.raises(StateMismatch, match="after 4 sequences, which is not a multiple"):
            other.load_state_dict({**state, "sequences": 4})


def test_training_resumes_at_random_places_on_any_world_size() -> None:
    """At 100 random places, all ranks together continue with the next sequences, for divisions of 12 sequences."""
    drawn = random.Random(0)

    def loader(ranks: int, rank: int = 0) -> DataLoader:
        options = {**OPTIONS, "batch_size": 12 // ranks, "drop_last": True, "tail": "uneven"}
        return DataLoader(Texts(), rank=rank, world_size=ranks, **options)

    whole = loader(1)
    state = whole.state_dict()
    epochs = [planned(whole, epoch) for epoch in range(3)]
    for _ in range(100):
        epoch, ranks = drawn.randrange(3), drawn.choice([1, 2, 3, 4, 6, 12])
        place = drawn.randrange(len(epochs[epoch]))
        batches = []
        for rank in range(ranks):
            resumed = loader(ranks, rank)
            resumed.load_state_dict({**state, "epoch": epoch, "sequences": 12 * place})
            batches.append(sequences(next(iter(resumed))))
        step = [sequence for column in zip(*batches, strict=True) for sequence in column]
        assert step == epochs[epoch][place]


def test_states_of_other_parameters_are_refused() -> None:
    """The position is valid only for the same sequence length, window and lengths."""
    with hosted() as text:
        state = DataLoader(text, **OPTIONS).state_dict()
        for packing in (Packing(sequence_length=64, window=60, pad_token_id=-1), Packing(sequence_length=L), None):
            with pytest.raises(StateMismatch, match="the state was saved with"):
                DataLoader(text, **{**OPTIONS, "packing": packing}).load_state_dict(state)


def test_two_servers_share_an_epoch_and_refuse_other_lengths() -> None:
    """Servers with the same lengths compute the same batches; a server with other lengths refuses the loader."""
    other = Texts()
    other.sample_lengths = LENGTHS + 1
    with hosted() as text, hosted() as same, hosted(other) as different:
        both = RemoteDataset([text.url, same.url], "text")
        assert received(DataLoader(both, **OPTIONS)) == received(DataLoader(text, **OPTIONS))
        with pytest.raises(DatasetChanged, match="all servers must have the same sample_lengths"):
            different.batch(DataLoader(text, **OPTIONS).spec, 0, 0)


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_workers_of_all_start_methods_pack(start_server: StartServer, tmp_path: Path, start_method: str) -> None:
    """Configured datasets are packed as objects are."""
    (tmp_path / "server.toml").write_text(
        f'[datasets.text]\nfactory = "tests.end_to_end.test_packing:Texts"\nstart_method = "{start_method}"\n'
    )
    server = start_server("--config", str(tmp_path / "server.toml"), "--num-workers", "2")
    loader = DataLoader(RemoteDataset(server.url, "text"), **OPTIONS)
    assert received(loader) == planned(loader, 0)


def test_batches_beyond_the_epoch_are_no_failures() -> None:
    """Only the client knows the number of batches: a server may prefetch further ones, which do not count as failed."""
    with hosted() as text:
        loader = DataLoader(text, **OPTIONS)
        received(loader)
        assert "BatchOutOfRange" in text.batch(loader.spec, 0, len(loader)).content.type
        assert statistics(text)["batches_failed"] == 0


def test_statistics_show_the_padding() -> None:
    """/stats counts the tokens of the pieces, and those of the sequences."""
    with hosted() as text:
        loader = DataLoader(text, **OPTIONS)
        assert len(loader)
        before = statistics(text)  # the lengths were downloaded
        batches, after = list(loader), statistics(text)
        assert (before["tokens"], after["tokens"]) == (0, LENGTHS.sum())
        assert after["tokens_padded"] == sum(batch["input_ids"].numel() for batch in batches)
        assert after["samples_computed"] - before["samples_computed"] == sum(len(each["input_ids"]) for each in batches)


# --- Errors -------------------------------------------------------------------------------------------------------


class Wrong(Texts):
    """Dataset whose first document is replaced."""

    def __init__(self, document: Any) -> None:
        self._document = document

    def __getitem__(self, index: int) -> Any:
        """Return a document."""
        return self._document if index == 0 else super().__getitem__(index)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([1, 2], "sample 0 of dataset 'text' has 2 tokens, and sample_lengths states 1"),
        ([], "sample 0 of dataset 'text' has 0 tokens"),
        ("a", r"cannot pack sample 0 of dataset 'text': expected a 1-D array of integers, got shape \(\)"),
        ([0.5], "expected a 1-D array of integers, got shape (1,) and dtype float64"),
        ({"text": [1]}, "sample 0 of dataset 'text' has no entry 'input_ids', only 'text'"),
        ({"input_ids": [1], "text": ["a"]}, "cannot pack entry 'text' of sample 0 of dataset 'text': expected a 1-D"),
        ({"input_ids": [1], "labels": [1, 2]}, "entry 'labels' of sample 0 of dataset 'text' has 2 tokens"),
        ({"input_ids": [1], "max_seqlen": [1]}, "cannot pack entry 'max_seqlen' of sample 0 of dataset 'text'"),
    ],
)
def test_documents_that_cannot_be_packed_are_named(document: Any, message: str) -> None:
    """The error has the index of the sample, what is wrong and what to change."""
    with hosted(Wrong(document)) as text, pytest.raises(ValueError) as caught:
        received(DataLoader(text, **OPTIONS))
    assert message.replace("\\", "") in str(caught.value)


def test_documents_with_other_entries_are_named() -> None:
    """The entries of a batch are those of all its documents."""
    wrong = Wrong({"input_ids": [1], "weights": [0.5]})
    with pytest.raises(
        ValueError, match=r"cannot pack samples \d+ and \d+ of dataset '.*' into one batch: their entries"
    ):
        list(DataLoader(wrong, **OPTIONS))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seed": None}, ValueError, "packing requires seed="),
        ({"collate_fn": torch.utils.data.default_convert}, InvalidSpec, "packing excludes collate"),
        ({"on_error": "skip"}, InvalidSpec, "packing excludes on_error=skip: another document has another length"),
        ({"batch_size": None}, InvalidSpec, "batch_size=null"),
        ({"balance": LengthBalance(window=60)}, InvalidSpec, "packing excludes balance"),
        ({"seed": None, "shuffle": None, "sampler": [1, 2]}, ValueError, "packing excludes sampler and batch_sampler"),
    ],
)
def test_arguments_that_exclude_packing_are_named(options: Any, error: type[Exception], message: str) -> None:
    """Errors state which arguments to remove, in the constructor."""
    with pytest.raises(error, match=message):
        DataLoader(Texts(), **{**OPTIONS, **options})


def test_datasets_that_cannot_be_packed_are_named() -> None:
    """Packing requires a map-style dataset with lengths, and no mixture."""
    with pytest.raises(InvalidSpec, match="dataset 'dataset' states none: define its attribute sample_lengths"):
        DataLoader([[1, 2]], **OPTIONS)
    with pytest.raises(ValueError, match="packing excludes a Mixture"):
        DataLoader(Mixture({"text": Texts()}, {"text": 1}), **OPTIONS)
    with pytest.raises(ValueError, match="packing requires a map-style dataset"):
        DataLoader(iter([1]), batch_size=3, seed=7, packing=PACKING)
    info = replace(host(Texts(), name="text").info, length=17 * 2**20)
    with pytest.raises(InvalidSpec, match="window=16 divides 17825792 samples into more than 1048576 windows"):
        Packing(sequence_length=8, window=16).spec(info)
    with pytest.raises(InvalidSpec, match="sequence_length of packing must be an integer"):
        Packing(sequence_length=0)


def test_frameworks_that_need_a_sampler_raise_an_error() -> None:
    """No sampler of torch has the order of a loader with packing."""
    import teleloader.torch

    with pytest.raises(ValueError, match=r"teleloader.torch.DataLoader does not support balance and packing"):
        teleloader.torch.DataLoader(Texts(), **OPTIONS)


# --- Copies, fakes and commands -----------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.copy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_copies_and_pickles_have_the_same_order(copied: Callable[[DataLoader], DataLoader]) -> None:
    """A copy of a loader is a new loader with the same packing."""
    with hosted() as text:
        loader = DataLoader(text, **OPTIONS)
        other = copied(loader)
        assert other.packing == loader.packing
        assert received(other) == planned(loader, 0)
        with pytest.raises(ValueError, match="packing attribute should not be set"):
            loader.packing = None
        assert "packing=Packing(sequence_length=32" in repr(loader)


def test_the_fake_server_packs() -> None:
    """Tests without a server have the same batches."""
    with FakeServer({"text": Texts()}) as fake:
        loader = DataLoader(RemoteDataset(fake.url, "text"), **OPTIONS)
        assert received(loader) == planned(loader, 0)


def test_visits_count_batches_with_tokens_of_a_document() -> None:
    """A document that is in two batches is visited twice."""
    loader = DataLoader(Texts(), **OPTIONS)
    list(loader)
    plan = loader.plan(0)
    batches = [set(plan.pieces(k).documents.tolist()) for k in range(len(plan))]
    assert loader.visits().tolist() == [sum(document in each for each in batches) for document in range(DOCUMENTS)]


def test_the_audit_counts_tokens() -> None:
    """``teleloader audit --sequence-length`` shows that no token is lost or doubled, and the padding."""
    with hosted() as text:
        command = ["audit", text.url, "--seed", "7", "--shuffle", "--world-size", "2", "--tail", "uneven"]
        command += ["--sequence-length", str(L), "--window", "60"]
        report = json.loads(output_of(TOOLS, *command, "--output", "json"))
        assert report["exact"] is True
        assert report["tokens"] == report["visits"] == LENGTHS.sum()
        assert (report["missing_tokens"], report["repeated_tokens"]) == (0, 0)
        assert 0 < report["padding_fraction"] < 0.1
        assert "each token is in exactly one sequence" in output_of(TOOLS, *command)


def test_the_benchmark_reports_the_padding() -> None:
    """``teleloader bench --sequence-length`` packs, and has the padding of the packed sequences."""
    with hosted() as text:
        command = ["bench", text.url, "--seconds", "0.2", "--shuffle", "--batch-size", "3", "--output", "json"]
        report = json.loads(output_of(TOOLS, *command, "--sequence-length", str(L), "--window", "60"))
        assert 0 <= report["padding_fraction"] < 0.1
        assert report["samples"] <= 3 * report["batches"]


def test_peek_shows_a_packed_batch() -> None:
    """``teleloader peek --sequence-length`` lists the entries of a batch."""
    with hosted() as text:
        printed = output_of(TOOLS, "peek", text.url, "text", "1", "--sequence-length", str(L), "--window", "60")
        assert all(name in printed for name in ("input_ids", "document_ids", "cu_seqlens", "max_seqlen"))
