"""The layer that measures a lone row."""

from __future__ import annotations

import pytest
import torch

from bench.kernels.inputs import Heads
from bench.kernels.one_row import Size, attention, layer
from gpu.kernels.attention.decode_config import DecodeConfig
from gpu.kernels.gemm.gemv import GemvConfig

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")


def test_keys_loaded_ahead_and_a_merge_kernel_change_nothing_of_a_layer() -> None:
    """A layer without attention is another one, though."""
    start, found, size = torch.randn(1, 64), [], Size(64, Heads(4, 2, 16))
    cut = DecodeConfig(32, 4, 2, 3)
    for each, attends in ((cut, True), (cut._replace(newest=1), True), (cut, False)):
        torch.manual_seed(7)
        residual = start.clone()
        shared = attention(size, [70], each, residual.dtype, residual.device)
        layer(size, shared, residual, attends, GemvConfig(8, 4))()
        found.append(residual)
    torch.testing.assert_close(found[0], found[1])  # parts are added up in another order
    assert not torch.equal(found[0], start)
    assert not torch.equal(found[0], found[2])
