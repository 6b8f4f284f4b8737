"""Attention over two sets of keys, merged, is attention over both."""

from __future__ import annotations

import torch

from bench.kernels import reference
from bench.kernels.inputs import Heads, error, pages, scalar
from gpu.kernels.attention.merge_state import merge_state


def test_merge_equals_attention_over_all(device: torch.device) -> None:
    heads = Heads(10, 2, 24)
    kept = pages([48, 70, 33], 16, heads, torch.float32, device)
    q = torch.randn(3, heads.q, heads.dim, device=device)
    cache, table = (kept.k, kept.v), kept.table[kept.slots]
    whole, whole_lse = reference.decode_attention(q, cache, table, [48, 70, 33], 16, 0.2)
    late, late_lse = reference.decode_attention(q, cache, table, [48, 70, 33], 16, 0.2, skip=32)
    early, early_lse = reference.decode_attention(q, cache, table, [32, 32, 32], 16, 0.2)
    merge_state(late, late_lse, early, early_lse)
    assert error(late, whole) < 1e-5
    assert error(late_lse, whole_lse) < 1e-5


def test_an_empty_side_counts_nothing(device: torch.device) -> None:
    out, other = (torch.randn(4, 2, 8, device=device) for _ in range(2))
    lse, other_lse = (torch.randn(4, 2, device=device) for _ in range(2))
    lse[0], out[0] = float("-inf"), float("nan")
    other_lse[1], other[1] = float("-inf"), float("nan")
    lse[2] = other_lse[2] = float("-inf")
    expected, sums = reference.merge_state(out[:2], lse[:2], other[:2], other_lse[:2])
    last = out[3].clone()
    merge_state(out, lse, other, other_lse, num_rows=scalar(3, device))
    torch.testing.assert_close(out[:2], expected)
    torch.testing.assert_close(lse[:2], sums)
    assert not out[2].any()
    assert bool((lse[2] == float("-inf")).all())
    assert torch.equal(out[3], last)


def test_several_parts_at_once(device: torch.device) -> None:
    out, lse = torch.randn(3, 9, 8, device=device), torch.randn(3, 9, device=device)
    parts, parts_lse = torch.randn(2, 3, 9, 8, device=device), torch.randn(2, 3, 9, device=device)
    expected, sums = reference.merge_state(out, lse, parts[0], parts_lse[0])
    expected, sums = reference.merge_state(expected, sums, parts[1], parts_lse[1])
    merge_state(out, lse, parts, parts_lse)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, sums)
