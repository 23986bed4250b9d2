"""Packed batches on a GPU: the attention kernels of docs/packing.md, which a CPU does not have."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import numpy as np
import pytest

from teleloader import DataLoader, Packing

HEADS, WIDTH = 4, 64


class Documents:
    """Documents of 20 to 300 tokens."""

    def __init__(self) -> None:
        self.sample_lengths = np.random.default_rng(0).integers(20, 300, 200)

    def __len__(self) -> int:
        return len(self.sample_lengths)

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        tokens: np.ndarray[Any, Any] = np.random.default_rng(index).integers(0, 1000, self.sample_lengths[index])
        return tokens


def masked(batch: dict[str, Any], values: Any) -> Any:
    """Return the attention of `values`, shape (B, HEADS, L, WIDTH), by `scaled_dot_product_attention`."""
    import torch

    documents = batch["document_ids"]
    mask = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    return torch.nn.functional.scaled_dot_product_attention(values, values, values, attn_mask=mask)


def flex_attention(batch: dict[str, Any], values: Any) -> Any:
    """Return the attention of `values`, shape (B, HEADS, L, WIDTH), by FlexAttention."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    documents = batch["document_ids"]
    mask = create_block_mask(
        lambda b, h, q, k: (documents[b, q] == documents[b, k]) & (q >= k),
        len(documents), None, *(2 * [documents.shape[1]]), device="cuda",
    )  # fmt: skip
    return torch.compile(flex_attention)(values, values, values, block_mask=mask)


def varlen(batch: dict[str, Any], values: Any) -> Any:
    """Return the attention of `values`, shape (B, HEADS, L, WIDTH), by `varlen_attn`."""
    from torch.nn.attention.varlen import varlen_attn

    flat = values.transpose(1, 2).flatten(0, 1)
    found = varlen_attn(
        flat, flat, flat, batch["cu_seqlens"], batch["cu_seqlens"], batch["max_seqlen"], batch["max_seqlen"],
        window_size=(-1, 0),
    )  # fmt: skip
    return found.unflatten(0, batch["input_ids"].shape).transpose(1, 2)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own compiler
def test_kernels_attend_within_documents(real_gpu: Any) -> None:
    """Kernels for variable lengths, as far as torch has them, yield the attention of the mask of `document_ids`."""
    import torch

    # in the test, because the parent package is imported, and torch may not be installed
    named = {"flex_attention": flex_attention, "varlen": varlen}
    kernels = [kernel for name, kernel in named.items() if importlib.util.find_spec(f"torch.nn.attention.{name}")]
    assert kernels, "requires torch 2.5"
    table = torch.randn(1000, HEADS, WIDTH, generator=torch.Generator().manual_seed(0)).to("cuda", torch.bfloat16)
    loader = DataLoader(
        Documents(), 4, num_workers=1, shuffle=True, seed=0, packing=Packing(sequence_length=512, window=64),
        device="cuda",
    )  # fmt: skip
    for batch in itertools.islice(loader, 8):
        values = table[batch["input_ids"]].transpose(1, 2)
        expected, tokens = masked(batch, values), (batch["document_ids"] > 0)[:, None, :, None]
        for kernel in kernels:
            torch.testing.assert_close(kernel(batch, values) * tokens, expected * tokens, atol=2e-2, rtol=2e-2)
