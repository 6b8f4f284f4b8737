"""What a step asks of an attention backend, of all its rows and of each phase, and the facts of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from core.models import ModelSpec
from gpu.state.view import StepView

Phase = Literal["prefill", "decode"]

Caches = Sequence[tuple[Tensor, Tensor]]
"""Per layer K and V, each [tokens, kv_heads, head_dim]: views of the pool, pages flattened to tokens."""


class DeviceAttention(Protocol):
    """Attention of graphs. Nothing here waits for the device, reads from it or depends on its data.

    Owner: launch thread. Between `bind` and `bind(None)`, each step calls `plan`, then `attend` once a
    layer, K and V of the step stored already. Entries of the page table past a slot's length, and what
    lies in the pages there, are arbitrary and must not reach a result, not even as 0 × NaN.
    """

    def bind(self, caches: Caches | None) -> None:
        """Work on these pages from the next step on; None lets go of them, and no step may come."""
        ...

    def plan(self, view: StepView) -> None:
        """Launch what divides the step's work, inside the graph, before the layers."""
        ...

    def attend(self, layer: int, q: Tensor, view: StepView) -> Tensor:
        """`q` [N, heads, head_dim], rotated, to [N, heads * head_dim]. Rows behind the true ones are
        arbitrary."""
        ...


class PhaseAttention(Protocol):
    """One phase of `DeviceAttention`: decode rows or chunks."""

    def bind(self, caches: Caches | None) -> None:
        """See `DeviceAttention.bind`."""
        ...

    def plan(self, view: StepView) -> None:
        """See `DeviceAttention.plan`. Called only for views that can hold this phase's rows."""
        ...

    def attend(self, layer: int, q: Tensor, view: StepView, out: Tensor) -> None:
        """As `DeviceAttention.attend`, of this phase's rows alone, into `out` [N, heads * head_dim]. Decode
        may write all rows that the graph has for it; prefill comes after and writes those of chunks alone."""
        ...


class AttentionFacts(NamedTuple):
    """What a backend is made for.

    windows   per layer the positions a token sees, itself included; 0 for all
    dtype     of queries and results; the pages' own may be float8 (see `kv_scales`)
    max_rows  decode rows of the largest graph
    cap       scores s become cap · tanh(s / cap); 0 for none
    kv_scales per layer what K and V of the pages are multiplied by; empty: by 1
    """

    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    page_size: int
    max_rows: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    cap: float = 0.0
    kv_scales: tuple[tuple[float, float], ...] = ()

    def scales(self, layer: int) -> tuple[float, float]:
        """What K and V of a layer's pages are multiplied by."""
        return self.kv_scales[layer] if self.kv_scales else (1.0, 1.0)


class AttentionOptions(NamedTuple):
    """How a backend runs. `pdl`: programmatic dependent launch (compute capability 9.0). `cascade_rows`:
    graphs of at least so many decode rows attend once to the keys that all rows share; 0: none does."""

    pdl: bool = False
    cascade_rows: int = 0


def attention_facts(
    spec: ModelSpec, page_size: int, max_rows: int, dtype: torch.dtype, device: torch.device
) -> AttentionFacts:
    """Of a model's layers, on this device."""
    windows = tuple(spec.window(layer) for layer in range(spec.layers))
    return AttentionFacts(
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        windows=windows,
        page_size=page_size,
        max_rows=max_rows,
        dtype=dtype,
        device=device,
        scale=spec.head_dim**-0.5,
    )
