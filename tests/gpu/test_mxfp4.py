"""Experts in MXFP4 are the weights that transformers reads, wherever they are restored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import ModelError
from core.plan import Chunk
from gpu import mxfp4
from gpu.build import spec_of
from gpu.shard import Shard
from gpu.weights import load_model
from tests.rigs import mxfp4_files, tiny_model
from tests.rigs.arrays import ints
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


@pytest.mark.parametrize("plain", [(), (1,)], ids=["all", "but one layer"])
def test_logits_are_those_of_transformers(plain: tuple[int, ...], tmp_path: Path) -> None:
    tiny = build(tmp_path, *plain)
    want = tiny_model.logits(tiny.reference, PROMPT)[-1]
    rig = Rig(tiny.path)
    rig.step(chunks=[Chunk(1, 0, ints(PROMPT[:9]), False)], new=[rig.new(1, PROMPT)])
    rig.step(chunks=[Chunk(1, 9, ints(PROMPT[9:]), True)])
    torch.testing.assert_close(rig.watched.seen[0], want, atol=1e-4, rtol=0)


def test_ranks_restore_what_is_theirs(tmp_path: Path) -> None:
    path = build(tmp_path).path
    whole = load_model(spec_of(path), path, torch.float32, CPU).places()
    for rank in range(2):
        own = load_model(spec_of(path).shard(2), path, torch.float32, CPU, shard=Shard(rank, 2))
        for name, place in own.places().items():
            part = own.slices.get(name)
            assert torch.equal(place, whole[name] if part is None else part.of(whole[name])), name


def _drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def _cut(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name][:, :-2].contiguous()})


def _coarse(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)})


UP, DOWN = (f"model.layers.1.mlp.experts.{part}_proj" for part in ("gate_up", "down"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            _drop(f"{UP}_scales"),
            rf"{UP}_blocks is MXFP4 and needs {UP}_scales \[4, 128, 2\], which is missing",
        ),
        (_cut(f"{UP}_scales"), r"needs .*_scales \[4, 128, 2\], which is \[4, 126, 2\]"),
        (_cut(f"{DOWN}_blocks"), r"of the wrong shape: model.layers.1.mlp.experts.0.down_proj.weight"),
        (_drop(f"{DOWN}_blocks"), r"4 tensors missing: model.layers.1.mlp.experts.0.down_proj.weight"),
        (_coarse(f"{DOWN}_bias"), rf"{DOWN}_bias is torch.float8_e4m3fn: stacked experts are read in"),
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
