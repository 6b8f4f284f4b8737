"""Attention on a CPU: decode rows by a kernel that reads the pages where they lie, chunks by torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from core.models import ModelSpec
from gpu.attention.torch_paged import TorchAttention
from gpu.kernels.cpu import DecodeRows, Heads, Kernels, Scores
from gpu.state.view import StepView


class CpuAttention(TorchAttention):
    """`TorchAttention` of layers without cap, sinks and latents. Torch attends to trees of drafts.

    Owner: launch thread.
    """

    name = "prefill=torch,decode=cpu"

    def __init__(self, windows: Sequence[int], scale: float, kernels: Kernels) -> None:
        super().__init__(windows, scale)
        self.kernels, self._score_scale = kernels, scale
        self._rows: DecodeRows | None = None
        """The decode rows of the step; None: torch attends."""

    def _plan_decode(self, view: StepView, rows: int, windows: set[int]) -> None:
        self._rows = None
        if view.ancestors is not None:
            super()._plan_decode(view, rows, windows)
        else:
            self._rows = DecodeRows(
                rows, view.page_table, self._page_size, view.decode_slots, view.decode_lengths
            )

    def cache(self, layer: int) -> Tensor:
        """Keys and values of the layer [tokens, 2 * kv_heads * head_dim]."""
        return self._tokens[layer]

    def attend(self, layer: int, q: Tensor, view: StepView, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionBackend.attend`."""
        if (decode := self._rows) is None:
            return super().attend(layer, q, view, sinks)
        window, (tokens, queries, dim) = self._windows[layer], q.shape
        heads = Heads(queries, self._data.shape[-2], dim)
        out = q.new_empty(tokens, queries * dim)
        if decode.rows:
            scores = Scores(window, self._score_scale)
            self.kernels.attend(q, heads, self._tokens[layer], decode, out, scores)
        if decode.rows == tokens:
            return out
        out[int(view.num_tokens) :] = 0  # drafts that the plan allowed and no row had
        for block in self._blocks[window]:
            out[block.rows] = self._attend_block(layer, block, q[block.rows], heads.keys, None)
        return out


def cpu_attention(spec: ModelSpec, kernels: Kernels) -> CpuAttention:
    """Attention for a model's layers."""
    return CpuAttention([spec.window(layer) for layer in range(spec.layers)], spec.softmax_scale, kernels)
