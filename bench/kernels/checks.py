"""Checks of every kernel on the GPU against its plain-torch reference, in bf16 and at real sizes, with random
data. Padding rows must not be written; NaN is placed where nothing may be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels import inputs, reference
from bench.kernels.inputs import LINEARS, Heads, MoeSize, error, scalar
from bench.kernels.timing import capture
from gpu.experts import Experts
from gpu.kernels import norm
from gpu.kernels import silu_mul as gated
from gpu.kernels.attention import cascade, decode, prefill, prefill_plan
from gpu.kernels.attention import merge_state as merge
from gpu.kernels.attention import qk_norm_rope_store as qkv
from gpu.kernels.attention.decode_config import decode_config
from gpu.kernels.attention.decode_plan import plan_decode
from gpu.kernels.attention.pages import Pages
from gpu.kernels.gemm import gemv, skinny
from gpu.kernels.moe import fused as moe
from gpu.kernels.moe import route
from gpu.kernels.moe.gemm_config import TileConfig
from gpu.kernels.moe.tuned import INT4_NAME, MoeConfig, MoeShape, rule
from gpu.sample.noise import bits, row_keys

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
LIMIT = 8e-3
"""Relative to the norm: bf16 rounding of a result gives 1.7e-3, of intermediates slightly more."""


class Check(NamedTuple):
    """A check: its relative error and limit."""

    name: str
    case: str
    error: float
    limit: float = LIMIT

    @property
    def good(self) -> bool:
        return self.error <= self.limit

    def line(self) -> str:
        return f"{'ok  ' if self.good else 'BAD '} {self.name:18} {self.case:46} {self.error:.2e}"


def _wrong(*pairs: tuple[Tensor, Tensor]) -> float:
    """0 where all pairs are equal, else infinity."""
    return 0.0 if all(torch.equal(a, b) for a, b in pairs) else float("inf")


def randn(*shape: int) -> Tensor:
    """Random numbers in the dtype of the kernels."""
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def elementwise() -> Iterator[Check]:
    """RMS norm, SiLU gate, and QK norm + RoPE + KV store."""
    for rows, live, width in ((1, 1, 2048), (33, 30, 4096), (512, 511, 2880)):
        x, residual, weight = randn(rows, width), randn(rows, width), randn(width)
        before, total = residual.clone(), residual + x
        found = norm.rms_norm(x, weight, 1e-6, residual=residual, num_rows=scalar(live, DEVICE))
        case = f"{live} of {rows} x {width}"
        yield Check("add_rms_norm", case, error(found[:live], reference.rms_norm(total, weight, 1e-6)[:live]))
        kept = _wrong((residual[:live], total[:live]), (residual[live:], before[live:]))
        yield Check("add_rms_norm", f"{case}: residual", kept)
        both = randn(rows, 2 * width)
        yield Check("silu_mul", case, error(gated.silu_mul(both), reference.silu_mul(both)))
        yield Check("gelu_mul", case, error(gated.gelu_mul(both), reference.gelu_mul(both)))
    for heads, normed, rotary, rows in (
        (Heads(), True, 128, 513),
        (Heads(32, 8, 128), False, 128, 7),
        (Heads(14, 2, 64), False, 64, 64),
        (Heads(16, 8, 256), True, 128, 64),
    ):
        fused = randn(rows, (heads.q + 2 * heads.kv) * heads.dim)
        rope = inputs.rope(rows, rotary, DTYPE, DEVICE)
        norms = (randn(heads.dim), randn(heads.dim), 1e-6) if normed else None
        cache = torch.zeros(1024, 2, heads.kv, heads.dim, device=DEVICE, dtype=DTYPE)
        kv_slot_mapping = torch.randperm(1024, device=DEVICE)[:rows]
        q, k, v = reference.norm_rope(fused, heads.kv, heads.dim, rope, norms)
        v = v.clone()
        got = qkv.norm_rope_store(fused, (cache[:, 0], cache[:, 1]), kv_slot_mapping, rope, norms)
        case = f"{heads} rotary {rotary}"
        yield Check("norm_rope_store", f"{case}: q", error(got, q))
        yield Check("norm_rope_store", f"{case}: k", error(cache[kv_slot_mapping, 0], k))
        yield Check("norm_rope_store", f"{case}: v", _wrong((cache[kv_slot_mapping, 1], v)))


def _exact(x: Tensor, weight: Tensor, bias: Tensor, both: bool) -> Tensor:
    exact = F.linear(x.double(), weight.double(), bias.double())
    if not both:
        return exact
    gate, up = exact.chunk(2, dim=1)
    return F.silu(gate) * up


def few_rows() -> Iterator[Check]:
    """`gemv`, with the configs of the rule."""
    for name, (outputs, inputs_, both) in LINEARS.items():
        weight, bias = randn(outputs, inputs_) * inputs_**-0.5, randn(outputs)
        for rows in (1, 2, 4, 8, 32):
            cut = gemv.gemv_config(rows, weight, both)
            if cut is None:
                continue
            x = randn(rows, inputs_)
            found = error(gemv.gemv(x, weight, bias, cut, gated=both), _exact(x, weight, bias, both))
            yield Check("gemv", f"{name}, {rows} rows", found)


def some_rows() -> Iterator[Check]:
    """`skinny_gemm`: correct, and bitwise the same in a graph."""
    counters = skinny.split_k_counters(DEVICE)
    for name, (outputs, inputs_, both) in LINEARS.items():
        weight, bias = randn(outputs, inputs_) * inputs_**-0.5, randn(outputs)
        for rows in (4, 5, 16, 24, 32, 40, 64):
            cut = skinny.skinny_config(rows, weight, both)
            if cut is None:
                continue
            x = randn(rows, inputs_)
            call = partial(skinny.skinny_gemm, x, weight, bias, cut, counters, gated=both, pdl=True)
            found, captured = call(), capture([call] * 3)
            captured.graph.replay()
            case = f"{name}, {rows} rows"
            yield Check("skinny_gemm", case, error(found, _exact(x, weight, bias, both)))
            yield Check(
                "skinny_gemm", f"{case}: again", _wrong(*((found, each) for each in captured.results))
            )
    yield Check("skinny_gemm", "counters", float(counters.sum()))


def routing() -> Iterator[Check]:
    """The sorted list must equal that of a stable sort."""
    sizes = (
        (1, 1),
        (3, 2),
        (64, 60),
        (65, 65),
        (512, 500),
        (513, 513),
        (2048, 2000),
        (8192, 8192),
        (20_000, 1),
    )
    for (rows, live), kind in product(sizes, (torch.float32, torch.bfloat16)):
        logits = torch.randn(rows, 128, device=DEVICE).to(kind)
        routes, tiles = route.route(logits, 8, 64, num_rows=scalar(live, DEVICE))
        weights, experts = reference.route(logits[:live].float(), 8, True)
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=128)
        expert, _, height = tiles.blocks.long()
        filled = torch.zeros_like(counts).index_add_(0, expert.clamp(max=127), height)
        exact = _wrong(
            (routes.experts[:live].long(), experts),
            (routes.experts[live:], torch.full_like(routes.experts[live:], -1)),
            (tiles.pairs[: live * 8].long(), order),
            (filled, counts),
        )
        yield Check("route", f"{live} of {rows}, {kind}: list", exact)
        yield Check(
            "route", f"{live} of {rows}, {kind}: weights", error(routes.weights[:live], weights), 1e-5
        )


def experts() -> Iterator[Check]:
    """The whole MoE layer, by the rule and with every kind of tile, for TP 1, 2 and 4."""
    swap, plain = TileConfig(64, 64, 4, 3, True), TileConfig(64, 64, 4, 3, False)
    configs: list[tuple[int, str, MoeConfig | None]] = [(n, "rule", None) for n in (1, 4, 5, 64, 300, 2048)]
    configs += [
        (200, "plain 16", MoeConfig(False, 16, plain, plain)),
        (200, "swap 32", MoeConfig(False, 32, swap, swap)),
        (700, "tma 64", MoeConfig(False, 64, swap._replace(tma=True), plain._replace(tma=True))),
        (700, "half", MoeConfig(False, 128, plain._replace(half=True), swap._replace(half=True, tma=True))),
        (3000, "tall", rule(MoeShape(128, 768, 2048, 8, "bfloat16", "H200"), 3000, deep=True)),
    ]
    for width in (768, 384, 192):
        size = MoeSize(width=width)
        shape = MoeShape(128, width, size.hidden, 8, "bfloat16", "H200")
        weights = inputs.moe_weights(size, DTYPE, DEVICE)
        for rows, name, config in configs:
            if width != 768 and name != "rule":
                continue
            live = max(rows - 3, 1)
            x, logits = randn(rows, size.hidden), torch.randn(rows, 128, device=DEVICE)
            x[live:] = float("nan")
            logits[live:] = float("nan")
            use = config or rule(shape, rows)
            found = inputs.run_moe(x, logits, weights, 8, use, num_rows=scalar(live, DEVICE))
            expected = reference.moe(x[:live], logits[:live], *weights, 8)
            yield Check(
                "fused_moe", f"{live} of {rows}, width {width}, {name}", error(found[:live], expected)
            )


def experts_in_4_bits() -> Iterator[Check]:
    """The whole MoE layer with weights of 4 bits, by the rule, against the weights that they stand for."""
    size = MoeSize()
    shape = MoeShape(128, size.width, size.hidden, 8, INT4_NAME, "H200")
    for group in (32, 128):
        made = [inputs.moe_int4(each, group, DTYPE) for each in inputs.moe_weights(size, DTYPE, DEVICE)]
        (n13, s13, w13), (n2, s2, w2) = made
        for rows in (1, 64, 300, 700, 4096):
            live = max(rows - 3, 1)
            x, logits = randn(rows, size.hidden), torch.randn(rows, 128, device=DEVICE)
            x[live:] = float("nan")
            logits[live:] = float("nan")
            found = inputs.run_moe(
                x, logits, (n13, n2), 8, rule(shape, rows), scales=(s13, s2), num_rows=scalar(live, DEVICE)
            )
            expected = reference.moe(x[:live], logits[:live], w13, w2, 8)
            case = f"4 bits by {group}, {live} of {rows}"
            yield Check("fused_moe", case, error(found[:live], expected))


def attention() -> Iterator[Check]:
    """Paged decode: lengths, page sizes, windows, logit caps, skipped prefixes."""
    cases = [
        (Heads(), 16, [1024] * 64, 0, 0.0, 0),
        (Heads(), 16, [1], 0, 0.0, 0),
        (Heads(), 16, [30_000], 0, 0.0, 0),
        (Heads(), 64, [int(n) for n in torch.randint(1, 4000, (100,))], 0, 0.0, 0),
        (Heads(), 1, [777, 5, 3000], 0, 0.0, 0),
        (Heads(14, 2, 64), 16, [777, 5, 3000, 64], 0, 0.0, 0),
        (Heads(16, 8, 256), 16, [777, 5, 3000, 64], 1024, 50.0, 0),
        (Heads(32, 8, 128), 16, [4096, 100, 2], 128, 0.0, 0),
        (Heads(8, 1, 128), 16, [2176 + i for i in range(128)], 0, 0.0, 2048),
    ]
    for heads, page, lengths, window, cap, skip in cases:
        kept = inputs.pages(lengths, page, heads, DTYPE, DEVICE)
        rows, live = len(lengths), len(lengths) - (len(lengths) > 2)
        q = randn(rows, heads.q, heads.dim)
        config = decode_config(
            heads.dim, heads.kv, _processors(), rows, group=heads.q // heads.kv, few=bool(skip)
        )
        held = scalar(skip, DEVICE) if skip else None
        count = scalar(live, DEVICE)
        own = kept.lengths[kept.slots]
        plan = plan_decode(kept.slots, own, config, window=window, num_rows=count, skip=held)
        space = decode.decode_workspace(rows, heads.q, heads.kv, heads.dim, config, DEVICE)
        lse = torch.zeros(rows, heads.q, device=DEVICE)
        scale = heads.dim**-0.5
        cache, layer = (kept.k, kept.v), kept.layer(page, scale, cap)
        table = kept.table[kept.slots]
        expected, sums = reference.decode_attention(
            q, cache, table, lengths[:live], page, scale, cap=cap, window=window, skip=skip
        )
        worst = 0.0
        for _ in range(3):
            found = decode.paged_decode(q, layer, plan, space, config, lse=lse)
            worst = max(
                worst, error(found.view_as(q)[:live], expected[:live]), error(lse[:live], sums[:live])
            )
        worst = max(worst, float("inf") if bool(space.counters.any() | lse[live:].any()) else 0.0)
        yield Check("paged_decode", f"{heads} page {page} rows {rows} window {window} cap {cap:g}", worst)


def chunks() -> Iterator[Check]:
    """Paged prefill, with decode rows before and padding after the chunks: sizes, page sizes, windows, logit
    caps, dtypes, FP8 pages. Rows outside the chunks must not be written."""
    plain, many = [(0, 1), (0, 700), (1000, 33), (16, 16)], [(0, 64)] * 20
    cases = [
        (Heads(), 16, [(0, 8192)], 0, 0.0, DTYPE),
        (Heads(), 16, [(8192, 2048)] * 4, 0, 0.0, DTYPE),
        (Heads(), 1, plain, 0, 0.0, DTYPE),
        (Heads(), 64, plain, 0, 0.0, torch.float16),
        (Heads(), 128, plain, 0, 0.0, DTYPE),
        (Heads(32, 8, 128), 16, many, 0, 0.0, DTYPE),
        (Heads(32, 8, 128), 16, plain, 128, 0.0, DTYPE),
        (Heads(14, 2, 64), 16, plain, 0, 0.0, DTYPE),
        (Heads(9, 3, 80), 16, plain, 0, 0.0, DTYPE),
        (Heads(16, 8, 256), 16, plain, 500, 50.0, DTYPE),
        (Heads(16, 8, 256), 16, plain, 0, 50.0, DTYPE),
        (Heads(32, 4, 128), 16, plain, 0, 0.0, torch.float32),
        (Heads(4, 4, 256), 16, plain, 0, 0.0, torch.float32),
        (Heads(32, 4, 128), 16, plain, 0, 0.0, torch.float8_e4m3fn),
    ]
    for heads, page, sizes, window, cap, kind in cases:
        dtype = kind if kind.itemsize > 1 else DTYPE
        scales = (1.0, 1.0) if kind.itemsize > 1 else (0.5, 2.0)
        kept = inputs.pages([start + tokens for start, tokens in sizes], page, heads, dtype, DEVICE)
        cut, lead = inputs.chunks(sizes, kept, 5, DEVICE), 5
        rows = lead + sum(tokens for _, tokens in sizes) + 7
        q = torch.randn(rows, heads.q, heads.dim, device=DEVICE).to(dtype)
        q[-7:] = float("nan")
        config = prefill_plan.prefill_config(heads.dim, dtype)
        plan = prefill_plan.plan_prefill(cut.step(len(sizes)), rows, heads.q // heads.kv, config)
        out = torch.full((rows, heads.q * heads.dim), 7.0, dtype=dtype, device=DEVICE)
        stored = [(side / scale).to(kind) for side, scale in zip((kept.k, kept.v), scales, strict=True)]
        args = {"page_size": page, "scale": heads.dim**-0.5, "window": window, "cap": cap}
        layer = Pages(stored[0], stored[1], kept.table, page, heads.dim**-0.5, cap, scales)
        prefill.paged_prefill(q, layer, plan, config, window=window, out=out)
        whole = [side.float() * scale for side, scale in zip(stored, scales, strict=True)]
        own = kept.table[kept.slots]
        expected = reference.prefill_attention(q, (whole[0], whole[1]), own, cut.true, **args)
        live = slice(lead, rows - 7)
        worst = error(out.view_as(q)[live], expected[live])
        alone = bool((out[:lead] == 7).all() & (out[-7:] == 7).all())
        case = f"{heads} page {page} x {len(sizes)} window {window} cap {cap:g} {str(kind)[6:]}"
        yield Check("paged_prefill", case, worst if alone else float("inf"))


def _processors() -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def merging() -> Iterator[Check]:
    """`merge_state` of two partial results."""
    a, b = randn(100, 32, 128), randn(100, 32, 128)
    la, lb = torch.randn(100, 32, device=DEVICE), torch.randn(100, 32, device=DEVICE)
    expected, sums = reference.merge_state(a.float(), la, b.float(), lb)
    merge.merge_state(a, la, b, lb)
    yield Check("merge_state", "100 x 32 x 128", max(error(a, expected), error(la, sums)))


def sampling() -> Iterator[Check]:
    """Sampled tokens equal those of exact scores, except in rows whose best two are within 1e-4."""
    rows, vocab = 64, 151_936
    logits = torch.randn(rows, vocab, device=DEVICE) * 4
    slots, positions = torch.randperm(rows, device=DEVICE), torch.arange(rows, device=DEVICE) + 1000
    temperatures = torch.rand(rows, device=DEVICE) * (torch.arange(rows, device=DEVICE) % 3 > 0)
    seeds = torch.randint(0, 2**63 - 1, (rows,), device=DEVICE)
    drawn = inputs.sampling_rows(slots, positions, temperature=temperatures, seed=seeds)
    found = inputs.choose_tokens(logits, drawn)
    words = bits(
        row_keys(seeds[slots].cpu().numpy(), positions.cpu().numpy()), torch.arange(vocab, dtype=torch.int32)
    )
    scores = reference.race(logits.cpu(), words, temperatures[slots].cpu())
    top = scores.topk(2, -1)
    close = (top.values[:, 0] - top.values[:, 1]) < 1e-4
    off = (found.cpu() != top.indices[:, 0]) & ~close
    yield Check("sample", f"{rows} x {vocab}, {int(close.sum())} too close to call", float(off.sum()), 0.0)
    rule = torch.arange(rows, device=DEVICE)
    top_k = torch.where(rule % 2 > 0, 1 + rule * 3, 0).int()
    top_p, min_p = 0.5 + (rule % 8) / 14, (rule % 5 == 0) * 0.01
    cut = inputs.sampling_rows(
        slots, positions, temperature=temperatures, seed=seeds, top_k=top_k, top_p=top_p, min_p=min_p
    )
    found = inputs.choose_tokens(logits, cut, filtered=True).cpu()
    edge = 0
    for row, slot in enumerate(slots.tolist()):
        if temperatures[slot] > 0:
            kept = reference.survivors(
                logits[row].cpu(),
                float(temperatures[slot]),
                int(top_k[slot]),
                float(top_p[slot]),
                float(min_p[slot]),
            )
            edge += int(found[row]) != int(scores[row].where(kept, float("-inf")).argmax())
    # One token at the edge of the nucleus may differ by rounding.
    yield Check("sample", f"{rows} rows filtered", float(edge), 1.0)


def _chain(
    x: Tensor, logits: Tensor, weights: tuple[Tensor, Tensor], norms: tuple[Tensor, Tensor], pdl: bool
) -> Tensor:
    """Four MoE layers with the same weights, with residual and norm."""
    shape = MoeShape(128, 768, 2048, 8, "bfloat16", "H200")
    residual, weight = norms[0].clone(), norms[1]
    for _ in range(4):
        after = residual, weight, 1e-6
        x = moe.fused_moe(x, logits, Experts(*weights, 8), rule(shape, len(x)), after, pdl=pdl)
    return x


def dependent_launch() -> Iterator[Check]:
    """Four layers with programmatic dependent launch in a graph, replayed: bitwise equal to those without."""
    weights = inputs.moe_weights(MoeSize(), DTYPE, DEVICE)
    for rows in (1, 32, 300):
        x, residual = randn(rows, 2048), randn(rows, 2048)
        logits, weight = torch.randn(rows, 128, device=DEVICE), randn(2048)

        norms = residual, weight
        expected = _chain(x, logits, weights, norms, False)
        graph, (found,) = capture([partial(_chain, x, logits, weights, norms, True)])
        worst = 0.0
        for _ in range(20):
            found.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            worst = max(worst, _wrong((found, expected)))
        yield Check("PDL", f"4 layers of experts, {rows} rows", worst)


def shared_prefix() -> Iterator[Check]:
    """Cascade attention (shared prefix, then the rest of each row, merged) against attention over all
    keys."""
    for rows, common, heads in ((128, 2048, Heads()), (5, 512, Heads(16, 8, 256)), (40, 0, Heads(14, 2, 64))):
        lengths = [common + int(n) for n in torch.randint(1, 300, (rows,))]
        kept = inputs.pages(lengths, 16, heads, DTYPE, DEVICE)
        kept.table[kept.slots, : common // 16] = kept.table[kept.slots[0], : common // 16].clone()
        q, scale = randn(rows, heads.q, heads.dim), heads.dim**-0.5
        cache, shared = (kept.k, kept.v), scalar(common, DEVICE)
        group = heads.q // heads.kv
        config = decode_config(heads.dim, heads.kv, _processors(), rows, group=group, few=True)
        plan = plan_decode(kept.slots, kept.lengths[kept.slots], config, skip=shared)
        space = decode.decode_workspace(rows, heads.q, heads.kv, heads.dim, config, DEVICE)
        lse = torch.zeros(rows, heads.q, device=DEVICE)
        layer = kept.layer(16, scale)
        out = decode.paged_decode(q, layer, plan, space, config, lse=lse).view_as(q)
        use = cascade.prefix_config(heads.dim)
        prefix = cascade.prefix_attention(q, layer, kept.slots, shared, use)
        merge.merge_state(out, lse, *prefix)
        table = kept.table[kept.slots]
        expected, sums = reference.decode_attention(q, cache, table, lengths, 16, scale)
        yield Check(
            "cascade", f"{rows} rows, {common} common, {heads}", max(error(out, expected), error(lse, sums))
        )


ALL: dict[str, Callable[[], Iterator[Check]]] = {
    "elementwise": elementwise,
    "few_rows": few_rows,
    "some_rows": some_rows,
    "routing": routing,
    "experts": experts,
    "experts_in_4_bits": experts_in_4_bits,
    "attention": attention,
    "chunks": chunks,
    "merging": merging,
    "shared_prefix": shared_prefix,
    "sampling": sampling,
    "dependent_launch": dependent_launch,
}
