"""Cases of `bench.kernels.compile`: MoE layers, and the choice of experts.

As there: tensors are never read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.kernels import inputs
from bench.kernels.inputs import MoeSize, empty
from bench.kernels.lora_inputs import blank_rows, lora_matrix
from core.models import ClampedGate
from core.models.spec import W8A8, Fp8
from gpu.experts import Choice, Experts, Packed
from gpu.kernels.jit import cdiv
from gpu.kernels.moe import fused as moe
from gpu.kernels.moe.gemm_config import TileConfig
from gpu.kernels.moe.route import route
from gpu.kernels.moe.tuned import MoeConfig, MoeShape, rule, weight_name
from gpu.lora import LoraExperts
from gpu.quant.scaled import dtype_of, scale_shape

CPU = torch.device("cpu")
DTYPE = torch.bfloat16
SIZE = MoeSize(experts=128)
GPT_OSS = MoeSize(32, 2880, 2880, 4)
CLAMPED = ClampedGate(alpha=1.702, limit=7.0)
EIGHT_BITS: dict[str, Fp8 | W8A8] = {"fp8 rows": "rows", "fp8 blocks": "blocks", "int8": W8A8()}


def moe_cases(pdl: bool) -> dict[str, Callable[[], Any]]:
    """See `bench.kernels.compile`."""
    n = inputs.scalar(64, CPU)

    def choice(tokens: int, experts: int, how: Choice) -> None:
        logits = empty(tokens, experts, dtype=torch.float32)
        if how.sigmoid:
            how = how._replace(bias=empty(experts, dtype=torch.float32))
        route(logits, 8, 64, choice=how, num_rows=n, pdl=pdl)

    def experts(
        tokens: int,
        config: MoeConfig | None = None,
        held: Fp8 | W8A8 = "",
        rank: int = 0,
        *,
        of: MoeSize = SIZE,
        clamped: ClampedGate | None = None,
        packed: Packed = "",
        group: int = 128,
    ) -> None:
        """Compile an MoE layer. With `rank`, that of an adapter; with `clamped`, with biases too; `packed`: 4
        bits, by `group`."""
        name = weight_name(packed or held, "bfloat16")
        shape = MoeShape(of.experts, of.width, of.hidden, of.top_k, name, "H200")
        kind = dtype_of(held) if held else DTYPE
        x, logits = empty(tokens, of.hidden), empty(tokens, of.experts, dtype=torch.float32)
        weights = (
            empty(of.experts, 2 * of.width, of.hidden, dtype=kind),
            empty(of.experts, of.hidden, of.width, dtype=kind),
        )
        sizes = ([of.width] * 2, of.hidden), ([of.hidden], of.width)
        shapes = [scale_shape(held or "rows", *size) or () for size in sizes]
        scales = [empty(of.experts, *each, dtype=torch.float32) for each in shapes]
        after = empty(tokens, of.hidden), empty(of.hidden), 1e-6
        use = config or rule(shape, tokens, deep=bool(held))
        used = (scales[0], scales[1]) if held else None
        if packed == "int4":
            w13, w2 = (empty(*w.shape[:2], w.shape[2] // 4, dtype=torch.int16) for w in weights)
            s13, s2 = (empty(of.experts, w.shape[2] // group, w.shape[1], 2) for w in weights)
            weights, used = (w13, w2), (s13, s2)
        elif packed:
            (e, n13, hidden), (_, n2, width) = (w.shape for w in weights)
            steps = cdiv(hidden, 128), cdiv(width, 128)
            w13, w2 = (empty(e, n, 32 * k, dtype=torch.int16) for n, k in zip((n13, n2), steps, strict=True))
            s13, s2 = (empty(e, k, n, dtype=torch.int32) for n, k in zip((n13, n2), steps, strict=True))
            weights, used = (w13, w2), (s13, s2)
        lora, rows = LoraExperts(), None
        if rank:
            both = partial(lora_matrix, [rank], dtype=DTYPE, device=CPU, experts=(of.experts,) * 2)
            made = both(of.hidden, (of.width,) * 2), both(of.width, (of.hidden,))
            lora, rows = LoraExperts(*made), blank_rows(tokens, 1, CPU)
        biases = (empty(of.experts, 2 * of.width), empty(of.experts, of.hidden)) if clamped else None
        layer = Experts(*weights, of.top_k, scales=used, lora=lora, biases=biases, clamped=clamped)
        moe.fused_moe(x, logits, layer, use, after, adapters=rows, num_rows=n, pdl=pdl)

    wide = TileConfig(128, 64, 8, 3, False, half=True, tma=True)
    tall = TileConfig(128, 64, 8, 4, False, tma=True)
    swapped = TileConfig(128, 64, 8, 3, True, half=True, tma=True)
    highest = MoeConfig(False, 192, tall, tall._replace(block_n=256))
    return {
        **{
            f"experts in groups {n}": partial(choice, n, 256, Choice(True, None, 8, 4, 2.5))
            for n in (64, 4096)
        },
        "experts in groups of 20": lambda: choice(4096, 160, Choice(False, None, 8, 3, 16.0)),
        "experts by sigmoids": lambda: choice(4096, 384, Choice(True, scale=2.827)),
        "moe 1": lambda: experts(1),
        "moe 32": lambda: experts(32),
        "moe 256": lambda: experts(256),
        "moe 512": lambda: experts(512),
        "moe 4096": lambda: experts(4096),
        "moe 4096 tall": lambda: experts(4096, highest),
        "moe 4096 tma": lambda: experts(4096, MoeConfig(False, 128, wide, wide._replace(block_n=256))),
        **{f"moe gpt-oss {n}": partial(experts, n, of=GPT_OSS, clamped=CLAMPED) for n in (1, 32, 256, 512)},
        **{
            f"moe mxfp4 {n}": partial(experts, n, of=GPT_OSS, clamped=CLAMPED, packed="mxfp4")
            for n in (1, 128, 256, 4096)
        },
        **{f"moe int4 {n}": partial(experts, n, packed="int4") for n in (1, 32, 256, 512, 4096)},
        "moe int4 by 32": lambda: experts(256, packed="int4", group=32, of=MoeSize(64, 384)),
        "moe int4 lora": lambda: experts(256, packed="int4", rank=16),
        "moe gpt-oss 4096": lambda: experts(4096, highest, of=GPT_OSS, clamped=CLAMPED),
        **{f"moe lora {n}": partial(experts, n, rank=16) for n in (1, 32, 256)},
        "moe lora 4096": lambda: experts(4096, highest, rank=16),
        "moe lora 1 step": lambda: experts(128, rank=32, of=MoeSize(8, 64, 128, 2)),
        **{
            f"moe {kind} {n}": partial(experts, n, held=held)
            for kind, held in EIGHT_BITS.items()
            for n in (1, 32, 256, 512, 2048, 4096)
        },
        "moe 4096 swap": lambda: experts(4096, MoeConfig(False, 128, swapped, swapped)),
    }
