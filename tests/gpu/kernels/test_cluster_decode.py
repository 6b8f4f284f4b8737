"""Decode attention in a cluster of thread blocks against its twin, and where it is used."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.kernels import reference
from bench.kernels.inputs import Heads, error, pages, rope, scalar
from bench.kernels.timing import capture
from gpu.attention.backend import AttentionConfig
from gpu.attention.triton_paged import TritonDecode
from gpu.device import CudaFacts
from gpu.kernels.attention import cluster_decode
from gpu.kernels.attention.cluster_decode import CAPABILITY, ClusterDecode, supported
from gpu.kernels.attention.decode_config import verify_config
from gpu.kernels.attention.qk_norm_rope_store import norm_rope_store
from gpu.kernels.cuda_kernel import Blocks, CudaKernel, compile_kernel
from gpu.kernels.jit import compiled_ahead
from gpu.state.view import StepView

HALVES = torch.bfloat16, torch.float16
CPU = torch.device("cpu")
QWEN = AttentionConfig(
    32, 8, 128, (0,), 16, 4, torch.bfloat16, CPU, CudaFacts("", "NVIDIA H200", CAPABILITY, 132), 0.1, pdl=True
)

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != CAPABILITY,
    reason=f"for compute capability {CAPABILITY}",
)


@pytest.mark.parametrize(
    ("config", "uses"),
    [
        (QWEN, True),
        (QWEN._replace(kv_heads=4), True),
        (QWEN._replace(heads=64, head_dim=64, page_size=32, dtype=torch.float16), True),
        (QWEN._replace(heads=16, kv_heads=16), False),
        (QWEN._replace(heads=36, kv_heads=4), False),
        (QWEN._replace(head_dim=80), False),
        (QWEN._replace(head_dim=256), False),
        (QWEN._replace(page_size=8), False),
        (QWEN._replace(dtype=torch.float32), False),
        (QWEN._replace(kv_scales=(1.0, 1.0)), False),
        (QWEN._replace(cap=30.0), False),
        (QWEN._replace(kv_heads=1, head_dim=192, values=128), False),
        (QWEN._replace(pdl=False), False),
        (QWEN._replace(gpu=QWEN.gpu._replace(capability=(10, 0))), False),
    ],
)
def test_it_is_used_for_what_it_knows(
    config: AttentionConfig, uses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr("gpu.attention.triton_paged.cuda_kernel.lack", lambda: "")
    monkeypatch.setattr("gpu.attention.triton_paged.ClusterDecode", lambda *args: made.append(args))
    TritonDecode(config)
    shape = config.heads, config.kv_heads, config.head_dim, config.dtype
    assert made == [(*shape, config.device)] * uses
    if uses:
        assert supported(*shape, config.page_size)


@pytest.mark.parametrize("lacks", ["bindings are missing", ""])
def test_where_it_cannot_be_compiled_triton_serves_and_the_log_says_so(
    lacks: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("cluster_decode.cu: no such architecture")

    monkeypatch.setattr("gpu.attention.triton_paged.cuda_kernel.lack", lambda: lacks)
    monkeypatch.setattr("gpu.attention.triton_paged.ClusterDecode", refuse)
    with caplog.at_level(logging.WARNING):
        TritonDecode(QWEN)
    assert (lacks or "no such architecture") in caplog.text


def test_a_cpu_is_refused_as_a_gpu_is_that_cannot_run_it() -> None:
    """Kernels for a GPU are compiled on tensors of a CPU, also where there is a GPU."""
    with pytest.raises(RuntimeError, match="cpu"):
        CudaKernel(b"", "cluster_decode", Blocks(8, 128, 0), CPU)


@pytest.mark.parametrize(
    ("kv_heads", "plain", "deep"), [(8, [1], [1]), (4, [1, 2], [2]), (1, [1, 2, 4, 8], [8])]
)
def test_rows_that_it_takes(kv_heads: int, plain: list[int], deep: list[int], monkeypatch: Any) -> None:
    """The kernel takes at most eight clusters; with many keys exactly eight."""
    monkeypatch.setattr(cluster_decode, "compile_kernel", lambda *_: b"")
    monkeypatch.setattr(cluster_decode, "CudaKernel", lambda *_: None)
    kernel = ClusterDecode(32, kv_heads, 128, torch.bfloat16, CPU)
    for few, of in ((plain, False), (deep, True)):
        assert [rows for rows in (1, 2, 4, 8, 16) if kernel.takes(rows, of)] == few


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_no_key_of_the_step_is_read_early(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens of a step may belong to one row: a draft model's block."""
    given: dict[str, Any] = {}

    class Kernel:
        def takes(self, rows: int, deep: bool) -> bool:
            return not deep

        def __call__(self, *_: Any, **more: Any) -> None:
            given.update(more)

    monkeypatch.setattr("gpu.attention.triton_paged.cuda_kernel.lack", lambda: "")
    monkeypatch.setattr("gpu.attention.triton_paged.ClusterDecode", lambda *_: Kernel())
    of_rows = torch.zeros(rows, dtype=torch.int32)
    view = StepView(
        rows, rows, 0, *[of_rows] * 11
    )  # fmt: skip
    backend, q = TritonDecode(QWEN), torch.zeros(rows, 32, 128)
    backend.plan(view)
    backend.attend(0, q, (q, q), view, q.flatten(1))
    assert given["newest"] == rows
    for query in range(1, 9):
        cut = verify_config(128, 8, 132, rows, query, group=4)
        assert cut.newest in (0, rows)


LENGTHS = ([1], [15, 16], [17, 2048], [300, 33], [4097], [2047, 2049], [9000])
"""Keys of one or two rows, around multiples of a chunk (16) and of what all warps of a cluster take at once
(2,048 or 4,096)."""


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("window", "sinks", "newest"), [(0, False, 1), (100, True, 1), (31, False, 3), (0, True, 20)]
)
@pytest.mark.parametrize(
    ("heads", "page_size"),
    [
        (Heads(32, 8, 128), 16),
        (Heads(32, 4, 128), 64),
        (Heads(28, 4, 128), 32),
        (Heads(10, 2, 64), 16),
        (Heads(3, 1, 64), 16),
        (Heads(4, 4, 128), 16),
        (Heads(8, 1, 128), 16),
        (Heads(64, 8, 64), 16),
    ],
)
def test_attention(
    heads: Heads, page_size: int, window: int, sinks: bool, newest: int, dtype: torch.dtype
) -> None:
    """Keys and values that no row sees are NaN. Padded rows are not written."""
    device, scale = torch.device("cuda"), heads.dim**-0.5
    kernel = ClusterDecode(*heads, dtype, device)
    for lengths in LENGTHS:
        if not kernel.takes(len(lengths) + 1, deep=False):
            lengths = lengths[-1:]
        padded = kernel.takes(len(lengths) + 1, deep=False)
        kept = pages(lengths, page_size, heads, dtype, device)
        seen = torch.zeros(len(kept.k), dtype=torch.bool, device=device)
        for slot, length in zip(kept.slots.tolist(), lengths, strict=True):
            at = torch.arange(max(length - window, 0) if window else 0, length, device=device)
            seen[kept.table[slot, at // page_size].long() * page_size + at % page_size] = True
        for side in (kept.k, kept.v):
            side[~seen] = float("nan")
        of_sinks = torch.randn(heads.q, device=device).to(dtype) if sinks else None
        slots = torch.cat([kept.slots, kept.slots[:1]]).int()
        own = kept.lengths[slots.long()].int()
        rows = len(lengths) + padded
        q = torch.randn(rows, heads.q, heads.dim, device=device).to(dtype)
        q[len(lengths) :] = float("nan")
        out = torch.full((rows, heads.q * heads.dim), 7.0, device=device, dtype=dtype)
        layer = kept.layer(page_size, scale)._replace(sinks=of_sinks)
        kernel(
            q, layer, slots, own, scalar(len(lengths), device),
            out=out, window=window, newest=min(newest, *lengths),
        )  # fmt: skip
        expected, _ = reference.decode_attention(
            q[: len(lengths)], (kept.k, kept.v), kept.table[kept.slots], lengths, page_size, scale,
            window=window, sinks=of_sinks,
        )  # fmt: skip
        found = out[: len(lengths)].view_as(expected)
        assert error(found, expected) < (4e-3 if dtype == torch.bfloat16 else 1e-3), lengths
        assert (out[len(lengths) :] == 7).all()


@on_hopper
@pytest.mark.gpu
@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize(("tokens", "causal"), [(1, True), (2, True), (2, False)])
def test_a_step_reads_the_keys_that_it_stores(tokens: int, causal: bool) -> None:
    """A graph of 24 layers under programmatic dependent launch. Each layer must see the keys that its store
    kernel has just written, never what was in their slots before. A row has one token, one and a draft, or a
    draft model's block, whose tokens all see each other."""
    device, heads, length = torch.device("cuda"), Heads(16, 4, 128), 1040
    kernel, width = ClusterDecode(*heads, torch.bfloat16, device), 24 * 128
    kept = pages([length] * 24, 16, heads, torch.bfloat16, device)
    at = length - tokens + torch.arange(tokens, device=device)
    slots = kept.slots[:1].int().expand(tokens).contiguous()
    lengths = (at + 1 if causal else torch.full_like(at, length)).int()
    cells = kept.table[kept.slots[0], at // 16] * 16 + at % 16
    turn = rope(tokens, heads.dim, torch.bfloat16, device)
    layers = []
    for _ in range(24):
        both = torch.randn(len(kept.k), 2, heads.kv, heads.dim, device=device).bfloat16()
        both[cells] = float("nan")
        layers.append((torch.randn(tokens, width, device=device).bfloat16(), both))
    outs = [torch.zeros(tokens, heads.q * heads.dim, device=device).bfloat16() for _ in layers]
    queries, count = [torch.zeros_like(out) for out in outs], scalar(tokens, device)

    def step() -> None:
        for (qkv, both), out, q_out in zip(layers, outs, queries, strict=True):
            caches = both[:, 0], both[:, 1]
            q = norm_rope_store(qkv + 0, caches, cells, turn, None, q_out=q_out, pdl=True)
            of_layer = kept._replace(k=caches[0], v=caches[1]).layer(16, 0.1)
            kernel(q, of_layer, slots, lengths, count, out=out, newest=tokens, pdl=True)

    graph = capture([step]).graph
    for _ in range(20):
        for qkv, both in layers:
            qkv.normal_()
            both[cells] = float("nan")
        graph.replay()
        torch.cuda.synchronize()
        for (_, both), out, q_out in zip(layers, outs, queries, strict=True):
            expected, _ = reference.decode_attention(
                q_out.view(tokens, heads.q, heads.dim), (both[:, 0], both[:, 1]),
                kept.table[slots.long()], lengths.tolist(), 16, 0.1,
            )  # fmt: skip
            assert error(out.view_as(expected), expected) < 1e-2


SOURCE = """
extern "C" __global__ void fill(float *out, float value, long count) {
    for (long i = threadIdx.x; i < count; i += blockDim.x) out[i] = value * SCALE;
}
"""


@on_hopper
@pytest.mark.gpu
def test_a_kernel_in_cuda(tmp_path: Path) -> None:
    """A kernel runs on the current stream, and is not launched within `compiled_ahead`. Errors of compiler
    and driver are raised."""
    path, device = tmp_path / "fill.cu", torch.device("cuda")
    path.write_text(SOURCE)
    code = compile_kernel(path, {"SCALE": 3}, CAPABILITY)
    kernel, out = CudaKernel(code, "fill", Blocks(1, 32, 0), device), torch.zeros(100, device=device)
    with compiled_ahead():
        kernel((1, 1, 1), out, 2.0, 70)
    assert not out.any()
    kernel((1, 1, 1), out, 2.0, 70)
    assert (out[:70] == 6).all()
    assert not out[70:].any()
    with pytest.raises(RuntimeError, match="SCALE"):
        compile_kernel(path, {}, CAPABILITY)
    with pytest.raises(RuntimeError, match="CUDA_ERROR"):
        CudaKernel(code, "fill", Blocks(1, 32, 2**20), device)
