"""Weights of 4 bits on a CPU: read from .gguf files as they are, multiplied, and in a whole engine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from core.config import CacheConfig
from core.models.gguf import Q4_FORMATS
from gpu.build import spec_of
from gpu.kernels.cpu import kernels
from gpu.memory import plan_memory
from gpu.quant import int8, q4
from gpu.shard import Shard
from gpu.weight_formats import shard_spec
from gpu.weights import load_model
from tests.rigs import gguf_file, lora, tiny_model
from tests.rigs.cpu_weights import ALL, AUTO, EXACT, SIZES, answers, held
from tests.rigs.int4_files import KINDS, quantise
from tests.rigs.runner import CPU

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiler, or no CPU with AVX2")

Kind = gguf.GGMLQuantizationType
TURNS, ROUNDED = 2**-11, 2**-13
"""Relative rounding errors: of a float16 scale, and of an activation in units of its row's largest."""


def restored(words: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64 [outputs, inputs] of a matrix as it is before `pack`."""
    shifts = torch.arange(4) * 4
    halves = torch.stack([words & 0xFFFF, words >> 16 & 0xFFFF], -1)
    numbers = (halves[..., None, :] >> shifts[:, None] & 15).flatten(1)
    grouped = numbers.double().unflatten(1, (-1, q4.GROUP))
    by, offset = scale.double().unsqueeze(2).unbind(-1)
    found: torch.Tensor = (grouped * by + offset).flatten(1)
    return found


def matrix(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(-(2**31), 2**31 - 1, (outputs, inputs // q4.WORD), dtype=torch.int32)
    return words, torch.randn(outputs, inputs // q4.GROUP, 2).half()


# -- products ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 8, 67])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 1), (96, 33), (576, 16), (2080, 40), (8960, 15)])
def test_product(rows: int, inputs: int, outputs: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product equals one in float64 whose activations are rounded to 13 bits and a sign."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    words, scale = matrix(outputs, inputs)
    words[0] = -1  # the largest numbers
    x, bias = torch.randn(rows, inputs), torch.randn(outputs)
    x[:1] = -3.0
    x[-1:, 0] = 1000.0
    top = x.abs().amax(-1, keepdim=True)
    rounded = (x * (torch.tensor(8127.0) / top)).round().double() * top / 8127
    weight = restored(words, scale)
    packed = q4.pack(words.clone(), scale.clone())
    found = int8.product(x, packed, bias)
    by = scale.double().abs().unsqueeze(2) @ torch.tensor([[15.0], [1.0]]).double()
    size = rounded.abs() @ by.flatten(1).repeat_interleave(q4.GROUP, 1).t()
    assert ((found - rounded @ weight.t() - bias).abs() <= (size + 1) * 2e-6).all()
    assert torch.equal(int8.product(x, packed)[:1], int8.product(x[:1], packed))


def test_what_is_no_number_stays_with_its_row() -> None:
    x = torch.ones(5, 64)
    x[1, 40] = torch.nan
    found = int8.product(x, q4.pack(*matrix(20, 64)))
    assert found[1].isnan().all()
    assert found[[0, 2, 3, 4]].isfinite().all()


def test_packing_takes_no_second_place() -> None:
    words, scale = matrix(64, 96)
    packed = q4.pack(words, scale)
    assert packed.own is not None
    assert packed.own[1].numbers.data_ptr() == words.data_ptr()
    assert packed.own[1].scale.data_ptr() == scale.data_ptr()


# -- files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", q4.FORMATS)
def test_numbers_of_a_file(kind: str) -> None:
    """Any bytes mean what the library says, but for the rounding of scales."""
    form, generator = q4.FORMATS[kind], np.random.default_rng(0)
    blocks = generator.integers(0, 256, (7, 512 // form.inputs, form.bytes), dtype=np.uint8)
    halves = generator.standard_normal((*blocks.shape[:2], 2)).astype(np.float16)
    blocks[..., :2] = halves[..., :1].view(np.uint8)
    if kind != "Q4_0":
        blocks[..., 2:4] = halves[..., 1:].copy().view(np.uint8)
    rows = blocks.reshape(7, -1)
    found = q4.read(kind, rows)
    words, scale = torch.empty(7, 64, dtype=torch.int32), torch.empty(7, 16, 2, dtype=torch.float16)
    q4.store(words, scale, found)
    want = gguf.dequantize(rows.reshape(1, -1), Kind[kind]).reshape(7, 512)
    bound = np.abs(found.scale).sum(-1).repeat(q4.GROUP, 1) * 15 * TURNS
    assert (np.abs(restored(words, scale).numpy() - want) <= bound).all()


def file_of(variant: str, folder: Path, kind: Kind = Kind.Q4_1, only: str = "", **fields: Any) -> Path:
    tiny = tiny_model.build(variant.replace("3moe", "3-moe"), folder / "hf", **SIZES, **fields)
    return gguf_file.write(folder / "tiny.gguf", variant, tiny.reference, True, kind, only)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("variant", "fields"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("phi3", {}),
        ("qwen3-moe", {"num_experts": 4, "moe_intermediate_size": 64}),
        ("qwen3-moe", {"num_experts": 3, "moe_intermediate_size": 64}),
    ],
    ids=["llama", "tied", "fused", "experts", "experts, fused"],
)
def test_matrices_keep_their_numbers(
    variant: str,
    fields: dict[str, Any],
    kind: Kind,
    ranks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In slabs that queries' halves cross, and of each rank its part."""
    tiny = tiny_model.build(variant, tmp_path / "hf", **SIZES, **fields)
    arch = variant.replace("-", "")
    how: gguf_file.How = "fused" if fields.get("num_experts") == 3 else ""
    file = gguf_file.write(tmp_path / "tiny.gguf", arch, tiny.reference, True, kind, how=how)
    want = load_model(spec_of(file), file, torch.float32, CPU).places()
    monkeypatch.setattr("gpu.weights.gguf._SLAB", 3 * 128)
    for rank in range(ranks):
        model = load_model(shard_spec(held(file), ranks), file, torch.float32, CPU, shard=Shard(rank, ranks))
        held_so = {name: place for name, place in model.places().items() if place.dtype == torch.int32}
        matrices = {name for name, place in want.items() if place.dim() == 2}
        untied = set() if fields.get("tie_word_embeddings") else {"model.embed_tokens.weight"}
        routers = {name for name in matrices if name.endswith("mlp.gate.weight")}
        assert set(held_so) == matrices - untied - routers
        for name, words in held_so.items():
            own = model.slices[name].of(want[name]) if ranks > 1 else want[name]
            found = restored(words, model.places()[f"{name}_scale"])[: len(own)]
            torch.testing.assert_close(found.float(), own, rtol=0, atol=float(own.abs().max()) * 4 * TURNS)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["awq", "gptq", "w4a16"])
def test_matrices_of_safetensors_keep_their_numbers(kind: str, ranks: int, tmp_path: Path) -> None:
    path = tiny_model.build("qwen3-moe", tmp_path, **SIZES, num_experts=4, moe_intermediate_size=256).path
    quantise(path, KINDS[kind])
    want = load_model(spec_of(path), path, torch.float32, CPU).places()
    for rank in range(ranks):
        model = load_model(shard_spec(held(path), ranks), path, torch.float32, CPU, shard=Shard(rank, ranks))
        places = model.places()
        for name in (each for each in want if each.endswith("_proj.weight")):
            own = model.slices[name].of(want[name]) if ranks > 1 else want[name]
            found = restored(places[name], places[f"{name}_scale"])
            torch.testing.assert_close(found.float(), own, rtol=0, atol=float(own.abs().max()) * 8 * TURNS)


def bytes_of(places: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the matrices, with the scales of those in 4 bits."""
    matrices = {name: place for name, place in places.items() if place.dtype in (torch.int8, torch.int32)}
    scales = [places[f"{name}_scale"] for name in matrices if matrices[name].dtype == torch.int32]
    return sum(each.numel() * each.element_size() for each in [*matrices.values(), *scales])


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True}], ids=["", "tied"])
@pytest.mark.parametrize("variant", ["llama", "qwen3moe"])
@pytest.mark.parametrize("only", ["", "attn_output|ffn", "ffn_down|output|token"])
def test_memory_is_planned_for_the_numbers(
    only: str, variant: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    file = file_of(variant, tmp_path, only=only, **fields)
    spec = held(file)
    plan = plan_memory(spec, torch.float32, CacheConfig(kv_tokens=64), 2**30, 64)
    # Routers, which are not quantised, count as 8 bits.
    found = bytes_of(load_model(spec, file, torch.float32, CPU).places())
    assert plan.weights == pytest.approx(found, rel=0.01 if "moe" in variant else 1e-5)
    assert tuple(q4.FORMATS) == Q4_FORMATS


def test_parts_in_several_formats_have_8_bits(tmp_path: Path) -> None:
    """The matrix of queries, keys and values, which is one, has 8 bits. The others keep 4."""
    file = file_of("llama", tmp_path, only="attn_[qk]|attn_output|ffn")
    model = load_model(held(file), file, torch.float32, CPU)
    for name, place in model.places().items():
        if name.endswith("_proj.weight"):
            assert place.dtype == (torch.int8 if name[-13] in "qkv" and "self_attn" in name else torch.int32)


def test_without_kernels_matrices_have_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(q4, "kernels", lambda: None)
    file = file_of("llama", tmp_path)
    dtypes = {place.dtype for place in load_model(held(file), file, torch.float32, CPU).places().values()}
    assert dtypes == {torch.int8, torch.float32}


# -- the whole engine -------------------------------------------------------------------------------

MEAN, MOST = 0.03, 0.2
"""Limits of the difference of a prompt token's log-probability: a third of what 8 bits may be off."""


@pytest.mark.parametrize(
    ("make", "tp", "adapts"),
    [
        (partial(file_of, "llama"), 1, True),
        (partial(file_of, "llama", tie_word_embeddings=True), 2, False),
        (partial(file_of, "gemma2", kind=Kind.Q4_0), 1, False),
        (partial(file_of, "phi3"), 2, False),
        (partial(file_of, "qwen3", only="attn_[qk]|ffn"), 1, False),
        (partial(file_of, "qwen3moe", **ALL, num_experts=4), 2, False),
        (partial(file_of, "qwen3moe", **ALL, num_experts=4, only="attn|down_exps"), 1, True),
    ],
    ids=[
        *("adapters", "tied, two ranks", "Q4_0", "fused, two ranks", "with 8 bits"),
        *("experts, two ranks", "experts with 8 bits"),
    ],
)
def test_text_is_that_of_the_dequantised_model(
    make: Any, tp: int, adapts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products have more rows than are done at once."""
    monkeypatch.setattr("gpu.quant.int8.LEAST_ROWS", 5)
    monkeypatch.setattr("gpu.quant.int8.ROWS", 9)
    path = make(tmp_path)
    adapter = lora.save(lora.adapter_for(path), tmp_path / "lora") if adapts else None
    found, want = answers(path, AUTO, tp, adapter), answers(path, EXACT, adapter=adapter)
    for one, other in zip(found, want, strict=True):
        values, wanted = (torch.cat([torch.tensor(p.values) for p in each.prompt]) for each in (one, other))
        assert (values - wanted).abs().mean() < MEAN
        assert (values - wanted).abs().max() < MOST


@pytest.mark.parametrize(("first", "then"), [(Kind.Q8_0, Kind.Q4_1), (Kind.Q4_0, Kind.Q8_0)])
def test_other_weights_in_another_format(first: Kind, then: Kind, tmp_path: Path) -> None:
    one, other = file_of("llama", tmp_path, first), tmp_path / "other.gguf"
    reference = tiny_model.build("llama", tmp_path / "other", **SIZES).reference
    for weight in reference.parameters():
        weight.data.mul_(-1)
    gguf_file.write(other, "llama", reference, True, then)
    found = answers(one, AUTO, then=other)
    want = answers(other, AUTO)
    assert [each.tokens for each in found] == [each.tokens for each in want]
