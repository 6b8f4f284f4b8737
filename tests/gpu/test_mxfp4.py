"""Experts in MXFP4 are the weights that transformers reads, wherever they are restored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config import CacheConfig, ModelConfig
from core.errors import ConfigError, ModelError
from core.models import ModelSpec, read_spec
from core.plan import Chunk
from gpu.build import spec_of
from gpu.device import CudaFacts
from gpu.memory import GIB, plan_memory
from gpu.parts import Target
from gpu.quant import mxfp4
from gpu.shard import Shard
from gpu.weight_formats import choose_fp8, choose_mxfp4, shard_spec
from gpu.weights import load_model
from tests.rigs import mxfp4_files, tiny_model
from tests.rigs.arrays import ints
from tests.rigs.model_config import GPT_OSS_20B
from tests.rigs.runner import CPU, Rig
from tests.rigs.tiny_model import Tiny

PROMPT = [int(i * 37 % 251) + 3 for i in range(40)]
Tensors = dict[str, torch.Tensor]


def build(folder: Path, *plain: int) -> Tiny:
    tiny = tiny_model.build("gpt-oss", folder, num_hidden_layers=2, intermediate_size=64)
    mxfp4_files.quantise(folder, tiny.reference, plain)
    return tiny


def test_numbers_are_those_of_the_standard() -> None:
    """Each of them, and scales from the least to one of which 6 is near the greatest float32."""
    numbers = torch.arange(256, dtype=torch.int64).to(torch.uint8).view(16, 16)
    scale = torch.tensor([0, 1, 126, 127, 128, 252] + [120] * 10, dtype=torch.uint8)[:, None]
    found = mxfp4.restore(numbers, scale)
    ups = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = [*ups, *(-each for each in ups)]
    for row in range(16):
        by = 2.0 ** (int(scale[row, 0]) - 127)
        want = [values[code] * by for byte in numbers[row].tolist() for code in (byte & 15, byte >> 4)]
        assert found[row].double().tolist() == pytest.approx(want, rel=1e-6)
    row = torch.tensor([[6.0, -0.5, *[1.5] * 30]])
    assert torch.equal(mxfp4.restore(*mxfp4.quantise(row)), row)
    assert mxfp4.restore(numbers, torch.full_like(scale, 255)).isnan().all()


@pytest.mark.parametrize("inputs", [128, 160])
def test_what_is_packed_can_be_unpacked(inputs: int) -> None:
    numbers, scale = mxfp4.quantise(torch.randn(3, inputs))
    words, scales = mxfp4.pack(numbers, scale)
    assert (words.shape, scales.shape) == ((3, -(-inputs // 128) * 32), (-(-inputs // 128), 3))
    again = mxfp4.unpack(words, scales, inputs)
    assert torch.equal(again[0], numbers) and torch.equal(again[1], scale)


@pytest.mark.parametrize("held", [False, True], ids=["restored", "held"])
@pytest.mark.parametrize("plain", [(), (1,)], ids=["all", "but one layer"])
def test_logits_are_those_of_transformers(plain: tuple[int, ...], held: bool, tmp_path: Path) -> None:
    tiny = build(tmp_path, *plain)
    want = tiny_model.logits(tiny.reference, PROMPT)[-1]
    rig = Rig(tiny.path, spec=spec(tiny.path, held))
    rig.step(chunks=[Chunk(1, 0, ints(PROMPT[:9]), False)], new=[rig.new(1, PROMPT)])
    rig.step(chunks=[Chunk(1, 9, ints(PROMPT[9:]), True)])
    torch.testing.assert_close(rig.watched.seen[0], want, atol=1e-4, rtol=0)


def spec(path: Path, held: bool = True) -> ModelSpec:
    found = spec_of(path)
    return msgspec.structs.replace(found, mxfp4=found.stored_mxfp4) if held else found


@pytest.mark.parametrize("held", [False, True], ids=["restored", "held"])
@pytest.mark.parametrize("dummy", [False, True], ids=["read", "random"])
def test_ranks_have_what_is_theirs(dummy: bool, held: bool, tmp_path: Path) -> None:
    path = build(tmp_path).path
    source = None if dummy else path
    whole = load_model(spec(path, held), source, torch.float32, CPU).places()
    for rank in range(2):
        each = shard_spec(spec(path, held), 2)
        own = load_model(each, source, torch.float32, CPU, shard=Shard(rank, 2))
        for name, place in own.places().items():
            part = own.slices.get(name)
            assert torch.equal(place, whole[name] if part is None else part.of(whole[name])), name


def _drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def _cut(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name][:, :-2].contiguous()})


def _to(name: str, dtype: torch.dtype) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def _turn(name: str) -> Callable[[Tensors], None]:
    """Turn a tensor: as many numbers, in groups of another size."""
    return lambda tensors: tensors.update({name: tensors[name].transpose(2, 3).contiguous()})


UP, DOWN = (f"model.layers.1.mlp.experts.{part}_proj" for part in ("gate_up", "down"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            _drop(f"{UP}_scales"),
            rf"{UP}_blocks is MXFP4 and needs {UP}_scales \[4, 128, 2\], torch.uint8, which is missing",
        ),
        (_cut(f"{UP}_scales"), r"needs .*_scales \[4, 128, 2\], torch.uint8, which is \[4, 126, 2\]"),
        (_to(f"{UP}_scales", torch.float32), r"needs .*, which is \[4, 128, 2\], torch.float32"),
        (
            _to(f"{UP}_scales", torch.float8_e8m0fnu),
            r"which is \[4, 128, 2\], torch.float8_e8m0fnu",
        ),
        (_turn(f"{UP}_blocks"), rf"not part of this architecture: {UP}_blocks"),
        (_cut(f"{DOWN}_blocks"), r"of the wrong shape: model.layers.1.mlp.experts.0.down_proj.weight"),
        (_drop(f"{DOWN}_blocks"), r"4 tensors missing: model.layers.1.mlp.experts.0.down_proj.weight"),
        (
            _to(f"{DOWN}_bias", torch.float8_e4m3fn),
            rf"{DOWN}_bias is torch.float8_e4m3fn: stacked experts are read in",
        ),
        (_drop(f"{UP}_bias"), r"8 tensors missing: model.layers.1.mlp.experts.0.gate_proj.bias"),
    ],
)
def test_a_damaged_checkpoint_is_told(change: Callable[[Tensors], None], words: str, tmp_path: Path) -> None:
    path = build(tmp_path).path
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=words):
        load_model(spec_of(path), path, torch.float32, CPU)


@pytest.mark.parametrize("kind", ["blocks", "scales"])
def test_what_is_held_is_checked_too(kind: str, tmp_path: Path) -> None:
    path = build(tmp_path).path
    tensors = load_file(path / "model.safetensors")
    name = f"{UP}_{kind}"
    tensors[name] = tensors[name].transpose(2, 3).contiguous() if kind == "blocks" else tensors[name][:0]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"8 tensors missing: model.layers.1.mlp.experts.0.gate_proj.weight"):
        load_model(spec(path), path, torch.float32, CPU)


def test_scales_that_no_kernel_reads(tmp_path: Path) -> None:
    path = build(tmp_path).path
    tensors = load_file(path / "model.safetensors")
    tensors[f"{UP}_scales"][3, 2, 1] = 129
    save_file(tensors, path / "model.safetensors")
    load_model(spec(path, held=False), path, torch.float32, CPU)
    with pytest.raises(ModelError, match=f"{UP}_scales has weights above 12.*--quantization none"):
        load_model(spec(path), path, torch.float32, CPU)


def test_experts_are_held_where_kernels_read_them(tmp_path: Path) -> None:
    found, auto = spec_of(build(tmp_path).path), ModelConfig()
    hopper = Target(torch.device("cuda"), torch.bfloat16, CudaFacts("", "H200", (9, 0), 132))
    assert choose_mxfp4(found, auto, hopper) == found.stored_mxfp4
    assert choose_mxfp4(found, auto, hopper._replace(dtype=torch.float16)) is None
    assert choose_mxfp4(found, auto, hopper._replace(device=CPU)) is None
    asked = ModelConfig(quantization="fp8")
    assert (choose_mxfp4(found, asked, hopper), choose_fp8(found, asked, hopper)) == (None, "rows")
    assert choose_mxfp4(found, ModelConfig(quantization="none"), hopper) is None
    held = msgspec.structs.replace(found, mxfp4=found.stored_mxfp4)
    with pytest.raises(ConfigError, match=r"--tp 4 of experts in MXFP4 .* 32 .* intermediate_size \(16\)"):
        shard_spec(held, 4)


def test_memory_of_gpt_oss() -> None:
    """Memory of 20b as OpenAI counts it: 12.8 GiB of weights, 38.9 in bfloat16."""
    plain = read_spec(GPT_OSS_20B)
    held = msgspec.structs.replace(plain, mxfp4=plain.stored_mxfp4)
    for each, gib, name in ((plain, 38.9, "bfloat16"), (held, 12.8, "mxfp4")):
        plan = plan_memory(each, torch.bfloat16, CacheConfig(kv_tokens=4096), 60 * GIB, 4096)
        assert plan.weights / GIB == pytest.approx(gib, abs=0.2)
        assert plan.weight_dtype == name
