"""Building an executor that answers, from settings."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from core.config import CacheConfig, ModelConfig, ParallelConfig, ScheduleConfig
from core.errors import ConfigError
from core.models.spec import W8A8, EncoderSpec
from core.plan import Chunk, NewSlot, PageWrites, StepFailure, StepPlan, StepResult
from core.types import NO_TOKENS
from gpu.build import Beside, build_executor, check_pages, spec_of
from gpu.device import CudaFacts
from gpu.executor import LocalExecutor
from gpu.layers.rope import frequencies
from gpu.parts import Target
from gpu.sizes import fit_rope
from gpu.targets import choose_dtype, choose_ranks, choose_targets
from gpu.weight_formats import choose_fp8
from tests.rigs import tiny_model
from tests.rigs.arrays import ints
from tests.rigs.runner import GREEDY
from tests.rigs.wait import PATIENCE


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build("qwen2", tmp_path_factory.mktemp("qwen2")).path


def build(path: Path, cache: CacheConfig = CacheConfig(kv_tokens=512), **model: object) -> LocalExecutor:  # noqa: B008
    config = ModelConfig(**model)  # type: ignore[arg-type]
    return build_executor(spec_of(path), path, config, cache, ScheduleConfig(), lambda stage, share: None)


def test_capabilities_say_what_was_built(path: Path) -> None:
    caps = build(path).capabilities
    assert (caps.num_pages, caps.page_size, caps.max_rows) == (33, 16, 64)
    assert (caps.context_length, caps.vocab_size, caps.device) == (256, 256, "cpu")
    assert (caps.dtype, caps.weight_dtype, caps.kv_dtype) == ("float32",) * 3
    assert caps.attention_backend in (
        "torch",
        "prefill=torch,decode=cpu",
    )  # without a C compiler, and with one
    assert build(path, CacheConfig(kv_tokens=64)).capabilities.context_length == 64
    assert build(path, context_length=100).capabilities.context_length == 100


@pytest.mark.parametrize(
    ("name", "checkpoint", "task", "device", "chosen"),
    [
        ("auto", "bfloat16", "generate", "cpu", torch.bfloat16),
        ("auto", "bfloat16", "embed", "cpu", torch.float32),
        ("auto", "float16", "generate", "cpu", torch.float32),
        ("float32", "bfloat16", "generate", "cpu", torch.float32),
        ("auto", "float16", "generate", "cuda", torch.float16),
        ("auto", "float32", "generate", "cuda", torch.bfloat16),
        ("auto", "float32", "embed", "cuda", torch.float32),
        ("float32", "float32", "generate", "cuda", torch.float32),
        ("bfloat16", "float32", "generate", "cpu", torch.bfloat16),
    ],
)
def test_the_dtype_of_the_computation(
    path: Path,
    name: Any,
    checkpoint: str,
    task: str,
    device: str,
    chosen: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The CPU has products of bfloat16."""
    monkeypatch.setattr("gpu.targets.multiplies_bfloat16", lambda: True)
    spec = msgspec.structs.replace(spec_of(path), dtype=checkpoint, task=task)
    assert choose_dtype(ModelConfig(dtype=name), spec, torch.device(device)) == chosen


def test_what_a_cpu_computes_in_float32(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the checkpoint has bfloat16: what is quantised, or will be, and all where it has no products."""
    cpu, spec = torch.device("cpu"), msgspec.structs.replace(spec_of(path), dtype="bfloat16")
    for has in (True, False):
        monkeypatch.setattr("gpu.targets.multiplies_bfloat16", lambda has=has: has)
        assert choose_dtype(ModelConfig(), spec, cpu) == (torch.bfloat16 if has else torch.float32)
        assert choose_dtype(ModelConfig(quantization="int8"), spec, cpu) == torch.float32
        for stored in ({"stored_gguf": True}, {"stored_fp8": "rows"}, {"stored_w8a8": W8A8()}):
            own = msgspec.structs.replace(spec, **stored)
            assert choose_dtype(ModelConfig(), own, cpu) == torch.float32


def test_longrope_stretches_as_much_as_the_context_needs(tmp_path: Path) -> None:
    spec = spec_of(tiny_model.build("phi3-longrope", tmp_path).path)
    short, long = (fit_rope(spec, context) for context in (16, 17))
    assert (short.rope.long, long.rope.long) == (False, True) and spec == long
    turns = torch.tensor(long.rope.long_factors) / torch.tensor(long.rope.short_factors)
    torch.testing.assert_close(frequencies(short.rope, 12), frequencies(long.rope, 12) * turns)
    windowed = fit_rope(msgspec.structs.replace(spec, window_rope=long.rope), 16)
    assert windowed.window_rope == windowed.rope == short.rope
    plain = spec_of(tiny_model.build("llama", tmp_path / "llama").path)
    assert fit_rope(plain, 16) == plain


@pytest.mark.parametrize(("tp", "threads"), [(1, 6), (2, 3), (4, 1)])
def test_ranks_share_the_threads_that_are_asked_for(path: Path, tp: int, threads: int) -> None:
    before = torch.get_num_threads()
    try:
        for _ in range(2):  # as for two replicas
            targets = choose_targets(
                spec_of(path), ModelConfig(device="cpu", threads=6), ParallelConfig(tp=tp), 0
            )
            choose_ranks(targets, spec_of(path), 8, 64, None)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_it_answers_through_its_threads(path: Path) -> None:
    executor, answered = build(path), threading.Event()
    executor.start(answered.set)
    prompt = ints(range(3, 13))
    chunk = Chunk(1, 0, prompt, True)
    writes = PageWrites(ints([1, 1]), ints([0, 1]), ints([1, 2]))
    new = (NewSlot(1, GREEDY, prompt, NO_TOKENS, 0),)
    plans = [StepPlan(0, NO_TOKENS, (chunk,), new, writes)]
    plans += [StepPlan(step, ints([1])) for step in range(1, 8)]
    results: list[Any] = []
    for plan in plans:  # as many before the first has answered as may be in flight
        while plan.step - len(results) > executor.capabilities.max_depth:
            assert answered.wait(PATIENCE)
            answered.clear()
            results += executor.results()
        executor.submit(plan)
    executor.close()
    results += executor.results()
    assert all(isinstance(result, StepResult) for result in results)
    reference = tiny_model.build("qwen2", path).reference
    assert [int(result.tokens[0]) for result in results] == tiny_model.greedy(reference, prompt.tolist(), 8)


def test_more_steps_than_the_rings_hold_are_a_failure_and_no_wrong_tokens(path: Path) -> None:
    executor = build(path)
    released = threading.Event()
    executor.start(lambda: released.wait(PATIENCE))  # the waiter thread reads no second answer
    prompt = ints(range(3, 13))
    writes = PageWrites(ints([1, 1]), ints([0, 1]), ints([1, 2]))
    new = (NewSlot(1, GREEDY, prompt, NO_TOKENS, 0),)
    executor.submit(StepPlan(0, NO_TOKENS, (Chunk(1, 0, prompt, True),), new, writes))
    for step in range(1, 16):
        executor.submit(StepPlan(step, ints([1])))
    while not executor._failed.is_set():
        assert not released.wait(0.01)
    released.set()
    executor.close()
    *answered, failure = executor.results()
    reference = tiny_model.build("qwen2", path).reference
    expected = tiny_model.greedy(reference, prompt.tolist(), len(answered))
    assert [int(result.tokens[0]) for result in answered if isinstance(result, StepResult)] == expected
    assert isinstance(failure, StepFailure) and "have not been read" in failure.reason


def test_dummy_weights_need_only_a_config(path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    assert build(tmp_path, load_format="dummy").capabilities.vocab_size == 256


def test_stages_are_reported_in_order(path: Path) -> None:
    seen: list[str] = []
    build_executor(
        spec_of(path),
        path,
        ModelConfig(),
        CacheConfig(kv_tokens=64),
        ScheduleConfig(),
        lambda stage, share: seen.append(stage),
    )
    assert list(dict.fromkeys(seen)) == ["memory", "weights", "pool"]


def test_replicas_share_the_memory_of_a_cpu(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.build.free_bytes", lambda device: 64 * 2**20)
    schedule, cache = ScheduleConfig(max_running=4096, step_tokens=4096), CacheConfig(mem_fraction=0.5)
    pages = [
        build_executor(
            spec_of(path), path, ModelConfig(), cache, schedule, lambda stage, share: None,
            Beside(parallel=ParallelConfig(dp=replicas), replica=replicas - 1),
        ).capabilities.num_pages
        for replicas in (1, 2, 4)
    ]  # fmt: skip
    assert pages[0] == pytest.approx(2 * pages[1], rel=0.1) == pytest.approx(4 * pages[2], rel=0.1)


def test_a_context_the_model_does_not_have(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--context-length 300 is longer than the 256"):
        build(path, context_length=300)


def test_a_device_that_is_not_there(path: Path) -> None:
    with pytest.raises(ConfigError, match="--device cpu"):
        build(path, device="cuda")


def test_fp8_pages_are_a_gpus(path: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-dtype fp8 needs a GPU"):
        build(path, CacheConfig(kv_tokens=512, kv_dtype="fp8"))
    spec, cache = spec_of(path), CacheConfig(kv_dtype="fp8")
    cuda = Target(torch.device("cuda"), torch.bfloat16, CudaFacts("", "NVIDIA A100", (8, 0)))
    with pytest.raises(ConfigError, match=r"needs compute capability 8\.9, NVIDIA A100 has 8\.0"):
        check_pages(spec, cuda, cache)
    hopper = cuda._replace(facts=CudaFacts("", "NVIDIA H200", (9, 0)))
    check_pages(spec, hopper, cache)
    with pytest.raises(ConfigError, match="keeps no keys and values"):
        check_pages(msgspec.structs.replace(spec, encoder=EncoderSpec(token_types=2)), hopper, cache)


def test_fp8_weights_are_a_gpus_choice(path: Path) -> None:
    with pytest.raises(ConfigError, match="--quantization fp8 is refused: it is there on a GPU"):
        build(path, quantization="fp8")
    spec = spec_of(path)
    stored = msgspec.structs.replace(spec, stored_fp8="blocks")
    hopper = Target(torch.device("cuda"), torch.bfloat16, CudaFacts("", "NVIDIA H200", (9, 0)))
    ada = hopper._replace(facts=CudaFacts("", "NVIDIA L4", (8, 9)))
    half = hopper._replace(dtype=torch.float16)
    auto, asked, blocks = (ModelConfig(quantization=name) for name in ("auto", "fp8", "fp8-blocks"))
    assert [choose_fp8(spec, given, hopper) for given in (auto, asked)] == ["", "rows"]
    assert [choose_fp8(stored, given, hopper) for given in (auto, asked)] == ["blocks", "blocks"]
    with pytest.raises(ConfigError, match=r"128 does not divide hidden_size \(64\), queries .* fp8, scaled"):
        choose_fp8(spec, blocks, hopper)
    wide = msgspec.structs.replace(spec, hidden=128, head_dim=32, kv_heads=4, intermediate=256)
    assert choose_fp8(wide, blocks, hopper) == "blocks"
    assert not choose_fp8(stored, ModelConfig(quantization="none"), hopper)
    for target, reason in ((ada, r"9\.0, NVIDIA L4 has 8\.9"), (half, "--dtype bfloat16")):
        assert not choose_fp8(stored, auto, target)  # dequantised, as on a CPU
        with pytest.raises(ConfigError, match=reason):
            choose_fp8(stored, asked, target)


def test_rows_fit_the_step_budget(path: Path) -> None:
    def build_with(**schedule: int) -> LocalExecutor:
        chosen = ScheduleConfig(**schedule)
        return build_executor(
            spec_of(path), path, ModelConfig(), CacheConfig(kv_tokens=512), chosen, lambda stage, share: None
        )

    assert build_with(step_tokens=16).capabilities.max_rows == 16
    with pytest.raises(ConfigError, match="--step-tokens"):
        build_with(step_tokens=16, max_running=17)
