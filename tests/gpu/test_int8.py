"""Dtypes on a CPU: quantised checkpoints run in 8 bits, others in bfloat16; single products and whole
models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import gguf
import msgspec
import pytest
import torch

from core.config import CacheConfig, ModelConfig, ScheduleConfig
from core.errors import ModelError
from gpu.build import spec_of
from gpu.device import multiplies_bfloat16
from gpu.kernels.cpu import kernels
from gpu.layers import Linear
from gpu.memory import plan_memory
from gpu.models.base import CausalModel
from gpu.quant import int8, scaled
from gpu.quant.rows import FileRows
from gpu.shard import Shard
from gpu.sizes import with_budget
from gpu.weight_formats import choose_int8, shard_spec
from gpu.weights import load_model
from tests.rigs import gguf_file, lora, mxfp4_files, tiny_model
from tests.rigs.cpu_weights import ALL, AUTO, EXACT, ON_CPU, SIZES, answers, held
from tests.rigs.driver import Answer
from tests.rigs.fp8_files import per_channel, quantised
from tests.rigs.int4_files import KINDS, quantise
from tests.rigs.runner import CPU

pytestmark = pytest.mark.skipif(not int8.runs_here(), reason="torch has no such product on this CPU")

Kind = gguf.GGMLQuantizationType


# -- products ---------------------------------------------------------------------------------------


def exact(x: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x.double() @ numbers.double().t() * scale.double()


@pytest.fixture(params=["onednn", "fbgemm", "own"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each of those that multiply, whatever this CPU prefers; FBGEMM in more blocks than one."""
    name, before = request.param, torch.backends.quantized.engine
    monkeypatch.setattr(int8, "by_onednn", lambda: name == "onednn")
    monkeypatch.setattr(int8, "kernels", kernels if name == "own" else lambda: None)
    if name == "own":
        if kernels() is None:
            pytest.skip("no compiler, or no CPU with AVX2")
        yield
        return
    if name not in torch.backends.quantized.supported_engines:
        pytest.skip(f"torch was built without {name}")
    monkeypatch.setattr(int8, "BLOCK", 576 * 400)
    torch.backends.quantized.engine = name
    yield
    torch.backends.quantized.engine = before


@pytest.mark.parametrize("rows", [1, 2, 17, int8.ROWS, int8.ROWS + 1])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (100, 7), (576, 960)])
@pytest.mark.usefixtures("library")
def test_a_product_is_that_of_the_weights(rows: int, inputs: int, outputs: int) -> None:
    """Activations are rounded to parts of the largest of their row, 8,127 a side, and nothing else is."""
    torch.manual_seed(rows)
    x, bias = torch.randn(rows, inputs), torch.randn(outputs)
    x[:, 3] *= 300  # one that leaves the others few digits
    x[0] = 0
    numbers, scale = scaled.quantise(torch.randn(outputs, inputs) * 0.02, scaled.INT8)
    found = int8.product(x, int8.pack(numbers.clone(), scale), bias)
    step = x.abs().amax(1, keepdim=True) / int8.TOP
    bound = step / 2 * scaled.restore(numbers, scale).abs().sum(1) * 1.01 + 1e-5
    assert ((found - exact(x, numbers, scale) - bias).abs() <= bound).all()
    assert torch.equal(found[0], bias)


@pytest.mark.usefixtures("library")
def test_the_largest_numbers_do_not_overflow() -> None:
    """Sums of pairs fit into 16 bits, where a CPU adds them so, and all of them into 32."""
    inputs = 8960
    numbers = torch.full((3, inputs), 127, dtype=torch.int8)
    numbers[1].neg_()
    numbers[2, ::2].neg_()
    x, scale = torch.ones(2, inputs), torch.ones(3)
    x[1, 1::2] = -1
    torch.testing.assert_close(
        int8.product(x, int8.pack(numbers.clone(), scale)).double(),
        exact(x, numbers, scale),
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.usefixtures("library")
def test_no_rows() -> None:
    numbers, scale = scaled.quantise(torch.randn(16, 32), scaled.INT8)
    assert int8.product(torch.zeros(0, 32), int8.pack(numbers, scale)).shape == (0, 16)


@pytest.mark.usefixtures("library")
def test_what_is_no_number_stays_none() -> None:
    numbers, scale = scaled.quantise(torch.randn(16, 32), scaled.INT8)
    x = torch.ones(3, 32)
    x[1, 5] = torch.nan
    found = int8.product(x, int8.pack(numbers.clone(), scale))
    assert found[1].isnan().all()
    assert found[::2].isfinite().all()


@pytest.mark.skipif(not int8._has_fbgemm(), reason="torch was built without FBGEMM")
def test_a_product_runs_none_of_torchs_checks_of_packed_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product runs no Python code of torch, and throws no exception when torch looks for overrides."""
    monkeypatch.setattr(int8, "by_onednn", lambda: False)
    monkeypatch.setattr(int8, "kernels", lambda: None)
    numbers, scale = scaled.quantise(torch.randn(16, 32), scaled.INT8)
    x, packed, entered = torch.randn(1, 32), int8.pack(numbers, scale), list[str]()
    int8.product(x, packed)
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code.co_filename))
    try:
        int8.product(x, packed)
    finally:
        sys.setprofile(None)
    assert not [name for name in entered if "/torch/" in name]
    assert not torch.overrides.has_torch_function(packed.blocks)
    assert "__torch_function__" in vars(type(packed.blocks[0]))


# -- loading ------------------------------------------------------------------------------------------


def gguf_of(variant: str, folder: Path, kind: Kind = Kind.Q8_0, **fields: Any) -> Path:
    tiny = tiny_model.build(variant, folder / "hf", **SIZES, **fields)
    return gguf_file.write(folder / "tiny.gguf", variant, tiny.reference, True, kind)


def awq(folder: Path) -> Path:
    path = tiny_model.build("llama", folder / "hf", **SIZES).path
    quantise(path, KINDS["awq"])
    return path


def fp8(folder: Path) -> Path:
    path = tiny_model.build("llama", folder / "hf", **SIZES).path
    quantised(path, per_channel, "_scale", {"quant_method": "fbgemm_fp8"})
    return path


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q5_0, Kind.Q5_1], ids=lambda kind: kind.name)
def test_matrices_of_a_gguf_and_its_tables(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dequantised and quantised anew in slabs of three rows, which queries' halves, too, cross."""
    file = gguf_of("llama", tmp_path, kind)
    want = load_model(spec_of(file), file, torch.float32, CPU).places()
    monkeypatch.setattr("gpu.weights.gguf._SLAB", 3 * 128)
    monkeypatch.setattr("gpu.quant.int8.SLAB", 2 * 128)
    model = load_model(held(file), file, torch.float32, CPU)
    places = model.places()
    table = want.pop("model.embed_tokens.weight")
    ids = torch.tensor([len(table) - 1, 0, 7, 7])
    assert torch.equal(model.embedding[ids], table[ids])
    assert not len(model.embedding[ids[:0]])
    for name, weight in want.items():
        if weight.dim() == 1:
            assert torch.equal(places[name], weight)
            continue
        numbers, scale = scaled.quantise(weight, scaled.INT8)
        assert torch.equal(places[name], numbers)
        assert torch.equal(places[name + "_scale"], scale)


def test_tables_that_the_checkpoint_has_in_16_bits_stay(tmp_path: Path) -> None:
    path = fp8(tmp_path)
    places = load_model(held(path), path, torch.float32, CPU).places()
    kept = {name for name, place in places.items() if place.dtype == torch.int8}
    assert len(kept) == 2 * 7
    assert all("_proj" in name for name in kept)


@pytest.mark.parametrize("make", [partial(gguf_of, "llama"), fp8], ids=["gguf", "fp8"])
def test_a_rank_quantises_its_part(make: Callable[[Path], Path], tmp_path: Path) -> None:
    path = make(tmp_path)
    want = load_model(spec_of(path), path, torch.float32, CPU).places()
    for rank in range(2):
        model = load_model(shard_spec(held(path), 2), path, torch.float32, CPU, shard=Shard(rank, 2))
        for name, place in model.places().items():
            if place.dtype == torch.int8:
                own = model.slices[name].of(want[name])
                numbers, scale = scaled.quantise(own, scaled.INT8)
                assert torch.equal(place, numbers)
                assert torch.equal(model.places()[name + "_scale"], scale)


def linears(model: CausalModel) -> list[Linear]:
    return [seal.__self__ for seal in model._parameters.seals if isinstance(seal, MethodType)]


def bytes_of(model: CausalModel) -> int:
    """Bytes of the matrices of a sealed model. A packed matrix counts by its shape."""
    plain = [linear.matrix.weight for linear in linears(model)]
    packed = [linear.quantized for linear in linears(model) if linear.quantized is not None]
    return sum(each.numel() * each.element_size() for each in plain) + sum(
        each.outputs * each.inputs for each in packed
    )


def tied_gguf(folder: Path) -> Path:
    return gguf_of("llama", folder, tie_word_embeddings=True)


def tied_fp8(folder: Path) -> Path:
    path = tiny_model.build("llama", folder / "hf", **SIZES, tie_word_embeddings=True).path
    quantised(path, per_channel, "_scale", {"quant_method": "fbgemm_fp8"})
    return path


@pytest.mark.parametrize(
    "make",
    [partial(gguf_of, "llama"), fp8, tied_gguf, tied_fp8],
    ids=lambda make: getattr(make, "__name__", "gguf"),
)
def test_a_table_is_held_once(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """The table is held as the head, in 8 bits of a .gguf file. The embedding, shared with it or not, stays
    in its file, and no other matrix is held in 32 bits either."""
    path = make(tmp_path)
    model = load_model(held(path), path, torch.float32, CPU)
    model.seal()
    assert not model.places()
    assert isinstance(model.embedding, FileRows)
    spec, table = model.spec, model.spec.vocab_size * model.spec.hidden
    layers = spec.num_parameters() - spec.table_parameters()
    assert bytes_of(model) == layers + table * (1 if spec.stored_gguf else 4)
    plan = plan_memory(spec, torch.float32, CacheConfig(kv_tokens=64), 2**30, 64)
    assert (plan.weight_dtype, plan.weights) == ("int8", bytes_of(model))


def test_a_file_that_was_cut(tmp_path: Path) -> None:
    """While it is served: an error that names it."""
    file = gguf_of("llama", tmp_path)
    table = load_model(held(file), file, torch.float32, CPU).embedding
    with file.open("r+b") as opened:
        opened.truncate(1000)
    with pytest.raises(ModelError, match=r"tiny\.gguf was cut while it is served"):
        table[torch.tensor([5])]


@pytest.mark.parametrize("tied", [False, True])
def test_random_weights(tied: bool, tmp_path: Path) -> None:
    file = gguf_of("llama", tmp_path, tie_word_embeddings=tied)
    places = load_model(held(file), None, torch.float32, CPU).places()
    for name in ("lm_head.weight", "model.layers.1.mlp.down_proj.weight"):
        assert 0.015 < float(scaled.restore(places[name], places[name + "_scale"]).std()) < 0.025


def test_where_8_bits_are_held(tmp_path: Path) -> None:
    spec, auto = spec_of(gguf_of("llama", tmp_path)), ModelConfig()
    assert choose_int8(spec, auto, ON_CPU)
    assert not choose_int8(spec, ModelConfig(quantization="none"), ON_CPU)
    assert not choose_int8(spec, auto, ON_CPU._replace(dtype=torch.bfloat16))
    assert not choose_int8(spec, auto, ON_CPU._replace(device=torch.device("cuda")))
    assert not choose_int8(msgspec.structs.replace(spec, stored_gguf=False), auto, ON_CPU)


@pytest.mark.parametrize(
    ("asked", "tokens"), [({}, 512), ({"max_running": 600}, 600), ({"step_tokens": 64}, 64)]
)
def test_steps_of_dense_matrices_are_short(asked: dict[str, int], tokens: int) -> None:
    """Steps are as short as rows and flags allow."""
    schedule = ScheduleConfig(**asked)
    assert with_budget(schedule, CPU, int8=True).step_tokens == tokens
    assert with_budget(ScheduleConfig(), CPU).step_tokens > 512


# -- the whole engine --------------------------------------------------------------------------------

MEAN, MOST = 0.1, 0.6
"""Limits of the difference of a prompt token's log-probability, over a prompt and at most."""


def alike(found: list[Answer], want: list[Answer]) -> None:
    """Log-probabilities of a prompt, which both read alike, and tokens until two were about as likely."""
    for one, other in zip(found, want, strict=True):
        values, wanted = (torch.cat([torch.tensor(p.values) for p in each.prompt]) for each in (one, other))
        off = (values - wanted).abs()
        assert off.mean() < MEAN
        assert off.max() < MOST
        for token, expected, margin in zip(one.tokens, other.tokens, other.margins, strict=True):
            if margin < MOST:
                break
            assert token == expected


def w4a16(folder: Path) -> Path:
    path = tiny_model.build("qwen3", folder / "hf", **SIZES).path
    quantise(path, KINDS["w4a16"])
    return path


def gptq(folder: Path) -> Path:
    path = tiny_model.build("qwen2", folder / "hf", **SIZES).path
    quantise(path, KINDS["gptq"])
    return path


def experts_gguf(folder: Path) -> Path:
    tiny = tiny_model.build("mixtral", folder / "hf", **SIZES, **ALL)
    return gguf_file.write(folder / "tiny.gguf", "llama", tiny.reference, True)


def experts_fp8(folder: Path) -> Path:
    path = tiny_model.build("qwen3-moe", folder / "hf", **SIZES, **ALL, num_experts=4).path
    quantised(path, per_channel, "_scale", {"quant_method": "fbgemm_fp8"})
    return path


def experts_mxfp4(folder: Path) -> Path:
    tiny = tiny_model.build("gpt-oss", folder / "hf", **SIZES, **ALL, num_local_experts=4)
    mxfp4_files.quantise(tiny.path, tiny.reference)
    return tiny.path


def experts_awq(folder: Path) -> Path:
    path = tiny_model.build("qwen3-moe", folder / "hf", **SIZES, **ALL, num_experts=4).path
    quantise(path, KINDS["awq"])
    return path


@pytest.mark.parametrize("make", [experts_gguf, experts_fp8, experts_mxfp4, experts_awq])
def test_experts_are_held_in_8_bits(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """A layer's experts are held as a matrix each, without the tensor of all that they were read into."""
    path = make(tmp_path)
    model = load_model(held(path), path, torch.float32, CPU)
    model.seal()
    assert not model.places()
    found = [each.__self__._experts for each in model._parameters.seals if "_pack_int8" in str(each)]
    assert len(found) == len(model.spec.moe.layers)
    for experts in found:
        assert not len(experts.w13)
        assert not len(experts.w2)
        assert {type(each) for matrices in experts.matrices for each in matrices} == {int8.Packed}
        assert {len(matrices) for matrices in experts.matrices} == {model.spec.moe.experts}


@pytest.mark.parametrize(
    ("make", "tp", "adapts"),
    [
        (partial(gguf_of, "llama"), 1, True),
        (partial(gguf_of, "llama", tie_word_embeddings=True), 2, False),
        (partial(gguf_of, "gemma2", kind=Kind.Q4_1), 1, False),
        (partial(gguf_of, "phi3"), 2, False),
        (awq, 2, True),
        (gptq, 1, False),
        (w4a16, 1, False),
        (fp8, 1, False),
        (experts_gguf, 2, False),
        (experts_fp8, 1, True),
        (experts_mxfp4, 1, False),
        (experts_awq, 1, False),
    ],
    ids=[
        *("gguf", "gguf, tied, two ranks", "gguf, 4 bits", "gguf, fused", "awq, two ranks", "gptq", "w4a16"),
        *("fp8", "experts in gguf, two ranks", "experts in fp8", "experts in mxfp4", "experts in awq"),
    ],
)
def test_text_is_that_of_the_dequantised_model(
    make: Callable[[Path], Path], tp: int, adapts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products have more rows than are done at once."""
    monkeypatch.setattr("gpu.quant.int8.LEAST_ROWS", 5)
    monkeypatch.setattr("gpu.quant.int8.ROWS", 9)
    path = make(tmp_path)
    adapter = lora.save(lora.adapter_for(path), tmp_path / "lora") if adapts else None
    alike(answers(path, AUTO, tp, adapter), answers(path, EXACT, adapter=adapter))


@pytest.mark.usefixtures("library")
def test_text_does_not_depend_on_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole engine: matrices in several blocks, products in several parts, and two ranks."""
    monkeypatch.setattr("gpu.quant.int8.BLOCK", 3 * 128)
    monkeypatch.setattr("gpu.quant.int8.LEAST_ROWS", 5)
    monkeypatch.setattr("gpu.quant.int8.ROWS", 9)
    path = experts_gguf(tmp_path)
    alike(answers(path, AUTO, tp=2), answers(path, EXACT))


@pytest.mark.skipif(not multiplies_bfloat16(), reason="this CPU has no products of bfloat16")
@pytest.mark.parametrize("variant", ["llama-tied-bias", "qwen3-moe"])
def test_text_in_bfloat16_is_that_in_float32(variant: str, tmp_path: Path) -> None:
    """The checkpoint is in bfloat16, which need not be asked for; its matrices are large enough to be
    packed."""
    wide = {**SIZES, "hidden_size": 256, "intermediate_size": 512}
    more = {**ALL, "num_experts": 4} if "moe" in variant else {}
    tiny = tiny_model.build(variant, tmp_path / "hf", **wide, **more)
    path = tmp_path / "bfloat16"
    tiny.reference.bfloat16().save_pretrained(path)
    found = answers(path, ModelConfig(device="cpu"), says="bfloat16")
    alike(found, answers(path, EXACT))


@pytest.mark.skipif(not multiplies_bfloat16(), reason="this CPU has no products of bfloat16")
def test_logits_in_bfloat16_are_not_rounded() -> None:
    """Logits of a packed head are the sums, as on a GPU: rounded to bfloat16 neighbours would be ties."""
    head = Linear(512, {"lm_head": 1024}, torch.bfloat16, CPU)
    torch.manual_seed(0)
    weight = torch.randn(1024, 512).bfloat16()
    head.matrix.weight.copy_(weight)
    head.seal()
    x = torch.randn(3, 512).bfloat16()
    torch.testing.assert_close(head.to_float32(x), x.float() @ weight.float().t(), atol=2e-3, rtol=0)


def test_other_weights(tmp_path: Path) -> None:
    one, other = gguf_of("llama", tmp_path), tmp_path / "other.gguf"
    torch.manual_seed(7)
    reference = tiny_model.build("llama", tmp_path / "other", **SIZES).reference
    for weight in reference.parameters():
        weight.data.mul_(-1)
    gguf_file.write(other, "llama", reference, True)
    want = answers(other, EXACT)
    assert [each.tokens for each in answers(one, EXACT)] != [each.tokens for each in want]
    alike(answers(one, AUTO, then=other), want)
