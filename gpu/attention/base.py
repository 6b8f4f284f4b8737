"""What the layers ask of an attention backend."""

from __future__ import annotations

from typing import Protocol

import torch

from gpu.inputs import StepInputs
from gpu.kv.pool import KvPool


class AttentionBackend(Protocol):
    """Stores a step's K and V in the pages, then attends over them, causally.

    Owner: launch thread. `prepare` is called once per step, before `run` is called once per layer in
    ascending order. A backend reads the page table it was built with; entries past a row's length,
    and what lies in the pages there, are arbitrary and must not reach a result, not even as
    0 × NaN.
    """

    def bind(self, pool: KvPool | None) -> None:
        """Work on these pages from the next step on; None lets go of them, and no step may come."""
        ...

    def prepare(self, inputs: StepInputs) -> None:
        """Read the step's rows. The pages are those in the table now. Mutates only the backend and
        the unwritten tails of pages."""
        ...

    def run(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Attend.

        q   [n, heads, head_dim], rotated
        kv  [n, 2, kv_heads, head_dim], K rotated; stored at `inputs.where`
        returns [n, heads * head_dim]; valid until the next call
        """
        ...
