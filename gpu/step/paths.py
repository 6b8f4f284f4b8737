"""Makes chains of accepted paths: behind acceptance a step is what chains of these drafts would have left."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu.kv.pool import KvPool
from gpu.sample.kernels import SamplingKernels
from gpu.step.buffers import StepBuffers


class PathMover:
    """Moves what a step made of each row's accepted path together: K and V of all layers, auxiliary hidden
    states, ids and positions. Owner: launch thread."""

    def __init__(self, buffers: StepBuffers, kernels: SamplingKernels, pdl: bool) -> None:
        self._buffers, self._kernels, self._pdl = buffers, kernels, pdl
        self._kv: Tensor | None = None

    def use_pool(self, pool: KvPool | None) -> None:
        """Move entries of these pages from the next step on; None lets go of them."""
        self._kv = None if pool is None else pool.data.view(torch.int32).flatten(1, 2).flatten(2)

    def __call__(self, samples: int) -> None:
        """Runs behind the acceptance of the first `samples` samples, in the same graph. Chains need none of
        it."""
        if self._buffers.paths is None:
            return
        buffers, rows = self._buffers, self._buffers.rows.first(samples)
        assert self._kv is not None, "a step came while the pages are given back"
        tokens, cells = buffers.begun()
        self._kernels.move_paths(self._kv, rows, cells, pdl=self._pdl)
        self._kernels.move_paths(tokens.unsqueeze(2), rows, pdl=self._pdl)
        if buffers.aux is not None:
            self._kernels.move_paths(buffers.aux.out.view(torch.int32)[None], rows, pdl=self._pdl)
