"""Grammars inside the step: masks, neighbours, retraction, failure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.helper.process import HelperProcess
from app.text.tokenizer import Tokenizer
from core.grammar import GrammarKind, GrammarSpec
from core.plan import Chunk, NewSlot
from core.request import SamplingParams
from gpu.grammar import Compiler
from gpu.grammar.matchers import Matchers
from gpu.grammar.stepper import Grammar
from gpu.sample.rows import RowTokens
from tests.rigs import tiny_model
from tests.rigs.arrays import ints
from tests.rigs.grammars import decode, new_slot
from tests.rigs.runner import GREEDY, Rig
from tests.rigs.tiny_model import VOCAB

PROMPT = [5, 7, 11, 13]
STOP = 3
"""A byte that no text has."""


@pytest.fixture(scope="module")
def grammars() -> Iterator[dict[str, Grammar]]:
    """The model has 256 tokens and they are all bytes."""
    compiler = Compiler(Tokenizer.load(None, VOCAB, [STOP]).token_table(VOCAB), HelperProcess())
    sources: dict[str, tuple[GrammarKind, str]] = {
        "digits": ("regex", "[0-9]{5}"),
        "letters": ("regex", "[a-z]*"),
        "object": ("json_schema", '{"type":"object","properties":{"a":{"enum":[1,2]}},"required":["a"],'
                   '"additionalProperties":false}'),
        "tag": ("structural_tag", json.dumps({"format": {"type": "const_string", "value": "yes"}})),
    }  # fmt: skip

    async def compile_all() -> dict[str, Any]:
        return {name: await compiler.compile(GrammarSpec(*source)) for name, source in sources.items()}

    yield asyncio.run(compile_all())
    compiler.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build("llama", tmp_path_factory.mktemp("llama")).path


def start(
    rig: Rig,
    slot: int,
    grammar: Grammar | None,
    params: SamplingParams = GREEDY,
    output: tuple[int, ...] = (),
) -> tuple[Chunk, NewSlot]:
    """A row that begins, or comes back after a retraction."""
    known = [*PROMPT, slot, *output]
    fresh = rig.new(slot, known[: len(PROMPT) + 1], params=params)
    new = NewSlot(slot, params, fresh.prompt, ints(output), 0, grammar=grammar)
    return Chunk(slot, 0, ints(known), True), new


def run(rig: Rig, rows: dict[int, Any], steps: int) -> dict[int, list[int]]:
    """Tokens of rows that start together; a row leaves after `STOP` or a failure."""
    begun = [start(rig, slot, grammar) for slot, grammar in rows.items()]
    result = rig.step(chunks=[chunk for chunk, _ in begun], new=[new for _, new in begun])
    out = {slot: [int(token)] for slot, token in zip(rows, result.tokens, strict=True)}
    for _ in range(steps - 1):
        live = [slot for slot in rows if out[slot][-1] not in (STOP, -1)]
        if not live:
            break
        result = rig.step(decode=live)
        for slot, token in zip(live, result.tokens, strict=True):
            out[slot].append(int(token))
    return out


def text(tokens: list[int]) -> str:
    assert tokens[-1] == STOP
    return bytes(tokens[:-1]).decode()


def test_masked_rows_obey_and_their_neighbours_do_not_notice(
    model: Path, grammars: dict[str, Grammar]
) -> None:
    free = run(Rig(model), {1: None, 2: None}, 8)
    rows = {1: None, 2: None, 3: grammars["digits"], 4: grammars["tag"]}
    mixed = run(Rig(model), rows, 8)
    assert (mixed[1], mixed[2]) == (free[1], free[2])
    assert text(mixed[3]).isdigit()
    assert len(text(mixed[3])) == 5
    assert text(mixed[4]) == "yes"


def test_a_retracted_row_goes_on_where_it_was(model: Path, grammars: dict[str, Grammar]) -> None:
    whole = run(Rig(model), {2: grammars["object"]}, 250)[2]
    for cut in (1, 4, len(whole) - 2):
        rig = Rig(model)
        chunk, new = start(rig, 2, grammars["object"], output=tuple(whole[:cut]))
        tokens = [int(rig.step(chunks=[chunk], new=[new]).tokens[0])]
        while tokens[-1] != STOP:
            tokens.append(int(rig.step(decode=[2]).tokens[0]))
        assert whole[:cut] + tokens == whole
    assert json.loads(text(whole)) in ({"a": 1}, {"a": 2})


def test_a_slot_forgets_its_former_owner(model: Path, grammars: dict[str, Grammar]) -> None:
    rig = Rig(model)
    assert text(run(rig, {1: grammars["tag"]}, 4)[1]) == "yes"
    free = run(Rig(model), {1: None}, 8)[1]
    assert run(rig, {1: None}, 8)[1] == free


def test_after_the_end_a_row_that_was_already_planned_runs_free(
    model: Path, grammars: dict[str, Grammar]
) -> None:
    """Overlap submits one more step of it before the end is known."""
    rig = Rig(model)
    assert text(run(rig, {1: grammars["tag"]}, 4)[1]) == "yes"
    result = rig.step(decode=[1])
    assert not result.failed
    assert result.tokens[0] >= 0


def test_no_bias_and_no_penalty_defeats_a_grammar(model: Path, grammars: dict[str, Grammar]) -> None:
    params = SamplingParams(temperature=0.0, logit_bias=((ord("x"), 100.0),), repetition_penalty=0.01)
    rig = Rig(model)
    chunk, new = start(rig, 1, grammars["digits"], params)
    new = NewSlot(1, params, new.prompt, new.output, 0, grammars["digits"])
    tokens = [int(rig.step(chunks=[chunk], new=[new]).tokens[0])]
    tokens += [int(rig.step(decode=[1]).tokens[0]) for _ in range(5)]
    assert text(tokens).isdigit()


def test_min_tokens_puts_the_end_off_for_as_long_as_the_grammar_can(
    model: Path, grammars: dict[str, Grammar]
) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=40, min_tokens=12, stop_ids=frozenset({STOP}), logit_bias=((STOP, 100.0),)
    )
    ends = {}
    for name in ("letters", "digits"):
        rig = Rig(model)
        chunk, new = start(rig, 1, grammars[name], params)
        tokens = [int(rig.step(chunks=[chunk], new=[new]).tokens[0])]
        while tokens[-1] != STOP:
            tokens.append(int(rig.step(decode=[1]).tokens[0]))
        ends[name] = len(tokens) - 1
    assert ends == {"letters": 12, "digits": 5}


def test_a_matcher_that_cannot_go_on_ends_its_row_only(model: Path, grammars: dict[str, Grammar]) -> None:
    """The output of a retracted row does not fit its grammar: nothing can be made of it."""
    free = run(Rig(model), {1: None}, 4)[1]
    rig = Rig(model)
    good, fine = start(rig, 1, None)
    bad, broken = start(rig, 2, grammars["digits"], output=(ord("x"),))
    result = rig.step(chunks=[good, bad], new=[fine, broken])
    assert result.tokens.tolist() == [free[0], -1]
    assert list(result.failed) == [1]
    assert "grammar" in result.failed[1]
    again = rig.step(decode=[1, 2])
    assert again.tokens[0] == free[1]
    assert not again.failed


def test_a_step_without_masked_rows_asks_no_matcher(grammars: dict[str, Grammar]) -> None:
    matchers = Matchers()
    assert matchers.fill(decode(1, 2)) is None
    matchers.apply([new_slot(1, grammars["digits"])])
    assert matchers.fill(decode(2, 3)) is None
    masks = matchers.fill(decode(2, 1))
    assert masks is not None
    assert list(masks.rows) == [1]
    assert matchers.accept(masks, RowTokens(ints([9, ord("1")]))) == {}


def test_a_mask_without_a_bit_is_a_failure_and_a_nan_is_not(grammars: dict[str, Grammar]) -> None:
    matchers = Matchers()
    matchers.apply([new_slot(1, grammars["digits"]), new_slot(2, grammars["digits"])])
    masks = matchers.fill(decode(1, 2))
    assert masks is not None
    masks.bits[0] = 0
    assert list(matchers.accept(masks, RowTokens(ints([-1, -1])))) == [0]
