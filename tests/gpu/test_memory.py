"""Memory plans: what fits, and the message when something does not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from core.config import CacheConfig
from core.errors import ConfigError
from core.models import ModelSpec, MoeSpec
from gpu.memory import (
    CPU_POOL_LIMIT,
    GIB,
    GPU_FRACTION,
    MemoryPlan,
    Needs,
    available_bytes,
    device_needs,
    memory_table,
    plan_memory,
)

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=128,
    max_position=4096,
)
TOKEN = 2 * 2 * 2 * 16 * 4
"""Bytes of one token's KV in float32: layers, K and V, heads, dim."""
WEIGHTS = SPEC.num_parameters() * 4


def pages(available: int, most: int = 10**9, **cache: float) -> int:
    return plan_memory(SPEC, torch.float32, CacheConfig(**cache), available, most).num_pages


def test_a_third_of_what_is_left_goes_to_the_pool() -> None:
    assert pages(WEIGHTS + 10_000_000) == 3_000_000 // (16 * TOKEN)


def test_the_guess_has_a_ceiling_and_a_fraction_lifts_it() -> None:
    assert pages(64 * GIB) * 16 * TOKEN == CPU_POOL_LIMIT
    assert pages(64 * GIB, mem_fraction=0.5) * 16 * TOKEN > CPU_POOL_LIMIT


def test_no_more_pages_than_anybody_can_use() -> None:
    assert pages(64 * GIB, most=100) == 8  # 7 pages of 16, and the dump


def test_explicit_tokens_are_honoured_exactly() -> None:
    plan = plan_memory(SPEC, torch.float32, CacheConfig(kv_tokens=40, page_size=16), GIB, 10**9)
    assert (plan.num_pages, plan.tokens) == (4, 48)
    with pytest.raises(ConfigError, match=r"--kv-tokens 1000000 needs .* is left"):
        pages(WEIGHTS + 10_000_000, kv_tokens=1_000_000)


def test_weights_that_do_not_fit_say_need_and_have() -> None:
    with pytest.raises(ConfigError, match=r"need 0\.8 MiB, 0\.5 MiB is free.*--dtype bfloat16"):
        pages(500_000)


def test_a_pool_too_small_for_one_request() -> None:
    with pytest.raises(ConfigError, match=r"at least 0\.\d MiB.*--mem-fraction"):
        pages(WEIGHTS + 512 * TOKEN)
    short = msgspec.structs.replace(SPEC, max_position=64)
    assert plan_memory(short, torch.float32, CacheConfig(), WEIGHTS + 512 * TOKEN, 64).num_pages == 5


def test_the_table_adds_up() -> None:
    plan = plan_memory(SPEC, torch.float32, CacheConfig(), 2 * GIB, 10**9)
    text = "\n".join(memory_table(plan))
    assert "2.00 GiB" in text and f"{plan.tokens:,} tokens" in text
    assert len(memory_table(plan)) == 4


QWEN3_30B = ModelSpec(
    architecture="Qwen3MoeForCausalLM",
    vocab_size=151_936,
    hidden=2048,
    layers=48,
    heads=32,
    kv_heads=4,
    head_dim=128,
    intermediate=6144,
    max_position=40_960,
    moe=MoeSpec(experts=128, per_token=8, intermediate=768, norm_topk=True, layers=frozenset(range(48))),
)
H200 = 139 * GIB
NEEDS = device_needs(QWEN3_30B, torch.bfloat16, rows=512, step_tokens=2048, graphs=60)


def on_gpu(available: int, loaded: int = 0, needs: Needs = NEEDS, **cache: float) -> MemoryPlan:
    chosen = CacheConfig(**cache)
    return plan_memory(QWEN3_30B, torch.bfloat16, chosen, available, 512 * 40_960, needs, loaded)


def test_a_gpu_keeps_a_reserve_beside_what_it_needs() -> None:
    plan = on_gpu(H200)
    left = H200 - plan.weights - sum(NEEDS)
    assert plan.num_pages == int(left * GPU_FRACTION) // plan.page_bytes
    assert plan.left >= (1 - GPU_FRACTION) * left * 0.99
    assert GIB < sum(NEEDS) < 4 * GIB
    assert plan.tokens > 700_000


def test_needs_grow_with_what_is_asked_for() -> None:
    more = device_needs(QWEN3_30B, torch.bfloat16, rows=1024, step_tokens=8192, graphs=90)
    assert all(big > small for big, small in zip(more[:4], NEEDS[:4], strict=True))
    # 8 experts' inputs and outputs of 8,192 tokens, in bfloat16
    assert more.graphs > 8192 * 8 * (768 + 2048) * 2


def test_measured_weights_replace_the_estimate() -> None:
    before = on_gpu(H200)
    after = on_gpu(H200 - before.weights, loaded=before.weights)
    assert (after.num_pages, after.available) == (before.num_pages, before.available)
    assert on_gpu(H200 - before.weights - GIB, loaded=before.weights).num_pages < before.num_pages


def test_a_gpu_without_room_names_the_flag() -> None:
    weights = on_gpu(H200).weights
    with pytest.raises(ConfigError, match=r"graphs, logits and workspace need .*--step-tokens"):
        on_gpu(weights + GIB)
    with pytest.raises(ConfigError, match="--mem-fraction"):
        on_gpu(weights + sum(NEEDS) + 10**6)
    with pytest.raises(ConfigError, match="Lower --kv-tokens"):
        on_gpu(H200, kv_tokens=10**6)
    assert (
        on_gpu(H200, mem_fraction=0.5).num_pages
        < on_gpu(H200).num_pages
        < on_gpu(H200, mem_fraction=0.95).num_pages
    )


def test_fp8_pages_take_half_and_say_so() -> None:
    half = plan_memory(QWEN3_30B, torch.bfloat16, CacheConfig(kv_dtype="fp8"), H200, 512 * 40_960, NEEDS)
    whole = on_gpu(H200)
    assert (half.page_bytes * 2, half.weights) == (whole.page_bytes, whole.weights)
    assert half.tokens >= 2 * whole.tokens
    assert any(line.endswith("tokens in float8_e4m3fn") for line in memory_table(half))
    assert any(line.endswith("tokens in bfloat16") for line in memory_table(whole))


def test_fp8_weights_take_half_of_all_but_the_tables() -> None:
    spec = msgspec.structs.replace(QWEN3_30B, fp8="rows")
    plan = plan_memory(spec, torch.bfloat16, CacheConfig(), H200, 512 * 40_960, NEEDS)
    tables = 2 * 151_936 * 2048
    assert plan.weights == tables * 2 + spec.num_parameters() - tables
    assert plan.weights < 0.53 * on_gpu(H200).weights
    assert any(line.startswith("weights") and "float8_e4m3fn" in line for line in memory_table(plan))


def test_the_table_of_a_gpu_names_every_need() -> None:
    plan = on_gpu(H200)
    text = "\n".join(memory_table(plan))
    for what in ("weights", "graphs", "logits", "penalty counts", "workspace", "KV pool", "reserve"):
        assert what in text
    assert plan.weights + sum(plan.needs) + plan.pool + plan.left == H200


def test_available_memory_is_the_smaller_of_machine_and_container(tmp_path: Path) -> None:
    proc = tmp_path / "meminfo"
    proc.write_text("MemTotal: 9 kB\nMemAvailable:    8192 kB\n")
    assert available_bytes(proc, tmp_path) == 8 * 2**20
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.stat").write_text("anon 1000000\nfile 77\n")
    assert available_bytes(proc, tmp_path) == 4_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(proc, tmp_path) == 8 * 2**20


def test_available_memory_without_proc(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "none", tmp_path) > 0
