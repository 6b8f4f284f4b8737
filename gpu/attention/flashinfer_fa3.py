"""Prefill of captured steps by FlashInfer's FA3 kernel, scheduled on the device.

What is called are the kernels' own entries, below FlashInfer's wrappers and their host plan: they take the
byte offsets of a schedule in device memory, and `gpu.kernels.attention.fa3_schedule` writes that schedule.
The entries are no public interface: written against FlashInfer 0.6.13.

FA3 gives a tile of queries to one multiprocessor, however many keys it sees, and where a small step's chunks
stand behind many it leaves the others idle: those are attended to by `gpu.kernels.attention.prefill`, which
cuts the keys among all.

Steps that can hold long chunks launch two of them, one that reads packed keys
(`gpu.kernels.attention.kv_packing`) and one that reads pages; which of them has work is decided on the
device.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError
from gpu.attention.backend import AttentionFacts, AttentionOptions, Caches
from gpu.attention.triton_paged import TritonPrefill, chunks_of
from gpu.kernels.attention.fa3_schedule import Fa3Schedule, fa3_tile, fa3_tiles, schedule_fa3
from gpu.kernels.attention.kv_packing import pack, plan_packing
from gpu.state.view import StepView

CAUSAL, NHD = 1, 0
"""FlashInfer's codes of mask and layout."""

PAIRS_PER_KEY = 1500
"""Pairs of query and key per key, where every query head has a KV head, from which packing pays: it takes
some 2 ns a key of 8 KV heads, and saves 5 ps a pair of 32 query heads."""

PACK_BYTES = 128 * 2**20
"""Of packed keys and values: 32,768 tokens of 8 heads of 128. Of a step with more all stay."""

KEYS_PER_TOKEN = 4
"""Packed keys that a graph has room for, by its tokens: what packs is launched for all of its room, and 5 us
where it finds nothing to do in 65,536 are a tenth of a small step's attention."""

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
"""Scale and base of one that is not asked for, and the length of a mask that is not."""


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

    def __init__(self, facts: AttentionFacts, options: AttentionOptions) -> None:
        self._facts, self._options = facts, options
        self._caches: Caches = ()
        self._triton = TritonPrefill(facts, options)
        properties = torch.cuda.get_device_properties(facts.device)
        self._processors = int(properties.multi_processor_count)
        self._kernels = {window > 0: _kernels(facts, window > 0) for window in sorted(set(facts.windows))}
        token = 2 * facts.kv_heads * facts.head_dim * facts.dtype.itemsize
        room = PACK_BYTES // token // PACK_TILE * PACK_TILE
        self._packed_kv = tuple(
            torch.zeros(room, facts.kv_heads, facts.head_dim, dtype=facts.dtype, device=facts.device)
            for _ in range(2)
        )
        self._room = 0
        self._packed_at: Tensor | None = None
        self._packed_schedule: Fa3Schedule | None = None
        self._paged_schedule: Fa3Schedule | None = None
        self._space = torch.empty(16, dtype=torch.uint8, device=facts.device)

    def bind(self, caches: Caches | None) -> None:
        """See `PhaseAttention.bind`."""
        self._caches = caches or ()
        self._triton.bind(caches)

    def _uses_triton(self, view: StepView) -> bool:
        tiles = view.tokens * self._facts.heads / fa3_tile(self._facts.head_dim)
        return view.deep and tiles <= SMALL_SHARE * self._processors

    def plan(self, view: StepView) -> None:
        """See `PhaseAttention.plan`: one schedule, or two, serve all layers."""
        if self._uses_triton(view):
            self._triton.plan(view)
            return
        facts, pdl, chunks = self._facts, self._options.pdl, chunks_of(view)
        tiles = fa3_tiles(chunks, view.tokens, facts.head_dim, pdl=pdl)
        shape = (facts.heads, facts.head_dim, view.page_table.stride(0), self._processors)
        self._packed_at = self._packed_schedule = None
        pairs = PAIRS_PER_KEY * facts.kv_heads / facts.heads
        if view.tokens >= pairs:  # no token sees more queries than there are
            self._room = min(len(self._packed_kv[0]), KEYS_PER_TOKEN * view.tokens)
            self._packed_at = plan_packing(chunks, pairs, self._room, PACK_TILE, pdl=pdl)
            self._packed_schedule = schedule_fa3(tiles, *shape, self._packed_at, True, pdl=pdl)
        self._paged_schedule = schedule_fa3(tiles, *shape, self._packed_at, pdl=pdl)

    def attend(self, layer: int, q: Tensor, view: StepView, out: Tensor) -> None:
        """See `PhaseAttention.attend`."""
        if self._uses_triton(view):
            self._triton.attend(layer, q, view, out)
            return
        assert self._paged_schedule is not None, "plan() comes first"
        facts, window = self._facts, self._facts.windows[layer]
        k, v = self._caches[layer]
        kernels, size = self._kernels[window > 0], facts.page_size
        here = view.chunk_firsts  # stands for what a schedule holds already
        result = out.view(q.shape)
        # To the left so many keys, -1 for all; FA3 knows no dependent launch; then masks and theirs.
        mask = (None, CAUSAL, NHD, window - 1, False, *[None] * 6, facts.cap, facts.scale)
        if self._packed_at is not None and self._packed_schedule is not None:
            k_side, v_side = (side[: self._room] for side in self._packed_kv)
            pack(
                (k, v), (k_side, v_side), self._packed_at, chunks_of(view), view.page_table, size, PACK_TILE,
                pdl=self._options.pdl,
            )  # fmt: skip
            numbers, offsets, _ = self._packed_schedule
            kernels.ragged_run(
                self._space, numbers, list(offsets), q, k_side, v_side, here, here, result, *mask, *ROTATION
            )
        numbers, offsets, _ = self._paged_schedule
        pages = (torch.unflatten(side, 0, (-1, size)) for side in (k, v))
        kernels.paged_run(
            self._space, numbers, list(offsets), q, *pages, here, here, view.page_table, here, result, *mask,
            *[None] * 3, *ROTATION, 0,
        )  # fmt: skip


def _kernels(facts: AttentionFacts, windowed: bool) -> Any:
    """FlashInfer's `paged_run` and `ragged_run` for these types and sizes: one library."""
    from flashinfer.prefill import get_batch_prefill_module

    dim, dtype = facts.head_dim, facts.dtype
    args = (dtype, dtype, dtype, torch.int32, dim, dim, 0, windowed, facts.cap > 0, False)
    try:
        return get_batch_prefill_module("fa3", *args)
    except (OSError, RuntimeError) as error:  # no compiler, no ninja, another CUDA
        raise ConfigError(f"FlashInfer could not build FA3: {str(error)[-300:]}") from error
