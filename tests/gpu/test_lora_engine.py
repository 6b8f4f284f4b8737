"""Adapters under a scheduler: more than places, drafts by prompt lookup, grammars, cached prefixes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.helper.process import HelperProcess
from app.text.tokenizer import Tokenizer
from core.adapters import TARGETS
from core.config import CacheConfig, ModelConfig, ScheduleConfig, SpeculativeConfig
from core.grammar import CompiledGrammar, GrammarSpec
from core.request import SamplingParams
from gpu.build import NO_DRAFTS, Beside, Drafting, build_executor, spec_of
from gpu.grammar import Compiler
from tests.rigs import lora, tiny_model
from tests.rigs.driver import Driver
from tests.rigs.lora import LIMITS
from tests.rigs.tiny_model import VOCAB

NAMES = ("", "a", "b", "c", "d")
"""Four adapters for three places, and the base model."""

PREFIX = [int(i * 37 % 251) + 3 for i in range(40)]
NGRAM = Drafting(SpeculativeConfig(algorithm="ngram"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build("qwen3-moe-mixed", tmp_path_factory.mktemp("moe")).path


@pytest.fixture(scope="module")
def digits() -> Iterator[CompiledGrammar]:
    compiler = Compiler(Tokenizer.load(None, VOCAB, [3]).token_table(VOCAB), HelperProcess())
    yield asyncio.run(compiler.compile(GrammarSpec("regex", "[0-9]{6}")))
    compiler.close()


def driver(path: Path, drafting: Drafting, root: Path) -> Driver:
    model, cache = ModelConfig(device="cpu"), CacheConfig(page_size=4, kv_tokens=1024)
    schedule = ScheduleConfig(step_tokens=64, max_running=6, overlap_depth=1)
    beside = Beside(drafting, LIMITS)
    made = build_executor(spec_of(path), path, model, cache, schedule, lambda stage, share: None, beside)
    made.prepare(lambda share: None)
    assert made.capabilities.adapters == LIMITS
    own = Driver(made, schedule)
    for seed, name in enumerate(NAMES[1:], 1):
        saved = root / name
        if not saved.exists():
            lora.save(lora.adapter_for(path, TARGETS, rank=2 * seed, seed=seed), saved, rank=2 * seed)
        own.load(name, saved)
    return own


@pytest.mark.parametrize("drafting", [NO_DRAFTS, NGRAM])
def test_a_batch_of_adapters_says_what_each_says_alone(
    path: Path, tmp_path: Path, digits: CompiledGrammar, drafting: Drafting
) -> None:
    """All have the same prompt, so that a prefix of another adapter would change the text."""
    params = SamplingParams(temperature=0.0, max_tokens=24)
    short = SamplingParams(temperature=0.0, max_tokens=6)
    alone = {}
    for name in NAMES:
        own = driver(path, NO_DRAFTS, tmp_path)
        alone[name] = own.run([PREFIX] * 2, [params, short], [None, digits], [name] * 2)
        own.close()
    assert len({tuple(answers[0].tokens) for answers in alone.values()}) == len(NAMES)
    together = driver(path, drafting, tmp_path)
    for _ in range(2):  # again, with its own prefix cached
        names = [*NAMES, *NAMES[::-1]]
        grammars = [None] * len(NAMES) + [digits] * len(NAMES)
        answers = together.run([PREFIX] * len(names), [params] * 5 + [short] * 5, grammars, names)
        for name, grammar, answer in zip(names, grammars, answers, strict=True):
            assert answer.tokens == alone[name][grammar is not None].tokens, name
    together.close()
