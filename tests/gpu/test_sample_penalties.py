"""Penalties against the formula written out token by token."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from core.types import NO_TOKENS, Ints
from gpu.sample.penalties import Counts, Penalty

VOCAB = 50
CPU = torch.device("cpu")


def ints(*tokens: int) -> Ints:
    return np.array(tokens, np.int32)


def start(counts: Counts, row: int, prompt: Ints, output: Ints) -> None:
    """Mark the tokens that a new owner of `row` has so far; output after a retraction."""
    counts.clear(row)
    words = [*prompt.tolist(), *(~output).tolist()]
    counts.mark(torch.tensor([(row, word) for word in words], dtype=torch.int32).view(-1, 2))


def by_formula(logits: torch.Tensor, prompt: list[int], output: list[int], penalty: Penalty) -> list[float]:
    times = Counter(output)
    result = []
    for token, x in enumerate(logits.tolist()):
        if token in times or token in prompt:
            x = x / penalty.repetition if x > 0 else x * penalty.repetition
        x -= penalty.frequency * times[token]
        x -= penalty.presence * (times[token] > 0)
        result.append(x)
    return result


@pytest.mark.parametrize(
    "penalty",
    [
        Penalty(1.3, 0.0, 0.0),
        Penalty(0.5, 0.0, 0.0),
        Penalty(1.0, 0.7, 0.0),
        Penalty(1.0, 0.0, -1.5),
        Penalty(1.0, 0.0, 0.0),
        Penalty(1.2, 0.4, 0.6),
    ],
)
def test_penalties_are_the_formula(penalty: Penalty) -> None:
    rng = np.random.default_rng(0)
    counts = Counts(3, VOCAB, CPU)
    prompt, output = rng.integers(0, 20, 30), rng.integers(10, 30, 25)
    start(counts, 1, prompt.astype(np.int32), output.astype(np.int32))
    generated = output.tolist()
    for _ in range(5):
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(len(generated))) * 3
        changed = logits.clone()
        counts.penalise(changed, 1, penalty)
        assert changed.tolist() == pytest.approx(
            by_formula(logits, prompt.tolist(), generated, penalty), rel=1e-5
        )
        token = int(rng.integers(0, VOCAB))
        counts.add(torch.tensor([1]), torch.tensor([token]))
        generated.append(token)


def test_prompt_tokens_are_repeated_but_not_frequent() -> None:
    counts = Counts(1, VOCAB, CPU)
    start(counts, 0, ints(3, 3), ints(4))
    logits = torch.full((VOCAB,), 2.0)
    counts.penalise(logits, 0, Penalty(2.0, 0.25, 0.5))
    assert logits[3] == 1.0
    assert logits[4] == 0.25
    assert (logits[5:] == 2.0).all()


def test_impossible_tokens_stay_impossible_and_nan_stays_visible() -> None:
    counts = Counts(1, VOCAB, CPU)
    start(counts, 0, ints(0, 1), ints(0, 1))
    logits = torch.zeros(VOCAB)
    logits[0], logits[1] = -torch.inf, torch.nan
    counts.penalise(logits, 0, Penalty(1.5, -2.0, -2.0))
    assert logits[0] == -torch.inf
    assert logits[1].isnan()


def test_a_row_forgets_its_former_owner() -> None:
    counts = Counts(2, VOCAB, CPU)
    start(counts, 0, ints(1, 2), ints(3, 3))
    start(counts, 1, ints(5), ints(6))
    start(counts, 0, ints(3), NO_TOKENS)
    logits = torch.ones(VOCAB)
    counts.penalise(logits, 0, Penalty(1.0, 1.0, 1.0))
    assert (logits == 1.0).all()
    start(counts, 0, NO_TOKENS, NO_TOKENS)
    counts.penalise(logits, 0, Penalty(2.0, 1.0, 1.0))
    assert (logits == 1.0).all()
    counts.penalise(logits, 1, Penalty(2.0, 1.0, 1.0))
    assert logits[:7].tolist() == [1.0, 1.0, 1.0, 1.0, 1.0, 0.5, -1.5]


def test_rows_without_a_token_count_nothing() -> None:
    counts = Counts(3, VOCAB, CPU)
    counts.add(torch.tensor([0, 1, 2, 1]), torch.tensor([7, -1, 0, 9]))
    expected = ({7}, {9}, {0})
    for row, tokens in enumerate(expected):
        logits = torch.zeros(VOCAB)
        counts.penalise(logits, row, Penalty(1.0, 0.0, 1.0))
        assert set(logits.nonzero().squeeze(1).tolist()) == tokens
