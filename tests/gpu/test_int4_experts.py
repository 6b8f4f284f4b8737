"""Experts of checkpoints in 4 bits run as the weights that they stand for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from core.adapters import LINEAR, AdapterLimits
from core.config import CacheConfig, ModelConfig, ParallelConfig, ScheduleConfig
from core.errors import ConfigError, ModelError
from core.models import ModelSpec, read_spec
from core.request import SamplingParams
from gpu.build import Beside, build_executor, spec_of
from gpu.layers.moe import experts_held
from gpu.memory import plan_memory
from gpu.quant.int4 import restore
from gpu.shard import ALONE, Shard
from gpu.weight_formats import shard_spec
from gpu.weights import load_model
from tests.rigs import lora, tiny_model
from tests.rigs.driver import Answer, Driver
from tests.rigs.int4_files import KINDS, WIDE, Kind, change, plain_of, quantise
from tests.rigs.runner import CPU
from tests.rigs.tree import ROOT

AWQ, GPTQ, W4A16 = KINDS["awq"], KINDS["gptq"], KINDS["w4a16, symmetric"]
QWEN3_AWQ = ROOT / "configs/models/qwen3-30b-a3b-awq"
LATENTS: dict[str, Any] = {"num_attention_heads": 8, "q_lora_rank": 128, "v_head_dim": 32}
EXPERT = "model.layers.1.mlp.experts.2.down_proj"


def held(path: Path) -> ModelSpec:
    """The spec of a checkpoint as a GPU holds it: in 4 bits."""
    spec = spec_of(path)
    return msgspec.structs.replace(spec, int4=spec.stored_int4)


def build(variant: str, folder: Path, **sizes: Any) -> Path:
    """A checkpoint of which each of two ranks has experts that are held in 4 bits."""
    return tiny_model.build(variant, folder, **{**WIDE, "moe_intermediate_size": 256, **sizes}).path


def weights(places: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Weights of a place, in 4 bits or not."""
    if places[name].dtype != torch.int16:
        return places[name]
    return restore(places[name], places[name + "_scale"].transpose(0, 1))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_each_format_is_what_it_stands_for(kind: Kind, tmp_path: Path) -> None:
    """Dequantised, as on a CPU, and in 4 bits, as on a GPU; all of it, and what each of two ranks has."""
    path = build("qwen3-moe", tmp_path, num_experts=4)
    meant = quantise(path, kind)
    whole, alone = held(path), spec_of(path)
    for spec, shard in ((alone, ALONE), (whole, ALONE), (whole, Shard(0, 2)), (whole, Shard(1, 2))):
        model = load_model(shard_spec(spec, shard.ranks), path, torch.float32, CPU, shard=shard)
        places = model.places()
        fine = {name for name, place in places.items() if place.dtype == torch.int16}
        assert fine == ({name for name in meant if "_proj" in name} if spec.int4 else set())
        for name, weight in meant.items():
            own = weight if (part := model.slices.get(name)) is None else part.of(weight)
            torch.testing.assert_close(weights(places, name), own, rtol=1e-6, atol=1e-7)


def test_random_weights(tmp_path: Path) -> None:
    """A rank has its part of what one alone would have."""
    path = build("qwen3-moe", tmp_path, num_experts=4)
    quantise(path, W4A16)
    whole = load_model(held(path), None, torch.float32, CPU).places()
    assert 0.015 < float(weights(whole, f"{EXPERT}.weight").std()) < 0.025
    model = load_model(shard_spec(held(path), 2), None, torch.float32, CPU, shard=Shard(1, 2))
    for name, part in model.slices.items():
        if ".experts." in name:
            torch.testing.assert_close(weights(model.places(), name), part.of(weights(whole, name)))


# -- the whole engine --------------------------------------------------------------------------------

LIMITS = AdapterLimits(places=1, max_rank=8, host=2, targets=LINEAR)
PROMPTS = [[int(i * 37 % 241) + 3 for i in range(n)] for n in (50, 23)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=10, logprobs=2),
    SamplingParams(temperature=0.8, seed=5, max_tokens=6, logprobs=0),
]


def answers(path: Path, tp: int = 1, adapter: Path | None = None) -> list[Answer]:
    """Answers to prompts in chunks beside decode rows, by exact products."""
    schedule = ScheduleConfig(step_tokens=32, max_running=4)
    model, cache = ModelConfig(device="cpu", quantization="none"), CacheConfig(page_size=4, kv_tokens=1024)
    beside = Beside(parallel=ParallelConfig(tp=tp), adapters=None if adapter is None else LIMITS)
    made = build_executor(spec_of(path), path, model, cache, schedule, lambda stage, share: None, beside)
    made.prepare(lambda share: None)
    driver = Driver(made, schedule)
    try:
        if adapter is None:
            return driver.run(PROMPTS, PARAMS)
        driver.load("one", adapter)
        return driver.run(PROMPTS, PARAMS, adapters=["one", ""])
    finally:
        driver.close()


@pytest.mark.parametrize(
    ("variant", "sizes", "kind", "tp", "config"),
    [
        ("qwen3-moe", {"num_experts": 4}, AWQ, 2, {}),
        ("qwen2-moe", {"shared_expert_intermediate_size": 256}, GPTQ, 2, {}),
        ("mixtral", {}, AWQ, 1, {"modules_to_not_convert": ["gate"]}),
        ("deepseek-v3", LATENTS, W4A16, 2, {}),
        ("deepseek-v2", {"v_head_dim": 32}, GPTQ, 1, {}),
        ("glm4-moe", {}, W4A16, 2, {"ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]}),
    ],
    ids=["qwen3", "shared expert", "mixtral", "latents", "latents, no rank of queries", "experts alone"],
)
def test_text_is_that_of_the_plain_weights(
    variant: str,
    sizes: dict[str, Any],
    kind: Kind,
    tp: int,
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By all layers, dequantised while loading and in 4 bits. Routers stay as they are in any case."""
    path = build(variant, tmp_path / "fine", **sizes)
    left = ("self_attn", "shared_experts") if variant == "glm4-moe" else ()
    plain = plain_of(path, quantise(path, kind, left, **config), tmp_path / "plain")
    want = answers(plain)
    found = answers(path)
    monkeypatch.setattr("gpu.build.choose_int4", lambda spec, model, target: spec.stored_int4)
    for other in (found, answers(path, tp)):
        for one, two in zip(want, other, strict=True):
            assert two.tokens == one.tokens
            assert two.logprobs == pytest.approx(one.logprobs, abs=1e-3)
    spec = held(path)
    assert spec.moe is not None and experts_held(spec, spec.moe) == "int4"


def test_adapters_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build("qwen3-moe", tmp_path / "fine", num_experts=4)
    plain = plain_of(path, quantise(path, AWQ), tmp_path / "plain")
    adapter = lora.save(lora.adapter_for(plain), tmp_path / "lora")
    want = answers(plain, adapter=adapter)
    monkeypatch.setattr("gpu.build.choose_int4", lambda spec, model, target: spec.stored_int4)
    for one, two in zip(want, answers(path, 2, adapter), strict=True):
        assert two.tokens == one.tokens


# -- what a checkpoint excepts, and what does not match -----------------------------------------------


def test_layers_whose_experts_are_excepted(tmp_path: Path) -> None:
    """If a checkpoint excepts one expert, all experts of its layer are held in 16 bits; those that the
    checkpoint has in 4 bits are dequantised."""
    path = build("qwen3-moe", tmp_path, num_experts=4)
    name = EXPERT.replace("layers.1", "layers.0")
    meant = quantise(path, W4A16, (name,), ignore=["lm_head", name])
    places = load_model(held(path), path, torch.float32, CPU).places()
    fine = {name for name, place in places.items() if place.dtype == torch.int16}
    assert fine == {each for each in meant if "_proj" in each and "layers.0.mlp" not in each}
    for each, weight in meant.items():
        torch.testing.assert_close(weights(places, each), weight, rtol=1e-6, atol=1e-7)


def test_a_router_in_4_bits_is_dequantised(tmp_path: Path) -> None:
    path = build("qwen3-moe", tmp_path, num_experts=8)
    meant = quantise(path, AWQ, layers=re.compile(r"(_proj|mlp\.gate)\.weight$"))
    places = load_model(held(path), path, torch.float32, CPU).places()
    name = "model.layers.1.mlp.gate.weight"
    torch.testing.assert_close(places[name], meant[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("last", "tensor", "told"),
    [
        ("scales", None, rf"{EXPERT} is quantised \(awq\) and has no {EXPERT}\.scales"),
        ("qzeros", torch.zeros(8, 8), rf"{EXPERT}\.qzeros \[8, 8\] instead of \[8, 16\]"),
        ("qweight", None, rf"tensors missing: {EXPERT}\.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    last: str, tensor: torch.Tensor | None, told: str, tmp_path: Path
) -> None:
    path = build("qwen3-moe", tmp_path, num_experts=4)
    quantise(path, AWQ)
    change(path, f"{EXPERT}.{last}", tensor)
    for spec in (spec_of(path), held(path)):
        with pytest.raises(ModelError, match=told):
            load_model(spec, path, torch.float32, CPU)


def test_an_expert_that_is_not_quantised_and_not_excepted(tmp_path: Path) -> None:
    path = build("qwen3-moe", tmp_path, num_experts=4)
    quantise(path, AWQ, (EXPERT,))
    with pytest.raises(ModelError, match=rf"{EXPERT}\.weight is not quantised, .*does not except it"):
        load_model(held(path), path, torch.float32, CPU)


# -- on a GPU -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "ranks", "told"),
    [
        ({}, 4, r"128 does not divide moe_intermediate_size \(192\) of each of 4 ranks.*fewer ranks"),
        ({"moe_intermediate_size": 704}, 1, r"128 does not divide moe_intermediate_size \(704\)\. Use --q"),
    ],
)
def test_experts_that_would_have_a_part_of_a_group(changed: dict[str, Any], ranks: int, told: str) -> None:
    config = json.loads((QWEN3_AWQ / "config.json").read_text())
    spec = read_spec(config | changed)
    with pytest.raises(ConfigError, match=told):
        shard_spec(msgspec.structs.replace(spec, int4=spec.stored_int4), ranks)
    shard_spec(held(QWEN3_AWQ), 2)


def test_weights_are_counted_before_they_are_read() -> None:
    """Qwen3-30B-A3B: 29.9e9 of 4.25 bits and two tables of 16, 16.0 GiB; 56.9 in bfloat16."""
    plan = plan_memory(held(QWEN3_AWQ), torch.bfloat16, CacheConfig(), 2**37, 2**20)
    assert plan.weight_dtype == "int4"
    assert plan.weights == pytest.approx(29.9e9 * 4.25 / 8 + 2 * 151_936 * 2048 * 2, rel=0.01)
