"""Matrices in int8, of W8A8 checkpoints or by `--quantization int8`, compute what plain torch does with
them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.adapters import LINEAR, AdapterLimits
from core.config import CacheConfig, ModelConfig, ParallelConfig, ScheduleConfig
from core.errors import ConfigError, ModelError
from core.models import ModelSpec, read_spec
from core.models.spec import W8A8, EncoderSpec
from core.plan import Chunk
from core.request import SamplingParams
from gpu.build import Beside, build_executor, spec_of
from gpu.device import CudaFacts
from gpu.kernels.moe.tuned import MoeShape, rule, weight_name
from gpu.layers.moe import expert_scales
from gpu.memory import plan_memory
from gpu.parts import Target
from gpu.quant.scaled import FP8, INT8, integer_sums, quantise, restore
from gpu.shard import Shard
from gpu.weight_formats import choose_fp8, choose_int8, choose_w8a8, shard_spec
from gpu.weights import load_model
from tests.rigs import int8_files, lora, tiny_model
from tests.rigs.arrays import ints
from tests.rigs.driver import Answer, Driver
from tests.rigs.int8_files import CONFIG, changed, install
from tests.rigs.runner import CPU, Rig
from tests.rigs.tiny_model import Tiny

PROMPT = [int(i * 37 % 251) + 3 for i in range(40)]
DOWN = "model.layers.0.mlp.down_proj.weight"
HOPPER = Target(torch.device("cuda"), torch.bfloat16, CudaFacts("", "NVIDIA H200", (9, 0)))


def held(path: Path) -> ModelSpec:
    spec = spec_of(path)
    return msgspec.structs.replace(spec, w8a8=spec.stored_w8a8 or W8A8())


def coarse(name: str, folder: Path, config: dict[str, Any] = CONFIG, **more: Any) -> Tiny:
    """A checkpoint in int8, and transformers' model with the same arithmetic."""
    tiny = tiny_model.build(name, folder, **more)
    install(tiny.reference, int8_files.quantise(folder, config))
    return tiny


@pytest.mark.parametrize("exact", [True, False], ids=["where torch has it", "where it saturates"])
def test_sums_are_exact(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are exact on any CPU, at numbers as large as there are; in parts that float32 has exactly."""
    if not exact:
        monkeypatch.setattr("gpu.quant.scaled.int_mm_is_exact", lambda: False)
    for rows, outputs, inputs in ((0, 16, 16), (1, 64, 1024), (5, 48, 2064), (70, 80, 1040)):
        x, weight = (torch.randint(-127, 128, (n, inputs), dtype=INT8) for n in (rows, outputs))
        x[:2], weight[0], weight[1] = 127, 127, -128
        assert torch.equal(integer_sums(x, weight).double(), x.double() @ weight.double().t())


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("qwen2", CONFIG),
        ("llama", changed(strategy="tensor")),
        ("phi3", CONFIG),
        (
            "llama-tied-bias",
            changed("re:.*down_proj", r"re:.*1\.self_attn\.[qkv]_proj", "model.layers.0.self_attn.o_proj"),
        ),
        ("gemma2", CONFIG),
    ],
    ids=["biases", "tensor", "fused in the checkpoint", "ignored layers", "other norms"],
)
def test_logits_and_text_are_those_of_the_same_arithmetic(
    name: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """The prompt comes in chunks and token by token."""
    tiny = coarse(name, tmp_path, config)
    rig = Rig(tiny.path, spec=held(tiny.path))
    rig.step(chunks=[Chunk(1, 0, ints(PROMPT[:9]), False)], new=[rig.new(1, PROMPT)])
    rig.step(chunks=[Chunk(1, 9, ints(PROMPT[9:]), True)])
    want = tiny_model.logits(tiny.reference, PROMPT)[-1]
    # A number that is nearly halfway may be rounded otherwise.
    assert (rig.watched.seen[0] - want).norm() < 0.01 * want.norm()
    assert rig.generate(2, PROMPT[::-1], 8) == tiny_model.greedy(tiny.reference, PROMPT[::-1], 8)


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("name", ["phi3", "qwen3-moe-mixed", "deepseek-v3"])
def test_numbers_and_scales_are_taken_as_they_are(name: str, strategy: str, tmp_path: Path) -> None:
    """Numbers of experts and of matrices that a checkpoint fuses are taken as they are, too; they are
    dequantised where nothing else is held."""
    sizes = {"q_lora_rank": 32} if name == "deepseek-v3" else {}
    path = tiny_model.build(name, tmp_path, **sizes).path
    numbers = int8_files.quantise(path, changed(strategy=strategy))
    meant = {
        each: weight.float() * numbers[f"{each}_scale"].float().reshape(-1, 1)
        for each, weight in numbers.items()
        if each.endswith(".weight")
    }
    places = load_model(held(path), path, torch.float32, CPU).places()
    plain = load_model(spec_of(path), path, torch.float32, CPU).places()
    kept = {each for each, place in places.items() if place.dtype == INT8}
    left = {each.split(".")[-2] for each in plain if each.endswith("_proj.weight") and each not in kept}
    assert kept and left == ({"kv_b_proj"} if name == "deepseek-v3" else set())  # which is not multiplied so
    for each in kept:
        torch.testing.assert_close(restore(places[each], places[f"{each}_scale"]), plain[each])
    for each in meant.keys() & plain.keys():
        assert torch.equal(plain[each], meant[each])
        if each in kept:
            assert torch.equal(places[each], numbers[each])
    if name == "phi3":
        own = "model.layers.0.self_attn."
        parts = [places[f"{own}{part}_proj.weight"] for part in "qkv"]
        assert torch.equal(torch.cat(parts), numbers[f"{own}qkv_proj.weight"])


def test_experts_that_a_checkpoint_leaves_are_held_as_they_are(tmp_path: Path) -> None:
    path = tiny_model.build("qwen3-moe-mixed", tmp_path).path
    int8_files.quantise(path, changed("re:.*experts.*"))
    spec = held(path)
    assert spec.moe is not None and expert_scales(spec, spec.moe) is None
    places = load_model(spec, path, torch.float32, CPU).places()
    assert {place.dtype for name, place in places.items() if ".experts." in name} == {torch.float32}
    assert places["model.layers.0.self_attn.o_proj.weight"].dtype == INT8


def test_a_layer_that_is_neither_quantised_nor_ignored_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_model.build("llama", tmp_path).path
    plain = load_file(path / "model.safetensors")[DOWN]
    int8_files.quantise(path, CONFIG)
    weights = load_file(path / "model.safetensors")
    save_file({**weights, DOWN: plain}, path / "model.safetensors", metadata={"format": "pt"})
    places = load_model(held(path), path, torch.float32, CPU).places()
    (told,) = caplog.messages
    assert told.startswith("1 matrices are not in 8 bits") and DOWN in told
    assert torch.equal(places[DOWN], quantise(plain, INT8)[0])
    del weights[f"{DOWN}_scale"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"{DOWN} has 8 bits and no scale"):
        load_model(held(path), path, torch.float32, CPU)


@pytest.mark.parametrize("dummy", [False, True], ids=["read", "random"])
def test_ranks_have_what_is_theirs(dummy: bool, tmp_path: Path) -> None:
    path = tiny_model.build("qwen3-moe-mixed", tmp_path).path
    int8_files.quantise(path, CONFIG)
    source = None if dummy else path
    whole = load_model(held(path), source, torch.float32, CPU).places()
    for rank in range(2):
        own = load_model(shard_spec(held(path), 2), source, torch.float32, CPU, shard=Shard(rank, 2))
        places = own.places()
        assert any(place.dtype == INT8 for place in places.values())
        for name, place in places.items():
            if dummy and place.dtype == INT8:
                want, got = (restore(each[name], each[f"{name}_scale"]) for each in (whole, places))
                part = own.slices.get(name)
                want = want if part is None else part.of(want)
                torch.testing.assert_close(got, want, atol=2e-3, rtol=0)  # each has scales of its part
            elif not name.endswith("_scale") or not dummy:
                part = own.slices.get(name)
                assert torch.equal(place, whole[name] if part is None else part.of(whole[name])), name


# -- the whole engine --------------------------------------------------------------------------------

PROMPTS = [[int(i * 37 % 241) + 3 for i in range(n)] for n in (90, 23, 40)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=0),
    SamplingParams(temperature=0.8, seed=5, max_tokens=20, logprobs=0),
    SamplingParams(temperature=0.0, max_tokens=6, logprobs=0),
]
SCHEDULE = ScheduleConfig(step_tokens=32, max_running=4, prefill_weight=0)


def driver(path: Path, quantization: Any = "auto", tp: int = 1, adapts: bool = False) -> Driver:
    limits = AdapterLimits(places=1, max_rank=8, host=2, targets=LINEAR) if adapts else None
    beside = Beside(parallel=ParallelConfig(tp=tp), adapters=limits)
    model, cache = (
        ModelConfig(device="cpu", quantization=quantization),
        CacheConfig(page_size=4, kv_tokens=2048),
    )
    made = build_executor(spec_of(path), path, model, cache, SCHEDULE, lambda stage, share: None, beside)
    made.prepare(lambda share: None)
    assert made.capabilities.weight_dtype == ("float32" if quantization == "none" else "int8")
    return Driver(made, SCHEDULE)


def answers(path: Path, quantization: Any = "auto", tp: int = 1, adapter: Path | None = None) -> list[Answer]:
    """Answers to prompts in chunks beside decode rows."""
    own = driver(path, quantization, tp, adapter is not None)
    try:
        if adapter is None:
            return own.run(PROMPTS, PARAMS)
        own.load("one", adapter)
        return own.run(PROMPTS, PARAMS, adapters=["one", "", "one"])
    finally:
        own.close()


def agree(tiny: Tiny, found: list[Answer]) -> None:
    """Greedy text is that of transformers, which `tiny` computes alike."""
    for prompt, params, answer in zip(PROMPTS, PARAMS, found, strict=True):
        if not params.temperature:
            assert answer.tokens == tiny_model.greedy(tiny.reference, prompt, params.max_tokens)


@pytest.mark.parametrize("online", [False, True], ids=["checkpoint", "while loading"])
@pytest.mark.parametrize("tp", [1, 2])
def test_text_by_all_layers(online: bool, tp: int, tmp_path: Path) -> None:
    """Each of two ranks quantises what it has of a token, and of a weight."""
    tiny = tiny_model.build("qwen2", tmp_path)
    numbers = int8_files.by_row(tiny.reference, tp) if online else int8_files.quantise(tmp_path, CONFIG)
    install(tiny.reference, numbers, tp)
    agree(tiny, answers(tiny.path, "int8" if online else "auto", tp))


def test_adapters_change_it(tmp_path: Path) -> None:
    """Their deltas are of rows that are not quantised."""
    tiny = tiny_model.build("qwen3", tmp_path / "model", num_hidden_layers=2)
    made = lora.adapter_for(tiny.path)
    install(tiny.reference, int8_files.quantise(tiny.path, CONFIG), adapter=made)
    with_adapter = answers(tiny.path, adapter=lora.save(made, tmp_path / "lora"))
    agree(tiny, with_adapter)
    assert answers(tiny.path)[0].tokens != with_adapter[0].tokens


@pytest.mark.parametrize("online", [False, True], ids=["checkpoint", "while loading"])
def test_weights_are_updated(online: bool, tmp_path: Path) -> None:
    tiny, other = (tiny_model.build("llama", tmp_path / name) for name in ("one", "other"))
    weights = load_file(other.path / "model.safetensors")
    changed_weights = {name: w.flip(0) if "_proj" in name else w for name, w in weights.items()}
    save_file({n: w.contiguous() for n, w in changed_weights.items()}, other.path / "model.safetensors")
    if not online:
        for each in (tiny, other):
            int8_files.quantise(each.path, CONFIG)
    kind = "int8" if online else "auto"
    want, before = answers(other.path, kind), answers(tiny.path, kind)
    own = driver(tiny.path, kind)
    try:
        own.reload(other.path)
        found = own.run(PROMPTS, PARAMS)
    finally:
        own.close()
    assert [each.tokens for each in found] == [each.tokens for each in want]
    assert found[0].tokens != before[0].tokens


def test_none_dequantises(tmp_path: Path) -> None:
    path = tiny_model.build("llama", tmp_path).path
    int8_files.quantise(path, CONFIG)
    driver(path, "none").close()


# -- what is held, and what is refused ---------------------------------------------------------------


def test_who_holds_it(tmp_path: Path) -> None:
    path = tiny_model.build("llama", tmp_path).path
    plain, cpu = spec_of(path), HOPPER._replace(device=CPU, dtype=torch.float32)
    int8_files.quantise(path, changed("re:.*down_proj"))
    stored = spec_of(path)
    auto, asked, none = (ModelConfig(quantization=each) for each in ("auto", "int8", "none"))
    older = HOPPER._replace(dtype=torch.float16, facts=CudaFacts("", "NVIDIA A100", (8, 0)))
    for target in (cpu, HOPPER, older):
        assert [choose_w8a8(plain, each, target) for each in (auto, asked, none)] == [None, W8A8(), None]
        found = [choose_w8a8(stored, each, target) for each in (auto, asked, none)]
        assert found == [stored.stored_w8a8, stored.stored_w8a8, None]
        assert not choose_fp8(msgspec.structs.replace(plain, stored_fp8="rows"), asked, target)
    gguf = msgspec.structs.replace(plain, stored_gguf=True)  # who asks has rows of 8 bits, too
    assert not choose_int8(gguf, asked, cpu) and not choose_int8(stored, auto, cpu)
    encoder = msgspec.structs.replace(stored, encoder=EncoderSpec(token_types=2))
    assert choose_w8a8(encoder, auto, cpu) is None
    with pytest.raises(ConfigError, match="--quantization int8 is refused: LlamaForCausalLM is an encoder"):
        choose_w8a8(encoder, asked, cpu)
    with pytest.raises(ConfigError, match=r"--quantization int8 is refused: .*runs through transformers"):
        choose_w8a8(msgspec.structs.replace(plain, transformers="{}"), asked, cpu)
    assert choose_fp8(stored, ModelConfig(quantization="fp8"), HOPPER) == "rows"
    kept = msgspec.structs.replace(stored, fp8="rows")
    assert load_model(kept, path, torch.float32, CPU).places()[DOWN].dtype == FP8


def test_memory_is_a_byte_a_weight(tmp_path: Path) -> None:
    spec = spec_of(tiny_model.build("llama", tmp_path).path)
    cache, sizes = CacheConfig(kv_tokens=64), (torch.float32, 1 << 30, 512)
    plans = [
        plan_memory(each, sizes[0], cache, *sizes[1:])
        for each in (spec, msgspec.structs.replace(spec, w8a8=W8A8()))
    ]
    assert [plan.weight_dtype for plan in plans] == ["float32", "int8"]
    matrices = spec.num_parameters() - spec.table_parameters()
    assert plans[0].weights - plans[1].weights == 3 * matrices


def test_tiles_of_experts_fit_devices_with_less_room() -> None:
    """Tiles of e4m3 are for Hopper."""
    shape = MoeShape(128, 768, 2048, 8, weight_name(W8A8(), "bfloat16"), "NVIDIA A100")
    for tokens in (8, 256, 512, 4096):
        small, deep = rule(shape, tokens), rule(shape, tokens, deep=True)
        assert deep == rule(shape._replace(dtype=weight_name("rows", "bfloat16")), tokens, deep=True)
        for cut, weights in ((small.up, 2), (small.down, 1)):
            assert not cut.tma
            assert (small.block_m + weights * cut.block_n) * cut.block_k * cut.stages <= 99 * 1024


def scheme(part: str = "weights", **fields: object) -> dict[str, Any]:
    """`CONFIG` with other fields in a part of its group."""
    config = deepcopy(CONFIG)
    config["config_groups"]["group_0"][part] |= fields
    return config


REFUSED = {
    "static activations": (scheme("input_activations", dynamic=False, strategy="tensor"), "dynamic False"),
    "by tensor": (scheme("input_activations", strategy="tensor"), "strategy 'tensor' is not served, 'token'"),
    "asymmetric rows": (scheme("input_activations", symmetric=False), "input_activations: symmetric False"),
    "asymmetric": (scheme(symmetric=False), "weights: symmetric False"),
    "groups": (scheme(strategy="group", group_size=128), "strategy 'group' is not served, 'channel' or"),
    "w4a8": (scheme(num_bits=4), "num_bits 4 is not served, 8"),
    "no groups": (CONFIG | {"config_groups": {}}, "config_groups {}"),
    "pages": (CONFIG | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "quant_method 'bitsandbytes'"),
}


@pytest.mark.parametrize(("config", "told"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_names_the_field_and_what_is_served(config: dict[str, Any], told: str) -> None:
    served = r"Served are FP8 .*, int8 \(compressed-tensors int-quantized, W8A8\) and 4 bits"
    with pytest.raises(ModelError, match=rf"config.json: quantization_config: .*{told}.*{served}"):
        read_spec({"architectures": ["LlamaForCausalLM"], "quantization_config": config})
