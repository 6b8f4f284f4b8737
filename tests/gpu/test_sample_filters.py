"""Tokens that survive the filters, against a full sort in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu.sample.filters import Field, Rule, nucleus, survivors
from tests.rigs.sampling import by_sorting

OFF = Rule(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def filtered(logits: torch.Tensor, rule: Rule) -> Field:
    ids = torch.arange(len(logits), dtype=torch.int32)
    return survivors(logits.clone(), ids, float(logits.max()), rule)


def check(logits: torch.Tensor, rule: Rule) -> None:
    field, expected = filtered(logits, rule), by_sorting(logits, rule)
    assert field.ids.tolist() == sorted(expected), rule
    share = field.weights.double() / field.weights.sum(dtype=torch.float64)
    want = torch.tensor([expected[i] for i in field.ids.tolist()], dtype=torch.float64)
    assert torch.allclose(share, want, rtol=1e-4, atol=1e-12)


RULES = [
    OFF,
    Rule(0.7, 0, 1.0, 0.0),
    Rule(2.0, 0, 1.0, 0.0),
    Rule(1.0, 1, 1.0, 0.0),
    Rule(1.0, 5, 1.0, 0.0),
    Rule(1.0, 700, 1.0, 0.0),
    Rule(1.0, 0, 0.9, 0.0),
    Rule(0.7, 0, 0.9, 0.0),
    Rule(3.0, 0, 0.5, 0.0),
    Rule(1.0, 0, 1e-9, 0.0),
    Rule(1.0, 0, 0.999, 0.0),
    Rule(1.0, 0, 1.0, 0.1),
    Rule(1.0, 0, 1.0, 1.0),
    Rule(0.8, 50, 0.9, 0.0),
    Rule(0.8, 50, 1.0, 0.02),
    Rule(1.5, 0, 0.95, 0.02),
    Rule(1.5, 40, 0.95, 0.02),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
def test_survivors_and_weights(rule: Rule, spread: float) -> None:
    generator = torch.Generator().manual_seed(int(spread * 10))
    for vocab in (5, 1_000, 20_000):
        if rule.top_k <= vocab:
            check(torch.randn(vocab, generator=generator) * spread, rule)


@pytest.mark.parametrize("rule", RULES)
def test_ties_leave_the_lower_ids(rule: Rule) -> None:
    # Logits as a bfloat16 head makes them: a few hundred values among 20,000 tokens.
    generator = torch.Generator().manual_seed(1)
    check((torch.randn(20_000, generator=generator) * 4).bfloat16().float(), rule)


@pytest.mark.parametrize("vocab", [10, 10_000])
def test_a_uniform_row(vocab: int) -> None:
    even = torch.full((vocab,), 3.5)
    assert filtered(even, OFF._replace(top_k=4)).ids.tolist() == [0, 1, 2, 3]
    assert filtered(even, OFF._replace(top_p=0.5)).ids.tolist() == list(range(vocab // 2))
    assert len(filtered(even, OFF._replace(min_p=1.0)).ids) == vocab


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the best two, 0.4 is 0.571: enough for 0.55, though it is not of the whole.
    assert filtered(logits, OFF._replace(top_p=0.55)).ids.tolist() == [0, 1]
    assert filtered(logits, OFF._replace(top_p=0.55, top_k=2)).ids.tolist() == [0]


def test_min_p_does_not_change_what_top_p_is_a_share_of() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # min_p first would leave 0.4 and 0.3, of which 0.4 is 0.571.
    assert filtered(logits, OFF._replace(top_p=0.55, min_p=0.6)).ids.tolist() == [0, 1]


def test_top_p_keeps_the_sets_one_reads_off_the_page() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for size, top_p in enumerate((0.5, 0.8, 0.95), start=1):
        assert len(filtered(logits, OFF._replace(top_p=top_p)).ids) == size
        assert len(filtered(logits, OFF._replace(top_p=top_p + 1e-4)).ids) == size + 1


def test_extreme_temperatures_stay_finite() -> None:
    logits = torch.tensor([1e4, 1e4, -1e4, -torch.inf])
    for temperature in (1e-300, 1e-40, 1e-6):
        assert filtered(logits, Rule(temperature, 0, 1.0, 0.0)).weights.tolist() == [1.0, 1.0, 0.0, 0.0]
    warm = filtered(logits, Rule(1e4, 0, 1.0, 0.0)).weights
    assert warm.tolist() == pytest.approx([1.0, 1.0, float(np.exp(-2.0)), 0.0])


def test_impossible_tokens_never_survive_top_p() -> None:
    logits = torch.full((10_000,), -torch.inf)
    logits[[17, 9_000]] = torch.tensor([1.0, 0.0])
    assert filtered(logits, OFF._replace(top_p=0.9999999)).ids.tolist() == [17, 9_000]
    assert filtered(logits, OFF._replace(top_p=0.5)).ids.tolist() == [17]


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999999])
def test_narrowing_finds_the_cut_of_a_full_sort(top_p: float) -> None:
    generator = torch.Generator().manual_seed(3)
    for shape in (lambda x: x, lambda x: x**8, lambda x: (x * 4).floor() + 1, lambda x: x * 0 + 0.25):
        weights = shape(torch.rand(60_000, generator=generator))
        ranked = weights.sort(descending=True).values
        mass = ranked.double().cumsum(0)
        size = min(int((mass < top_p * (1 - 1e-6) * float(mass[-1])).sum()) + 1, len(ranked))
        assert nucleus(weights, top_p) == (float(ranked[size - 1]), size)
