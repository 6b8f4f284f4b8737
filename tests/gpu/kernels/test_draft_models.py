"""Draft models by the fused operations, over padded views, as by plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.models import read_draft
from core.models.mtp import mtp_draft
from gpu.build import spec_of
from gpu.context import ForwardContext
from gpu.kernels.moe.tuned import MoeConfigs, MoeShape
from gpu.kv.pool import KvPool
from gpu.models.draft import BlockModel, ChainModel
from gpu.ops.fused import Kernels, TritonOps
from gpu.state.view import StepView
from gpu.thread import device_thread
from gpu.weights import load_draft, load_model
from tests.rigs import draft_heads, mtp, tiny_model
from tests.rigs.attention import NAN, EagerAttention
from tests.rigs.draft_heads import CPU, HIDDEN, VOCAB, Pages
from tests.rigs.padding import padded

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="the interpreter's; a GPU has tests/gpu/test_cuda.py",
)

PADDING = 3


class Both:
    """A draft model with two pools, one per set of operations."""

    def __init__(self, name: str, folder: Path) -> None:
        if name in draft_heads.CONFIGS:
            path = tiny_model.build("llama", folder, num_hidden_layers=6).path
            target = load_model(spec_of(path), path, torch.float32, CPU)
            spec = read_draft(draft_heads.CONFIGS[name], target.spec)
            path = draft_heads.write(name, folder)
        else:
            path = mtp.build(name, folder).path
            target = load_model(spec_of(path), path, torch.float32, CPU)
            spec = mtp_draft(target.spec)
        self.model = load_draft(spec, path, target, torch.float32, CPU)
        self.pages = Pages.of(spec.decoder)
        plain = self.pages.pool
        heads = spec.decoder.kv_shape
        pool = KvPool(spec.decoder.layers, plain.num_pages, plain.page_size, heads, torch.float32, CPU)
        pool.data.fill_(NAN)
        self.pool, caches = pool, pool.caches()
        experts = None
        if (moe := spec.decoder.moe) is not None:
            experts = MoeConfigs(
                MoeShape(moe.experts, moe.intermediate, HIDDEN, moe.per_token, "float32", "none")
            )
        attention = EagerAttention(caches, [0] * spec.decoder.layers, spec.decoder.softmax_scale)
        self.kernels = Kernels(attention, caches, experts)

    def fused(self) -> ForwardContext:
        """Context for the last view, padded."""
        view: StepView = self.pages.seen[-1]
        view = padded(view, view.tokens + PADDING)
        return ForwardContext(view.positions, TritonOps(view, self.kernels))

    def check_pages(self) -> None:
        """Check that both wrote the same, and nothing else."""
        plain, fused = self.pages.pool.data, self.pool.data
        written = plain.flatten(3).any(-1)
        assert torch.equal(written, fused.flatten(3).isfinite().any(-1))
        torch.testing.assert_close(fused[written], plain[written], atol=2e-4, rtol=2e-4)


def pad(x: torch.Tensor) -> torch.Tensor:
    """`x` [n, ...] with rows behind it that nobody may look at."""
    value = NAN if x.is_floating_point() else 0
    return torch.cat([x, torch.full((PADDING, *x.shape[1:]), value, dtype=x.dtype)])


def close(fused: torch.Tensor, plain: torch.Tensor) -> None:
    assert len(fused) == len(plain) + PADDING
    torch.testing.assert_close(fused[: len(plain)], plain, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    "name", ["eagle", "eagle3-vllm", "eagle3.1", "glm4-moe", "deepseek-v3", "qwen3-next"]
)
def test_chain(name: str, tmp_path: Path) -> None:
    with device_thread(CPU):
        both = Both(name, tmp_path)
        model = both.model
        assert isinstance(model, ChainModel)
        for start, count in [(0, 5), (5, 2)]:
            ids, aux = torch.randint(VOCAB, (count,)), torch.randn(count, draft_heads.aux_width(model.spec))
            ctx = both.pages.chunk(0, start, count)
            want = model.forward(ctx, ids, model.fuse(aux))
            ctx = both.fused()
            found = model.forward(ctx, pad(ids), model.fuse(pad(aux), ctx.ops))
            for fused, plain in zip(found, want, strict=True):
                close(fused, plain)
        both.check_pages()


@pytest.mark.parametrize("name", ["dflash", "dflash-bias"])
def test_block(name: str, tmp_path: Path) -> None:
    with device_thread(CPU):
        both = Both(name, tmp_path)
        model = both.model
        assert isinstance(model, BlockModel)
        for start, count in [(0, 5), (5, 2)]:
            aux = torch.randn(count, draft_heads.aux_width(model.spec))
            model.store(both.pages.chunk(0, start, count), model.fuse(aux))
            ctx = both.fused()
            model.store(ctx, model.fuse(pad(aux), ctx.ops))
            both.check_pages()
        ids = torch.tensor([9, *[model.spec.mask_token] * 3])
        want = model.forward(both.pages.block(0, 7, 4, model.spec.causal), ids)
        close(model.forward(both.fused(), pad(ids)), want)
