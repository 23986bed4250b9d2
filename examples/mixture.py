"""Pretraining data from two sources, whose proportion changes during training.

    python examples/mixture.py

One process serves two datasets of token sequences and trains on their mixture: first 80 % "text" and 20 % "code", and
50 % each from sample 4,000 on. Training stops in the middle of the epoch, and another loader resumes from the state.
With a server on another machine, replace ``serve()`` by its URL.
"""

import itertools
import json

import torch

from teleloader import DataLoader, Mixture, RemoteDataset
from teleloader_server import serve


class Tokens:
    """Sequences of 16 random tokens, which are even in one source and odd in the other."""

    def __init__(self, length: int, odd: int) -> None:
        self.length, self.odd = length, odd

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, 1000, (16,)) * 2 + self.odd


def train(url: str) -> None:
    """Count the samples of each source in the batches of an epoch."""
    sources = {name: RemoteDataset(url, name) for name in ("text", "code")}
    mixture = Mixture(
        sources,
        {0: {"text": 0.8, "code": 0.2}, 4_000: {"text": 0.5, "code": 0.5}},
        samples=8_000,
    )
    loader = DataLoader(mixture, batch_size=50, shuffle=True, seed=7)
    code = [int(batch[:, 0].remainder(2).sum()) for batch in itertools.islice(loader, 60)]
    state = json.dumps(loader.state_dict())
    print(f"interrupted after {len(code)} batches, state of {len(state)} bytes")

    resumed = DataLoader(mixture, batch_size=50, shuffle=True, seed=7)
    resumed.load_state_dict(json.loads(state))
    code += [int(batch[:, 0].remainder(2).sum()) for batch in resumed]
    print(f"batches 0 to 79: {sum(code[:80])} of 4000 samples are code, {min(code[:80])} to {max(code[:80])} per batch")
    print(
        f"batches 80 to 159: {sum(code[80:])} of 4000 samples are code, {min(code[80:])} to {max(code[80:])} per batch"
    )


if __name__ == "__main__":
    with serve({"text": Tokens(10_000, odd=0), "code": Tokens(1_000, odd=1)}, num_workers=2) as address:
        train(address)
