"""The kernels of `gpu.kernels.cpu`, against torch's operations in float64; how they are compiled; and whole
answers with them and without."""

from __future__ import annotations

import ctypes
import logging
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core.config import ModelConfig, ParallelConfig
from core.errors import ConfigError
from core.request import SamplingParams
from gpu.kernels import cpu
from gpu.kernels.cpu import DecodeRows, Heads, Kernels, Scores, Weight, build, interleave
from gpu.ops.plain import rotate, turn
from gpu.survey import survey
from tests.rigs import tiny_model
from tests.rigs.driver import serve

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None or not torch.cpu._is_avx2_supported(), reason="no gcc, or no CPU with AVX2"
)


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    own = cpu.kernels()
    assert own is not None
    return own


def near(found: Tensor, wanted: Tensor, bound: float = 2e-6) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=bound, atol=bound)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.double(), weight.shape, weight.double(), eps)


# -- between products -------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 576), (0, 16), (65, 1024)])
@pytest.mark.parametrize("adds", [False, True])
def test_norm(kernels: Kernels, rows: int, width: int, adds: bool) -> None:
    residual, part, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    kept = torch.full((rows, 2 * width), 7.0)
    wanted = residual.double() + part if adds else residual.double()
    found = kernels.rms_norm(part if adds else None, residual, weight, 1e-5, kept[:, width:])
    near(found, normed(wanted, weight, 1e-5))
    near(residual, wanted)
    near(kept[:, width:], wanted)
    assert (kept[:, :width] == 7).all()


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (5, 1536), (33, 1000)])
def test_silu(kernels: Kernels, rows: int, width: int) -> None:
    """Numbers are of every size: e^x has neither overflow nor a wrong sign."""
    both = torch.randn(rows, 2 * width)
    both[0, :8] = torch.tensor([0.0, -0.0, 88.0, -88.0, 1e4, -1e4, 1e-30, -20.0])
    gate, up = both.double().chunk(2, -1)
    near(kernels.silu_mul(both), F.silu(gate) * up)


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(
    ("heads", "turned"), [(Heads(3, 1, 64), 64), (Heads(4, 4, 24), 16), (Heads(16, 2, 256), 64)]
)
def test_heads_are_turned_and_stored(kernels: Kernels, heads: Heads, turned: int, with_norms: bool) -> None:
    queries, keys, dim = heads
    rows, every = 33, queries + 2 * keys
    qkv, places = torch.randn(rows, every * dim), torch.randperm(100, dtype=torch.int32)[:rows]
    weights = torch.randn(2, dim)
    angles = torch.arange(rows)[:, None] * torch.rand(turned // 2)
    x, wide = qkv.view(rows, every, dim).double(), turn(angles.double(), 1.0, torch.float64)
    if with_norms:
        x[:, :queries] = normed(x[:, :queries], weights[0], 1e-6)
        x[:, queries : queries + keys] = normed(x[:, queries : queries + keys], weights[1], 1e-6)
    rotate(x[:, : queries + keys], wide)
    pool = torch.full((100, 2 * keys * dim), 7.0)
    norms = (weights[0], weights[1], 1e-6) if with_norms else None
    kernels.store_kv(qkv, heads, turn(angles, 1.0, torch.float32), norms, pool, places)
    near(qkv.view_as(x), x, 2e-5)
    assert torch.equal(pool[places], qkv.view(rows, every, dim)[:, queries:].flatten(1))
    untouched = torch.ones(100, dtype=torch.bool)
    untouched[places] = False
    assert (pool[untouched] == 7).all()


# -- attention --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 1, 63, 64, 100])
@pytest.mark.parametrize(
    ("heads", "page"),
    [(Heads(3, 1, 64), 16), (Heads(2, 2, 8), 1), (Heads(16, 1, 40), 7), (Heads(8, 2, 256), 64)],
)
def test_rows_attend_to_their_own_keys(kernels: Kernels, heads: Heads, page: int, window: int) -> None:
    """Whatever lies in other pages, behind a row's length and behind its window is NaN."""
    queries, keys, dim = heads
    lengths = torch.tensor([1, 8, 63, 64, 65, 200, 129, 127], dtype=torch.int32)
    each = -(-int(lengths.max()) // page)
    order = torch.randperm(len(lengths) * each, dtype=torch.int32) + 1
    table = torch.zeros(12, each + 3, dtype=torch.int32)
    slots = torch.randperm(12, dtype=torch.int32)[: len(lengths)]
    table[slots, :each] = order.view(len(lengths), each)
    pool = torch.full(((len(order) + 1) * page, 2 * keys * dim), torch.nan)
    q = torch.randn(len(lengths) + 2, queries + 5, dim)[:, :queries]
    out, wanted = torch.full((len(q), queries * dim), 7.0), torch.empty(len(lengths), queries, dim).double()
    for row, length in enumerate(lengths.tolist()):
        at = torch.arange(max(length - window, 0) if window else 0, length)
        tokens = table[slots[row], at // page].long() * page + at % page
        pool[tokens] = torch.randn(len(at), 2 * keys * dim)
        k, v = (
            side.repeat_interleave(queries // keys, 1)
            for side in pool[tokens].view(-1, 2, keys, dim).double().unbind(1)
        )
        shares = (torch.einsum("hd,khd->hk", q[row].double(), k) * 0.3).softmax(-1)
        wanted[row] = torch.einsum("hk,khd->hd", shares, v)
    decode = DecodeRows(len(lengths), table, page, slots, lengths)
    kernels.attend(q, heads, pool, decode, out, Scores(window, 0.3))
    near(out[: len(lengths)].view_as(wanted), wanted, 1e-5)
    assert (out[len(lengths) :] == 7).all()


def test_large_scores_and_what_is_no_number(kernels: Kernels) -> None:
    """Scores of a thousand, which grow from block to block; and a row of NaN beside others."""
    heads, length = Heads(2, 1, 8), 200
    pool, q = torch.randn(3 * length, 16), torch.randn(3, 2, 8)
    pool[:, 0] = torch.arange(length).repeat(3) * 5.0
    q[:, :, 0], q[1, 0, 3] = 1.0, torch.nan
    table = torch.arange(3, dtype=torch.int32)[:, None]
    decode = DecodeRows(
        3, table, length, torch.arange(3, dtype=torch.int32), torch.full((3,), length, dtype=torch.int32)
    )
    out = torch.empty(3, 16)
    kernels.attend(q, heads, pool, decode, out, Scores(0, 1.0))
    k, v = pool.view(3, length, 2, 8).double().unbind(2)
    wanted = (q.double() @ k.mT).softmax(-1) @ v
    near(out[::2].view(2, 2, 8), wanted[::2], 1e-3)  # float32 rounds such a score to 6e-5
    assert out[1, :8].isnan().all()
    near(out[1, 8:], wanted[1, 1], 1e-3)


# -- products ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 67])
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 1), (576, 33), (2048, 16), (2064, 40), (8960, 15)])
def test_product(kernels: Kernels, rows: int, inputs: int, outputs: int) -> None:
    """Activations are rounded to 13 bits, and nothing else is: sums of the largest numbers are exact."""
    numbers = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    x, scale, bias = torch.randn(rows, inputs), torch.rand(outputs), torch.randn(outputs)
    numbers[0], x[0] = -128, -3.0
    x[-1, 0] = 1000.0
    top = x.abs().amax(-1, keepdim=True)
    rounded = (x * (torch.tensor(8127.0) / top)).round().double() * top / 8127
    weight = Weight(interleave(numbers.clone().view(torch.int16)), scale, outputs)
    found = kernels.multiply(x, weight, bias)
    wanted = rounded @ numbers.double().t() * scale + bias
    bound = (rounded.abs() @ numbers.double().abs().t() * scale + 1) * 1e-6
    assert ((found - wanted).abs() <= bound).all()
    assert torch.equal(kernels.multiply(x, weight, None)[:1], kernels.multiply(x[:1], weight, None))


def test_interleaved_weights_take_no_second_place() -> None:
    numbers = torch.randint(-128, 128, (64, 32), dtype=torch.int8)
    before = numbers.clone()
    found = interleave(numbers.view(torch.int16))
    assert found.data_ptr() == numbers.data_ptr()
    assert torch.equal(found.view(torch.int8).view(4, 16, 16, 2), before.view(4, 16, 16, 2).transpose(1, 2))


# -- compiling --------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty one, and nothing in memory of what was loaded before."""
    monkeypatch.setenv("LOOM_CACHE", str(tmp_path / "cache"))
    build._find.cache_clear()
    yield tmp_path / "cache" / "kernels"
    build._find.cache_clear()


def test_a_second_start_compiles_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.library() is not None
    [made] = cache.iterdir()
    build._find.cache_clear()
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.library() is not None
    assert list(cache.iterdir()) == [made]


@pytest.mark.usefixtures("cache")
def test_another_machine_has_a_library_of_its_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.library()
    build._find.cache_clear()
    monkeypatch.setattr(build, "_features", lambda: "flags: other")
    build.library()
    assert len(list(cache.iterdir())) == 2


def test_starts_at_once_share_what_is_compiled(cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: build._load("gcc"), range(4)))
    assert all(isinstance(each, ctypes.CDLL) for each in found)
    assert len(list(cache.iterdir())) == 1


@pytest.mark.usefixtures("cache")
def test_without_a_compiler_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert build.library() is None
    assert cpu.kernels() is None
    assert any("gcc" in line for line in survey(ModelConfig(device="cpu"), ParallelConfig()))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("script", ["exit 1", "[ $1 = --version ] || { echo no such flag >&2; exit 4; }"])
def test_a_compiler_that_fails_is_reported(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with caplog.at_level(logging.WARNING):
        assert build.library() is None
    assert "torch serves without" in caplog.text
    assert ("no such flag" in caplog.text) == ("flag" in script)


def test_a_cache_that_cannot_be_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is compiled for this process only, and its file is deleted."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert build.library() is not None
    assert not cache.exists()


# -- whole answers ----------------------------------------------------------------------------------

PROMPTS = [[int(i * 37 % 241) + 3 for i in range(n)] for n in (100, 1, 64, 37)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=n, logprobs=2, prompt_logprobs=0) for n in (50, 90, 8, 30)
]


@pytest.mark.parametrize("flags", ["", "--tp 2", "--speculative-algorithm ngram"])
@pytest.mark.parametrize(
    "variant", ["llama-tied-bias", "qwen3", "qwen3-window", "mixtral", "olmo2", "mistral"]
)
def test_answers_are_those_of_torch(variant: str, flags: str, tmp_path: Path) -> None:
    """Prompts in chunks beside decode rows, over ends of pages, of blocks of keys and of windows."""
    path = tiny_model.build(variant, tmp_path).path
    found = []
    for backend in ("decode=cpu", "decode=torch"):
        driver = serve(path, f"{flags} --attention-backend {backend}")
        try:
            found.append(driver.run(PROMPTS, PARAMS))
        finally:
            driver.close()
    for own, torchs in zip(*found, strict=True):
        assert own.tokens == torchs.tokens
        torch.testing.assert_close(own.logprobs, torchs.logprobs, rtol=1e-4, atol=1e-4)
        one, other = ([v for piece in each.prompt for v in piece.values.tolist()] for each in (own, torchs))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_model_that_they_do_not_compute(tmp_path: Path) -> None:
    """The model runs in torch, unless the kernels are asked for by name."""
    path = tiny_model.build("gpt-oss", tmp_path).path
    serve(path, "").close()
    with pytest.raises(ConfigError, match="decode=torch"):
        serve(path, "--attention-backend decode=cpu")
