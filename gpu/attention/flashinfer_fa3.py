"""Prefill of captured steps by FlashInfer's FA3 kernel, scheduled on the device.

What is called are the kernels' own entries, below FlashInfer's wrappers and their host plan: they take the
byte offsets of a schedule in device memory, and `gpu.kernels.attention.fa3_schedule` writes that schedule.
The entries are no public interface: written against FlashInfer 0.6.13.

FA3 gives a tile of queries to one multiprocessor, however many keys it sees, and where a small step's chunks
stand behind many it leaves the others idle: those are attended to by `gpu.kernels.attention.prefill`, which
cuts the keys among all.

Steps that can hold long chunks launch two kernels, one that reads packed keys
(`gpu.kernels.attention.kv_packing`) and one that reads pages; which of them has work is decided on the
device. FA3 cannot read float8 pages if queries have 16 bits. With float8 pages, keys are packed in 16 bits
for FA3, and steps that are not packed run `gpu.kernels.attention.prefill`.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError
from gpu.attention.backend import AttentionConfig, Cache
from gpu.attention.fa3_build import is_built, module_args, module_spec, require_built
from gpu.attention.triton_paged import TritonPrefill, chunks_of
from gpu.device import HOPPER
from gpu.kernels.attention.fa3_schedule import Fa3Schedule, fa3_tile, fa3_tiles, schedule_fa3
from gpu.kernels.attention.kv_packing import Packing, pack, plan_packing
from gpu.kernels.jit import only_compiling
from gpu.state.view import StepView

CAUSAL, NHD = 1, 0
"""FlashInfer's codes of mask and layout."""

PAIRS_PER_KEY = 1500
"""Pairs of query and key per key, where every query head has a KV head, from which packing pays: it takes
some 2 ns a key of 8 KV heads, and saves 5 ps a pair of 32 query heads."""

PACK_BYTES = 128 * 2**20
"""Maximum bytes of packed keys and values: 32,768 tokens of 8 heads of 128. A step with more reads them
from their pages."""

KEYS_PER_TOKEN = 4
"""Packed keys that a graph has room for, by its tokens: what packs is launched for all of its room, and 5 us
where it finds nothing to do in 65,536 are a tenth of a small step's attention."""

COARSE_PAIRS_PER_KEY, COARSE_KEYS_PER_TOKEN = 110, 16
"""`PAIRS_PER_KEY` and `KEYS_PER_TOKEN` for float8 pages. The first does not depend on the number of heads. If
keys are not packed, our own kernel computes the attention, in two to three times the time for long prompts.
µs on an H200, 32 query heads of 128, with 8 and 4 KV heads: our kernel, and FA3 with packing
             ours          packed
128 @ 0        9.3   9.4    12.1  11.0
256 @ 0       14.0  13.9    14.1  12.9
128 @ 380     23.5  23.6    17.2  15.5
512 @ 1,500     78    78      36    33
8 x 1,024      396   421     177   171
2 x 4,096    1,174 1,176     431   422
"""

PACK_TILE = 128
"""Keys per tile of FA3 at most."""

SMALL_SHARE = 0.5
"""FA3's tiles of a `deep` graph's queries per multiprocessor up to which its chunks are not FA3's: 256 tokens
of 32 heads. µs on an H200 of FA3 and of ours, 32 query and 8 KV heads of 128, of a chunk behind so many keys:
         16         64        128        256        512
0        6.0  7.1   6.3  7.6  8.0  9.1   9.6 11.7   20   17
2,048     34   16    34   19   36   22    37   35   47   57
8,192    115   23   115   32   118  54   118   98  130  177
"""

ROTATION = (1.0, 1e4, 0)
"""Scale and base of a rotary embedding, and the length of a custom mask: FA3 uses neither here."""


def check_flashinfer(name: str, config: AttentionConfig) -> None:
    """Raises `ConfigError` where FlashInfer's kernel of that name cannot run, whatever its sizes."""
    if config.values:
        raise ConfigError(f"{name} reads keys and values apart, and MLA has latents that are both.")
    if find_spec("flashinfer") is None:
        raise ConfigError("flashinfer is not installed: pip install 'loom-serve[cuda]'.")
    if config.gpu.capability != HOPPER:
        raise ConfigError(f"{name} is supported on compute capability 9.0 alone.")
    if config.sinks:
        raise ConfigError(f"{name} is run without attention sinks.")
    if config.dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(f"{name} computes in bfloat16 and float16, not in {config.dtype}.")


def check_fa3(config: AttentionConfig) -> None:
    """Raise `ConfigError` if FA3 does not support `config`."""
    check_flashinfer("FA3", config)
    if config.head_dim not in (64, 128, 256):
        raise ConfigError(f"FA3 has head_dim 64, 128 and 256, not {config.head_dim}.")


def compiled_prefill(config: AttentionConfig) -> FlashInferPrefill:
    """Return the backend if FA3 is compiled. Raises `ConfigError` otherwise, which says whether FA3 is being
    compiled now."""
    check_fa3(config)
    require_built(config)
    return FlashInferPrefill(config)


class FlashInferPrefill:
    """`PhaseAttention` of chunks. Owner: launch thread.

    Making one compiles the kernel where no cache has it (one to two minutes), loads it, and may synchronise:
    it must exist before the first graph.
    """

    name = "flashinfer"

    def __init__(self, config: AttentionConfig) -> None:
        check_fa3(config)
        self._config = config
        self._triton = TritonPrefill(config)
        self._kernels = {window > 0: _kernels(config, window > 0) for window in sorted(set(config.windows))}
        heads = config.kv_heads, config.head_dim
        room = PACK_BYTES // (2 * math.prod(heads) * config.dtype.itemsize) // PACK_TILE * PACK_TILE
        self._packed_kv = torch.zeros(2, room, *heads, dtype=config.dtype, device=config.device)
        self._coarse = config.kv_scales is not None
        self._pairs_per_key = PAIRS_PER_KEY * config.kv_heads / config.heads
        self._keys_per_token = KEYS_PER_TOKEN
        if self._coarse:
            self._pairs_per_key, self._keys_per_token = COARSE_PAIRS_PER_KEY, COARSE_KEYS_PER_TOKEN
        self._room = 0
        self._packing: Packing | None = None
        self._packed_schedule: Fa3Schedule | None = None
        self._paged_schedule: Fa3Schedule | None = None
        self._space = torch.empty(16, dtype=torch.uint8, device=config.device)

    def _packs(self, view: StepView) -> bool:
        """Whether a step of this graph may pack its keys. A key is seen by at most as many queries as the
        graph has tokens."""
        return view.tokens >= self._pairs_per_key

    def _uses_triton(self, view: StepView) -> bool:
        tiles = view.tokens * self._config.heads / fa3_tile(self._config.head_dim)
        few = view.deep and tiles <= SMALL_SHARE * self._config.gpu.processors
        return few or (self._coarse and not self._packs(view))

    def plan(self, view: StepView) -> None:
        """See `PhaseAttention.plan`: one schedule, or two, serve all layers."""
        if self._uses_triton(view):
            self._triton.plan(view)
            return
        config, pdl, chunks = self._config, self._config.pdl, chunks_of(view)
        tiles = fa3_tiles(chunks, view.tokens, config.head_dim, pdl=pdl)
        shape = (config.heads, config.head_dim, view.page_table.stride(0), config.gpu.processors)
        self._packing = self._packed_schedule = self._paged_schedule = places = None
        if self._packs(view):
            self._room = min(self._packed_kv.shape[1], self._keys_per_token * view.tokens)
            self._packing = plan_packing(chunks, self._pairs_per_key, self._room, PACK_TILE, pdl=pdl)
            places = self._packing.places
            self._packed_schedule = schedule_fa3(tiles, *shape, places, True, pdl=pdl)
        if not self._coarse:
            self._paged_schedule = schedule_fa3(tiles, *shape, places, pdl=pdl)
        elif self._packing is not None:
            self._triton.plan(view, chunks._replace(num_chunks=self._packing.left))

    def attend(
        self, layer: int, q: Tensor, cache: Cache, view: StepView, out: Tensor, sinks: Tensor | None = None
    ) -> None:
        """See `PhaseAttention.attend`."""
        if self._uses_triton(view):
            self._triton.attend(layer, q, cache, view, out)
            return
        config, window = self._config, self._config.windows[layer]
        kernels, size = self._kernels[window > 0], config.page_size
        here = view.chunk_firsts  # stands for what a schedule holds already
        result = out.view(q.shape)
        # To the left so many keys, -1 for all; FA3 knows no dependent launch; then masks and theirs.
        mask = (None, CAUSAL, NHD, window - 1, False, *[None] * 6, config.cap, config.scale)
        k_side, v_side = self._packed_kv[:, : self._room]
        if self._packing is not None:
            pack(
                cache, (k_side, v_side), self._packing.places, chunks_of(view), view.page_table, size,
                PACK_TILE, scales=config.kv_scales or (1.0, 1.0), pdl=config.pdl,
            )  # fmt: skip
        if self._coarse:
            self._triton.attend(layer, q, cache, view, out)
        if only_compiling():  # no kernel has written the schedule that FA3 reads
            return
        if self._packed_schedule is not None:
            numbers, offsets = self._packed_schedule
            kernels.ragged_run(
                self._space, numbers, list(offsets), q, k_side, v_side, here, here, result, *mask, *ROTATION
            )
        if self._paged_schedule is not None:
            numbers, offsets = self._paged_schedule
            pages = (torch.unflatten(side, 0, (-1, size)) for side in cache)
            kernels.paged_run(
                self._space, numbers, list(offsets), q, *pages, here, here, view.page_table, here, result,
                *mask, *[None] * 3, *ROTATION, 0,
            )  # fmt: skip


def _kernels(config: AttentionConfig, windowed: bool) -> Any:
    """FlashInfer's `paged_run` and `ragged_run` for these types and sizes: one library."""
    args = module_args(config, windowed)
    try:
        from flashinfer.prefill import get_batch_prefill_module

        if not is_built(module_spec(*args)):
            config.progress("FlashInfer compiles FA3 for this model, once: one to two minutes", 0.0)
        return get_batch_prefill_module("fa3", *args)
    except (OSError, RuntimeError) as error:  # no compiler, no ninja, another CUDA
        raise ConfigError(f"FlashInfer could not build FA3: {str(error)[-300:]}") from error
