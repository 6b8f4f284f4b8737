"""What a step asks of an attention backend, for all its rows and for each phase, and its configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from core.models import ModelSpec
from gpu.device import HOPPER, CudaFacts
from gpu.kv.pool import KvPool
from gpu.state.view import StepView

Phase = Literal["prefill", "decode"]

Cache = tuple[Tensor, Tensor]
"""K and V of a layer, each [tokens, kv_heads, head_dim]: views of the pool, pages flattened to tokens. Of
latents V is [tokens, 1, values], a view of K's first columns."""


class AttentionBackend(Protocol):
    """Attention of a step's rows over the pages, causally; K and V of the step are stored already.

    Owner: launch thread. Between `bind` and `bind(None)`, each step calls `plan`, then `attend` once a layer
    in ascending order. On a GPU nothing here waits for the device, reads from it or depends on its data.
    Entries of the page table past a slot's length, and what lies in the pages there, are arbitrary and must
    not reach a result, not even as 0 × NaN.
    """

    @property
    def name(self) -> str:
        """The name in the form that `--attention-backend` takes."""
        ...

    def bind(self, pool: KvPool | None) -> None:
        """Work on these pages from the next step on; None lets go of them, and no step may come."""
        ...

    def plan(self, view: StepView) -> None:
        """Divide the step's work, once for all layers: inside the graph, where there is one."""
        ...

    def attend(self, layer: int, q: Tensor, view: StepView, sinks: Tensor | None = None) -> Tensor:
        """`q` [N, heads, head_dim], rotated, to [N, heads * head_dim], over latents to [N, heads * values],
        valid until the next call. Rows behind the true ones are arbitrary. `sinks` [heads] are scores of a
        key more, which has no value."""
        ...


class TorchBackend(AttentionBackend, Protocol):
    """A backend in plain torch, which lays out K and V itself."""

    def store(self, layer: int, kv: Tensor) -> None:
        """Keep K, rotated, and V of the planned step's rows: `kv` [N, 2, kv_heads, head_dim], of latents
        [N, 1, 1, head_dim]."""
        ...


class PhaseAttention(Protocol):
    """One phase of `AttentionBackend`: decode rows or chunks."""

    @property
    def name(self) -> str:
        """See `gpu.attention.selector.BACKENDS`."""
        ...

    def plan(self, view: StepView) -> None:
        """See `AttentionBackend.plan`. Called only for views that can hold this phase's rows."""
        ...

    def attend(
        self, layer: int, q: Tensor, cache: Cache, view: StepView, out: Tensor, sinks: Tensor | None = None
    ) -> None:
        """Like `AttentionBackend.attend` over the layer's `cache`, for this phase's rows alone, into `out`
        [N, heads * head_dim]. Decode may write all rows that the graph has for it; prefill comes after and
        writes those of chunks alone."""
        ...


def silent(stage: str, share: float) -> None:
    """Ignore progress."""


class AttentionConfig(NamedTuple):
    """What a backend is made for, and how it runs.

    windows       per layer the positions a token sees, itself included; 0 for all
    max_rows      tokens of decode rows in the largest graph
    query         the most tokens of a decode row
    sinks         whether layers have them
    values        columns of a key that are its value, where keys are latents of one KV head (MLA); 0: V has
                  columns of its own
    trees         whether a decode row's drafts may be trees
    dtype         of queries and results
    gpu           the device's compute capability and number of multiprocessors
    cap           scores s become cap · tanh(s / cap); 0 for none
    kv_scales     what K and V of float8 pages are multiplied by; None: pages are of `dtype`
    pdl           programmatic dependent launch (compute capability 9.0)
    cascade_rows  graphs of at least so many decode rows attend once to the keys that all rows share; 0: none
                  does
    progress      called with what a start waits for, and the share of it that is done
    """

    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    page_size: int
    max_rows: int
    dtype: torch.dtype
    device: torch.device
    gpu: CudaFacts
    scale: float
    cap: float = 0.0
    kv_scales: tuple[float, float] | None = None
    pdl: bool = False
    cascade_rows: int = 0
    query: int = 1
    trees: bool = False
    sinks: bool = False
    values: int = 0
    progress: Callable[[str, float], None] = silent


def attention_config(
    spec: ModelSpec, page_size: int, max_rows: int, dtype: torch.dtype, device: torch.device, gpu: CudaFacts
) -> AttentionConfig:
    """The configuration for a model's layers on this device."""
    return AttentionConfig(
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        windows=tuple(spec.window(i) for i in range(spec.layers) if i not in spec.linear_layers),
        page_size=page_size,
        max_rows=max_rows,
        dtype=dtype,
        device=device,
        gpu=gpu,
        scale=spec.softmax_scale,
        cap=spec.attention_cap,
        values=spec.kv_shape[2],
        pdl=gpu.capability >= HOPPER,
        sinks=spec.sinks,
    )
