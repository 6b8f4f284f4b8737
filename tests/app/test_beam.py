"""The search by itself, against every continuation there is and against a search written as plainly as can
be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest

from app.engine.beam_search import Beams, Found, Rules
from tests.rigs.beam import Model, plainly

PROMPT = 4
END = 3


def search(model: Model, rules: Rules) -> tuple[list[Found], int]:
    """The result of `app.engine.beam_search` without an engine, and the rounds it took."""
    beams, prompts, rounds = Beams(rules), [[]], 0
    while True:
        beams.grow([model.row(prompt, 2 * rules.width) for prompt in prompts])
        rounds += 1
        if beams.finished:
            return list(beams.best()), rounds
        prompts = [[*prompts[beam.parent], beam.token] for beam in beams.live]


def score(model: Model, tokens: Sequence[int], rules: Rules) -> float:
    total = sum(float(model.logprobs(tokens[:i])[token]) for i, token in enumerate(tokens))
    length = rules.prompt + len(tokens) - (bool(tokens) and tokens[-1] in rules.ends)
    return total / length**rules.penalty


def whole(found: Found) -> tuple[int, ...]:
    """The tokens of a beam, with the end that it has."""
    return (*found.tokens, *([] if found.end is None else [found.end.token]))


def every(model: Model, rules: Rules) -> list[tuple[int, ...]]:
    """All continuations: those that end, and those of full length."""
    made = []
    for length in range(1, rules.limit + 1):
        for tokens in itertools.product(range(model.vocab), repeat=length):
            ends = [token in rules.ends for token in tokens]
            if not any(ends[:-1]) and (ends[-1] or length == rules.limit):
                made.append(tokens)
    return made


@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.5, 2.5])
@pytest.mark.parametrize("ends", [frozenset(), frozenset({END}), frozenset({0, END})])
@pytest.mark.parametrize("seed", range(4))
def test_a_wide_search_finds_the_best_of_all(seed: int, ends: frozenset[int], penalty: float) -> None:
    """A search as wide as there are beams before the last token loses nothing on the way."""
    model = Model(seed, 4)
    rules = Rules(width=16, prompt=PROMPT, limit=3, penalty=penalty, ends=ends, logprobs=-1)
    found, _ = search(model, rules)
    expected = sorted(every(model, rules), key=lambda tokens: score(model, tokens, rules), reverse=True)
    assert [whole(each) for each in found] == expected[: len(found)]
    assert len(found) == min(16, len(expected))


@pytest.mark.parametrize("steps", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, -1.0, 3.0])
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_narrow_searches_go_as_vllms_does(width: int, penalty: float, steps: bool) -> None:
    """The results are vLLM's also where a search ends early: what is left out could not have changed them."""
    early = 0
    for seed in range(12):
        model = Model(seed, 11, steps)
        for ends in (frozenset(), frozenset({END}), frozenset({END, 5, 6})):
            rules = Rules(width, PROMPT, 9, penalty, ends, -1)
            found, rounds = search(model, rules)
            assert [whole(each) for each in found] == plainly(model, rules)
            early += rounds < 9
            assert len(found) == width
    assert early or penalty > 1


def test_what_is_told_of_every_token() -> None:
    model = Model(1, 11)
    rules = Rules(2, PROMPT, 6, 1.0, frozenset({END}), logprobs=3)
    for each in search(model, rules)[0]:
        tokens = whole(each)
        rows = [*each.rows, *([] if each.end is None else [each.end.row])]
        assert len(rows) == len(tokens)
        for i, row in enumerate(rows):
            assert row is not None
            own = model.row(tokens[:i], 3)
            assert math.isclose(row.chosen, model.logprobs(tokens[:i])[tokens[i]])
            assert row.top_ids.tolist() == own.top_ids.tolist()
            assert row.top_values.tolist() == own.top_values.tolist()


def test_nothing_is_told_unasked() -> None:
    found, _ = search(Model(1, 11), Rules(2, PROMPT, 4, 1.0, frozenset(), logprobs=-1))
    assert {row for each in found for row in each.rows} == {None}


def test_a_search_of_one_beam_is_greedy() -> None:
    model = Model(5, 11)
    (found,), _ = search(model, Rules(1, PROMPT, 8, 1.0, frozenset(), -1))
    tokens: list[int] = []
    for _ in range(8):
        tokens.append(int(model.logprobs(tokens).argmax()))
    assert found.tokens == tokens and found.end is None


def test_all_that_is_left_ends_at_once() -> None:
    """Two tokens, both of them ends: the only beam is complete twice and nothing goes on."""
    model = Model(1, 2)
    found, rounds = search(model, Rules(1, PROMPT, 8, 1.0, frozenset({0, 1}), -1))
    assert rounds == 1
    assert [whole(each) for each in found] == [(int(model.logprobs(()).argmax()),)]
