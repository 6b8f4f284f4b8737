"""Random requests, aborts and retractions with drafts of every kind: each text is what its request says
alone, without drafts, and at the end nothing is held. `LOOM_RANDOM_STEPS` says how many steps are run."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from app.engine.job import Job
from app.helper.process import HelperProcess
from app.text.tokenizer import Tokenizer
from gpu.draft.tree import Tree
from gpu.grammar import Compiler
from tests.rigs import drafters, tiny_model
from tests.rigs.draft_random import ALONE, RandomEngine, Setup, Text, some_jobs
from tests.rigs.drafters import Make
from tests.rigs.drafting import Drafts
from tests.rigs.tiny_model import VOCAB

STOP = 3
STEPS = int(os.environ.get("LOOM_RANDOM_STEPS", "600"))

MAKERS: dict[str, Callable[[int, Path, Path], Make]] = {
    "right": lambda depth, target, path: drafters.small(target),
    "small": lambda depth, target, path: drafters.small(tiny_model.build("llama", path).path),
    "eagle": lambda depth, target, path: drafters.head("eagle", path),
    "eagle3": lambda depth, target, path: drafters.head("eagle3", path),
    "ngram": lambda depth, target, path: drafters.ngram(depth),
    "right-tree": lambda depth, target, path: drafters.small(target, Tree(3, 3, depth)),
    "eagle3-tree": lambda depth, target, path: drafters.head("eagle3", path, tree=Tree(4, 2, depth)),
}
CASES: dict[str, tuple[str, int, Setup]] = {
    "right-1": ("right", 1, Setup(Drafts(1, 0.0), overlap=2, pages=34)),
    "right-3-little-memory": ("right", 3, Setup(Drafts(3, 0.0), overlap=1, pages=34)),
    "right-7-pages-of-one": ("right", 7, Setup(Drafts(7, 0.0), overlap=2, page=1, pages=120)),
    "small-4-least-memory": ("small", 4, Setup(Drafts(4, 0.0), overlap=0, pages=30)),
    "eagle-2-few-tokens": ("eagle", 2, Setup(Drafts(2, 0.0), overlap=1, step_tokens=17, samples=14)),
    "eagle3-5-priorities": ("eagle3", 5, Setup(Drafts(5, 0.0), overlap=2, pages=36, order="priority")),
    "eagle3-3-large-pages": ("eagle3", 3, Setup(Drafts(3, 0.0), overlap=0, page=16, pages=12)),
    "ngram-4-little-memory": ("ngram", 4, Setup(Drafts(4, 0.0), overlap=2, pages=34)),
    "ngram-7-few-samples": ("ngram", 7, Setup(Drafts(7, 0.0), overlap=1, samples=9, target=20.0, pages=32)),
    "given-3": ("", 3, Setup(Drafts(3, 0.6), overlap=2, page=2, pages=60)),
    "right-tree-2-little-memory": ("right-tree", 9, Setup(Drafts(9, 0.0, trees=True), overlap=2, pages=30)),
    "eagle3-tree-page-1": (
        "eagle3-tree",
        9,
        Setup(Drafts(9, 0.0, trees=True), overlap=1, page=1, pages=120),
    ),
    "given-tree-7": ("", 7, Setup(Drafts(7, 0.9, trees=True), overlap=2, page=2, pages=64)),
    "given-tree-15": ("", 15, Setup(Drafts(15, 1.0, trees=True), overlap=1, page=16, pages=20)),
    "given-6-few-tokens": ("", 6, Setup(Drafts(6, 0.9), overlap=1, step_tokens=12, samples=12, pages=34)),
}


class Alone(NamedTuple):
    """Texts of many requests, each alone."""

    path: Path
    tokenizer: Tokenizer
    compiler: Compiler
    jobs: list[Job]
    texts: dict[str, list[Text]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    path = tiny_model.build("qwen3", tmp_path_factory.mktemp("target")).path
    tokenizer = Tokenizer.load(None, VOCAB, [STOP])
    compiler = Compiler(tokenizer.token_table(VOCAB), HelperProcess())
    jobs = some_jobs(random.Random(5), 40)

    async def answers() -> dict[str, list[Text]]:
        engine = RandomEngine(path, ALONE, {}, tokenizer, compiler)
        found = {job.id: await engine.alone(job) for job in jobs}
        await engine.settle()
        engine.close()
        return found

    yield Alone(path, tokenizer, compiler, jobs, asyncio.run(answers()))
    compiler.close()


@pytest.mark.parametrize("name", CASES)
async def test_texts_are_those_of_requests_alone(alone: Alone, tmp_path: Path, name: str) -> None:
    kind, depth, setup = CASES[name]
    if kind:
        make = MAKERS[kind](depth, alone.path, tmp_path)
        setup = setup._replace(drafts=setup.drafts._replace(drafter=make))
    texts = {job.prompt.tobytes(): alone.texts[job.id][0].tokens for job in alone.jobs}
    engine = RandomEngine(alone.path, setup, texts, alone.tokenizer, alone.compiler, seed=len(name) + depth)
    whole = await engine.play(alone.jobs, STEPS // len(CASES), alone.texts)
    engine.close()
    assert whole > 10
    assert engine.scheduler.statistics().retractions > 0
    # `small` and the heads guess badly; the others are right now and then.
    if kind in ("right", "right-tree", "ngram", ""):
        assert 1 < max(engine.most.values()) <= 1 + depth
