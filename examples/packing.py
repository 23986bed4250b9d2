"""Language model on packed sequences: documents of any length, no padding, and attention within each document.

    python examples/packing.py

One process serves documents of characters, and trains a small transformer on sequences of 256 tokens that are packed
from them. The mask of the attention is computed from ``document_ids``. Kernels for variable lengths use ``cu_seqlens``
and ``max_seqlen`` instead. With a server on another machine, replace ``serve()`` by its URL.
"""

import json

import torch
from torch import nn

from teleloader import DataLoader, Packing, RemoteDataset
from teleloader_server import serve

SENTENCE = b"the quick brown fox jumps over the lazy dog. "
PACKING = Packing(sequence_length=256)


class Documents:
    """Documents of 10 to 700 characters, as tokens from 0 to 127."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.sample_lengths = torch.randint(10, 700, (count,), generator=generator).numpy()

    def __len__(self) -> int:
        return len(self.sample_lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        length = int(self.sample_lengths[index])
        return torch.tensor(list((SENTENCE * 20)[index % len(SENTENCE) :][:length]))


class LanguageModel(nn.Module):
    """Transformer with one layer, whose attention does not cross the boundaries of documents."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(128, width), nn.Embedding(256, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 128)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch."""
        documents = batch["document_ids"]
        sees = (documents[:, :, None] == documents[:, None, :]).tril()
        hidden = self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])
        logits = self.head(self.layer(hidden, ~sees.repeat_interleave(2, 0)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def main(url: str) -> None:
    """Train an epoch, and resume the next one."""
    torch.manual_seed(0)
    documents = RemoteDataset(url, "documents")
    loader = DataLoader(documents, batch_size=4, shuffle=True, seed=7, packing=PACKING)
    model = LanguageModel()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses, tokens, size = [], 0, 0
    for batch in loader:
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        tokens += int((batch["document_ids"] > 0).sum())
        size += batch["input_ids"].numel()
    print(f"epoch 0: {tokens} tokens, {1 - tokens / size:.1%} padding, loss {losses[0]:.2f} to {losses[-1]:.2f}")

    batches = iter(loader)
    before = len(next(batches)["input_ids"])
    state = json.dumps(loader.state_dict())
    resumed = DataLoader(documents, batch_size=4, shuffle=True, seed=7, packing=PACKING)
    resumed.load_state_dict(json.loads(state))
    after = sum(len(batch["input_ids"]) for batch in resumed)
    print(f"epoch 1: {before} of {before + after} sequences before the interruption")


if __name__ == "__main__":
    with serve({"documents": Documents(120)}, num_workers=2) as address:
        main(address)
