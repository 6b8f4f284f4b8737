"""FP8 checkpoints run as the numbers that they stand for, wherever their scales lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from core.errors import ModelError
from core.models import Fp8, ModelSpec
from gpu.build import spec_of
from gpu.context import ForwardContext
from gpu.kv.pool import KvPool
from gpu.layers import Linear
from gpu.layers.moe import expert_scales
from gpu.ops import TorchOps
from gpu.quant.scaled import FP8, quantise, quantise_blocks, restore
from gpu.state.view import StepView
from gpu.thread import device_thread
from gpu.weights import load_model
from gpu.weights.fill import Filler
from gpu.weights.fp8 import as_place_scale, dequantise, store
from tests.rigs import tiny_model
from tests.rigs.fp8_files import TOP, Quantise, per_block, per_channel, per_tensor, quantised, spread
from tests.rigs.runner import CPU, Rig


@pytest.mark.parametrize("of", [per_tensor, per_channel, per_block])
@pytest.mark.parametrize("shape", [(300, 200), (128, 256), (5, 7), (2, 256)])
def test_numbers_times_scales(of: Quantise, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    scale = of(weight)
    stored = (weight / spread(scale, weight.shape)).to(FP8)
    found = dequantise("w", stored, scale)
    torch.testing.assert_close(found, stored.float() * spread(scale, weight.shape))
    # e4m3 keeps three bits: half a step is a sixteenth.
    torch.testing.assert_close(found, weight, rtol=1 / 16, atol=float(scale.max()) / 2**9)


def test_what_a_checkpoint_left_in_16_bits_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny_model.build("qwen3-moe-wide", tmp_path).path
    left = "model.layers.0.mlp.down_proj.weight"
    plain = load_file(path / "model.safetensors")[left]
    quantised(path, per_block, "_scale_inv", {"quant_method": "fp8", "weight_block_size": [128, 128]})
    load_model(held(path), path, torch.float32, CPU)
    assert not caplog.messages
    weights = load_file(path / "a.safetensors")
    save_file({**weights, left: plain}, path / "a.safetensors", metadata={"format": "pt"})
    places = load_model(held(path), path, torch.float32, CPU).places()
    (told,) = caplog.messages
    assert told.startswith("1 matrices") and left in told
    found = restore(places[left], places[left + "_scale"])
    torch.testing.assert_close(found, plain, rtol=1 / 16, atol=float(plain.abs().max()) / TOP)
    caplog.clear()
    load_model(msgspec.structs.replace(held(path), fp8="rows"), path, torch.float32, CPU)
    assert not caplog.messages, "asked for"


def test_a_scale_that_does_not_fit() -> None:
    with pytest.raises(ModelError, match=r"w \[300, 200\] has scales \[3, 3\]"):
        dequantise("w", torch.zeros(300, 200).to(FP8), torch.ones(3, 3))


def exact(tokens: int) -> StepView:
    """A view of so many tokens, of whose tensors nothing is read."""
    blank = torch.zeros(0, dtype=torch.int32)
    return StepView(tokens, 0, 1, *[blank] * 11)


class Causal:
    """Attention over one text that is all there."""

    def bind(self, pool: KvPool | None) -> None: ...

    def plan(self, view: StepView) -> None: ...

    def store(self, layer: int, kv: torch.Tensor) -> None:
        self.kv = kv

    def attend(
        self, layer: int, q: torch.Tensor, view: StepView, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        k, v = self.kv.transpose(0, 1).transpose(1, 2).unbind(0)
        out = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True, enable_gqa=True)
        return out.transpose(0, 1).flatten(1)


BLOCKS = {
    "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
}
CHANNEL = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}


@pytest.mark.parametrize(
    ("of", "suffix", "config"),
    [
        (per_block, "_scale_inv", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        (per_tensor, "_scale", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
        (per_channel, "_scale", {"quant_method": "compressed-tensors", "config_groups": {"g": CHANNEL}}),
    ],
    ids=["block", "tensor", "channel"],
)
def test_a_checkpoint_is_filled_with_what_it_stands_for(
    of: Quantise, suffix: str, config: dict[str, Any], tmp_path: Path
) -> None:
    path = tiny_model.build("qwen3-moe-mixed", tmp_path).path
    meant = quantised(path, of, suffix, config)
    places = load_model(spec_of(path), path, torch.float32, CPU).places()
    assert any("experts" in name for name in meant)
    for name, weight in meant.items():
        torch.testing.assert_close(places[name], weight, rtol=0, atol=0)


def copy(place: torch.Tensor, tensor: torch.Tensor) -> None:
    place.copy_(tensor)


def held(path: Path) -> ModelSpec:
    return msgspec.structs.replace(spec_of(path), fp8=spec_of(path).stored_fp8 or "rows")


@pytest.mark.parametrize(
    ("of", "suffix", "config"),
    [
        (per_tensor, "_scale", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
        (per_channel, "_scale", {"quant_method": "compressed-tensors", "config_groups": {"g": CHANNEL}}),
        (per_block, "_scale_inv", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        (per_block, "_scale", {"quant_method": "compressed-tensors", "config_groups": {"g": BLOCKS}}),
    ],
    ids=["tensor", "channel", "block", "block, compressed-tensors"],
)
def test_a_model_in_fp8_takes_numbers_and_scales_as_they_are(
    of: Quantise, suffix: str, config: dict[str, Any], tmp_path: Path
) -> None:
    path = tiny_model.build("qwen3-moe-wide", tmp_path).path
    meant = quantised(path, of, suffix, config)
    assert spec_of(path).stored_fp8 == ("blocks" if of is per_block else "rows")
    places = load_model(held(path), path, torch.float32, CPU).places()
    kept = [name for name in meant if places[name].dtype == FP8]
    assert len(kept) == len(meant)
    for name in kept:
        found = restore(places[name], places[name + "_scale"])
        torch.testing.assert_close(found, meant[name], rtol=0, atol=0)
    assert places["lm_head.weight"].dtype == torch.float32
    assert all(place.dtype != FP8 for name, place in places.items() if name.endswith(".gate.weight"))


def test_latents_are_made_by_dequantised_matrices(tmp_path: Path) -> None:
    """Matrices that make keys and values are dequantised, and so are those that make latents, whose last
    block of rows is a part; other matrices stay e4m3 where they are held so. The text is that of what the
    numbers stand for."""
    sizes = {"hidden_size": 128, "q_lora_rank": 128, "v_head_dim": 32, "qk_nope_head_dim": 24}
    more = {"intermediate_size": 128, "moe_intermediate_size": 128}
    tiny = tiny_model.build("deepseek-v3", tmp_path / "fp8", **sizes, **more)
    weights = load_file(tiny.path / "model.safetensors")
    meant = quantised(
        tiny.path, per_block, "_scale_inv", {"quant_method": "fp8", "weight_block_size": [128, 128]}
    )
    places = load_model(held(tiny.path), tiny.path, torch.float32, CPU).places()
    kept = [name for name, place in places.items() if place.dtype == FP8]
    left = {name.split(".")[-2] for name in meant if name not in kept}
    assert left == {"kv_a_proj_with_mqa", "kv_b_proj"} and len(kept) > len(left)
    for name, weight in meant.items():
        place = places[name]
        found = restore(place, places[name + "_scale"]) if place.dtype == FP8 else place
        torch.testing.assert_close(found, weight, rtol=0, atol=0)
    same = tmp_path / "same"
    same.mkdir()
    told = json.loads((tiny.path / "config.json").read_text())
    (same / "config.json").write_text(json.dumps({**told, "quantization_config": None}))
    save_file({**weights, **meant}, same / "model.safetensors", metadata={"format": "pt"})
    coarse_text, same_text = (Rig(path).generate(1, list(range(3, 23)), 8) for path in (tiny.path, same))
    assert coarse_text == same_text


def test_blocks_have_no_scale_for_a_row() -> None:
    """They are dequantised, and quantised anew where a place is scaled by rows."""
    weight = torch.randn(300, 200)
    scale = per_block(weight)
    stored = (weight / spread(scale, weight.shape)).to(FP8)
    assert as_place_scale(scale, (300,)) is None
    places = {"w": torch.empty(300, 200, dtype=FP8), "w_scale": torch.empty(300)}
    filler = Filler(places, copy)
    assert filler.wants("w", (300, 200)) and filler.scale_shape("w", FP8) == tuple(places["w_scale"].shape)
    filler.put("w", dequantise("w", stored, scale))
    filler.finish("nowhere")
    numbers, scales = quantise(dequantise("w", stored, scale))
    assert torch.equal(places["w"].float(), numbers.float()) and torch.equal(places["w_scale"], scales)


def test_one_scale_is_every_blocks() -> None:
    found = as_place_scale(torch.tensor([0.5], dtype=torch.bfloat16), (2, 3))
    assert found is not None and torch.equal(found, torch.full((2, 3), 0.5))
    assert as_place_scale(torch.ones(256, 1), (2, 3)) is None


def test_blocks_of_numbers() -> None:
    """Each block's largest number becomes the format's; what is restored is within its step."""
    weight = torch.randn(2, 256, 384) * torch.rand(2, 256, 1)
    numbers, scale = quantise_blocks(weight)
    assert numbers.dtype == FP8 and scale.shape == (2, 2, 3)
    for each in range(2):
        torch.testing.assert_close(scale[each], per_block(weight[each]))
    torch.testing.assert_close(restore(numbers, scale), weight, rtol=1 / 16, atol=float(scale.max()) / 2**9)
    assert float(numbers[1, 128:, 256:].float().abs().max()) == TOP


def test_blocks_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(384, 256)
    numbers, scales = torch.empty(384, 256, dtype=FP8), torch.empty(3, 2)
    monkeypatch.setattr("gpu.weights.fp8.SLAB", 40_000)
    store(numbers, scales, weight, copy)
    whole = quantise_blocks(weight)
    assert torch.equal(numbers.float(), whole[0].float()) and torch.equal(scales, whole[1])


@pytest.mark.parametrize("parts", [{"a": 128, "b": 64}, {"a": 64, "b": 64}])
def test_a_block_of_two_parts_is_nobodys(parts: dict[str, int]) -> None:
    """A matrix with such a block stays as it is, and so does one whose inputs end within a block."""
    assert Linear(256, parts, torch.float32, CPU, held="blocks").matrix.scale is None
    assert Linear(200, {"a": 128}, torch.float32, CPU, held="blocks").matrix.scale is None


def test_slabs_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(301, 200)
    numbers, scales = torch.empty(301, 200, dtype=FP8), torch.empty(301)
    monkeypatch.setattr("gpu.weights.fp8.SLAB", 1000)
    store(numbers, scales, weight, copy)
    whole = quantise(weight)
    assert torch.equal(numbers.float(), whole[0].float()) and torch.equal(scales, whole[1])


@pytest.mark.parametrize("fp8", ["rows", "blocks"])
def test_a_layer_in_fp8_is_near_the_plain_one(fp8: Fp8) -> None:
    sizes = {"a": 128, "b": 256}
    kinds: tuple[Fp8, Fp8] = ("", fp8)
    plain, coarse = (Linear(256, sizes, torch.float32, CPU, bias=True, held=kind) for kind in kinds)
    names = plain.places("")
    assert coarse.places("").keys() == {*names, "a.weight_scale", "b.weight_scale"}
    filler = Filler(coarse.places(""), copy)
    for name, place in names.items():
        filler.put(name, place.normal_())
    x = torch.randn(50, 256)
    want, got = plain(x), coarse(x, TorchOps(exact(20), Causal()))
    assert 0.01 < (got - want).norm() / want.norm() < 0.05  # three bits on either side
    odd = Linear(256, {"a": 24}, torch.float32, CPU, held=fp8)
    assert odd.matrix.scale is None, "no product takes 24 outputs"


@pytest.mark.parametrize(
    ("variant", "fp8"), [("qwen2", "rows"), ("qwen3-moe-mixed", "rows"), ("qwen3-moe-wide", "blocks")]
)
def test_a_plain_checkpoint_in_fp8_stays_near(variant: str, fp8: Fp8, tmp_path: Path) -> None:
    """Quantised while it is read, computed by the twin: hidden states keep their direction."""
    path = tiny_model.build(variant, tmp_path).path
    found = []
    for spec in (spec_of(path), msgspec.structs.replace(spec_of(path), fp8=fp8)):
        model = load_model(spec, path, torch.float32, CPU)
        model.seal()
        ids = torch.arange(3, 23)
        with device_thread(CPU):
            ctx = ForwardContext(torch.arange(20), TorchOps(exact(20), Causal()))
            found.append(model.forward(ctx, ids))
    near = F.cosine_similarity(found[0], found[1], dim=-1)
    assert 0.95 < near.median() < 1.0, near


@pytest.mark.parametrize("fp8", ["rows", "blocks"])
def test_dummy_weights_in_fp8(fp8: Fp8, tmp_path: Path) -> None:
    path = tiny_model.build("qwen3-moe-wide", tmp_path).path
    spec = msgspec.structs.replace(spec_of(path), fp8=fp8)
    places = load_model(spec, None, torch.float32, CPU).places()
    some = [name for name, place in places.items() if place.dtype == FP8]
    assert some
    for name in some:
        assert 0.01 < restore(places[name], places[name + "_scale"]).std() < 0.03


def test_fp8_without_a_scale(tmp_path: Path) -> None:
    path = tiny_model.build("llama", tmp_path).path
    quantised(path, per_tensor, "_other", {"quant_method": "fp8"})
    with pytest.raises(ModelError, match=r"has 8 bits and no scale: neither .*weight_scale_inv"):
        load_model(spec_of(path), path, torch.float32, CPU)


def test_experts_of_other_sides_stay_as_they_are(tmp_path: Path) -> None:
    """Their width ends within a block: tiles for FP8 would not fit what they then are."""
    spec = msgspec.structs.replace(spec_of(tiny_model.build("qwen3-moe", tmp_path).path), fp8="blocks")
    assert spec.moe is not None and expert_scales(spec, spec.moe) is None
    places = load_model(spec, None, torch.float32, CPU).places()
    assert all(place.dtype == torch.float32 for place in places.values())
