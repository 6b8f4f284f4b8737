"""The weights of routed experts, as layers hold them and kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from core.models import ClampedGate
from gpu.lora import LoraExperts
from gpu.quant import int8

Packed = Literal["", "mxfp4", "int4"]
"""Format of 4-bit weights: MXFP4 or integers; "": the weights have more bits."""


class Choice(NamedTuple):
    """How a row's experts are chosen and weighed, as in `MoeSpec`.

    sigmoid     scores are sigmoids of logits, not a softmax over all of them
    bias        float32 [experts], added to scores to choose by; weights are without it
    groups      equal runs of experts, of which those of the best `top_groups` are open: a group is worth its
                best expert, with sigmoids its best two together
    scale       what weights are multiplied by
    """

    sigmoid: bool = False
    bias: Tensor | None = None
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0

    @property
    def plain(self) -> bool:
        """The best of a softmax."""
        return not self.sigmoid and self.bias is None and self.groups == 1 and self.scale == 1.0


PLAIN = Choice()


class Experts(NamedTuple):
    """One layer's routed experts, contiguous.

    w13          [experts, 2 * width, hidden], gate over up
    w2           [experts, hidden, width]
    renormalise  a row's chosen weights are scaled to sum to 1
    scales       of w13 and w2 where they are e4m3 or int8: float32 [experts, 2 * width] and [experts,
    hidden],
                 or of e4m3 [experts, 2 * width / 128, hidden / 128] and [experts, hidden / 128, width / 128];
                 or of 4 bits, both as `gpu.quant.mxfp4` packs them or, integers, as `gpu.quant.int4` has one
                 matrix, for each expert
    lora         what adapters add to both, in steps with adapters
    biases       [experts, 2 * width] and [experts, hidden], where there are any; of ranks the first adds the
                 second one alone
    clamped      how gate and up are joined; None: activation(gate) · up
    matrices     w13 and w2 on a CPU in 8 or 4 bits, a `gpu.quant.int8.Packed` for each expert; the two
                 tensors are empty then
    """

    w13: Tensor
    w2: Tensor
    top_k: int
    renormalise: bool = True
    activation: str = "silu"
    scales: tuple[Tensor, Tensor] | None = None
    lora: LoraExperts = LoraExperts()
    biases: tuple[Tensor, Tensor | None] | None = None
    clamped: ClampedGate | None = None
    choice: Choice = PLAIN
    matrices: tuple[Sequence[int8.Packed], Sequence[int8.Packed]] | None = None

    @property
    def is_packed(self) -> bool:
        """Whether the weights have 4 bits: MXFP4, or integers."""
        return self.w13.dtype in (torch.uint8, torch.int16)

    @property
    def is_int4(self) -> bool:
        """Whether they are integers of 4 bits."""
        return self.is_packed and self.scales is not None and self.scales[0].is_floating_point()

    @property
    def is_mxfp4(self) -> bool:
        """Whether they are MXFP4."""
        return self.is_packed and not self.is_int4
