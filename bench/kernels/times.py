"""Times of every kernel at the sizes of Qwen3-30B-A3B (and Qwen3-8B where it differs), as table rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from bench.kernels import inputs, tune
from bench.kernels.checks import DEVICE, DTYPE, randn
from bench.kernels.chunk_times import CHUNK_CUTS, chunks, compile_chunks, flashinfer
from bench.kernels.compile import compiling
from bench.kernels.end_times import ends
from bench.kernels.inputs import LINEARS, Heads, MoeSize
from bench.kernels.part_times import parts
from bench.kernels.timing import Row, microseconds
from gpu.experts import Experts
from gpu.kernels import norm
from gpu.kernels import silu_mul as gated
from gpu.kernels.attention import cascade, decode
from gpu.kernels.attention import merge_state as merge
from gpu.kernels.attention import qk_norm_rope_store as qkv
from gpu.kernels.attention.decode_config import DecodeConfig, decode_config
from gpu.kernels.attention.decode_plan import plan_decode
from gpu.kernels.gemm.gemv import GemvConfig, gemv, gemv_config
from gpu.kernels.gemm.skinny import SkinnyConfig, skinny_config, skinny_gemm, split_k_counters
from gpu.kernels.moe import fused as moe
from gpu.kernels.moe import route
from gpu.kernels.moe.few_rows import FewRowsConfig, few_rows_moe
from gpu.kernels.moe.tuned import MoeShape, rule

COPIES = 8
"""Input sets of the small kernels: enough to avoid reuse of one buffer's lines; at decode sizes the data is
in L2 in a real step too."""


def elementwise() -> Iterator[Row]:
    """Norm, gate, norm + rope + store."""
    for rows in (1, 256, 2048):
        pairs = [(randn(rows, 2048), randn(rows, 2048)) for _ in range(COPIES)]
        weight = randn(2048)
        us = microseconds([partial(norm.rms_norm, x, weight, 1e-6, residual=r) for x, r in pairs])
        yield Row("add_rms_norm", f"{rows} x 2048", us, rows * 2048 * 2 * 4)
        both = [randn(rows, 2 * 12288) for _ in range(2)]
        us = microseconds([partial(gated.silu_mul, b) for b in both])
        yield Row("silu_mul", f"{rows} x 12288", us, rows * 12288 * 2 * 3)
        heads = Heads()
        width = (heads.q + 2 * heads.kv) * heads.dim
        fused = [randn(rows, width) for _ in range(COPIES)]
        rope = inputs.rope(rows, heads.dim, DTYPE, DEVICE)
        norms = randn(heads.dim), randn(heads.dim), 1e-6
        cache = torch.zeros(65_536, 2, heads.kv, heads.dim, device=DEVICE, dtype=DTYPE)
        kv_slot_mapping, sides = torch.randperm(65_536, device=DEVICE)[:rows], (cache[:, 0], cache[:, 1])
        us = microseconds(
            [partial(qkv.norm_rope_store, f, sides, kv_slot_mapping, rope, norms) for f in fused]
        )
        yield Row("norm_rope_store", f"{rows} rows 32/4/128", us, rows * width * 2 * 2)


def _decode_calls(
    heads: Heads, page: int, lengths: list[int], config: DecodeConfig, sets: int
) -> list[Callable[[], Tensor]]:
    rows = len(lengths)
    calls: list[Callable[[], Tensor]] = []
    for _ in range(sets):
        kept = inputs.pages(lengths, page, heads, DTYPE, DEVICE)
        plan = plan_decode(kept.slots, kept.lengths[kept.slots], config)
        space = decode.decode_workspace(rows, heads.q, heads.kv, heads.dim, config, DEVICE)
        q = randn(rows, heads.q, heads.dim)

        calls.append(partial(decode.paged_decode, q, kept.layer(page, heads.dim**-0.5), plan, space, config))
    return calls


def _decode_row(
    name: str, heads: Heads, page: int, lengths: list[int], config: DecodeConfig, goal: str
) -> Row:
    moved = 2 * sum(lengths) * heads.kv * heads.dim * 2
    # Enough sets to exceed the 50 MB of L2 several times.
    sets = max(1, min(8, int(200e6 / moved)))
    us = microseconds(_decode_calls(heads, page, lengths, config, sets))
    described = f"t{config.tile} w{config.warps} s{config.stages} p{config.programs} l{config.least}"
    shape = f"{len(lengths)} x ~{sum(lengths) // len(lengths)}"
    return Row(
        name, f"{shape} {heads.q}/{heads.kv}/{heads.dim} page {page}", us, moved, 0.0, f"{described} {goal}"
    )


def attention() -> Iterator[Row]:
    """Decode attention: the default config at many sizes, other configs at three."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    base = decode_config(128, 4, processors)
    goal = "(goal 3.9 TB/s, 91%)"
    mixed = [100, 8000, 300, 1500] * 16
    for page in (1, 16, 64):
        yield _decode_row("paged_decode", Heads(), page, [1024] * 256, base, goal if page == 16 else "")
    for lengths in ([1024], [128], [32_768], [1024] * 32, [8192] * 64, [128] * 512, mixed):
        config = decode_config(128, 4, processors, len(lengths))
        yield _decode_row("paged_decode", Heads(), 16, lengths, config, "")
    for heads in (Heads(32, 8, 128), Heads(16, 8, 256), Heads(14, 2, 64)):
        config = decode_config(heads.dim, heads.kv, processors, group=heads.q // heads.kv)
        yield _decode_row("paged_decode", heads, 16, [1024] * 256, config, "")
    for lengths in ([1024] * 256, [8192] * 64, [1024]):
        rows = []
        for tile, warps, stages, resident in CUTS:
            config = DecodeConfig(tile, warps, stages, max(resident * processors // 4, 1), 1)
            rows.append(_decode_row("decode cut", Heads(), 16, lengths, config, ""))
        yield from sorted(rows, key=lambda row: row.us)[:4]
    slots, lens = torch.arange(1, 513, device=DEVICE), torch.full((514,), 1000, device=DEVICE)
    us = microseconds([partial(plan_decode, slots, lens, base)])
    yield Row("plan_decode", "512 rows", us, 512 * 4 * 6)
    a, la = randn(128, 32, 128), torch.randn(128, 32, device=DEVICE)
    us = microseconds([partial(merge.merge_state, a, la, a.clone(), la.clone())])
    yield Row("merge_state", "128 x 32 x 128", us, 128 * 32 * 128 * 2 * 3)


CUTS = (
    (64, 4, 7, 2), (64, 4, 5, 3), (64, 4, 2, 2), (128, 4, 3, 1), (32, 4, 7, 3), (32, 2, 5, 4), (32, 2, 5, 5),
)  # fmt: skip
"""(tile, warps, stages, programs per 4 SMs) of decode attention to compare."""


PREFIX_CUTS = tuple(
    (queries, tile, queries // 16, stages, parts)
    for queries, tile, stages, parts in product((64, 128), (32, 64, 128), (3, 5), (2, 4, 8))
    if tile * stages <= 384
)
"""Fields of `PrefixConfig` to compare: a warpgroup per 64 queries."""


def compile_decode(cut: tuple[int, int, int, int]) -> None:
    """Compile decode attention at one of CUTS, in the pool of `tune.compile_all`."""
    heads, config = Heads(), DecodeConfig(*cut[:3], 66)
    kept, q = _blank(heads, 256), torch.empty(256, heads.q, heads.dim, dtype=DTYPE)
    with compiling():
        plan = plan_decode(kept.slots, kept.slots, config)
        space = decode.decode_workspace(256, heads.q, heads.kv, heads.dim, config, q.device)
        decode.paged_decode(q, kept.layer(16, heads.dim**-0.5), plan, space, config)


def compile_prefix(cut: tuple[int, int, int, int, int]) -> None:
    """Compile prefix attention at one of PREFIX_CUTS, in the same pool."""
    heads, common = Heads(), torch.empty(1, dtype=torch.int32)
    kept, q = _blank(heads, 128), torch.empty(128, heads.q, heads.dim, dtype=DTYPE)
    with compiling():
        layer, config = kept.layer(16, 0.09), cascade.PrefixConfig(*cut)
        cascade.prefix_attention(q, layer, kept.slots, common, config)


def compile_small(config: FewRowsConfig) -> None:
    """Compile the few-rows MoE path at one of SMALL, in the same pool."""
    w13, w2 = torch.empty(128, 1536, 2048, dtype=DTYPE), torch.empty(128, 2048, 768, dtype=DTYPE)
    with compiling():
        x, logits = torch.empty(2, 2048, dtype=DTYPE), torch.empty(2, 128)
        few_rows_moe(x, logits, Experts(w13, w2, 8), config=config)


def compile_tasks() -> list[partial[None]]:
    """Compile tasks of all configs compared here, for `tune.compile_all`."""
    return [
        *(partial(compile_decode, cut) for cut in CUTS),
        *(partial(compile_chunks, cut) for cut in CHUNK_CUTS),
        *(partial(compile_prefix, cut) for cut in PREFIX_CUTS),
        *(partial(compile_small, config) for config in SMALL),
    ]


def _blank(heads: Heads, rows: int) -> inputs.Pages:
    both = torch.empty(64, 2, heads.kv, heads.dim, dtype=DTYPE)
    table = torch.empty(rows + 1, 64, dtype=torch.int32)
    return inputs.Pages(both[:, 0], both[:, 1], table, torch.empty(rows).long(), torch.empty(rows + 1).long())


def shared_prefix() -> Iterator[Row]:
    """128 rows with a shared prefix of 2,048 tokens, by several configs."""
    heads, rows, common = Heads(), 128, 2048
    kept = inputs.pages([common] * rows, 16, heads, DTYPE, DEVICE)
    q, shared = randn(rows, heads.q, heads.dim), inputs.scalar(common, DEVICE)
    flops = 4.0 * rows * heads.q * heads.dim * common
    found = []
    for cut in PREFIX_CUTS:
        config = cascade.PrefixConfig(*cut)
        call = partial(cascade.prefix_attention, q, kept.layer(16, 0.09), kept.slots, shared, config)
        found.append(Row("prefix", f"{rows} x {common}", microseconds([call]), 0.0, flops, str(cut)))
    yield from sorted(found, key=lambda row: row.us)[:4]
    out, lse = randn(rows, heads.q, heads.dim), torch.randn(rows, heads.q, device=DEVICE)
    layer = kept.layer(16, 0.09)
    prefix = cascade.prefix_attention(q, layer, kept.slots, shared, cascade.PrefixConfig())
    us = microseconds([partial(merge.merge_state, out, lse, *prefix)])
    yield Row("merge_state", f"{rows} x 32 x 128, 4 parts", us, rows * 32 * 128 * (4 * 4 + 2 * 2))


def sampling() -> Iterator[Row]:
    """Times of greedy and random sampling."""
    for rows in (1, 32, 256, 512):
        logits = torch.randn(rows, 151_936, device=DEVICE) * 4
        ints = torch.arange(rows, device=DEVICE)
        for name, temperature in (("greedy", 0.0), ("drawn", 0.8)):
            temperatures = torch.full((rows,), temperature, device=DEVICE)
            drawn = inputs.sampling_rows(ints, ints, temperature=temperatures, seed=ints)
            us = microseconds([partial(inputs.choose_tokens, logits, drawn)])
            yield Row("sample", f"{rows} x 151936 {name}", us, rows * 151_936 * 4)
        temperatures = torch.full((rows,), 0.8, device=DEVICE)
        for name, k, p in (("top_p 0.9", 0, 0.9), ("top_k 50", 50, 1.0), ("both", 50, 0.9)):
            top_k = torch.full((rows,), k, dtype=torch.int32, device=DEVICE)
            top_p = torch.full((rows,), p, device=DEVICE)
            cut = inputs.sampling_rows(
                ints, ints, temperature=temperatures, seed=ints, top_k=top_k, top_p=top_p
            )
            us = microseconds([partial(inputs.choose_tokens, logits, cut, filtered=True)])
            yield Row("sample", f"{rows} x 151936 {name}", us, 2 * rows * 151_936 * 4)


class _Product:
    """Calls of one GEMM with the norm that precedes it in a step, each with its own weights."""

    def __init__(self, outputs: int, size: int, both: bool, rows: int) -> None:
        self.both = both
        self.sets = max(2, min(8, int(150e6 / (outputs * size)) + 1))
        self.weights = [randn(outputs, size) * size**-0.5 for _ in range(self.sets)]
        self._pairs = [(randn(rows, size), randn(rows, size)) for _ in range(self.sets)]
        self._scale = randn(size)
        self._counters = split_k_counters(DEVICE)

    def _norm(self, at: int) -> Tensor:
        x, residual = self._pairs[at]
        return norm.rms_norm(x, self._scale, 1e-6, residual=residual, pdl=True)

    def library(self, at: int) -> Tensor:
        """The norm and the GEMM by cuBLAS."""
        found = torch.nn.functional.linear(self._norm(at), self.weights[at])
        return gated.silu_mul(found, pdl=True) if self.both else found

    def small(self, cut: GemvConfig, at: int) -> Tensor:
        """The norm and the GEMM by `gemv`."""
        return gemv(self._norm(at), self.weights[at], None, cut, gated=self.both, pdl=True)

    def mid(self, cut: SkinnyConfig, at: int) -> Tensor:
        """The norm and the GEMM by `skinny_gemm`."""
        x, weight = self._norm(at), self.weights[at]
        return skinny_gemm(x, weight, None, cut, self._counters, gated=self.both, pdl=True)


def linears() -> Iterator[Row]:
    """GEMMs of few rows, with their norm: by cuBLAS, and the best of LINEAR_CUTS. A norm alone takes
    1.4 µs; weights that are prefetched before it ends overlap with it."""
    for (name, (outputs, size, both)), rows in product(LINEARS.items(), (1, 2, 4, 8)):
        case, moved = f"{name} x {rows}", 2.0 * outputs * size
        one = _Product(outputs, size, both, rows)
        us = microseconds([partial(one.library, at) for at in range(one.sets)])
        yield Row("norm, cuBLAS", case, us, moved)
        rule_cut, found = gemv_config(rows, one.weights[0], both), []
        for cut in LINEAR_CUTS:
            us = microseconds([partial(one.small, cut, at) for at in range(one.sets)])
            described = f"{cut.columns}/{cut.warps}{' rule' * (cut == rule_cut)}"
            found.append(Row("norm, gemv", case, us, moved, 0.0, described))
        yield from sorted(found, key=lambda row: row.us)[:2]


def some_linears() -> Iterator[Row]:
    """GEMMs of 4 to 64 rows, with their norm, by `skinny_gemm`; where the rule has no config, with the config
    for 32 rows, to check the rule."""
    for (name, (outputs, size, both)), rows in product(LINEARS.items(), (4, 8, 16, 24, 32, 48, 64)):
        case, moved = f"{name} x {rows}", 2.0 * outputs * size
        one = _Product(outputs, size, both, rows)
        cut = skinny_config(rows, one.weights[0], both)
        used = cut or skinny_config(32, one.weights[0], both)
        if used is None:
            continue
        us = microseconds([partial(one.library, at) for at in range(one.sets)])
        yield Row("norm, cuBLAS", case, us, moved)
        us = microseconds([partial(one.mid, used, at) for at in range(one.sets)])
        yield Row(
            "norm, skinny_gemm", case, us, moved, 0.0, "/".join(map(str, used)) + " rule" * (cut == used)
        )


LINEAR_CUTS = tuple(GemvConfig(*cut) for cut in ((1, 4), (1, 8), (2, 4), (2, 8), (4, 4)))


def routing() -> Iterator[Row]:
    """Router softmax, top-k and sort, of several consecutive layers."""
    for tokens, pdl in product((1, 16, 32, 64, 256, 512, 2048, 8192), (False, True)):
        steps = [randn(tokens, 128) for _ in range(4)]
        tall = 64 if tokens > 256 else 16
        us = microseconds([partial(route.route, logits, 8, tall, pdl=pdl) for logits in steps])
        yield Row("route" + " PDL" * pdl, f"T {tokens}", us, tokens * (128 * 2 + 8 * 16))


def small() -> Iterator[Row]:
    """The few-rows MoE path at several configs, with and without dependent launch."""
    size = MoeSize()
    bench = tune.Bench(size, DEVICE)
    experts = Experts(bench.w13, bench.w2, size.top_k)
    for tokens in (1, 2, 4):
        steps, rows = bench.inputs(tokens), []
        for config in SMALL:
            calls = [partial(few_rows_moe, x, g, experts, config=config) for x, g in steps]
            line = tune.row(tokens, size, microseconds(calls), "few_rows_moe")
            rows.append(line._replace(target=" ".join(map(str, config))))
        yield from sorted(rows, key=lambda row: row.us)[:3]
    weight = randn(2048)
    shape = MoeShape(128, 768, 2048, 8, "bfloat16", "")
    for tokens in (1, 32, 256):
        steps, residual = bench.inputs(tokens), randn(tokens, 2048)
        use = rule(shape, tokens)
        for pdl in (False, True):
            after = residual, weight, 1e-6
            chain = [partial(moe.fused_moe, x, g, experts, use, after, pdl=pdl) for x, g in steps]
            us = microseconds(chain)
            yield tune.row(tokens, size, us, f"moe + norm{' PDL' * pdl}")


SMALL = tuple(
    FewRowsConfig(*up, *low)
    for up in ((2, 3), (2, 4), (4, 3), (4, 4), (8, 3))
    for low in ((4, 4), (2, 4), (2, 2), (4, 8))
)


def ceilings() -> Iterator[Row]:
    """Measured memory bandwidth and matmul throughput of this card, for comparison."""
    a, b = (torch.empty(2**31, dtype=torch.int16, device=DEVICE).random_() for _ in range(2))
    yield Row("copy", "4 GiB to 4 GiB", microseconds([partial(b.copy_, a)], 7, 2), 2.0**34)
    x, y = randn(8192, 8192), randn(8192, 8192)
    yield Row(
        "matmul", "8192 cubed bf16", microseconds([partial(torch.matmul, x, y)], 7, 3), 0.0, 2.0 * 8192**3
    )


ALL: dict[str, Callable[[], Iterator[Row]]] = {
    "ceilings": ceilings,
    "elementwise": elementwise,
    "routing": routing,
    "attention": attention,
    "chunks": chunks,
    "shared_prefix": shared_prefix,
    "sampling": sampling,
    "ends": ends,
    "parts": parts,
    "small": small,
    "linears": linears,
    "some_linears": some_linears,
    "flashinfer": flashinfer,
}
