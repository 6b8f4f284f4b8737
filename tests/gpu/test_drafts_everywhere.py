"""Drafts through all layers: whatever a request asks for, it gets what it gets without them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.helper.process import HelperProcess
from app.text.tokenizer import Tokenizer
from gpu.grammar import Compiler
from tests.rigs import tiny_model
from tests.rigs.draft_jobs import HOSTS_OWN, STOP, TOKENS, Engines, jobs, same
from tests.rigs.drafting import Drafts
from tests.rigs.tiny_model import VOCAB, Tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny_model.build("qwen3-moe", tmp_path_factory.mktemp("moe"), **tiny_model.FEW_EXPERTS)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """All 256 tokens are bytes."""
    return Tokenizer.load(None, VOCAB, [STOP])


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Compiler]:
    compiler = Compiler(tokenizer.token_table(VOCAB), HelperProcess())
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def engines(tiny: Tiny, tokenizer: Tokenizer, grammars: Compiler) -> Engines:
    return Engines(tiny.path, tokenizer, grammars)


CASES = [
    (depth, overlap, (1.0, 0.7, 0.0)[(at + overlap) % 3])
    for at, depth in enumerate((1, 3, 7))
    for overlap in (0, 1, 2)
]


@pytest.mark.parametrize(("depth", "overlap", "right"), CASES)
async def test_every_option_has_the_answer_that_it_has_without_drafts(
    engines: Engines, depth: int, overlap: int, right: float
) -> None:
    plain = await engines.plain(jobs())
    assert plain["grammar"].text.isdigit() and len(plain["stop ids"].tokens) < TOKENS
    assert plain["stop strings"].finish != plain["greedy"].finish != plain["processor that raises"].finish
    engine = engines.make(Drafts(depth, right), overlap)
    for answer in await engine.answers(jobs()):
        same(answer, plain[answer.run.id])
        most = engine.runner.most.get(answer.run.prompt.tobytes(), 0)
        if answer.run.id in HOSTS_OWN or (not right and len(answer.tokens) == TOKENS):
            assert most == 1  # behind a stop, where no more is known of the text, a draft may be right
        elif right == 1.0 and len(answer.tokens) > 2:
            assert most > 1, "no draft of it was taken"
    assert any(plan.drafts and plan.chunks for plan in engine.runner.plans), "no prompt beside drafts"
    assert max(engine.runner.most.values()) > depth * (right == 1.0)


@pytest.mark.parametrize(
    ("nodes", "overlap", "right"), [(2, 0, 1.0), (7, 1, 1.0), (15, 2, 1.0), (12, 0, 0.8)]
)
async def test_trees_say_what_is_said_without_drafts(
    engines: Engines, nodes: int, overlap: int, right: float
) -> None:
    """The right path is hidden among wrong siblings and moves as a whole."""
    plain = await engines.plain(jobs())
    engine = engines.make(Drafts(nodes, right, trees=True), overlap)
    for answer in await engine.answers(jobs()):
        same(answer, plain[answer.run.id])
        if answer.run.id in HOSTS_OWN:
            assert engine.runner.most[answer.run.prompt.tobytes()] == 1
    assert max(engine.runner.most.values()) > min(nodes, 5)
    assert any(plan.drafts and plan.chunks for plan in engine.runner.plans), "no prompt beside drafts"


async def test_retracted_rows_go_on_as_if_nothing_had_happened(engines: Engines) -> None:
    plain = await engines.plain(jobs())
    engine = engines.make(Drafts(3, 0.7), 1)
    for answer in await engine.answers(jobs(), retract=True):
        same(answer, plain[answer.run.id])
    assert engine.scheduler.counters.retractions > 5
