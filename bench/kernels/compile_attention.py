"""Cases of `bench.kernels.compile`: attention, and the kernels that store keys and merge results.

As there: tensors are never read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.kernels import inputs
from bench.kernels.inputs import Heads, empty
from gpu.kernels.attention import cascade, decode, latent, prefill, prefill_merge, prefill_plan
from gpu.kernels.attention import merge_state as merge
from gpu.kernels.attention import qk_norm_rope_store as qkv
from gpu.kernels.attention.decode_config import DecodeConfig, latent_config, verify_config
from gpu.kernels.attention.decode_plan import plan_decode
from gpu.kernels.attention.pages import Pages, latent_parts

CPU = torch.device("cpu")
GPT_OSS = Heads(64, 8, 64)
FP8 = torch.float8_e4m3fn


def attention_cases(pdl: bool) -> dict[str, Callable[[], Any]]:
    """See `bench.kernels.compile`."""
    heads = Heads()
    n = inputs.scalar(64, CPU)
    table = torch.zeros(512, 64, dtype=torch.int32)

    def pages(size: Heads, page: int, dtype: torch.dtype = torch.bfloat16, sinks: bool = False) -> Pages:
        both = empty(64, 2, size.kv, size.dim, dtype=dtype)
        return Pages(both[:, 0], both[:, 1], table, page, 0.1, sinks=empty(size.q) if sinks else None)

    def decode_rows(q: torch.Tensor, layer: Pages, kv: int, config: DecodeConfig, query: int = 1) -> None:
        rows, width = len(q), layer.v.shape[-1]
        slots, lengths = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        plan = plan_decode(slots, lengths, config, longest=query, num_rows=n, pdl=pdl)
        space = decode.decode_workspace(rows, q.shape[1], kv, width, config, CPU)
        decode.paged_decode(q, layer, plan, space, config, pdl=pdl)

    def chunk_rows(
        q: torch.Tensor, layer: Pages, kv: int, config: prefill_plan.PrefillConfig, window: int = 0
    ) -> None:
        space = prefill_merge.prefill_space(config, kv, layer.v.shape[-1], CPU)
        slots, firsts = torch.zeros(64, dtype=torch.int32), torch.zeros(65, dtype=torch.int32)
        step = prefill_plan.Chunks(slots, slots, firsts, n)
        plan = prefill_plan.plan_prefill(step, len(q), q.shape[1] // kv, config, pdl=pdl)
        prefill.paged_prefill(q, layer, plan, config, space, window=window, pdl=pdl)

    def attention(
        page: int,
        size: Heads,
        query: int = 1,
        sinks: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        rows: int = 256,
    ) -> None:
        coarse, group = dtype == FP8, size.q // size.kv
        config = verify_config(size.dim, size.kv, 132, rows * query, query, group=group, coarse=coarse)
        decode_rows(empty(rows, size.q, size.dim), pages(size, page, dtype, sinks), size.kv, config, query)

    def chunks(
        page: int,
        size: Heads,
        dtype: torch.dtype = torch.bfloat16,
        window: int = 0,
        sinks: bool = False,
    ) -> None:
        config = prefill_plan.prefill_config(size.dim, torch.bfloat16, size.kv, 132)
        layer = pages(size, page, dtype, sinks)
        chunk_rows(empty(2048, size.q, size.dim), layer, size.kv, config, window)

    def latents(heads: int) -> Pages:
        """Pages of MLA's latents, of 512 + 64 columns."""
        k = empty(64, 1, 576)
        where, rope = torch.zeros(256, dtype=torch.int64), (empty(256, 1, 64), empty(256, 1, 64))
        q, own = empty(256, heads, 576), empty(256, heads, 192)
        norm_of = empty(512), 1e-6
        latent.latent_store(
            q, own[..., 128:], empty(256, 576), k, where, rope, norm_of, True, num_rows=n, pdl=pdl
        )
        return Pages(k, k[..., :512], table, 16, 0.1)

    def latent_rows(heads: int) -> None:
        parts = latent_parts(heads)
        decode_rows(empty(256, heads, 576), latents(heads), parts, latent_config(parts, 132))

    def latent_chunks(heads: int) -> None:
        parts = latent_parts(heads)
        config = prefill_plan.latent_prefill_config(parts, 132)
        chunk_rows(empty(2048, heads, 576), latents(heads), parts, config)

    def prefix(config: cascade.PrefixConfig, dtype: torch.dtype = torch.bfloat16) -> None:
        slots, layer = torch.zeros(128, dtype=torch.int64), pages(heads, 16, dtype)
        cascade.prefix_attention(empty(128, heads.q, heads.dim), layer, slots, n, config, pdl=pdl)

    def fused_qkv() -> None:
        both = empty(64, 2, heads.kv, heads.dim)
        rope = empty(256, 1, heads.dim), empty(256, 1, heads.dim)
        norms = empty(heads.dim), empty(heads.dim), 1e-6
        fused = empty(256, (heads.q + 2 * heads.kv) * heads.dim)
        kv_slot_mapping = torch.zeros(256, dtype=torch.int64)
        qkv.norm_rope_store(
            fused, (both[:, 0], both[:, 1]), kv_slot_mapping, rope, norms, num_rows=n, pdl=pdl
        )

    lse, wide_lse = (empty(256, size, dtype=torch.float32) for size in (32, 64))
    return {
        "qkv": fused_qkv,
        "merge": lambda: merge.merge_state(empty(256, 32, 128), lse, empty(256, 32, 128), lse, pdl=pdl),
        "decode, page 1": lambda: attention(1, heads),
        "decode, page 16": lambda: attention(16, heads),
        "decode, page 64": lambda: attention(64, heads),
        "decode, one row": lambda: attention(16, heads, rows=1),
        "decode, one row, dim 256": lambda: attention(16, Heads(16, 8, 256), rows=1),
        "decode, fp8": lambda: attention(16, heads, dtype=FP8),
        "decode, fp8, dim 256": lambda: attention(16, Heads(16, 8, 256), dtype=FP8),
        "decode, dim 8": lambda: attention(16, Heads(8, 4, 8)),
        "decode, dim 256": lambda: attention(16, Heads(16, 8, 256)),
        "verify, 16 lanes": lambda: attention(16, Heads(32, 8, 128), 4),
        "verify, 32 lanes": lambda: attention(16, heads, 4),
        "verify, 64 lanes": lambda: attention(16, heads, 8),
        "verify, fp8": lambda: attention(16, heads, 4, dtype=FP8),
        "verify, fp8, 64 lanes": lambda: attention(16, heads, 8, dtype=FP8),
        "verify, dim 256": lambda: attention(16, Heads(16, 8, 256), 4),
        "chunks, page 16": lambda: chunks(16, heads),
        "chunks, page 64": lambda: chunks(64, heads),
        "chunks, 8 kv": lambda: chunks(16, Heads(32, 8, 128)),
        "chunks, dim 8": lambda: chunks(16, Heads(8, 4, 8)),
        "chunks, dim 64": lambda: chunks(16, Heads(14, 2, 64)),
        "chunks, dim 256": lambda: chunks(16, Heads(16, 8, 256)),
        "chunks, window": lambda: chunks(16, heads, window=1024),
        "chunks, fp8": lambda: chunks(16, heads, FP8),
        "sinks, decode": lambda: attention(16, GPT_OSS, sinks=True),
        "sinks, one row": lambda: attention(16, GPT_OSS, sinks=True, rows=1),
        "sinks, verify": lambda: attention(16, GPT_OSS, 4, sinks=True),
        "sinks, chunks": lambda: chunks(16, GPT_OSS, sinks=True),
        "sinks, window": lambda: chunks(16, GPT_OSS, window=128, sinks=True),
        "sinks, merge": lambda: merge.merge_state(
            empty(256, 64, 64), wide_lse, empty(256, 64, 64), wide_lse, sinks=empty(64), pdl=pdl
        ),
        "latents, decode": lambda: latent_rows(128),
        "latents, chunks": lambda: latent_chunks(128),
        "prefix 64": lambda: prefix(cascade.PrefixConfig()),
        "prefix 64, fp8": lambda: prefix(cascade.PrefixConfig(), FP8),
        "prefix 128": lambda: prefix(cascade.PrefixConfig(128, 128, 8)),
    }
