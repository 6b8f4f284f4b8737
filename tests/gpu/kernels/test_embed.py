"""A step's embedding rows come from cells and from ids, and only for true tokens."""

from __future__ import annotations

import torch

from gpu.kernels.embed import embed


def test_cells_then_ids(device: torch.device, dtype: torch.dtype) -> None:
    table = torch.randn(50, 24, device=device).to(dtype)
    cells = torch.tensor([0, 7, 49, 3], device=device)
    slots = torch.tensor([3, 1, 0], device=device)  # the third is padding
    ids = torch.tensor([11, 12, 99_999], dtype=torch.int32, device=device)  # and so is this one
    counts = torch.tensor([2, 2], dtype=torch.int32, device=device)
    found = embed(table, cells, slots, counts, ids)
    assert torch.equal(found[[0, 1, 3, 4]], table[[3, 7, 11, 12]])


def test_decode_only(device: torch.device, dtype: torch.dtype) -> None:
    table = torch.randn(50, 32, device=device).to(dtype)
    cells, slots = torch.tensor([0, 7, 49], device=device), torch.tensor([2, 1], device=device)
    counts = torch.tensor([2, 0], dtype=torch.int32, device=device)
    assert torch.equal(embed(table, cells, slots, counts), table[[49, 7]])
