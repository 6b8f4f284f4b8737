"""Shards: the parts of a checkpoint that each of several ranks holds."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from core.adapters import TARGETS
from core.errors import ConfigError, ModelError
from core.models.spec import W8A8, Fp8
from gpu.adapters.pool import AdapterLayout
from gpu.build import spec_of
from gpu.layers import Parameters
from gpu.models.base import CausalModel
from gpu.models.decoder import Decoder
from gpu.quant.scaled import dtype_of, quantise, quantise_blocks
from gpu.shard import COLUMN, ROW, Shard
from gpu.weight_formats import shard_spec
from gpu.weights import load_model
from gpu.weights.fill import Filler
from gpu.weights.peft import read_adapter
from gpu.weights.stage import copier
from tests.rigs import lora, tiny_model
from tests.rigs.gguf_file import write
from tests.rigs.lora import LIMITS

CPU = torch.device("cpu")


def ranks(path: Path, count: int, source: Path | None) -> list[CausalModel]:
    spec = spec_of(path).shard(count)
    return [load_model(spec, source, torch.float32, CPU, shard=Shard(i, count)) for i in range(count)]


@pytest.mark.parametrize(
    ("name", "count", "more"),
    [
        ("llama", 2, {}),
        ("llama", 4, {}),  # two ranks for each KV head
        ("llama-tied-bias", 2, {"vocab_size": 251}),
        ("qwen2", 4, {}),
        ("qwen3", 2, {"vocab_size": 253}),
        ("qwen3-moe-mixed", 2, {}),
        ("qwen3-moe", 4, {}),
        ("gpt-oss", 2, {}),
        ("deepseek-v3", 2, {}),
    ],
)
def test_each_rank_reads_its_slices(name: str, count: int, more: dict[str, int], tmp_path: Path) -> None:
    path = tiny_model.build(name, tmp_path, **more).path
    whole = load_model(spec_of(path), path, torch.float32, CPU).places()
    covered = {key: torch.zeros(place.shape, dtype=torch.int32) for key, place in whole.items()}
    for model in ranks(path, count, path):
        assert model.places().keys() == whole.keys()
        for key, place in model.places().items():
            own = model.slices.get(key)
            torch.testing.assert_close(place, whole[key] if own is None else own.of(whole[key]))
            (covered[key] if own is None else own.of(covered[key])).add_(1)
        if not more:  # else the last rank has padding
            assert (
                sum(p.numel() for p in model.places().values() if p.dim() > 1) == model.spec.num_parameters()
            )
        latent = model.spec.latent
        heads = model.spec.heads * (latent.value_dim if latent else model.spec.head_dim)
        assert model.places()["model.layers.0.self_attn.o_proj.weight"].shape[1] == heads
    copies = max(count // spec_of(path).kv_heads, 1)
    for key, times in covered.items():
        match key.split(".")[-2]:
            case "q_b_proj" | "kv_b_proj":
                held = 1
            case "k_proj" | "v_proj":
                held = copies
            case "o_proj" | "down_proj" | "q_proj" | "gate_proj" | "up_proj" | "embed_tokens" | "lm_head":
                held = 1  # a bias of a partial sum, too
            case "self_attn":
                held = 1  # sinks
            case _:
                held = count
        assert bool((times == held).all()), key


@pytest.mark.parametrize("count", [2, 4])
def test_random_weights_are_slices_of_one_ranks(count: int, tmp_path: Path) -> None:
    path = tiny_model.build("qwen3-moe-mixed", tmp_path, vocab_size=251).path
    whole = load_model(spec_of(path), None, torch.float32, CPU).places()
    for model in ranks(path, count, None):
        for key, place in model.places().items():
            own = model.slices.get(key)
            torch.testing.assert_close(place, whole[key] if own is None else own.of(whole[key]))


def test_a_gguf_is_sliced_once_dequantised(tmp_path: Path) -> None:
    made = tiny_model.build("llama", tmp_path / "model")
    path = write(tmp_path / "model.gguf", "llama", made.reference, quantise=True)
    whole = load_model(spec_of(path), path, torch.float32, CPU).places()
    for model in ranks(path, 2, path):
        for key, place in model.places().items():
            own = model.slices.get(key)
            torch.testing.assert_close(place, whole[key] if own is None else own.of(whole[key]))


@pytest.mark.parametrize("held", ["rows", "blocks", W8A8()], ids=["rows", "blocks", "int8"])
def test_8_bits_and_their_scales_are_sliced_alike(held: Fp8 | W8A8) -> None:
    weight = torch.randn(512, 256, generator=torch.Generator().manual_seed(1))
    numbers, scale = quantise_blocks(weight) if held == "blocks" else quantise(weight, dtype_of(held))
    for rank in range(2):
        parameters = Parameters(torch.bfloat16, CPU, Shard(rank, 2))
        parameters.linear("", 256, {"up": 256}, held=held, split=COLUMN)
        parameters.linear("", 128, {"down": 512}, held=held, split=ROW)
        filler = Filler(parameters.places, copier(CPU), slices=parameters.slices)
        for name in ("up.weight", "down.weight"):
            assert filler.wants(name, (512, 256))
            assert filler.scale_shape(name, numbers.dtype) == tuple(scale.shape)
            filler.put(name, numbers, scale)
        filler.finish("the test")
        places, half = parameters.places, slice(rank * 256, (rank + 1) * 256)
        columns = slice(rank * 128, (rank + 1) * 128)
        assert torch.equal(places["up.weight"].float(), numbers[half].float())
        assert torch.equal(places["down.weight"].float(), numbers[:, columns].float())
        if held != "blocks":
            assert torch.equal(places["up.weight_scale"], scale[half])
            assert torch.equal(places["down.weight_scale"], scale)
        else:
            assert torch.equal(places["up.weight_scale"], scale[2 * rank : 2 * rank + 2])
            assert torch.equal(places["down.weight_scale"], scale[:, rank : rank + 1])


def test_shapes_are_checked_against_whole_tensors() -> None:
    parameters = Parameters(torch.float32, CPU, Shard(1, 2))
    parameters.linear("", 8, {"up": 4}, split=COLUMN)
    filler = Filler(parameters.places, copier(CPU), slices=parameters.slices)
    assert not filler.wants("up.weight", (4, 8))
    with pytest.raises(ModelError, match=r"up\.weight \[4, 8\] instead of \[8, 8\]"):
        filler.finish("the test")


@pytest.mark.parametrize(("name", "count"), [("llama", 2), ("llama-tied-bias", 4), ("qwen3-moe-mixed", 2)])
def test_adapters_are_sliced_as_what_they_change(name: str, count: int, tmp_path: Path) -> None:
    """The sum, or the rows one after the other, of what each rank's part adds is what one rank adds."""
    path = tiny_model.build(name, tmp_path / "model", vocab_size=251).path
    targets = TARGETS
    saved = lora.save(lora.adapter_for(path, targets), tmp_path / "adapter")

    def read(shard: Shard) -> dict[str, torch.Tensor]:
        model = Decoder(spec_of(path).shard(shard.ranks), torch.float32, torch.device("meta"), shard)
        layout = AdapterLayout([each.shape for each in model.adaptable], LIMITS, torch.float32)
        views = layout.views(torch.full((1, layout.bytes), 7, dtype=torch.uint8))
        read_adapter(saved, layout.shapes, targets, views, spec_of(path).vocab_size)
        found = {}
        for shape, view in zip(layout.shapes, views, strict=True):
            for part, (key, b) in enumerate(
                zip(shape.parts, torch.split(view.b[0], list(view.parts), dim=-2), strict=True)
            ):
                a = view.a[0][..., part * view.rank : (part + 1) * view.rank, :]
                own, made = shape.slice(key), b @ a
                assert not made.narrow(own.dim - 2, own.size, made.shape[own.dim - 2] - own.size).any()
                placed = torch.zeros(*made.shape[:-2], *own.shape)
                placed.narrow(own.dim - 2, own.start, own.size).copy_(made.narrow(own.dim - 2, 0, own.size))
                found[key] = placed
        return found

    whole, parts = read(Shard()), [read(Shard(rank, count)) for rank in range(count)]
    copies = max(count // spec_of(path).kv_heads, 1)
    for key, expected in whole.items():
        times = copies if key.endswith(("k_proj", "v_proj")) else 1
        torch.testing.assert_close(sum(part[key] for part in parts) / times, expected, msg=key)


def test_sizes_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    spec = spec_of(tiny_model.build("llama", tmp_path / "llama").path)
    assert spec.shard(1) is spec
    heads, kv_heads = r"num_attention_heads \(4\)", r"num_key_value_heads \(2\)"
    for count, named, fits in ((3, f"{heads}, {kv_heads}", 1), (6, f"{heads}.*", 2), (8, f"{heads}.*", 4)):
        with pytest.raises(ConfigError, match=rf"--tp {count} does not divide {named}.*Use --tp {fits}\."):
            spec.shard(count)
        spec.shard(fits)
    with pytest.raises(ConfigError, match=r"intermediate_size \(97\)"):
        msgspec.structs.replace(spec, intermediate=97).shard(2)
    moe = spec_of(tiny_model.build("qwen3-moe", tmp_path / "moe", moe_intermediate_size=33).path)
    with pytest.raises(ConfigError, match=r"--tp 2 does not divide moe_intermediate_size \(33\) of Qwen3Moe"):
        moe.shard(2)
    bert = spec_of(tiny_model.build_headless("BertModel", tmp_path / "bert").path)
    with pytest.raises(ConfigError, match="is an encoder"):
        bert.shard(2)


def test_blocks_of_fp8_are_not_cut(tmp_path: Path) -> None:
    spec = spec_of(tiny_model.build("qwen3-moe-wide", tmp_path).path)
    blocks = msgspec.structs.replace(spec, fp8="blocks", kv_heads=4, heads=8, head_dim=64, intermediate=512)
    with pytest.raises(
        ConfigError, match=r"--tp 2 of FP8 .* 128 does not divide moe_intermediate_size \(64\)"
    ):
        shard_spec(blocks, 2)
    assert shard_spec(blocks, 1) is blocks
    dense = msgspec.structs.replace(blocks, moe=None)
    assert shard_spec(dense, 2).intermediate == 256
    with pytest.raises(ConfigError, match=r"keys \(64\)"):
        shard_spec(dense, 4)
