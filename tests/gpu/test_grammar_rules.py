"""Allowed tokens and banned sequences: alone and under a grammar, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from app.helper.process import HelperProcess
from app.text.tokenizer import Tokenizer
from core.errors import RequestError
from core.grammar import CompiledGrammar, GrammarSpec, TokenRules
from core.plan import Chunk, NewSlot, PageWrites, StepPlan
from core.request import SamplingParams
from core.types import NO_TOKENS
from gpu.grammar import Compiler
from gpu.grammar.matchers import Matchers
from gpu.grammar.token_rules import RestrictedGrammar, TokenRuleStepper
from gpu.sample.rows import RowTokens
from tests.rigs import vocabularies

WIDTH = 70


def taken(bits: np.ndarray[Any, Any], width: int = WIDTH) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def follow(grammar: Any, said: Sequence[int], width: int = WIDTH) -> set[int]:
    """Tokens that may come after `said`."""
    matcher = grammar.matcher()
    stepper, state = matcher.stepper, matcher.state
    for token in said:
        assert stepper.accept([state], [token]) == [None]
        assert not stepper.ended(state, token)
    bits = np.zeros((2, stepper.words), np.int32)
    stepper.fill([state], [1], bits)
    assert not bits[0].any(), "another row was written"
    return taken(bits[1], width)


def ruled(rules: TokenRules, grammar: CompiledGrammar | None = None) -> RestrictedGrammar:
    return RestrictedGrammar(TokenRuleStepper(WIDTH), grammar, rules)


EVERY = set(range(WIDTH))


def test_only_the_allowed() -> None:
    assert follow(ruled(TokenRules(allowed=(0, 31, 32, 69))), [5]) == {0, 31, 32, 69}


def test_no_bit_beyond_the_vocabulary() -> None:
    assert follow(ruled(TokenRules()), []) == EVERY


def test_single_tokens_are_banned_everywhere_sequences_where_they_would_be_complete() -> None:
    rules = ruled(TokenRules(banned=((31,), (1, 2, 63), (2, 4))))
    assert follow(rules, []) == EVERY - {31}
    assert follow(rules, [1]) == EVERY - {31}
    assert follow(rules, [1, 2]) == EVERY - {31, 63, 4}
    assert follow(rules, [1, 9, 2]) == EVERY - {31, 4}
    assert follow(rules, [1, 2, 9]) == EVERY - {31}
    assert follow(rules, [9] * 50 + [1, 2]) == EVERY - {31, 63, 4}


def test_both_at_once() -> None:
    assert follow(ruled(TokenRules((1, 2, 3), ((3,), (1, 2)))), [1]) == {1}


def test_matchers_are_apart() -> None:
    rules = ruled(TokenRules(banned=((1, 2),)))
    first, second = rules.matcher(), rules.matcher()
    first.stepper.accept([first.state], [1])
    bits = np.zeros((2, first.stepper.words), np.int32)
    first.stepper.fill([first.state, second.state], [0, 1], bits)
    assert (taken(bits[0]), taken(bits[1])) == (EVERY - {2}, EVERY)


def test_what_was_said_before_a_retraction_counts() -> None:
    """The matcher of a slot that comes back has its output replayed."""
    matchers = Matchers()
    output = np.array([1], np.int32)
    new = NewSlot(
        slot=3,
        params=SamplingParams(),
        prompt=NO_TOKENS,
        output=output,
        cached=0,
        grammar=ruled(TokenRules(banned=((1, 2),))),
    )
    matchers.apply([new])
    chunk = Chunk(slot=3, start=0, tokens=output, samples=True)
    plan = StepPlan(
        step=0,
        decode_slots=NO_TOKENS,
        chunks=(chunk,),
        new_slots=(new,),
        page_writes=PageWrites(NO_TOKENS, NO_TOKENS, NO_TOKENS),
    )
    masks = matchers.fill(plan)
    assert masks is not None
    assert taken(masks.bits[0]) == EVERY - {2}
    assert matchers.accept(masks, RowTokens(np.array([7], np.int32))) == {}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (TokenRules(), {ord("a"), ord("b")}),
        (TokenRules(banned=((ord("a"),),)), {ord("b")}),
        (TokenRules(allowed=(ord("a"), ord("b"), ord("z"))), {ord("a"), ord("b")}),
        (TokenRules(banned=((ord("b"), ord("a")),)), {ord("b")}),
    ],
)
async def test_under_a_grammar(rules: TokenRules, expected: set[int]) -> None:
    vocabulary, stop = 300, 258
    tokenizer = Tokenizer.load(None, vocabulary, [stop])
    compiler = Compiler(tokenizer.token_table(vocabulary), HelperProcess())
    try:
        spec = GrammarSpec("regex", "b[ab]{3}")
        grammar = await compiler.restrict(await compiler.compile(spec), rules, "bad_words")
        assert follow(grammar, [ord("b")], vocabulary) == expected
        matcher: Any = grammar.matcher()
        assert matcher.stepper.accept([matcher.state], [ord("z")]) != [None]
    finally:
        compiler.close()
        tokenizer.close()


@pytest.mark.parametrize("spec", [None, GrammarSpec("regex", "[^a]"), GrammarSpec("json_object")])
async def test_tokens_that_only_the_tokenizer_has_are_in_no_mask(spec: GrammarSpec | None) -> None:
    core = vocabularies.byte_level()
    width = core.get_vocab_size()
    core.add_tokens([f"<{i}>" for i in range(100)])
    tokenizer = Tokenizer(core, {}, [width - 1])
    compiler = Compiler(tokenizer.token_table(width), HelperProcess())
    try:
        grammar = None if spec is None else await compiler.compile(spec)
        if grammar is None:
            grammar = await compiler.restrict(None, TokenRules(), "bad_words")
        matcher: Any = grammar.matcher()
        assert matcher.stepper.words == -(-width // 32)
        assert 0 < max(follow(grammar, [])) < width
    finally:
        compiler.close()
        tokenizer.close()


@pytest.mark.parametrize(
    ("spec", "rules"),
    [
        (None, TokenRules((5,), ((5,),))),
        (GrammarSpec("choice", '["yes", "no"]'), TokenRules(allowed=(ord("a"),))),
        (GrammarSpec("regex", "b+"), TokenRules(banned=((ord("b"),),))),
        (GrammarSpec("json_object"), TokenRules(allowed=(ord("a"), 258))),
    ],
)
async def test_rules_that_contradict_a_constraint_are_refused(
    spec: GrammarSpec | None, rules: TokenRules
) -> None:
    """The request is refused before anything is queued: it would fail at its first token."""
    tokenizer = Tokenizer.load(None, 300, [258])
    compiler = Compiler(tokenizer.token_table(300), HelperProcess())
    try:
        grammar = None if spec is None else await compiler.compile(spec)
        with pytest.raises(RequestError, match="leaves no token") as caught:
            await compiler.restrict(grammar, rules, "allowed_token_ids")
        assert caught.value.param == "allowed_token_ids"
    finally:
        compiler.close()
        tokenizer.close()
