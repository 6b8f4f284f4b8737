"""Every drafter through all layers: whatever a request asks for, it gets what it gets without drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu.draft.tree import Tree
from tests.rigs import drafters, tiny_model
from tests.rigs.draft_jobs import FEW, HOSTS_OWN, Engines, engines_of, jobs, same
from tests.rigs.drafting import Drafts
from tests.rigs.tiny_model import Tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny_model.build("qwen3-moe", tmp_path_factory.mktemp("moe"), **tiny_model.FEW_EXPERTS)


@pytest.fixture(scope="module")
def engines(tiny: Tiny) -> Iterator[Engines]:
    with engines_of(tiny.path) as made:
        yield made


@pytest.fixture(scope="module")
def under_heads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Over as many layers as the heads of `draft_heads` are for."""
    path, dense = tmp_path_factory.mktemp("moe"), [0, 1, 3, 4, 5]
    more = {"num_hidden_layers": 6, "mlp_only_layers": dense, "num_experts": 4}
    with engines_of(tiny_model.build("qwen3-moe", path, **more).path) as made:
        yield made


@pytest.mark.parametrize(("depth", "overlap"), [(1, 0), (3, 1), (7, 2)])
async def test_a_draft_model_that_is_the_target_is_always_right(
    engines: Engines, tiny: Tiny, depth: int, overlap: int
) -> None:
    """Drawn tokens too: drafts have the noise of their positions."""
    plain = await engines.plain(jobs(FEW))
    engine = engines.make(Drafts(depth, 0.0, drafters.small(tiny.path)), overlap)
    for answer in await engine.answers(jobs(FEW)):
        same(answer, plain[answer.run.id])
        most = engine.runner.most.get(answer.run.prompt.tobytes(), 0)
        assert most == 1 if answer.run.id in HOSTS_OWN else most <= 1 + depth
    assert max(engine.runner.most.values()) == 1 + depth
    assert engine.runner.most[plain["greedy"].run.prompt.tobytes()] == 1 + depth
    assert engine.runner.most[plain["seeded"].run.prompt.tobytes()] == 1 + depth


@pytest.mark.parametrize(("tree", "overlap"), [(Tree(1, 3, 2), 0), (Tree(5, 3, 12), 2), (Tree(4, 4, 5), 1)])
async def test_trees_of_the_target_are_often_right(
    engines: Engines, tiny: Tiny, tree: Tree, overlap: int
) -> None:
    plain = await engines.plain(jobs(FEW))
    most = max(tree.nodes, (tree.steps - 1) * tree.topk)
    engine = engines.make(Drafts(most, 0.0, drafters.small(tiny.path, tree), trees=True), overlap)
    for answer in await engine.answers(jobs(FEW)):
        same(answer, plain[answer.run.id])
    for name in ("greedy", "seeded"):
        assert engine.runner.most[plain[name].run.prompt.tobytes()] > min(tree.steps, 2)


@pytest.mark.parametrize(
    ("name", "tree", "overlap"), [("eagle", Tree(2, 4, 9), 0), ("eagle3", Tree(4, 2, 6), 2)]
)
async def test_a_heads_trees_change_no_text(
    under_heads: Engines, tmp_path: Path, name: str, tree: Tree, overlap: int
) -> None:
    plain = await under_heads.plain(jobs(FEW))
    drafts = Drafts(tree.nodes, 0.0, drafters.head(name, tmp_path, tree=tree), trees=True)
    for answer in await under_heads.make(drafts, overlap).answers(jobs(FEW)):
        same(answer, plain[answer.run.id])


@pytest.mark.parametrize(
    ("name", "depth", "overlap"),
    [
        ("eagle", 5, 2),
        ("eagle-sglang", 3, 1),
        ("eagle3", 3, 2),
        ("eagle3.1", 1, 0),
        ("dflash", 3, 0),
        ("dflash-bias", 2, 1),
        ("dflash-speculators", 3, 2),
    ],
)
async def test_the_guesses_of_heads_and_blocks_change_no_text(
    under_heads: Engines, tmp_path: Path, name: str, depth: int, overlap: int
) -> None:
    plain = await under_heads.plain(jobs(FEW))
    engine = under_heads.make(Drafts(depth, 0.0, drafters.head(name, tmp_path)), overlap)
    for answer in await engine.answers(jobs(FEW)):
        same(answer, plain[answer.run.id])


@pytest.mark.parametrize("overlap", [0, 2])
async def test_looked_up_drafts_change_no_text(engines: Engines, overlap: int) -> None:
    plain = await engines.plain(jobs(FEW))
    engine = engines.make(Drafts(4, 0.0, drafters.ngram(4)), overlap)
    for answer in await engine.answers(jobs(FEW)):
        same(answer, plain[answer.run.id])
    assert max(engine.runner.most.values()) > 1
