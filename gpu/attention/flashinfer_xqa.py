"""Decode of captured steps by FlashInfer's XQA kernel, which needs no plan.

It divides a graph's rows and KV heads among the multiprocessors evenly, whatever their lengths: a long row
beside short ones is a few programs' alone. It returns no log-sum-exp: in a graph that is `shared` each row
attends to all of its keys itself. Behind a row's last key it fetches nothing and multiplies zeros.

Written against FlashInfer 0.6.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from core.errors import ConfigError
from gpu.attention.backend import AttentionConfig, Cache
from gpu.attention.flashinfer_fa3 import check_flashinfer
from gpu.state.view import StepView

PAGES = (16, 32, 64, 128)

SCRATCH = 8 << 20
"""Bytes for the parts of rows: at most one a multiprocessor, of 64 query heads of 256 in 16 bits and two sums
of each, 4.4 MB on 132."""

SEMAPHORES = 2
"""Semaphores of a row's KV head: one per 32 query heads that share it. The kernel leaves them at zero."""


def check_xqa(config: AttentionConfig) -> None:
    """Raises `ConfigError` where XQA cannot run."""
    check_flashinfer("XQA", config)
    if config.page_size not in PAGES:
        sizes = ", ".join(map(str, PAGES))
        raise ConfigError(f"XQA has pages of {sizes} tokens, not of {config.page_size}.")
    if config.head_dim % 16 or config.head_dim > 256:
        raise ConfigError(f"XQA has heads of multiples of 16 up to 256, not of {config.head_dim}.")
    if (group := config.heads // config.kv_heads) > 64:
        raise ConfigError(f"XQA has at most 64 query heads to a KV head, not {group}.")
    if config.trees:
        raise ConfigError("XQA has no trees of drafts (--speculative-eagle-topk above 1).")
    if config.cap:
        raise ConfigError("XQA has no soft cap.")
    if config.kv_scales is not None:
        raise ConfigError("XQA has one scale for K and V of float8 pages, not one for each.")


class FlashInferDecode:
    """`PhaseAttention` of decode rows. Owner: launch thread.

    Making one compiles the kernel where no cache has it (half a minute), loads it, and synchronises: it must
    exist before the first graph.
    """

    name = "flashinfer"

    def __init__(self, config: AttentionConfig) -> None:
        """`pdl` changes nothing: the kernel's dependent launch is one setting for all threads."""
        check_xqa(config)
        device = config.device
        for windowed in sorted({window > 0 for window in config.windows}):
            self._run = _kernel(config, windowed)
        self._config = config
        self._scratch = torch.empty(SCRATCH, dtype=torch.uint8, device=device)
        counters = config.max_rows * config.kv_heads * SEMAPHORES
        self._semaphores = torch.zeros(counters, dtype=torch.int32, device=device).view(torch.uint32)
        self._table: Tensor | None = None

    def plan(self, view: StepView) -> None:
        """See `PhaseAttention.plan`: XQA finds a row's pages by its place in the batch, ours are by slot."""
        self._table = view.page_table.index_select(0, view.decode_slots)

    def attend(
        self, layer: int, q: Tensor, cache: Cache, view: StepView, out: Tensor, sinks: Tensor | None = None
    ) -> None:
        """See `PhaseAttention.attend`. Writes all rows that the graph has for it."""
        assert self._table is not None, "plan() comes first"
        config, rows = self._config, view.max_decode
        k, v = (torch.unflatten(side, 0, (-1, config.page_size)) for side in cache)
        self._run(
            q[:rows, None],
            k,
            v,
            self._table,
            view.decode_lengths.view(torch.uint32)[:, None],
            out[:rows].view(rows, 1, config.heads, config.head_dim),
            self._scratch,
            self._semaphores,
            config.kv_heads,
            config.page_size,
            q_scale=config.scale * config.head_dim**0.5,  # it multiplies by 1/√head_dim itself
            sliding_win_size=config.windows[layer],
            sm_count=config.gpu.processors,
            enable_pdl=False,
        )


def _kernel(config: AttentionConfig, windowed: bool) -> Callable[..., None]:
    """FlashInfer's `xqa`, its library for these types and sizes loaded; the call finds it by them. Raises
    `ConfigError`."""
    group = config.heads // config.kv_heads
    here = config.device.index if config.device.index is not None else torch.cuda.current_device()
    try:
        run, device = _library(config.dtype, config.page_size, config.head_dim, group, windowed)
    except (OSError, RuntimeError) as error:  # no compiler, no ninja, sizes that the kernel's asserts refuse
        raise ConfigError(f"FlashInfer could not build XQA: {str(error)[-300:]}") from error
    if device != here:
        raise ConfigError(f"XQA's library was loaded for GPU {device} and launches on no other.")
    return run


@functools.cache
def _library(
    dtype: torch.dtype, page_size: int, head_dim: int, group: int, windowed: bool
) -> tuple[Callable[..., None], int]:
    """The device is the one that is current: as it is loaded a library asks for its shared memory there
    alone."""
    from flashinfer.xqa import get_xqa_module, xqa

    get_xqa_module(dtype, dtype, page_size, head_dim, group, windowed, dtype, 1)
    return xqa, torch.cuda.current_device()
