"""Fused operations give the same hidden states as plain torch, for every family.

One decoder runs twice: on packed rows of true tokens with `TorchOps`, and on a padded view with
`TritonOps`, whose pages start as NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bench.kernels.inputs import MoeSize, moe_inputs
from bench.kernels.lora_inputs import lora_matrix, lora_rows, slots_view
from core.models.spec import W8A8, Fp8
from core.plan import Chunk, NewSlot, PageWrites, StepPlan
from core.types import NO_TOKENS
from gpu.attention import TorchAttention
from gpu.build import spec_of
from gpu.context import ForwardContext
from gpu.experts import Experts
from gpu.kernels.gemm.gemv import GemvConfig
from gpu.kernels.gemm.skinny import SkinnyConfig, split_k_counters
from gpu.kernels.lora.linear import Branch
from gpu.kernels.moe.tuned import MoeConfigs, MoeShape
from gpu.kernels.norm import rms_norm
from gpu.kv.pool import KvPool
from gpu.lora import LoraExperts, LoraMatrix, StepAdapters
from gpu.ops.base import Matrix, Ops, PendingExperts, PendingProduct
from gpu.ops.fused import Kernels, TritonOps
from gpu.ops.plain import TorchOps
from gpu.state.view import StepView
from gpu.thread import device_thread
from gpu.weights import load_model
from tests.rigs import tiny_model
from tests.rigs.arrays import ints
from tests.rigs.attention import NAN, PAGE, EagerAttention
from tests.rigs.int4_files import KINDS, WIDE, Kind, quantise
from tests.rigs.padding import PAGES, padded
from tests.rigs.runner import CPU, GREEDY
from tests.rigs.views import Views

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="the interpreter's; a GPU has tests/gpu/test_cuda.py",
)

ROWS = 4


def build(variant: str, folder: Path, **more: Any) -> Path:
    """A checkpoint of two layers, because the interpreter is slow."""
    if variant in ("gemma3", "olmo3", "qwen3-window"):
        more["layer_types"] = ["sliding_attention", "full_attention"]
    return tiny_model.build(variant, folder, **{"num_hidden_layers": 2, **more}).path


class Both:
    """A model with two pools, one per set of operations, under one page table."""

    def __init__(self, variant: str, folder: Path, held: Fp8 | W8A8 = "", int4: Kind | None = None) -> None:
        path = build(variant, folder, **WIDE if int4 else {})
        if int4 is not None:
            quantise(path, int4)
        spec = spec_of(path)
        kinds = {"w8a8": held} if isinstance(held, W8A8) else {"fp8": held}
        spec = self.spec = msgspec.structs.replace(spec, int4=spec.stored_int4, **kinds)
        self.model = load_model(spec, path, torch.float32, CPU)
        shape = (spec.layers, ROWS * PAGES + 1, PAGE, spec.kv_shape, torch.float32, CPU)
        self.plain, self.fused = KvPool(*shape), KvPool(*shape)
        self.fused.data.fill_(NAN)
        self.views = Views(ROWS, PAGES, PAGE, 128)
        windows = [spec.window(layer) for layer in range(spec.layers)]
        self.attention = TorchAttention(windows, sinks=spec.sinks, values=spec.kv_shape[2])
        self.attention.bind(self.plain)
        pool = self.fused
        caches = pool.caches()
        configs = None
        if (moe := spec.moe) is not None:
            configs = MoeConfigs(
                MoeShape(moe.experts, moe.intermediate, spec.hidden, moe.per_token, "float32", "none")
            )
        self.kernels = Kernels(EagerAttention(caches, windows), caches, configs)
        self.written = torch.zeros(PAGE * (ROWS * PAGES + 1), dtype=torch.bool)

    def step(self, plan: StepPlan, tokens: int) -> None:
        """Run `plan` by both, padded to `tokens` for the fused operations, and compare."""
        with device_thread(CPU):
            exact, want = self.plainly(plan)
            view = padded(exact, tokens)
            ctx = ForwardContext(view.positions, TritonOps(view, self.kernels))
            got = self.model.forward(ctx, view.ids)
            if plan.chunks and len(plan.decode_slots):
                self.check_wanted(view, want)
            samples = self.views.samples
            self.views.write_tokens(samples, samples.slots * 31 + plan.step)
        assert got.shape == (tokens, self.spec.hidden)
        torch.testing.assert_close(got[: len(want)], want, atol=2e-4, rtol=2e-4)
        self.written[exact.kv_slot_mapping.long()] = True
        by_token = self.fused.data.flatten(1, 2)
        assert bool(by_token[:, ~self.written].isnan().all()), "written where no true token is"
        stored = self.plain.data.flatten(1, 2)[:, self.written]
        torch.testing.assert_close(by_token[:, self.written], stored, atol=2e-4, rtol=2e-4)

    def plainly(self, plan: StepPlan) -> tuple[StepView, torch.Tensor]:
        """The exact view of a plan, and its hidden states by the plain operations."""
        view = self.views.take(plan)
        self.attention.plan(view)
        ctx = ForwardContext(view.positions, TorchOps(view, self.attention))
        return view, self.model.forward(ctx, view.ids)

    def check_wanted(self, view: StepView, want: torch.Tensor) -> None:
        """Asked for the rows that sample, a model returns those, whatever stands behind them."""
        true = self.views.samples.rows
        rows = torch.cat([true, torch.zeros(2, dtype=torch.int32)])
        ctx = ForwardContext(view.positions, TritonOps(view, self.kernels), wanted=rows)
        got = self.model.forward(ctx, view.ids)
        assert len(got) == len(rows)
        torch.testing.assert_close(got[:-2], want[true.long()], atol=2e-4, rtol=2e-4)


def pages_of(slot: int, count: int) -> PageWrites:
    """All pages of a slot at once, scattered over the pool."""
    pages = [1 + (slot - 1 + ROWS * (i * 5 % PAGES)) for i in range(count)]
    return PageWrites(ints([slot] * count), ints(range(count)), ints(pages))


def prompt(slot: int, count: int) -> np.ndarray:
    return ints([(i * 37 + slot * 11) % 251 + 3 for i in range(count)])


def begins(step: int, slot: int, count: int, decode: Sequence[int] = ()) -> StepPlan:
    """The first chunk of a slot, `count` tokens, beside decode rows."""
    tokens = prompt(slot, count)
    new = (NewSlot(slot, GREEDY, tokens, NO_TOKENS, 0),)
    return StepPlan(step, ints(decode), (Chunk(slot, 0, tokens, True),), new, pages_of(slot, PAGES))


FAMILIES = (
    "llama-tied-bias",
    "llama-llama3",  # head_dim 24
    "llama-dynamic",
    "deepseek-v2-groups",
    "deepseek-v3-halves",
    "gemma3",
    "glm4-moe",
    "mistral",
    "olmo3",
    "qwen2",
    "qwen3-window",
    "qwen3-moe",
    "qwen3-moe-mixed",
    "gpt-oss",
)
"""One variant of each kind that differs to the kernels; the interpreter takes two seconds a model."""


@pytest.mark.parametrize("variant", FAMILIES)
def test_hidden_states_and_pages(variant: str, tmp_path: Path) -> None:
    both = Both(variant, tmp_path)
    both.step(begins(1, 1, 20), 22)
    # On with slot 1 behind its own keys, beside a new slot. Above 64 rows routing takes two kernels.
    more = begins(2, 2, 5)
    chunk = Chunk(1, 20, prompt(7, 7), True)
    both.step(
        StepPlan(2, NO_TOKENS, (chunk, *more.chunks), more.new_slots, more.page_writes),
        66 if variant == "qwen3-moe" else 14,
    )
    both.step(begins(3, 3, 2, decode=[2, 1]), 7)
    both.step(StepPlan(4, ints([3, 1, 2])), 4)  # few rows: experts without tiles
    both.step(StepPlan(5, ints([1, 2])), 5)


@pytest.mark.parametrize(
    "variant", ["qwen2", "qwen3-moe-mixed", "qwen2-moe", "gemma3", "olmo3", "deepseek-v3-halves", "gpt-oss"]
)
def test_products_of_few_rows(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of few rows have kernels of their own, which float32 is not given: here it is, in wide cuts
    for the interpreter. Of a lone row they run the norms in front of them and add to the residual."""
    monkeypatch.setattr("gpu.ops.fused.gemv_config", lambda *_, **__: GemvConfig(32, 4))
    both = Both(variant, tmp_path)
    both.step(begins(1, 1, 2), 2)
    both.step(StepPlan(2, ints([1])), 1)
    both.step(begins(3, 2, 1, decode=[1]), 2)
    both.step(begins(4, 3, 3), 3)


@pytest.mark.parametrize("variant", ["qwen2", "qwen3-moe"])
def test_norms_of_a_lone_row_are_no_launches(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the last one, in front of the head."""
    monkeypatch.setattr("gpu.ops.fused.gemv_config", lambda *_, **__: GemvConfig(32, 4))
    both, launched = Both(variant, tmp_path), []

    def spy(*args: Any, **more: Any) -> torch.Tensor:
        launched.append(args)
        return rms_norm(*args, **more)

    for module in ("gpu.ops.fused", "gpu.kernels.moe.fused"):
        monkeypatch.setattr(f"{module}.rms_norm", spy)
    both.step(begins(1, 1, 3), 3)
    assert len(launched) > 1
    launched.clear()
    both.step(StepPlan(2, ints([1])), 1)
    assert len(launched) == 1


@pytest.mark.parametrize("variant", ["qwen2", "qwen3-moe-mixed", "qwen2-moe", "gemma3", "gpt-oss"])
def test_products_of_many_rows_are_added_to_the_residual(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one operation; a norm adds only what has a bias, as gpt-oss has."""
    monkeypatch.setattr("gpu.ops.fused.ADDED_ROWS", 4)
    both, added = Both(variant, tmp_path), []

    def spy(*args: Any, residual: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
        added.append(residual is not None)
        return rms_norm(*args, residual=residual, **more)

    monkeypatch.setattr("gpu.ops.fused.rms_norm", spy)
    both.step(begins(1, 1, 6), 8)
    assert any(added) == (variant == "gpt-oss")
    added.clear()
    both.step(StepPlan(2, ints([1])), 2)
    assert any(added) == (variant != "gemma3")  # it norms what it adds


def test_products_of_some_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise."""

    def cut(rows: int, weight: torch.Tensor, gated: bool = False) -> SkinnyConfig:
        return SkinnyConfig(64, 16, 1 if gated else 2, 4, 2)

    monkeypatch.setattr("gpu.ops.fused.skinny_config", cut)
    both = Both("qwen2", tmp_path)
    counters = split_k_counters(CPU)
    both.kernels = both.kernels._replace(counters=counters)
    both.step(begins(1, 1, 6), 8)
    assert not counters.any()


@pytest.mark.parametrize(
    ("variant", "held", "count"),
    [
        ("qwen2", "rows", 2),
        ("qwen2", "rows", 20),
        ("qwen3-moe-mixed", "rows", 2),
        ("qwen3-moe-mixed", "rows", 20),
        ("qwen3-moe-wide", "blocks", 20),  # a handful of its rows take the interpreter half a minute
        ("qwen2", W8A8(), 20),
        ("qwen3-moe-mixed", W8A8(), 20),
    ],
)
@pytest.mark.usefixtures("rounding")
def test_weights_of_8_bits(variant: str, held: Fp8 | W8A8, count: int, tmp_path: Path) -> None:
    """Results are those of the plain operations, but for inputs that lie between two numbers and fall to
    either."""
    both = Both(variant, tmp_path, held)
    plan = begins(1, 1, count)
    with device_thread(CPU):
        exact, want = both.plainly(plan)
        view = padded(exact, 2 * count)
        got = both.model.forward(ForwardContext(view.positions, TritonOps(view, both.kernels)), view.ids)
    near = F.cosine_similarity(got[:count], want, dim=-1)
    assert near.min() > 0.99, near


@pytest.mark.parametrize("counted", [True, False])
def test_weights_of_4_bits(counted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products have few rows, more rows, and so many that weights are taken with all their bits; also on a
    device without counters, where inputs are not split."""
    monkeypatch.setattr("gpu.kernels.gemm.int4.MOST_ROWS", 40)
    both = Both("qwen2", tmp_path, int4=KINDS["awq"])
    counters = split_k_counters(CPU) if counted else None
    both.kernels = both.kernels._replace(counters=counters)
    both.step(begins(1, 1, 20), 22)
    both.step(StepPlan(2, ints([1])), 1)
    both.step(begins(3, 2, 41), 50)
    assert counters is None or not counters.any()


def test_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation that adapters change, of tokens and of samples."""
    used, size = [1, -1, 0, 1, 2, -1], MoeSize(experts=3, width=16, hidden=32, top_k=2)
    rows, one = lora_rows(used, 3, CPU), lora_rows([2, -1], 3, CPU)
    view = slots_view([1] * len(used), [], len(used), 0, CPU)
    view = view._replace(adapters=StepAdapters(rows, one))
    view.counts[3] = 2
    shape = MoeShape(size.experts, size.width, size.hidden, size.top_k, "float32", "none")
    kernels = Kernels(EagerAttention([], []), [], MoeConfigs(shape), branch=Branch(CPU))
    fused, plain = TritonOps(view, kernels), TorchOps(view, TorchAttention([]))

    def lora(inputs: int, *parts: int, experts: bool = False) -> LoraMatrix:
        many = (size.experts,) * 2 if experts else None
        return lora_matrix([4, 0, 16], inputs, parts, torch.float32, CPU, experts=many)

    x, logits, w13, w2 = moe_inputs(len(used), size, torch.float32, CPU)
    matrix = Matrix(torch.randn(48, 32), lora=lora(32, 24, 24))
    square = Matrix(torch.randn(32, 32), lora=lora(32, 32))
    monkeypatch.setattr("gpu.ops.fused.ADDED_ROWS", 1)
    table, ids = torch.randn(20, 32), torch.arange(len(used), dtype=torch.int32)
    of_table, of_head = lora(20, 32), lora(32, 20)
    layer = Experts(w13, w2, size.top_k, lora=LoraExperts(lora(32, 16, 16, experts=True), None))

    def run(ops: Ops) -> list[torch.Tensor]:
        residual, again, third, made = x.clone(), x.clone(), x.clone(), ops.experts(x, logits, layer)
        both = made._replace(beside=2 * x) if isinstance(made, PendingExperts) else made + 2 * x
        return [
            ops.add_rms_norm(made, residual, x.new_ones(32), 1e-6),
            residual,
            ops.add_rms_norm(both, again, x.new_ones(32), 1e-6),  # as a rank's part of a shared expert
            again,
            ops.add_rms_norm(PendingProduct(x, square), third, x.new_ones(32), 1e-6),
            third,
            ops.linear(x, matrix),
            ops.gated_linear(x, matrix, "silu"),
            ops.gated_linear(x, matrix, "gelu_pytorch_tanh"),
            ops.embed(table, ids, of_table),
            ops.for_samples().add_lora(x[:2], of_head, torch.ones(2, 20)),
        ]

    for got, want in zip(run(fused), run(plain), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert not torch.equal(fused.linear(x, matrix)[2], F.linear(x, matrix.weight)[2])
