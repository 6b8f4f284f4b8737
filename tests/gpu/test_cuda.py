"""A GPU says what a CPU says, in every configuration, and a graph what its own work says, bit by bit.

The numerics rule: float32 texts are equal wherever the best two tokens are further apart than the
arithmetic's error; bfloat16 is compared with itself, by teacher-forced log-probabilities across shapes,
and exactly between graphs and plain launches of the same shape.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from core.command import Command
from core.config import CacheConfig, ModelConfig, ScheduleConfig
from core.plan import StepPlan
from core.request import SamplingParams
from gpu.build import build_executor, spec_of
from gpu.executor import LocalExecutor
from gpu.step.steps import DEEP_ROW_KEYS, Forward
from gpu.thread import device_thread
from tests.rigs import int8_files, mxfp4_files, tiny_model
from tests.rigs.captured import full, same_text
from tests.rigs.configurations import TINY_CONFIGURATIONS
from tests.rigs.driver import Answer, Driver
from tests.rigs.int4_files import KINDS, WIDE, WIDE_HYBRID, plain_of, quantise

pytestmark = pytest.mark.gpu

PROMPTS = [[int(i * 37 % 251) + 3 for i in range(n)] for n in (40, 23, 7, 90, 40, 1)]
PROMPTS.append([*PROMPTS[0][:33], 9, 8, 7])
SCHEDULE = ScheduleConfig(step_tokens=128, max_running=8, prefill_weight=0)
"""Plans that do not depend on how long steps took: what is compared has the same ones."""


def executor(
    path: Path,
    device: str,
    dtype: str,
    schedule: ScheduleConfig = SCHEDULE,
    quantization: str = "auto",
    **cache: Any,
) -> LocalExecutor:
    settings = CacheConfig(**({"page_size": 16, "kv_tokens": 4096} | cache))
    model = ModelConfig(model=str(path), device=device, dtype=dtype, quantization=quantization)  # type: ignore[arg-type]
    made = build_executor(spec_of(path), path, model, settings, schedule, lambda stage, share: None)
    made.prepare(lambda share: None)
    return made


def answers(
    path: Path,
    device: str,
    dtype: str,
    params: Sequence[SamplingParams],
    radix: bool = True,
    schedule: ScheduleConfig = SCHEDULE,
    **cache: Any,
) -> list[Answer]:
    return driven(executor(path, device, dtype, schedule, **cache), PROMPTS, params, schedule, radix)


def driven(
    made: LocalExecutor,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    schedule: ScheduleConfig,
    radix: bool = True,
) -> list[Answer]:
    driver = Driver(made, schedule, radix)
    try:
        return driver.run(prompts, params)
    finally:
        driver.close()


GREEDY = [SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)] * len(PROMPTS)


@pytest.fixture(scope="module", params=sorted(tiny_model.VARIANTS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(request.param, tmp_path_factory.mktemp(request.param)).path


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build("qwen3-moe", tmp_path_factory.mktemp("moe")).path


def test_every_family_as_on_a_cpu(path: Path) -> None:
    for got, want in zip(
        answers(path, "cuda", "float32", GREEDY), answers(path, "cpu", "float32", GREEDY), strict=True
    ):
        same_text(got, want)


@pytest.mark.parametrize("name", tiny_model.UNLISTED)
def test_without_a_family_as_on_a_cpu(name: str, tmp_path: Path) -> None:
    """Through transformers, in graphs but for experts."""
    path = tiny_model.build(name, tmp_path).path
    test_every_family_as_on_a_cpu(path)


MIXED = [
    SamplingParams(temperature=0.0, max_tokens=20),
    SamplingParams(temperature=0.9, seed=3, max_tokens=20),
    SamplingParams(temperature=0.8, seed=4, top_p=0.9, top_k=20, max_tokens=20),
    SamplingParams(temperature=0.7, seed=5, frequency_penalty=0.5, presence_penalty=0.4, max_tokens=20),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=20),
    SamplingParams(temperature=0.0, logprobs=3, max_tokens=20),
    SamplingParams(temperature=0.0, prompt_logprobs=1, max_tokens=4),
]


def test_sampling_as_on_a_cpu(path: Path) -> None:
    """float32, so that only draws near a tie may differ: none of these is."""
    got = answers(path, "cuda", "float32", MIXED)
    want = answers(path, "cpu", "float32", MIXED)
    equal = sum(mine.tokens == theirs.tokens for mine, theirs in zip(got, want, strict=True))
    assert equal >= len(MIXED) - 1, [(a.tokens, b.tokens) for a, b in zip(got, want, strict=True)]


ASKING = [
    *MIXED,
    SamplingParams(temperature=0.0, logprobs=2, logprobs_mode="processed_logprobs", max_tokens=20),
    SamplingParams(temperature=0.9, seed=6, top_k=9, support=True, entropy=True, max_tokens=20),
    SamplingParams(temperature=0.0, logit_bias=((5, 3.0), (9, -100.0)), logprobs=20, max_tokens=20),
    SamplingParams(temperature=0.0, min_tokens=9, stop_ids=frozenset(range(200)), max_tokens=20),
    SamplingParams(temperature=0.0, hidden="all", max_tokens=4),
]


def test_no_launch_waits_for_the_device(moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rows ask for: torch raises where the launch thread would wait."""
    made = executor(moe, "cuda", "float32")
    runner: Any = made._workers[0]._runner
    kind, launch = type(runner), type(runner).launch

    def watched(self: Any, plan: StepPlan) -> Any:
        try:
            torch.cuda.set_sync_debug_mode("error")
            return launch(self, plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(kind, "launch", watched)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(ASKING))]
    found = driven(made, prompts, ASKING, SCHEDULE)
    assert all(answer.tokens for answer in found)


@pytest.mark.parametrize("graphs", [True, False])
def test_long_prompts_are_scored_as_on_a_cpu(tmp_path: Path, graphs: bool) -> None:
    """Chunks of more positions than are scored at once, one prompt behind the cached beginning of another."""
    path = tiny_model.build("llama", tmp_path, max_position_embeddings=2048).path
    schedule = ScheduleConfig(step_tokens=600, max_running=8, cuda_graphs=graphs, prefill_weight=0)
    prompts = [[int(i * 37 % 251) + 3 for i in range(n)] for n in (1, 255, 256, 257, 700, 1500)]
    prompts.append([*prompts[-1][:1000], 9, 8, 7])
    starts = [0] * 6 + [900]
    params = [
        SamplingParams(max_tokens=1, prompt_logprobs=2, prompt_logprobs_start=start) for start in starts
    ]
    got, want = (
        driven(executor(path, device, "float32", schedule, kv_tokens=8192), prompts, params, schedule)
        for device in ("cuda", "cpu")
    )
    for prompt, start, mine, theirs in zip(prompts, starts, got, want, strict=True):
        for told in (mine.prompt, theirs.prompt):
            places = [piece.start + i for piece in told for i in range(len(piece.values))]
            assert places == list(range(max(start, 1), len(prompt)))
        for at, (one, other) in enumerate(zip(scored(mine), scored(theirs), strict=True)):
            assert one == pytest.approx(other, abs=2e-2), (len(prompt), at)


def scored(answer: Answer) -> list[float]:
    return [value for piece in answer.prompt for value in piece.values.tolist()]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_graphs_change_nothing(moe: Path, depth: int) -> None:
    schedule = msgspec.structs.replace(SCHEDULE, overlap_depth=depth)
    plain = msgspec.structs.replace(schedule, cuda_graphs=False)
    got = answers(moe, "cuda", "bfloat16", MIXED, schedule=schedule)
    want = answers(moe, "cuda", "bfloat16", MIXED, schedule=plain)
    if depth == 0:  # at others the shapes depend on when results arrive
        assert [answer.tokens for answer in got] == [answer.tokens for answer in want]
    assert [len(answer.tokens) for answer in got] == [len(answer.tokens) for answer in want]


@pytest.mark.parametrize("name", TINY_CONFIGURATIONS)
def test_text_is_the_same_in_every_configuration(moe: Path, name: str) -> None:
    given = dict(TINY_CONFIGURATIONS[name])
    cache = {key: given.pop(key) for key in ("kv_tokens", "page_size") if key in given}
    radix = given.pop("radix", True)
    schedule = msgspec.structs.replace(SCHEDULE, **given)
    want = answers(moe, "cuda", "float32", GREEDY)
    got = answers(moe, "cuda", "float32", GREEDY, radix=radix, schedule=schedule, **cache)
    for mine, theirs in zip(got, want, strict=True):
        same_text(mine, theirs)


def test_bfloat16_is_within_its_own_error(path: Path) -> None:
    check_bfloat16(path, PROMPTS[0], "cuda")


@pytest.mark.parametrize("length", [40, DEEP_ROW_KEYS - 8])
@pytest.mark.parametrize(("name", "head_dim"), [("llama", 64), ("llama", 128), ("mistral", 64)])
def test_one_row_is_within_its_own_error(
    name: str, head_dim: int, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel for few rows is used, on both sides of the length from which another one serves."""
    from gpu.kernels.attention.cluster_decode import CAPABILITY, ClusterDecode  # imports Triton

    called, run = [], ClusterDecode.__call__

    def counted(self: ClusterDecode, *args: Any, **more: Any) -> None:
        called.append(1)
        run(self, *args, **more)

    monkeypatch.setattr(ClusterDecode, "__call__", counted)
    path = tiny_model.build(name, tmp_path, head_dim=head_dim, max_position_embeddings=8192).path
    check_bfloat16(path, [int(i * 37 % 251) + 3 for i in range(length)], "cuda", kv_tokens=16384)
    assert bool(called) == (torch.cuda.get_device_capability() == CAPABILITY)


def check_bfloat16(path: Path, prompt: list[int], device: str, **cache: Any) -> None:
    """Decoding and prefill compute the log-probabilities of the same tokens, but round in different places.
    The error of decoding, compared with float32, must be about as large as that of prefill, which is 0.03 to
    0.14 on average with these random weights."""
    params = [SamplingParams(temperature=0.0, max_tokens=16, logprobs=0)]
    (decoded,) = driven(executor(path, device, "bfloat16", **cache), [prompt], params, SCHEDULE)
    forced = [SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)]
    text, found = [[*prompt, *decoded.tokens]], []
    for dtype in ("bfloat16", "float32"):
        (answer,) = driven(executor(path, device, dtype, **cache), text, forced, SCHEDULE)
        found.append(np.concatenate([piece.values for piece in answer.prompt])[-16:])
    prefilled, exact = found
    own, apart = (np.abs(values - exact).mean() for values in (prefilled, decoded.logprobs))
    assert apart <= 2 * own + 0.02, (apart, own)


@pytest.mark.parametrize(
    "chosen",
    [{"kv_dtype": "fp8"}, {"quantization": "fp8"}, {"quantization": "int8"}],
    ids=["pages", "weights", "int8"],
)
def test_8_bits_are_near_and_graphs_change_nothing(path: Path, chosen: dict[str, str]) -> None:
    if not spec_of(path).causal:
        pytest.skip("it keeps no pages, and runs in plain torch")
    if "kv_dtype" in chosen and (spec_of(path).linear or spec_of(path).latent):
        pytest.skip("refused by its name")
    check_coarse(path, chosen)


def test_blocks_are_near_and_graphs_change_nothing(tmp_path: Path) -> None:
    """The model's matrices consist of whole blocks of 128 x 128: others are not quantised."""
    path = tiny_model.build("qwen3-moe-wide", tmp_path).path
    check_coarse(path, {"quantization": "fp8-blocks"})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_w8a8_is_near_and_graphs_change_nothing(dtype: str, tmp_path: Path) -> None:
    """Matrices and experts are quantised, and some layers of the checkpoint are not."""
    path, plain = (tiny_model.build("qwen3-moe-mixed", tmp_path / name).path for name in ("coarse", "plain"))
    int8_files.quantise(path, int8_files.changed("re:.*o_proj"))
    check_near(path, plain, dtype, {})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        ("qwen3", WIDE),
        ("qwen3-moe", WIDE | {"moe_intermediate_size": 128}),
        ("qwen3-next", WIDE_HYBRID),
        ("qwen3.5-moe", WIDE_HYBRID),
    ],
)
def test_4_bits_are_near_and_graphs_change_nothing(
    variant: str, sizes: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    """The weights that they stand for, in a model each matrix of which is held so."""
    path = tiny_model.build(variant, tmp_path / "fine", **sizes).path
    plain = plain_of(path, quantise(path, KINDS["awq"]), tmp_path / "plain")
    check_near(path, plain, dtype, {})


def test_mxfp4_is_near_and_graphs_change_nothing(tmp_path: Path) -> None:
    """The weights that experts stand for."""
    made = tiny_model.build("gpt-oss", tmp_path / "fine", intermediate_size=64)
    mxfp4_files.quantise(made.path, made.reference)
    made.reference.save_pretrained(tmp_path / "plain")
    check_near(made.path, tmp_path / "plain", "bfloat16", {})


def check_coarse(path: Path, chosen: dict[str, str]) -> None:
    check_near(path, path, "bfloat16", chosen)


def check_near(path: Path, plain: Path, dtype: str, chosen: dict[str, str]) -> None:
    """The answers of `path` as `chosen` are near those of `plain`, and the same without graphs."""
    graphs = msgspec.structs.replace(SCHEDULE, overlap_depth=0)
    eager = msgspec.structs.replace(graphs, cuda_graphs=False)
    got = answers(path, "cuda", dtype, GREEDY, schedule=graphs, **chosen)
    same = answers(path, "cuda", dtype, GREEDY, schedule=eager, **chosen)
    assert [answer.tokens for answer in got] == [answer.tokens for answer in same]
    want = answers(plain, "cuda", dtype, GREEDY)
    apart = [abs(mine.logprobs[0] - theirs.logprobs[0]) for mine, theirs in zip(got, want, strict=True)]
    assert np.median(apart) < 0.5, apart  # tiny models of large random weights; most of an answer's is noise


# -- one executor after another ---------------------------------------------------------------------


def test_a_closed_executor_gives_its_memory_back(moe: Path) -> None:
    """Memory goes back to the device, though somebody still holds the executor; so it does when one sleeps.
    Reserved is what torch has taken from the device for this process, in use or not."""
    executor(moe, "cuda", "bfloat16").close()  # what a process takes once
    before = torch.cuda.memory_reserved()
    made = executor(moe, "cuda", "bfloat16", kv_tokens=4 << 20)
    taken = torch.cuda.memory_reserved() - before
    assert taken > 1 << 30
    runner = made._workers[0]._runner
    with device_thread(torch.device("cuda")):
        runner.carry_out(Command(id=1, action="sleep", tags=("kv_cache",)))
    assert torch.cuda.memory_reserved() - before < taken / 4
    made.close()
    assert torch.cuda.memory_reserved() - before < taken / 4


def test_graphs_that_nobody_holds_disturb_no_capture(moe: Path) -> None:
    """They call the device when they are collected, which must not happen within another's capture."""
    kept = gc.get_threshold()
    try:
        gc.disable()
        for _ in range(2):  # runners are garbage in circles
            made = executor(moe, "cuda", "bfloat16")
            del made
        gc.set_threshold(1, 1, 1)
        gc.enable()
        driver = Driver(executor(moe, "cuda", "bfloat16"), SCHEDULE)
    finally:
        gc.set_threshold(*kept)
        gc.enable()
    try:
        (found,) = driver.run(PROMPTS[:1], GREEDY[:1])
    finally:
        driver.close()
    assert found.tokens, "captured, and whole"


# -- graphs, bit by bit ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runner(moe: Path) -> Iterator[Any]:
    """The runner of an executor that gets no plans; the test is its launch thread."""
    made = executor(moe, "cuda", "bfloat16")
    yield made._workers[0]._runner
    made.close()


def test_every_graph_is_its_work_bit_by_bit(runner: Any) -> None:
    seen = 0
    with device_thread(runner.device):
        for key in runner._machine.sizes.all():
            if not isinstance(key, Forward):
                continue
            plan = full(key.tokens, key.chunks > 0, runner.shape.rows)
            found = []
            for launch in (runner._launches[key], lambda key=key: runner._forward(key)):
                runner._rings.write(plan)
                runner._buffers.sample_hidden.fill_(float("nan"))
                launch()
                torch.cuda.synchronize()
                found.append(runner._buffers.sample_hidden[: plan.num_samples].clone())
            assert found[0].isfinite().all(), key
            assert torch.equal(*found), key
            seen += 1
    assert seen > 5


def test_padding_changes_nothing(runner: Any) -> None:
    """Three rows in a graph of four: the dump alone is written, and the rows say what they say in the
    same graph beside a fourth."""
    with device_thread(runner.device):
        plan = full(3, False, 8)
        key = runner._machine.sizes.forward(plan)
        caches = runner._pages.ops(runner._buffers.view(key))._kernels.caches
        for keys, _ in caches:
            keys.fill_(3.0)  # an earlier test's rows stand where these will: the same keys again
        pages = torch.cat([k.flatten() for k, _ in caches])
        runner._rings.write(plan)
        runner._launches[key]()
        torch.cuda.synchronize()
        after = torch.cat([k.flatten() for k, _ in caches])
        changed = (pages != after).view(len(caches), -1)
        per_token = changed.view(len(changed), -1, changed.shape[1] // (4096 + 16)).any(-1)
        assert per_token.sum(1).tolist() == [3] * len(changed)
