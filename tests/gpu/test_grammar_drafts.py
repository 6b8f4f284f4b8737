"""Masks along the drafts of a row: those that the row would have had token by token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from app.helper.process import HelperProcess
from core.grammar import CompiledGrammar, GrammarSpec, TokenRules
from core.plan import StepPlan
from core.types import NO_LIMIT, Ints
from gpu.grammar import Compiler, matchers
from gpu.grammar.matchers import Masks, Matchers
from gpu.sample.rows import RowTokens
from gpu.state.tables import SlotTables
from tests.rigs.arrays import ints
from tests.rigs.grammars import END, THINK, UNTHINK, WIDTH, new_slot, table
from tests.rigs.runner import CPU

MOST = 5
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANSWER = '{"name":"Ada","age":36}'


class Case(NamedTuple):
    """A constraint, and a text that it allows."""

    kind: Any
    source: Any
    text: Sequence[int]


def tag(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


THOUGHT = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
CASES = {
    "schema": Case("json_schema", PERSON, ANSWER.encode()),
    "regex": Case("regex", "[0-9]{3}(ab|cd)*", b"123abcdab"),
    "choice": Case("choice", ["yes", "yesterday", "no"], b"yesterday"),
    "grammar": Case("ebnf", 'start: "(" start ")" | "x"', b"((((x))))"),
    "answer behind a thinking": Case(
        "structural_tag",
        tag({"type": "sequence", "elements": [THOUGHT, {"type": "json_schema", "json_schema": PERSON}]}),
        [THINK, *b"so", UNTHINK, *ANSWER.encode()],
    ),
    "tag of the other library": Case(
        "structural_tag",
        tag({"type": "or", "elements": [
            {"type": "json_schema", "json_schema": PERSON}, {"type": "regex", "pattern": r"\{[a-z]+\}!"}]}),
        ANSWER.encode(),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    made = Compiler(table(), HelperProcess())
    yield made
    made.close()


@pytest.fixture(scope="module")
def grammars(compiler: Compiler) -> dict[str, CompiledGrammar]:
    async def compile_all() -> dict[str, CompiledGrammar]:
        sources = {
            name: source if isinstance(source, str) else json.dumps(source)
            for name, (_, source, _) in CASES.items()
        }
        found = {
            name: await compiler.compile(GrammarSpec(CASES[name].kind, source))
            for name, source in sources.items()
        }
        rules = TokenRules(None, ((ord("Z"),), (*b"Ada!",), (*b"so-",)))
        return found | {
            f"{name}, under rules": await compiler.restrict(each, rules, "bad_words")
            for name, each in found.items()
        }

    return asyncio.run(compile_all())


NAMES = [*CASES, *(f"{name}, under rules" for name in CASES)]


def text_of(name: str) -> list[int]:
    return [*CASES[name.split(",")[0]].text, END]


class Speculating:
    """Matchers of rows with drafts. Slot s is row s - 1."""

    def __init__(self, *grammars: CompiledGrammar | None, drafts: bool = True) -> None:
        self.tables = SlotTables(len(grammars), 4, CPU, MOST)
        self.matchers = Matchers(self.tables)
        self.slots = ints(range(1, 1 + len(grammars)))
        self.matchers.apply([new_slot(slot, each, drafts=drafts) for slot, each in enumerate(grammars, 1)])

    def draft(self, slot: int, tokens: Sequence[int]) -> None:
        self.tables.drafts.numpy()[slot, : 1 + len(tokens)] = [len(tokens), *tokens]

    def fill(self, longest: int = MOST, budget: int = 100) -> Masks:
        plan = StepPlan(0, self.slots, query_length=1 + longest, drafts=budget)
        masks = self.matchers.fill(plan)
        assert masks is not None
        return masks

    def accept(self, masks: Masks, *rows: Sequence[int]) -> dict[int, str]:
        counts = ints([len(tokens) for tokens in rows])
        made = RowTokens(ints([token for tokens in rows for token in tokens]), counts, counts)
        return self.matchers.accept(masks, made)


def known(masks: Masks, row: int = 0) -> list[np.ndarray]:
    """The masks of a row by the drafts before them, as far as they matter."""
    if masks.drafts is None:
        return [masks.bits[masks.rows.index(row)]]
    places = [at for at, each in enumerate(masks.rows) if each == row and masks.drafts[at] != NO_LIMIT]
    assert masks.drafts[places].tolist() == list(range(len(places)))
    return [masks.bits[at] for at in places]


def one_by_one(grammar: CompiledGrammar, text: Sequence[int]) -> list[np.ndarray]:
    """The mask before each token."""
    matchers, found = Matchers(), []
    matchers.apply([new_slot(1, grammar)])
    for token in text:
        masks = matchers.fill(StepPlan(0, ints([1])))
        assert masks is not None
        found.append(masks.bits[0].copy())
        assert matchers.accept(masks, RowTokens(ints([token]))) == {}
    return found


def refused(mask: Ints) -> int:
    """A token that it forbids."""
    allows = np.unpackbits(mask.view(np.uint8), bitorder="little")[:WIDTH]
    return int(np.flatnonzero(allows == 0)[0])


@pytest.mark.parametrize("name", NAMES)
def test_masks_along_drafts_are_those_of_the_tokens(grammars: dict[str, CompiledGrammar], name: str) -> None:
    """Right drafts, and drafts that the grammar refuses at each depth. Nothing of them stays behind."""
    text, rows = text_of(name), Speculating(grammars[name])
    wanted = one_by_one(grammars[name], text)
    for at, token in enumerate(text):
        right = text[at : at + MOST]
        for wrong in range(len(right) + 1):
            drafts = list(right)
            if wrong < len(right):
                drafts[wrong] = refused(wanted[at + wrong])
            rows.draft(1, drafts)
            found = known(rows.fill())
            # Behind the end there is none.
            assert len(found) == min(1 + wrong, len(text) - at)
            np.testing.assert_array_equal(found, wanted[at : at + len(found)])
        assert rows.accept(rows.fill(), [token]) == {}
    assert rows.matchers.fill(StepPlan(0, rows.slots)) is None


@pytest.mark.parametrize("count", [1, 2, 3, 6])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_takes_all_tokens_of_a_step(
    grammars: dict[str, CompiledGrammar], name: str, count: int
) -> None:
    """Tokens behind the end are of nobody."""
    text, rows = text_of(name), Speculating(grammars[name], grammars["regex"])
    wanted = one_by_one(grammars[name], text)
    for at in range(0, len(text), count):
        rows.draft(1, text[at : at + count - 1])
        masks = rows.fill()
        np.testing.assert_array_equal(known(masks)[0], wanted[at])
        taken = text[at : at + count]
        assert rows.accept(masks, [*taken, *[7] * (count - len(taken))], []) == {}
    masks = rows.fill()
    assert masks.rows == [1], "it has ended, and its neighbour has not begun"


def test_a_step_fills_no_more_than_it_may_verify(grammars: dict[str, CompiledGrammar]) -> None:
    rows = Speculating(grammars["regex"], None, grammars["choice"])
    for slot, text in ((1, b"12ab"), (2, b"ab"), (3, b"yeste")):
        rows.draft(slot, [*text])
    assert [len(known(rows.fill(), row)) for row in (0, 2)] == [3, 6]
    assert [len(known(rows.fill(longest=2), row)) for row in (0, 2)] == [3, 3]
    assert [len(known(rows.fill(budget=1), row)) for row in (0, 2)] == [2, 2]
    assert rows.fill(budget=0).drafts is None


def test_a_slot_that_may_not_draft_has_one_mask(grammars: dict[str, CompiledGrammar]) -> None:
    rows = Speculating(grammars["choice"], drafts=False)
    rows.draft(1, [*b"yes"])
    assert rows.fill().drafts is None


def test_a_new_slot_has_no_drafts_of_its_former_owner(grammars: dict[str, CompiledGrammar]) -> None:
    rows = Speculating(grammars["choice"])
    rows.draft(1, [*b"yes"])
    rows.matchers.apply([new_slot(1, grammars["choice"])])
    assert rows.fill().drafts is None


def test_failures_are_of_the_token_that_has_none(grammars: dict[str, CompiledGrammar]) -> None:
    rows = Speculating(grammars["choice"], grammars["choice"], grammars["choice"])
    for slot in (1, 2, 3):
        rows.draft(slot, [*b"yes"])
    masks = rows.fill()
    known(masks, 1)[2][:] = 0  # nothing may follow "ye"
    failed = rows.accept(masks, [*b"y", ord("n"), 7], [*b"ye", -1], [*b"yes"])
    assert list(failed) == [1, 5], "one that its grammar refuses, and one that could be none"
    assert set(rows.fill().rows) == {2}, "the third goes on"


async def test_drafts_that_break_a_matcher_are_forgotten(compiler: Compiler) -> None:
    """Behind them the library gives up, which says nothing of the text."""
    deep = "".join(f'r{i}: r{i + 1} r{i + 1} | "x"\n' for i in range(300))
    hostile = await compiler.compile(GrammarSpec("ebnf", f'start: "n"+ | "b" r0\n{deep}r300: "y"'))
    text, breaking = [*b"nnn", END], [*b"bxxxx"]
    matcher = hostile.matcher()
    matcher.stepper.fill_ahead(
        [matcher.state], [0], np.zeros((5, matcher.stepper.words), np.int32), [breaking]
    )
    assert matcher.stepper.lost(matcher.state), "it does not break here any more"
    rows = Speculating(hostile)
    for token, wanted in zip(text, one_by_one(hostile, text), strict=True):
        rows.draft(1, breaking)
        masks = rows.fill()
        np.testing.assert_array_equal(known(masks)[0], wanted)
        assert rows.accept(masks, [token]) == {}


def test_rows_whose_masks_take_too_long_draft_no_more(
    grammars: dict[str, CompiledGrammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the next step on: this one's drafts are verified, so they have masks."""
    monkeypatch.setattr(matchers, "MOST_SECONDS", 0.0)
    rows = Speculating(grammars["choice"], grammars["choice"], None)
    rows.tables.max_drafts[:] = NO_LIMIT
    rows.draft(1, [*b"yes"])
    assert len(known(rows.fill())) == 4
    assert rows.tables.max_drafts.tolist() == [NO_LIMIT, 0, NO_LIMIT, NO_LIMIT]
    rows.draft(2, [*b"no"])
    masks = rows.fill()
    assert [len(known(masks, row)) for row in (0, 1)] == [1, 3]
