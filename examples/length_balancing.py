"""Batches of texts of similar length: less padding than in random batches, and a limit of tokens per batch.

    python examples/length_balancing.py

One process serves a dataset of token sequences that states their lengths, and trains on it with random batches, with
batches of 32 sequences of similar length, and with batches of at most 8,192 tokens. With a server on another machine,
replace ``serve()`` by its URL.
"""

import json

import torch
from torch.nn.utils.rnn import pad_sequence

from teleloader import DataLoader, LengthBalance, RemoteDataset
from teleloader_server import serve


class Texts:
    """Sequences of 8 to 1,024 random tokens, most of them short."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(count, generator=generator).add(4.5).exp()
        self.sample_lengths = drawn.clamp(8, 1024).long().numpy()

    def __len__(self) -> int:
        return len(self.sample_lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(1, 32_000, (int(self.sample_lengths[index]),))


def train(name: str, loader: DataLoader) -> None:
    """Count the tokens and the padding of an epoch."""
    tokens = size = largest = batches = 0
    for batch in loader:
        tokens += int((batch > 0).sum())
        size += batch.numel()
        largest = max(largest, batch.numel())
        batches += 1
    print(f"{name}: {batches} batches, {1 - tokens / size:.0%} padding, at most {largest} tokens in a batch")


def main(url: str) -> None:
    """Compare three orders of the same dataset, and resume the last one."""
    texts = RemoteDataset(url, "texts")
    train("random", DataLoader(texts, batch_size=32, shuffle=True, seed=7))
    train("similar length", DataLoader(texts, batch_size=32, shuffle=True, seed=7, balance=LengthBalance()))

    limited = LengthBalance(max_tokens=8192, window=2048)
    loader = DataLoader(texts, shuffle=True, seed=7, balance=limited)
    train("limited tokens", loader)

    batches = iter(loader)  # epoch 1
    before = len(next(batches)) + len(next(batches))
    state = json.dumps(loader.state_dict())
    resumed = DataLoader(texts, shuffle=True, seed=7, balance=limited)
    resumed.load_state_dict(json.loads(state))
    print(f"epoch 1: {before} texts before the interruption, {sum(map(len, resumed))} after it")


if __name__ == "__main__":
    with serve({"texts": Texts(4_000)}, num_workers=2, collate_fn=lambda items: pad_sequence(items, True)) as address:
        main(address)
