"""Experts that a checkpoint stacks, as gpt-oss has them: of each layer

    experts.gate_up_proj    [experts, hidden, 2 * width]    experts.gate_up_proj_bias    [experts, 2 * width]
    experts.down_proj       [experts, width, hidden]        experts.down_proj_bias       [experts, hidden]

where of gate_up every other output is gate's, from the first on. In MXFP4 (`gpu.quant.mxfp4`) outputs come
first:

    experts.gate_up_proj_blocks    uint8 [experts, 2 * width, hidden / 32, 16]
    experts.gate_up_proj_scales    uint8 [experts, 2 * width, hidden / 32]

and so those of down_proj. Places have a name for each expert's matrix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from core.models.quant import MXFP4_GROUP

_NAME = re.compile(r"(.+\.experts)\.(gate_up|down)_proj(|_bias|_blocks|_scales)")

_KINDS = {"": ("weight", 3), "_bias": ("bias", 2), "_blocks": ("weight", 4), "_scales": ("weight_scale", 3)}
"""Our name of the tensor, and the number of dimensions it has in a checkpoint."""


class Stack(NamedTuple):
    """A tensor of all experts of a layer.

    experts  what stands before an expert's number
    fused    of gate and up, else of down
    kind     the end of its name
    """

    experts: str
    fused: bool
    kind: str

    @property
    def packed(self) -> bool:
        """Whether it is a part of MXFP4 numbers."""
        return self.kind in ("_blocks", "_scales")

    def fits(self, shape: list[int]) -> bool:
        """Whether the tensor has as many dimensions as it should, and blocks the bytes of a group."""
        whole = self.kind != "_blocks" or shape[-1:] == [MXFP4_GROUP // 2]
        return whole and len(shape) == _KINDS[self.kind][1]

    def place(self, expert: int, part: str) -> str:
        """The name of the place of that expert's gate, up or down."""
        return f"{self.experts}.{expert}.{part}_proj.{_KINDS[self.kind][0]}"

    def parts(self, expert: int, tensor: Tensor) -> Mapping[str, Tensor]:
        """Views of one expert's part of `tensor`, by place: numbers as they lie or restored, [outputs,
        inputs]."""
        rows = tensor if self.kind == "_bias" else tensor.flatten(1) if self.packed else tensor.T
        if not self.fused:
            return {self.place(expert, "down"): rows}
        return {self.place(expert, "gate"): rows[::2], self.place(expert, "up"): rows[1::2]}


def stack_of(name: str) -> Stack | None:
    """What a tensor of that name is; None for one that is not of all experts."""
    if (found := _NAME.fullmatch(name)) is None:
        return None
    experts, part, kind = found.groups()
    return Stack(experts, part == "gate_up", kind)
