"""Reports on a token besides log-probabilities: against numpy, and without a change to any token."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch

from core.request.params import SamplingParams
from core.types import NAN_TOKEN, LogprobsMode
from gpu.grammar.matchers import Masks
from gpu.sample.filters import Rule
from tests.rigs.sampling import VOCAB, by_sorting, make, sample

POSITIONS = list(range(3, 35))


def logits_for(seed: int, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def entropy(logits: torch.Tensor) -> float:
    x = logits.double().numpy()
    p = np.exp(x - x.max())
    p = p[p > 0] / p.sum()
    return float(-(p * np.log(p)).sum())


FILTERS = [
    SamplingParams(top_k=7),
    SamplingParams(top_k=12, top_p=0.8),
    SamplingParams(top_k=12, min_p=0.2, temperature=0.7),
    SamplingParams(top_k=20, top_p=0.9, min_p=0.05, temperature=1.7),
    SamplingParams(top_k=VOCAB),
]


@pytest.mark.parametrize("params", FILTERS)
def test_a_mask_is_what_the_filters_left(params: SamplingParams) -> None:
    logits = logits_for(1)
    sampler = make(msgspec.structs.replace(params, support=True))
    got = sample(sampler, logits.expand(len(POSITIONS), -1), [1] * len(POSITIONS), POSITIONS)
    rule = Rule(params.temperature, params.top_k, params.top_p, params.min_p)
    want = by_sorting(logits, rule)
    for i, token in enumerate(got.tokens.tolist()):
        told = got.logprobs[i].support
        assert told is not None and got.logprobs[i].entropy is None
        assert told.ids.tolist() == sorted(want) and told.ids.dtype == np.int32
        assert not told.ids.flags.writeable
        assert told.chosen == pytest.approx(math.log(want[token]), abs=1e-4)
    assert len(set(got.tokens.tolist())) > 1


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(top_k=1)])
def test_a_greedy_mask_is_the_token(params: SamplingParams) -> None:
    logits = logits_for(2)
    got = sample(make(msgspec.structs.replace(params, support=True)), logits[None], [1], [3])
    told = got.logprobs[0].support
    assert told is not None
    assert (told.ids.tolist(), told.chosen) == ([int(logits.argmax())], 0.0)


def masks_of(rows: dict[int, list[int]]) -> Masks:
    """A mask for each of `rows`, with the tokens that it allows; row i is slot i + 1's."""
    words = np.zeros((len(rows), -(-VOCAB // 32)), np.uint32)
    for at, allowed in enumerate(rows.values()):
        for token in allowed:
            words[at, token // 32] |= np.uint32(1 << token % 32)
    return Masks(rows=list(rows), slots=[row + 1 for row in rows], bits=words.view(np.int32))


def test_what_a_grammar_forbids_is_in_no_mask() -> None:
    logits, allowed = logits_for(3), [1, 4, 9]
    sampler = make(SamplingParams(top_k=8, support=True))
    masks = masks_of({0: allowed})
    got = sampler.sample(logits[None].clone(), torch.tensor([1]), torch.tensor([3]), masks)
    told = got.logprobs[0].support
    assert told is not None
    assert told.ids.tolist() == allowed
    p = np.exp(logits[allowed].double().numpy())
    want = dict(zip(allowed, np.log(p / p.sum()).tolist(), strict=True))
    assert told.chosen == pytest.approx(want[int(got.tokens[0])], abs=1e-4)


def among(logits: torch.Tensor, allowed: list[int]) -> torch.Tensor:
    """Log-probabilities [vocab] of `logits` among the `allowed` alone."""
    only = torch.full_like(logits, -math.inf)
    only[allowed] = logits[allowed]
    return only.log_softmax(-1)


def test_log_probabilities_before_and_after_the_mask() -> None:
    """Each row has log-probabilities by its own mode; entropy stays that of the model."""
    logits, allowed = logits_for(11), [1, 4, 9]
    modes: list[LogprobsMode] = ["raw_logprobs", "masked_logprobs", "processed_logprobs", "masked_logprobs"]
    greedy = SamplingParams(temperature=0.0, logprobs=2, logprob_ids=(1,), entropy=True)
    biased = msgspec.structs.replace(greedy, logit_bias=((4, 3.0),))
    sampler = make(*(msgspec.structs.replace(biased, logprobs_mode=mode) for mode in modes))
    rows = logits.expand(4, -1).clone()
    masks = masks_of(dict.fromkeys((0, 1, 2), allowed))
    got = sampler.sample(rows, torch.tensor([1, 2, 3, 4]), torch.tensor([3] * 4), masks)
    moved = logits.clone()
    moved[4] += 3.0
    raw = logits.log_softmax(-1)
    wanted = [raw, among(logits, allowed), among(moved, allowed), raw]
    for i, want in enumerate(wanted):
        told, token = got.logprobs[i], int(got.tokens[i])
        best = want.sort(descending=True, stable=True)
        assert told.chosen == pytest.approx(float(want[token]), abs=1e-5)
        assert told.top_ids.tolist() == [*best.indices[:2].tolist(), 1]
        assert told.top_values.tolist() == pytest.approx(
            [*best.values[:2].tolist(), float(want[1])], abs=1e-5
        )
        assert told.entropy == pytest.approx(entropy(logits), abs=1e-4)


@pytest.mark.parametrize("params", FILTERS)
def test_processed_log_probabilities_are_of_what_was_drawn_from(params: SamplingParams) -> None:
    logits = logits_for(12)
    asks = msgspec.structs.replace(params, logprobs=VOCAB, logprobs_mode="processed_logprobs")
    got = sample(make(asks), logits[None], [1], [3])
    want = by_sorting(logits, Rule(params.temperature, params.top_k, params.top_p, params.min_p))
    told = dict(zip(got.logprobs[0].top_ids.tolist(), got.logprobs[0].top_values.tolist(), strict=True))
    assert {token for token, value in told.items() if value > -math.inf} == set(want)
    for token, share in want.items():
        assert told[token] == pytest.approx(math.log(share), abs=1e-4)
    assert got.logprobs[0].chosen == told[int(got.tokens[0])]


def test_entropy_is_of_what_the_model_made() -> None:
    """Entropy is computed before bias, penalties, temperature and filters."""
    changed = SamplingParams(
        entropy=True, temperature=0.3, top_k=3, logit_bias=((5, 90.0),), repetition_penalty=1.5
    )
    rows = torch.stack([logits_for(4), logits_for(5, 0.0), logits_for(6, 9.0)])
    rows[2, 7:] = -math.inf
    for params in (SamplingParams(entropy=True, temperature=0.0), changed):
        got = sample(make(params, params, params), rows, [1, 2, 3], [3, 3, 3])
        for i, row in enumerate(rows):
            assert got.logprobs[i].entropy == pytest.approx(entropy(row), abs=1e-4)
            assert got.logprobs[i].support is None
    assert got.logprobs[1].entropy == pytest.approx(math.log(VOCAB), abs=1e-4)


def test_each_row_is_told_what_it_asked_for() -> None:
    asked = [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(entropy=True),
        SamplingParams(top_k=5),
        SamplingParams(top_k=5, support=True, entropy=True, logprobs=3),
        SamplingParams(temperature=0.0, support=True),
    ]
    rows = torch.stack([logits_for(10 + i) for i in range(5)])
    got = sample(make(*asked), rows, [1, 2, 3, 4, 5], [3] * 5)
    assert sorted(got.logprobs) == [0, 1, 3, 4]
    told = {i: (len(r.top_ids), r.entropy is None, r.support is None) for i, r in got.logprobs.items()}
    assert told == {0: (2, True, True), 1: (0, False, True), 3: (3, False, False), 4: (0, True, False)}
    assert got.logprobs[3].entropy == pytest.approx(entropy(rows[3]), abs=1e-4)
    raw = rows[1].log_softmax(-1)
    assert got.logprobs[1].chosen == pytest.approx(float(raw[got.tokens[1]]), abs=1e-5)


def test_being_told_changes_no_token() -> None:
    logits = logits_for(7)
    for params in FILTERS:
        plain, told = make(params), make(msgspec.structs.replace(params, support=True, entropy=True))
        rows, slots = logits.expand(len(POSITIONS), -1), [1] * len(POSITIONS)
        want = sample(plain, rows, slots, POSITIONS).tokens.tolist()
        assert sample(told, rows, slots, POSITIONS).tokens.tolist() == want


def test_a_row_without_a_token_is_told_nothing() -> None:
    params = SamplingParams(top_k=5, support=True, entropy=True)
    rows = torch.stack([logits_for(8), torch.full((VOCAB,), math.nan)])
    got = sample(make(params, params), rows, [1, 2], [3, 3])
    assert got.tokens.tolist()[1] == NAN_TOKEN
    assert sorted(got.logprobs) == [0]
