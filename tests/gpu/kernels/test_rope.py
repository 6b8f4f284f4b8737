"""cos and sin by the kernel are those of plain torch, far out too."""

from __future__ import annotations

import torch

from bench.kernels.inputs import scalar
from gpu.kernels.attention.rope import rope_rows
from gpu.ops.plain import turn


def test_rope_rows(device: torch.device) -> None:
    # 131,000 radians: a sine without argument reduction is noise there.
    positions = torch.tensor([0, 1, 40_000, 131_000, 77], dtype=torch.int32, device=device)
    frequencies = 1e4 ** (-torch.arange(12, device=device) / 12)
    cos, sin = rope_rows(positions, frequencies, 1.25, torch.float32, num_rows=scalar(4, device))
    expected = turn(positions.float()[:, None] * frequencies, 1.25, torch.float32)
    assert cos.shape == expected.cos.shape
    torch.testing.assert_close(cos[:4], expected.cos[:4], atol=1e-5, rtol=0)
    torch.testing.assert_close(sin[:4], expected.sin[:4], atol=1e-5, rtol=0)
