"""Attention over latents (MLA) through all layers: what pages hold, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.config import CacheConfig, ModelConfig, ScheduleConfig, SpeculativeConfig
from core.errors import ConfigError
from core.request import SamplingParams
from gpu.build import Beside, Drafting, build_executor, check_pages, spec_of
from gpu.device import CudaFacts
from gpu.draft.build import read_drafting
from gpu.kv.pool import KvPool
from gpu.memory import plan_memory
from gpu.parts import Target
from tests.rigs import lora, tiny_model
from tests.rigs.driver import Driver
from tests.rigs.runner import CPU, Rig
from tests.rigs.tiny_model import Tiny

PROMPTS = [[int(i * 37 % 241) + 3 for i in range(n)] for n in (40, 23, 61, 40)]
TOKENS = 24


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny_model.build("deepseek-v3", tmp_path_factory.mktemp("v3"))


def test_retracted_rows_with_drafts_say_what_transformers_says(tiny: Tiny) -> None:
    """Too few pages for all rows at once; the last prompt is a prefix hit; tokens are looked up ahead."""
    schedule = ScheduleConfig(step_tokens=32, max_running=4, conservativeness=0.01, prefill_weight=0.0)
    cache, drafting = CacheConfig(page_size=4, kv_tokens=128), SpeculativeConfig(algorithm="ngram")
    made = build_executor(
        spec_of(tiny.path), tiny.path, ModelConfig(device="cpu", context_length=128), cache, schedule,
        lambda stage, share: None, Beside(drafting=Drafting(drafting)),
    )  # fmt: skip
    made.prepare(lambda share: None)
    driver = Driver(made, schedule)
    try:
        found = driver.run(PROMPTS, [SamplingParams(temperature=0.0, max_tokens=TOKENS)] * len(PROMPTS))
    finally:
        driver.close()
    assert driver.scheduler.counters.retractions
    texts = [tiny_model.greedy(tiny.reference, prompt, TOKENS) for prompt in PROMPTS]
    assert [answer.tokens for answer in found] == texts


def test_a_page_holds_latents_once_for_all_heads(tiny: Tiny) -> None:
    spec, cache = spec_of(tiny.path), CacheConfig(page_size=16)
    token = 2 * (32 + 8) * 4  # layers, latent and key, bytes
    plan = plan_memory(spec, torch.float32, cache, 2**30, 10**6)
    assert plan.page_bytes == 16 * token
    pool = KvPool(spec.kv_layers, 5, 16, spec.kv_shape, torch.float32, CPU)
    assert pool.data.numel() * 4 == 5 * plan.page_bytes
    for k, v in pool.caches():
        assert (k.shape, v.shape) == ((80, 1, 40), (80, 1, 32))
        assert v.data_ptr() == k.data_ptr()
    assert spec.shard(4).kv_shape == spec.kv_shape, "each rank keeps whole latents"


def test_what_latents_do_not_have(tiny: Tiny, tmp_path: Path) -> None:
    spec = spec_of(tiny.path)
    for algorithm in ("eagle", "eagle3", "dflash"):
        settings = SpeculativeConfig(algorithm=algorithm)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"{algorithm}: heads for DeepseekV3ForCausalLM"):
            read_drafting(settings, tmp_path, spec, False, spec_of)
    assert read_drafting(SpeculativeConfig(algorithm="ngram"), None, spec, False, spec_of) is not None
    hopper = Target(torch.device("cuda"), torch.bfloat16, CudaFacts("", "NVIDIA H200", (9, 0)))
    with pytest.raises(ConfigError, match="--kv-dtype fp8: DeepseekV3ForCausalLM keeps latents"):
        check_pages(spec, hopper, CacheConfig(kv_dtype="fp8"))


def test_adapters_of_what_makes_keys_are_refused_by_name(tiny: Tiny, tmp_path: Path) -> None:
    module = "model.layers.0.self_attn.kv_b_proj"
    saved = lora.save({module: lora.Factors(torch.ones(4, 32), torch.ones(128, 4))}, tmp_path / "a")
    refused = str(Rig(tiny.path, adapters=lora.LIMITS).command("adapter_read", "a", saved))
    assert f"it changes {module}, which is none of" in refused
