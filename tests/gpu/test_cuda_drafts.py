"""Every drafter in graphs on a GPU: texts are those without drafts, and no launch waits for the device."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from app.helper.process import HelperProcess
from app.text.tokenizer import Tokenizer
from core.config import CacheConfig, ModelConfig, ScheduleConfig, SpeculativeConfig
from core.grammar import CompiledGrammar, GrammarSpec
from core.plan import StepPlan
from core.request import SamplingParams
from gpu.build import NO_DRAFTS, Beside, Drafting, build_executor, spec_of
from gpu.executor import LocalExecutor
from gpu.grammar import Compiler
from tests.rigs import draft_heads, mtp, tiny_model
from tests.rigs.driver import Answer, Driver
from tests.rigs.tiny_model import VOCAB

pytestmark = pytest.mark.gpu

TIE = 5e-3
"""See `tests/gpu/test_cuda.py`."""
PROMPTS = [[int(i * 37 % 251) + 3 for i in range(n)] for n in (40, 23, 7, 90, 40, 1)]
PROMPTS += [[*PROMPTS[0][:33], 9, 8, 7], [5, 6, 7] * 30]
PARAMS = [
    *[SamplingParams(temperature=0.0, max_tokens=40, logprobs=2)] * 5,
    SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=24, logprobs=2),
    SamplingParams(temperature=0.9, seed=3, max_tokens=40, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=40, logprobs=2),
]
SCHEDULE = ScheduleConfig(step_tokens=128, max_running=8, prefill_weight=0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build("qwen3-moe", tmp_path_factory.mktemp("moe")).path


def executor(path: Path, drafting: Drafting, graphs: bool) -> LocalExecutor:
    model = ModelConfig(model=str(path), device="cuda", dtype="float32")
    cache, schedule = CacheConfig(page_size=16, kv_tokens=4096), msgspec.structs.replace(SCHEDULE)
    schedule = msgspec.structs.replace(schedule, cuda_graphs=graphs)
    made = build_executor(
        spec_of(path), path, model, cache, schedule, lambda stage, share: None, Beside(drafting)
    )
    made.prepare(lambda share: None)
    return made


def answered(
    made: LocalExecutor, steps: list[int], grammars: Sequence[CompiledGrammar | None] = ()
) -> list[Answer]:
    """`steps` gets how many were taken."""
    driver = Driver(made, SCHEDULE)
    try:
        return driver.run(PROMPTS, PARAMS, grammars)
    finally:
        steps.append(driver.scheduler.counters.steps)
        driver.close()


TREE = ", a tree"
TREES = [name + TREE for name in ("draft-model", "eagle", "eagle3")]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", ["ngram", "draft-model", "eagle", "eagle3", "eagle3.1", *TREES])
def test_drafts_change_no_text(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, graphs: bool
) -> None:
    steps: list[int] = []
    want = answered(executor(path, NO_DRAFTS, graphs), steps)
    name, tree = (name.removesuffix(TREE), name.endswith(TREE))
    algorithm: Any = name.partition(".")[0]
    settings = SpeculativeConfig(algorithm=algorithm, num_draft_tokens=5)
    if tree:
        settings = SpeculativeConfig(algorithm=algorithm, num_draft_tokens=12, num_steps=4, eagle_topk=3)
    draft = {"ngram": None, "draft-model": path}
    where = draft[name] if name in draft else draft_heads.write(name, tmp_path)
    made = executor(path, Drafting(settings, where), graphs)
    runner: Any = made._workers[0]._runner
    kind, launch = type(runner), type(runner).launch

    def watched(self: Any, plan: StepPlan) -> Any:
        try:
            torch.cuda.set_sync_debug_mode("error")
            return launch(self, plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(kind, "launch", watched)
    for mine, theirs in zip(answered(made, steps), want, strict=True):
        same_text(mine, theirs)
    if name == "draft-model" and not tree:
        assert steps[1] < 0.6 * steps[0], "its drafts are the target's own tokens"


@pytest.mark.parametrize("variant", ["glm4-moe", "deepseek-v3", "qwen3-next"])
def test_a_models_own_layer_drafts(variant: str, tmp_path: Path) -> None:
    path, steps = mtp.build(variant, tmp_path, right=True).path, list[int]()
    want = answered(executor(path, NO_DRAFTS, True), steps)
    settings = SpeculativeConfig(algorithm="mtp", num_draft_tokens=5)
    for mine, theirs in zip(
        answered(executor(path, Drafting(settings, path), True), steps), want, strict=True
    ):
        same_text(mine, theirs)
    assert steps[1] < 0.6 * steps[0], "it knows the model"


@pytest.mark.parametrize("algorithm", ["ngram", "mtp"])
def test_drafts_of_a_hybrid_change_no_text(algorithm: Any, tmp_path: Path) -> None:
    """Some are accepted of the text that repeats itself, few of a random layer's."""
    path, steps = mtp.build("qwen3-next", tmp_path).path, list[int]()
    want = answered(executor(path, NO_DRAFTS, True), steps)
    settings = SpeculativeConfig(algorithm=algorithm, num_draft_tokens=5)
    drafting = Drafting(settings, path if algorithm == "mtp" else None)
    for mine, theirs in zip(answered(executor(path, drafting, True), steps), want, strict=True):
        same_text(mine, theirs)


@pytest.mark.parametrize("graphs", [True, False])
def test_drafts_follow_grammars(path: Path, graphs: bool) -> None:
    """Rows with grammars draft too, beside rows without."""
    compiler = Compiler(Tokenizer.load(None, VOCAB, [3]).token_table(VOCAB), HelperProcess())
    sources = ("[a-z]{9}([0-9]{3},)*", "(yes|no|maybe){3,60}", '["x-z]+', ".*")

    async def compile_all() -> list[CompiledGrammar | None]:
        found = [await compiler.compile(GrammarSpec("regex", source)) for source in sources]
        return [found[0], None, *found[1:], None, found[0]]

    steps: list[int] = []
    try:
        grammars = asyncio.run(compile_all())
        want = answered(executor(path, NO_DRAFTS, graphs), steps, grammars)
        settings = SpeculativeConfig(algorithm="draft-model", num_draft_tokens=5)
        made = executor(path, Drafting(settings, path), graphs)
        for mine, theirs in zip(answered(made, steps, grammars), want, strict=True):
            same_text(mine, theirs)
    finally:
        compiler.close()


def same_text(got: Answer, want: Answer) -> None:
    assert len(got.tokens) == len(want.tokens)
    for at, (mine, theirs) in enumerate(zip(got.tokens, want.tokens, strict=True)):
        if mine != theirs:
            assert want.margins[at] < TIE, f"token {at}: {mine} for {theirs}"
            return  # from here on the texts are two
        assert got.logprobs[at] == pytest.approx(want.logprobs[at], abs=2e-2)
