"""Grammars with drafts through all layers: the answers are those without drafts, several tokens a step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.engine.job import Job
from app.helper.process import HelperProcess
from app.text.tokenizer import Tokenizer
from core.grammar import GrammarSpec
from core.request import SamplingParams
from core.types import FinishReason
from gpu.grammar import Compiler, matchers
from gpu.state.known import KnownDrafts
from gpu.state.tables import SlotTables
from tests.rigs import drafters, tiny_model
from tests.rigs.draft_jobs import GREEDY, STOP, Engines, same
from tests.rigs.drafting import PAGE, Drafts
from tests.rigs.tiny_model import VOCAB

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CALLED = {
    "type": "tag",
    "begin": "<call>",
    "content": {"type": "regex", "pattern": "[a-f]{7}"},
    "end": "</call>",
}
CALL = {
    "type": "triggered_tags",
    "triggers": ["<call>"],
    "tags": [CALLED],
    "at_least_one": True,
    "stop_after_first": True,
}
THINKING = {
    "type": "sequence",
    "elements": [
        {"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "[a-f]{7}"}, "end": ">"},
        {"type": "json_schema", "json_schema": PERSON},
    ],
}
OTHER = {
    "type": "or",
    "elements": [
        {"type": "json_schema", "json_schema": PERSON},
        {"type": "regex", "pattern": r"\{[a-z]{6,9}\}!"},
    ],
}
GRAMMARS: dict[str, tuple[Any, str]] = {
    "schema": ("json_schema", json.dumps(PERSON)),
    "regex": ("regex", "[0-9]{3}(ab|cd){2,6}!"),
    "choice": ("choice", json.dumps(["yes, certainly", "yesterday evening", "not at all"])),
    "call": ("structural_tag", json.dumps({"format": CALL})),
    "thinking": ("structural_tag", json.dumps({"format": THINKING})),
    "other library": ("structural_tag", json.dumps({"format": OTHER})),
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seeded": {},
    "filtered, logprobs": {
        "temperature": 0.8, "top_p": 0.9, "logprobs": 3, "logprobs_mode": "processed_logprobs",
    },
    "penalties, masked logprobs": {
        **GREEDY, "frequency_penalty": 0.7, "logprobs": 2, "logprobs_mode": "masked_logprobs",
    },
    "min_tokens, logprobs": {"min_tokens": 12, "logprobs": 0},
}  # fmt: skip
TOKENS = 90


def jobs() -> list[Job]:
    """Every grammar, every way to sample and some beside them that have none. Pairs have a prompt's beginning
    in common."""
    found = []
    for at, (kind, source) in enumerate(GRAMMARS.values()):
        for number, (name, params) in enumerate(SAMPLING.items()):
            length = 9 + (7 * at + number) % 12
            prompt = np.array([5, 100 + at, *range(20, 20 + length), 60 + number], np.int32)
            more: dict[str, Any] = {"grammar": GrammarSpec(kind, source)}
            if (at + number) % 4 == 0:
                more["bad_words"] = ("yes", "Ada")
            found.append(Job(id=f"{list(GRAMMARS)[at]}, {name}", prompt=prompt, max_tokens=TOKENS, seed=at,
                             sampling=SamplingParams(**params), **more))  # fmt: skip
        free = np.array([5, 100 + at, *range(20, 29)], np.int32)
        found.append(Job(id=f"free {at}", prompt=free, max_tokens=TOKENS, seed=at, ignore_eos=True))
    return found


def some() -> list[Job]:
    """Every grammar twice, each way to sample with two or three, and half of those without."""
    kept = [each for at in range(len(GRAMMARS)) for each in ((6 * at + at % 5), (6 * at + (at + 2) % 5))]
    every = jobs()
    return [every[at] for at in sorted([*kept, *range(5, len(every), 12)])]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build("qwen3", tmp_path_factory.mktemp("target"), num_hidden_layers=2).path


@pytest.fixture(scope="module")
def engines(target: Path) -> Iterator[Engines]:
    tokenizer = Tokenizer.load(None, VOCAB, [STOP])
    compiler = Compiler(tokenizer.token_table(VOCAB), HelperProcess())
    yield Engines(target, tokenizer, compiler)
    compiler.close()


@pytest.mark.parametrize(
    ("depth", "right", "overlap"),
    [(1, 1.0, 0), (3, 1.0, 1), (7, 1.0, 0), (7, 1.0, 2), (4, 0.7, 1), (4, 0.7, 2), (3, 0.0, 1)],
)
async def test_answers_under_grammars_are_those_without_drafts(
    engines: Engines, depth: int, right: float, overlap: int
) -> None:
    plain = await engines.plain(jobs())
    ended = {name.split(",")[0] for name, each in plain.items() if each.finish.reason is FinishReason.STOP}
    assert ended >= set(GRAMMARS), "texts of each kind are whole"
    engine = engines.make(Drafts(depth, right), overlap)
    # All of them where drafts make it fast.
    for answer in await engine.answers(jobs() if right == 1.0 and depth > 1 else some()):
        same(answer, plain[answer.run.id])
        most = engine.runner.most.get(answer.run.prompt.tobytes(), 0)
        if right == 1.0 and len(answer.tokens) > 20:
            assert most > 1, f"no draft of {answer.run.id} was taken"
        elif not right and answer.run.id.startswith("free"):
            assert most == 1
    assert any(0 < plan.drafts < depth * len(plan.decode_slots) for plan in engine.runner.plans) or depth < 7
    pages = {len(answer.run.prompt) % PAGE for answer in plain.values()}
    assert len(pages) == PAGE, "rows cross the ends of pages at every depth"
    assert max(engine.runner.most.values()) > depth * (right == 1.0)


@pytest.mark.parametrize(("depth", "overlap"), [(2, 1), (5, 0), (5, 2)])
async def test_a_drafter_of_its_own_drafts_for_them(
    engines: Engines, target: Path, depth: int, overlap: int
) -> None:
    """The drafter does not know the masks, so its drafts are right where the grammar leaves the text
    alone."""
    plain = await engines.plain(jobs())
    engine = engines.make(Drafts(depth, 0.0, drafters.small(target)), overlap)
    for answer in await engine.answers(some()):
        same(answer, plain[answer.run.id])
    masked = [each.prompt.tobytes() for each in some() if not each.id.startswith("free")]
    assert max(engine.runner.most[prompt] for prompt in masked) > 1


@pytest.mark.parametrize(("overlap", "retract"), [(0, True), (2, False), (2, True)])
async def test_the_host_learns_of_drafts_behind_the_drafter_alone(
    engines: Engines, target: Path, overlap: int, retract: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host cannot read the drafter's tables, as with a GPU: only what it fetched then."""

    def apart(known: KnownDrafts, tables: SlotTables) -> None:
        known._drafts, known._held = tables.drafts, torch.zeros_like(tables.drafts)
        known._allowed = tables.max_drafts
        known.rows = known._held.numpy()

    monkeypatch.setattr(KnownDrafts, "__init__", apart)
    plain = await engines.plain(jobs())
    engine = engines.make(Drafts(4, 0.0, drafters.small(target)), overlap)
    for answer in await engine.answers(some(), retract=retract):
        same(answer, plain[answer.run.id])
    assert max(engine.runner.most.values()) > 3


@pytest.mark.parametrize("overlap", [0, 2])
async def test_drafts_that_take_too_long_end_in_the_middle(
    engines: Engines, overlap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matchers, "MOST_SECONDS", 1e-4)
    plain = await engines.plain(jobs())
    engine = engines.make(Drafts(4, 1.0), overlap)
    for answer in await engine.answers(some()):
        same(answer, plain[answer.run.id])


@pytest.mark.parametrize("right", [1.0, 0.7])
async def test_retracted_rows_go_on_in_their_grammars(engines: Engines, right: float) -> None:
    plain = await engines.plain(jobs())
    engine = engines.make(Drafts(4, right), 2)
    for answer in await engine.answers(some(), retract=True):
        same(answer, plain[answer.run.id])
    assert engine.scheduler.counters.retractions > 5


async def test_what_is_aborted_leaves_nothing(engines: Engines) -> None:
    plain = await engines.plain(jobs())
    engine, ended = engines.make(Drafts(5, 0.9), 2), 0
    for answer in await engine.answers(jobs(), abort=3):
        want = plain[answer.run.id]
        if answer.finish == want.finish:
            same(answer, want)
            ended += 1
        else:
            assert answer.tokens == want.tokens[: len(answer.tokens)]
    assert 0 < ended < len(plain)
    assert engine.scheduler.idle
