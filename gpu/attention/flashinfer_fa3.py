"""Prefill of captured steps by FlashInfer's FA3 kernel, scheduled on the device.

What is called is the kernel's own entry, below FlashInfer's wrapper and its host plan: it takes the byte
offsets of a schedule in device memory, and `gpu.kernels.fa3_schedule` writes that schedule. The entry is
no public interface: written against FlashInfer 0.6.13.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError
from gpu.attention.device import AttentionFacts, AttentionOptions, Caches
from gpu.kernels.fa3_schedule import Fa3Schedule, schedule_fa3
from gpu.state.view import StepView

CAUSAL, NHD = 1, 0
"""FlashInfer's codes of mask and layout."""


def refusal(facts: AttentionFacts) -> str:
    """Why FA3 cannot do it; empty where it can."""
    if find_spec("flashinfer") is None:
        return "flashinfer is not installed: pip install 'loom-serve[cuda]'."
    if facts.device.type != "cuda" or torch.cuda.get_device_capability(facts.device) != (9, 0):
        return "FA3 runs on compute capability 9.0 alone."
    if facts.head_dim not in (64, 128, 256):
        return f"FA3 has head_dim 64, 128 and 256, not {facts.head_dim}."
    if facts.dtype not in (torch.bfloat16, torch.float16):
        return f"FA3 computes in bfloat16 and float16, not in {facts.dtype}."
    if facts.kv_scales:
        return "FA3 reads float8 pages only with float8 queries."
    return ""


class FlashInferPrefill:
    """`PhaseAttention` of chunks. Owner: launch thread.

    Making one compiles the kernel where no cache has it (a minute), loads it, and may synchronise: it
    must exist before the first graph.
    """

    __slots__ = ("_caches", "_facts", "_options", "_processors", "_run", "_schedule", "_space")

    def __init__(self, facts: AttentionFacts, options: AttentionOptions) -> None:
        self._facts, self._options = facts, options
        self._caches: Caches = ()
        properties = torch.cuda.get_device_properties(facts.device)
        self._processors = int(properties.multi_processor_count)
        self._run = {window > 0: _kernel(facts, window > 0) for window in sorted(set(facts.windows))}
        self._schedule: Fa3Schedule | None = None
        self._space = torch.empty(16, dtype=torch.uint8, device=facts.device)

    def bind(self, caches: Caches | None) -> None:
        """See `PhaseAttention.bind`. K and V as pages: [pages, page_size, kv_heads, head_dim]."""
        shape = (-1, self._facts.page_size)
        self._caches = [(torch.unflatten(k, 0, shape), torch.unflatten(v, 0, shape)) for k, v in caches or ()]

    def plan(self, view: StepView) -> None:
        """See `PhaseAttention.plan`: one schedule serves all layers."""
        self._schedule = schedule_fa3(
            (view.chunk_slots, view.chunk_starts, view.chunk_firsts, view.counts[2:3]),
            view.tokens,
            self._facts.heads,
            self._facts.head_dim,
            view.page_table.stride(0),
            self._processors,
            pdl=self._options.pdl,
        )

    def attend(self, layer: int, q: Tensor, view: StepView, out: Tensor) -> None:
        """See `PhaseAttention.attend`."""
        assert self._schedule is not None, "plan() comes first"
        facts, window = self._facts, self._facts.windows[layer]
        k, v = self._caches[layer]
        self._run[window > 0](
            self._space,
            self._schedule.numbers,
            list(self._schedule.offsets),
            q,
            k,
            v,
            view.chunk_firsts,  # this and the next: what the schedule holds already
            view.chunk_firsts,
            view.page_table,
            view.chunk_firsts,
            out.view(q.shape),
            None,  # log-sum-exp
            CAUSAL,
            NHD,
            window - 1,  # keys to the left; -1 for all
            False,  # FA3 knows no dependent launch
            *[None] * 6,  # masks and what goes with them
            facts.cap,
            facts.scale,
            *[None] * 3,  # scales of float8
            1.0,
            1e4,  # both of a rotation that is not asked for
            0,
            0,
        )


def _kernel(facts: AttentionFacts, windowed: bool) -> Callable[..., Any]:
    """FlashInfer's `paged_run` for these types and sizes."""
    from flashinfer.prefill import get_batch_prefill_module

    dim, dtype = facts.head_dim, facts.dtype
    args = (dtype, dtype, dtype, torch.int32, dim, dim, 0, windowed, facts.cap > 0, False)
    try:
        run: Callable[..., Any] = get_batch_prefill_module("fa3", *args).paged_run
    except (OSError, RuntimeError) as error:  # no compiler, no ninja, another CUDA
        raise ConfigError(f"FlashInfer could not build FA3: {str(error)[-300:]}") from error
    return run
