"""Checkpoints in 4 bits run as the weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import reduce
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
from gpu.build import Beside, build_executor, model_spec, spec_of
from gpu.device import CudaFacts
from gpu.memory import plan_memory
from gpu.parts import Target
from gpu.quant.int4 import restore
from gpu.shard import ALONE, Shard
from gpu.weight_formats import choose_fp8, choose_int4, shard_spec
from gpu.weights import load_model
from gpu.weights.files import table_in_files
from tests.rigs import int8_files, lora, tiny_model
from tests.rigs.driver import Answer, Driver
from tests.rigs.int4_files import (
    KINDS,
    WIDE,
    WIDE_HYBRID,
    Kind,
    awq,
    change,
    gptq,
    pack_quantized,
    plain_of,
    quantise,
)
from tests.rigs.runner import CPU
from tests.rigs.tree import ROOT

AWQ = KINDS["awq"]
LAYER = "model.layers.0.mlp.down_proj"
QWEN3_AWQ = ROOT / "configs/models/qwen3-8b-awq"
HOPPER = Target(torch.device("cuda"), torch.bfloat16, CudaFacts("", "NVIDIA H200", (9, 0)))


def held(path: Path) -> ModelSpec:
    """The spec of a checkpoint as a GPU holds it: in 4 bits."""
    spec = spec_of(path)
    assert spec.stored_int4 is not None
    return msgspec.structs.replace(spec, int4=spec.stored_int4)


def weights(places: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Dequantised weights of a place of 4 bits."""
    return restore(places[name], places[name + "_scale"].transpose(0, 1))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_each_format_is_what_it_stands_for(kind: Kind, tmp_path: Path) -> None:
    """Dequantised, as on a CPU, and repacked, as on a GPU."""
    path = tiny_model.build("llama", tmp_path, **WIDE).path
    meant = quantise(path, kind)
    plain = load_model(spec_of(path), path, torch.float32, CPU).places()
    places = load_model(held(path), path, torch.float32, CPU).places()
    assert plain.keys() == meant.keys()
    for name, weight in meant.items():
        torch.testing.assert_close(plain[name], weight, rtol=1e-6, atol=1e-7)
        if "_proj" in name:
            assert places[name].dtype == torch.int16
            torch.testing.assert_close(weights(places, name), weight, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(places[name], weight), "tables, norms and the head stay as they are"


def test_zero_points_of_gptq_are_up_to_16(tmp_path: Path) -> None:
    """Stored less 1, 15 stands for 16."""
    path = tiny_model.build("llama", tmp_path, **WIDE).path
    meant = quantise(path, KINDS["gptq"])[f"{LAYER}.weight"]
    name = f"{LAYER}.qzeros"
    change(path, name, torch.full((8, 16), -1, dtype=torch.int32))
    found = weights(load_model(held(path), path, torch.float32, CPU).places(), f"{LAYER}.weight")
    assert float(found.max()) < 0 < float(meant.max()), "no number is above 15"


@pytest.mark.parametrize(
    ("variant", "kind"),
    [("qwen2", AWQ), ("phi3", KINDS["gptq"]), ("gemma2", KINDS["w4a16"])],
    ids=["biases", "fused in the checkpoint", "other norms"],
)
def test_other_families(variant: str, kind: Kind, tmp_path: Path) -> None:
    path = tiny_model.build(variant, tmp_path / "fine", **WIDE, sliding_window=20).path
    plain = plain_of(path, quantise(path, kind), tmp_path / "plain")
    want = load_model(spec_of(plain), plain, torch.float32, CPU).places()
    places = load_model(held(path), path, torch.float32, CPU).places()
    for name, weight in want.items():
        found = weights(places, name) if places[name].dtype == torch.int16 else places[name]
        torch.testing.assert_close(found, weight, rtol=1e-6, atol=1e-7)


HYBRIDS = ["qwen3-next", "qwen3.5", "qwen3.5-moe"]


@pytest.mark.parametrize("kind", [AWQ, KINDS["gptq"], KINDS["w4a16"]], ids=["awq", "gptq", "w4a16"])
@pytest.mark.parametrize("variant", HYBRIDS)
def test_linear_attention(variant: str, kind: Kind, tmp_path: Path) -> None:
    """The wide projections and the output are held in 4 bits, also where ranks divide queries, keys and
    values apart; what makes decays and gates has few outputs and stays."""
    path = tiny_model.build(variant, tmp_path / "fine", **WIDE_HYBRID).path
    plain = plain_of(path, quantise(path, kind), tmp_path / "plain")
    for shard in (ALONE, Shard(0, 2), Shard(1, 2)):
        want, found = (
            load_model(shard_spec(spec, shard.ranks), where, torch.float32, CPU, shard=shard).places()
            for spec, where in ((spec_of(plain), plain), (held(path), path))
        )
        fine = {name for name, place in found.items() if place.dtype == torch.int16}
        own = {name.rpartition("linear_attn.")[2] for name in fine if "linear_attn" in name}
        apart = ("in_proj_q", "in_proj_k", "in_proj_v") if shard.ranks > 1 else ("in_proj_qkv",)
        wide = ("in_proj_qkvz",) if variant == "qwen3-next" else (*apart, "in_proj_z")
        assert own == {f"{name}.weight" for name in (*wide, "out_proj")}
        for name, weight in want.items():
            is_fine = found[name].dtype == torch.int16
            one = weights(found, name) if is_fine else found[name]
            torch.testing.assert_close(one, weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (AWQ, {"modules_to_not_convert": ["linear_attn.in_proj_qkv"]}),
        (KINDS["gptq"], {"dynamic": {"-:.*linear_attn.in_proj_qkv": {}}}),
        (
            KINDS["w4a16"],
            {"ignore": ["lm_head", *(f"model.layers.{at}.linear_attn.in_proj_qkv" for at in (0, 2))]},
        ),
    ],
    ids=["awq", "gptq", "w4a16"],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_linear_attention_that_is_excepted(
    kind: Kind, config: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    """By the name that the checkpoint has, which is that of a rank's three parts too."""
    path = tiny_model.build("qwen3.5", tmp_path, **WIDE_HYBRID).path
    quantise(path, kind, ("in_proj_qkv",), **config)
    spec, shard = shard_spec(held(path), ranks), Shard(0, ranks)
    places = load_model(spec, path, torch.float32, CPU, shard=shard).places()
    fine = {name for name, place in places.items() if place.dtype == torch.int16}
    assert {name for name in fine if "linear_attn" in name} == {
        f"model.layers.{at}.linear_attn.out_proj.weight" for at in (0, 2)
    }, "a matrix of which one part is not quantised is held as that part is"


def test_layers_that_a_checkpoint_excepts(tmp_path: Path) -> None:
    """A matrix of which one part is not quantised is held as that part is."""
    path = tiny_model.build("llama", tmp_path, **WIDE).path
    meant = quantise(
        path,
        AWQ,
        ("0.self_attn.q_proj", "down_proj"),
        modules_to_not_convert=["0.self_attn.q_proj", "down_proj"],
    )
    places = load_model(held(path), path, torch.float32, CPU).places()
    fine = {name for name, place in places.items() if place.dtype == torch.int16}
    assert not any("down_proj" in name or "0.self_attn.k_proj" in name for name in fine)
    assert "model.layers.1.self_attn.q_proj.weight" in fine
    for name in meant.keys() - fine:
        torch.testing.assert_close(places[name], meant[name], rtol=1e-6, atol=1e-7)


def test_layers_that_a_checkpoint_excepts_where_it_stacks_matrices(tmp_path: Path) -> None:
    path = tiny_model.build("phi3", tmp_path, **WIDE).path
    quantise(path, AWQ, ("1.self_attn.qkv_proj",), modules_to_not_convert=["layers.1.self_attn.qkv_proj"])
    places = load_model(held(path), path, torch.float32, CPU).places()
    kinds = [places[f"model.layers.{layer}.self_attn.k_proj.weight"].dtype for layer in range(2)]
    assert kinds == [torch.int16, torch.float32]


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (KINDS["w4a16"], {"ignore": ["lm_head", "re:.*down_proj"]}),
        (KINDS["gptq"], {"dynamic": {r"-:.*\.down_proj$": {}}}),
    ],
    ids=["ignore", "dynamic"],
)
def test_layers_by_expression(kind: Kind, config: dict[str, Any], tmp_path: Path) -> None:
    path = tiny_model.build("llama", tmp_path, **WIDE).path
    quantise(path, kind, ("down_proj",), **config)
    places = load_model(held(path), path, torch.float32, CPU).places()
    assert {places[f"{LAYER}.weight"].dtype, places["model.layers.0.mlp.up_proj.weight"].dtype} == {
        torch.float32,
        torch.int16,
    }


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_rank_has_its_part(kind: Kind, tmp_path: Path) -> None:
    path = tiny_model.build("llama", tmp_path, **WIDE).path
    meant = quantise(path, kind)
    for rank in range(2):
        model = load_model(shard_spec(held(path), 2), path, torch.float32, CPU, shard=Shard(rank, 2))
        places = model.places()
        for name, weight in meant.items():
            own = weight if (part := model.slices.get(name)) is None else part.of(weight)
            found = weights(places, name) if places[name].dtype == torch.int16 else places[name]
            torch.testing.assert_close(found, own, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_slabs_make_no_difference(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.weights.int4.SLAB", 1)
    path = tiny_model.build("llama", tmp_path, **WIDE).path
    meant = quantise(path, kind)[f"{LAYER}.weight"]
    for spec in (spec_of(path), held(path)):
        places = load_model(spec, path, torch.float32, CPU).places()
        fine = places[f"{LAYER}.weight"].dtype == torch.int16
        found = weights(places, f"{LAYER}.weight") if fine else places[f"{LAYER}.weight"]
        torch.testing.assert_close(found, meant, rtol=1e-6, atol=1e-7)


def test_random_weights(tmp_path: Path) -> None:
    """A rank has its part of what one alone would have."""
    path = tiny_model.build("llama", tmp_path, **WIDE).path
    quantise(path, AWQ)
    whole = load_model(held(path), None, torch.float32, CPU).places()
    assert 0.015 < float(weights(whole, f"{LAYER}.weight").std()) < 0.025
    model = load_model(shard_spec(held(path), 2), None, torch.float32, CPU, shard=Shard(1, 2))
    for name, place in model.places().items():
        if place.dtype == torch.int16:
            want = model.slices[name].of(weights(whole, name))
            torch.testing.assert_close(weights(model.places(), name), want)


# -- the whole engine --------------------------------------------------------------------------------

PROMPTS = [[int(i * 37 % 241) + 3 for i in range(n)] for n in (90, 23, 40)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=2),
    SamplingParams(temperature=0.8, seed=5, max_tokens=20, logprobs=0),
    SamplingParams(temperature=0.0, max_tokens=6, logprobs=0),
]
LIMITS = AdapterLimits(places=1, max_rank=8, host=2, targets=LINEAR)


def answers(path: Path, tp: int = 1, adapter: Path | None = None) -> list[Answer]:
    """Answers to prompts in chunks beside decode rows, by exact products."""
    schedule = ScheduleConfig(step_tokens=32, max_running=4)
    beside = Beside(parallel=ParallelConfig(tp=tp), adapters=None if adapter is None else LIMITS)
    model, cache = ModelConfig(device="cpu", quantization="none"), CacheConfig(page_size=4, kv_tokens=2048)
    made = build_executor(spec_of(path), path, model, cache, schedule, lambda stage, share: None, beside)
    made.prepare(lambda share: None)
    driver = Driver(made, schedule)
    try:
        if adapter is None:
            return driver.run(PROMPTS, PARAMS)
        driver.load("one", adapter)
        return driver.run(PROMPTS, PARAMS, adapters=["one", "", "one"])
    finally:
        driver.close()


@pytest.mark.parametrize("served", ["dequantised", "in 4 bits"])
@pytest.mark.parametrize(
    ("variant", "kind", "tp", "adapts"),
    [
        ("qwen3", AWQ, 1, True),
        ("qwen3", KINDS["gptq"], 2, False),
        ("qwen3", KINDS["w4a16"], 1, False),
        ("qwen3-next", AWQ, 1, False),
        ("qwen3.5", KINDS["gptq"], 2, False),
        ("qwen3.5-moe", KINDS["w4a16"], 1, False),
    ],
)
def test_text_is_that_of_the_plain_weights(
    variant: str,
    kind: Kind,
    tp: int,
    adapts: bool,
    served: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By all layers: dequantised while loading, and by the twin of the kernels."""
    sizes = WIDE_HYBRID if variant in HYBRIDS else WIDE
    path = tiny_model.build(variant, tmp_path / "fine", **sizes).path
    plain = plain_of(path, quantise(path, kind), tmp_path / "plain")
    adapter = lora.save(lora.adapter_for(plain), tmp_path / "lora") if adapts else None
    want = answers(plain, adapter=adapter)
    if served == "in 4 bits":
        monkeypatch.setattr("gpu.build.choose_int4", lambda spec, model, target: spec.stored_int4)
    for one, other in zip(want, answers(path, tp, adapter), strict=True):
        assert other.tokens == one.tokens
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-3)


# -- what does not match -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "last", "tensor", "told"),
    [
        (AWQ, "scales", None, rf"{LAYER} is quantised \(awq\) and has no {LAYER}\.scales"),
        (AWQ, "qzeros", torch.zeros(8, 8), rf"{LAYER}\.qzeros \[8, 8\] instead of \[8, 16\]"),
        (AWQ, "qweight", torch.zeros(128, 256), rf"{LAYER}\.qweight \[128, 256\] instead of \[256, 16\]"),
        (AWQ, "qweight", None, rf"tensors missing: {LAYER}\.weight"),
        (KINDS["gptq"], "g_idx", torch.arange(256) % 8, rf"{LAYER}\.g_idx puts inputs that"),
        (KINDS["gptq"], "g_idx", torch.ones(256, dtype=torch.bool), rf"{LAYER}\.g_idx puts inputs that"),
        (KINDS["w4a16"], "weight_zero_point", None, rf"no {LAYER}\.weight_zero_point"),
        (AWQ, "qweight", torch.zeros(256, 16), rf"{LAYER}\.qweight is torch.float32 instead of torch.int32"),
        (AWQ, "scales", torch.ones(8, 128, dtype=torch.int32), r"scales is torch.int32 instead of floats"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(
    kind: Kind, last: str, tensor: torch.Tensor | None, told: str, tmp_path: Path
) -> None:
    path = tiny_model.build("llama", tmp_path, **WIDE).path
    quantise(path, kind)
    change(path, f"{LAYER}.{last}", tensor)
    for spec in (spec_of(path), held(path)):
        with pytest.raises(ModelError, match=told):
            load_model(spec, path, torch.float32, CPU)


def test_a_norm_in_4_bits(tmp_path: Path) -> None:
    path = tiny_model.build("llama", tmp_path, **WIDE).path
    quantise(path, AWQ)
    change(path, "model.norm.weight", torch.zeros(16, dtype=torch.int32), "model.norm.qweight")
    for spec in (spec_of(path), held(path)):
        with pytest.raises(ModelError, match=r"model\.norm is quantised \(awq\) and is no matrix here"):
            load_model(spec, path, torch.float32, CPU)


def test_a_layer_that_is_not_quantised_and_not_excepted(tmp_path: Path) -> None:
    path = tiny_model.build("llama", tmp_path, **WIDE).path
    quantise(path, AWQ, ("down_proj",))
    with pytest.raises(ModelError, match=r"down_proj\.weight is not quantised, .*does not except it"):
        load_model(held(path), path, torch.float32, CPU)
    load_model(spec_of(path), path, torch.float32, CPU)  # in 32 bits it is one like the others


def test_a_bias_of_a_layer_that_has_none(tmp_path: Path) -> None:
    """AutoGPTQ writes zeros, which `quantise` has; anything else belongs to another architecture."""
    path = tiny_model.build("llama", tmp_path, **WIDE).path
    quantise(path, KINDS["gptq"])
    load_model(held(path), path, torch.float32, CPU)
    change(path, f"{LAYER}.bias", torch.ones(128))
    with pytest.raises(ModelError, match=rf"not part of this architecture: {LAYER}\.bias"):
        load_model(held(path), path, torch.float32, CPU)


@pytest.mark.parametrize("damage", ["empty", "pointer", "cut", "another"])
def test_a_damaged_shard_of_the_embedding_is_named(damage: str, tmp_path: Path) -> None:
    """The embedding's rows stay in the file, whose header is read apart from the other weights."""
    path = tiny_model.build("llama", tmp_path, **WIDE).path
    quantise(path, KINDS["awq"])
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    shard = path / index["model.embed_tokens.weight"]
    other = next(path / name for name in index.values() if name != shard.name)
    found = {
        "empty": b"",
        "pointer": b"version https://git-lfs.github.com/spec/v1\n",
        "cut": shard.read_bytes()[:50],
        "another": other.read_bytes(),
    }
    shard.write_bytes(found[damage])
    with pytest.raises(ModelError, match=shard.name):
        table_in_files(path)


# -- what is refused, before anything is read ---------------------------------------------------------


def changed(kind: Callable[..., Any], **fields: Any) -> dict[str, Any]:
    """The quantization_config of a format with other fields."""
    return {**Kind(kind, 128, True).config, **fields}


def scheme(**fields: Any) -> dict[str, Any]:
    """The quantization_config of compressed-tensors with other fields of the weights."""
    found = Kind(pack_quantized, 128).config
    found["config_groups"]["group_0"]["weights"] |= fields
    return found


REFUSED = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'"),
    "mxfp4": ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
    "no method": ({"bits": 4}, "quant_method None"),
    "awq for gemv": (changed(awq, version="gemv"), "version 'gemv' is not served, 'gemm'"),
    "awq without zeros": (changed(awq, zero_point=False), "zero_point False"),
    "awq, 16": (changed(awq, group_size=16), "group_size 16 is not served, 32 or 64 or 128 or -1 is"),
    "gptq in 8 bits": (changed(gptq, bits=8), "bits 8 is not served, 4 is"),
    "gptq in 3 bits": (changed(gptq, bits=3), "bits 3"),
    "act-order": (changed(gptq, desc_act=True), r"desc_act True is not served, false \(groups of"),
    "marlin": (changed(gptq, checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
    "head": (changed(gptq, lm_head=True), "lm_head True"),
    "dynamic": (changed(gptq, dynamic={"-:x": {}, "+:y": {"bits": 8}}), "dynamic .* that begin with '-:'"),
    "no expression of gptq": (changed(gptq, dynamic={"-:(": {}}), r"dynamic '\(' .* a regular expression"),
    "w8a8 and w4a16": (changed(pack_quantized, format="mixed-precision"), "format 'mixed-precision'"),
    "w8a16": (scheme(num_bits=8), "num_bits 8"),
    "w4a16 by tensor": (scheme(strategy="tensor"), "strategy 'tensor' is not served, 'group' or 'channel'"),
    "w4a16 with act-order": (scheme(actorder="group"), "actorder 'group'"),
    "sparse": (changed(pack_quantized, sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24"),
    "rotated": (changed(pack_quantized, transform_config={"config_groups": {}}), "transform_config"),
    "no expression": (changed(pack_quantized, ignore=["lm_head", "re:("]), "ignore 're:"),
    "head of w4a16": (changed(pack_quantized, ignore=[]), "ignore"),
    "fp8 by 64": ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "told"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_names_the_field_and_what_is_served(config: dict[str, Any], told: str) -> None:
    with pytest.raises(
        ModelError, match=rf"config.json: quantization_config: .*{told}.*Served are FP8 .* 4 bits \(awq"
    ):
        read_spec({"architectures": ["LlamaForCausalLM"], "quantization_config": config})


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    "told", [*(kind.config for kind in KINDS.values()), FP8, int8_files.CONFIG], ids=[*KINDS, "fp8", "w8a8"]
)
def test_any_field_may_be_missing_or_of_another_type(told: dict[str, Any]) -> None:
    """The checkpoint is served or refused by name: nothing else is raised."""
    served, qwen3 = 0, json.loads((QWEN3_AWQ / "config.json").read_text())
    for path in (*fields_of(told), ("config_groups",), ("ignore",), ("modules_to_not_convert",)):
        for value in (None, True, 4, -1, 10**30, 0.5, "4", [], [None], {}, {"a": 1}, {"a": {}}):
            config = deepcopy(told)
            inner = reduce(dict.__getitem__, path[:-1], config)
            inner[path[-1]] = value
            try:
                spec = model_spec(qwen3 | {"quantization_config": config})
                served += bool(spec.stored_int4) + bool(spec.stored_fp8) + bool(spec.stored_w8a8) == 1
            except ModelError as error:
                assert str(error).startswith("config.json: ")
    assert served > 0


def fields_of(told: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Paths of an object's fields, those of nested objects too."""
    for name, value in told.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *rest) for rest in fields_of(value))


@pytest.mark.parametrize("architecture", ["GptOssForCausalLM", "BertModel"])
def test_architectures_that_are_refused_by_name(architecture: str) -> None:
    with pytest.raises(ModelError, match=f"awq is not served of {architecture}"):
        read_spec({"architectures": [architecture], "quantization_config": AWQ.config})


# -- on a GPU -----------------------------------------------------------------------------------------


def test_where_4_bits_are_held(tmp_path: Path) -> None:
    path = tiny_model.build("llama", tmp_path, **WIDE).path
    quantise(path, AWQ)
    spec, auto = spec_of(path), ModelConfig()
    assert choose_int4(spec, auto, HOPPER) == choose_int4(spec, auto, HOPPER._replace(dtype=torch.float16))
    assert choose_int4(spec, auto, HOPPER) == spec.stored_int4
    assert choose_int4(spec, auto, HOPPER._replace(dtype=torch.float32)) is None
    assert choose_int4(spec, auto, HOPPER._replace(device=CPU)) is None
    assert choose_int4(spec, ModelConfig(quantization="none"), HOPPER) is None
    asked = ModelConfig(quantization="fp8")
    assert (choose_int4(spec, asked, HOPPER), choose_fp8(spec, asked, HOPPER)) == (None, "rows")


def test_ranks_that_would_have_a_part_of_a_group(tmp_path: Path) -> None:
    path = tiny_model.build("llama", tmp_path, **WIDE).path
    quantise(path, AWQ)
    shard_spec(held(path), 2)
    told = r"128 does not divide queries \(64\), intermediate_size \(64\) of each of 4 ranks.*fewer ranks"
    with pytest.raises(ConfigError, match=told):
        shard_spec(held(path), 4)


def test_weights_are_counted_before_they_are_read() -> None:
    """Qwen3-8B: 6.95e9 of 4.25 bits and two tables of 16."""
    plan = plan_memory(held(QWEN3_AWQ), torch.bfloat16, CacheConfig(), 2**37, 2**20)
    assert plan.weight_dtype == "int4"
    assert plan.weights == pytest.approx(6.95e9 * 4.25 / 8 + 2 * 151_936 * 4096 * 2, rel=0.01)
    told = json.loads((QWEN3_AWQ / "config.json").read_text())
    assert told["quantization_config"]["quant_method"] == "awq"
