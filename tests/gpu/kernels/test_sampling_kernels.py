"""Both sets of sampling kernels: the same changes to logits, the same tokens and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from core.plan import NewSlot
from core.request.params import MAX_BIAS, SamplingParams
from gpu.grammar.matchers import Masks
from gpu.kernels.sampling import kernels as triton_kernels
from gpu.sample import torch_kernels, weights
from gpu.sample.kernels import SamplingKernels
from gpu.sample.penalties import Counts, Penalty
from gpu.sample.rows import DraftSamples, Rows
from gpu.state.tables import SlotTables
from tests.rigs.arrays import ints
from tests.rigs.runner import CPU
from tests.rigs.sampler import Sampled, Sampler

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter's; a GPU has tests/gpu/test_cuda.py"
)

SETS: dict[str, SamplingKernels] = {"torch": torch_kernels, "triton": triton_kernels}
PROMPT = (1, 2, 3)


def start(sampler: Sampler, *params: SamplingParams, output: Sequence[int] = ()) -> None:
    """Slots 1, 2, ... with `params`."""
    sampler.apply([NewSlot(i + 1, each, ints(PROMPT), ints(output), 0) for i, each in enumerate(params)])


def masks_of(vocab: int, rows: dict[int, list[int]]) -> Masks:
    """A mask for each of `rows`, with the tokens that it allows."""
    allowed = np.zeros((len(rows), -(-vocab // 32) * 32), bool)
    for at, tokens in enumerate(rows.values()):
        allowed[at, tokens] = True
    return Masks(list(rows), [1] * len(rows), np.packbits(allowed, axis=1, bitorder="little").view(np.int32))


@pytest.fixture(params=SETS)
def kernels(request: pytest.FixtureRequest) -> SamplingKernels:
    return SETS[request.param]


# -- scores of rows --------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 7, 300, 4096, 9000])
def test_scores_are_those_of_a_stable_sort(kernels: SamplingKernels, vocab: int) -> None:
    """Logits have ties as bfloat16 has them, and zeros of both signs; there are more rows than have keys at
    once."""
    rows = 70
    logits = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3).bfloat16().float()
    logits[:, ::5] = 0.0
    logits[:, 1::5] = -0.0
    logits[2, vocab // 2 + 1 :] = -math.inf
    tokens = torch.arange(rows) * 31 % vocab
    by_sort = logits.sort(dim=-1, descending=True, stable=True)
    for k in (0, 1, 5, 20, 21, 128):
        assert torch.equal(kernels.best_tokens(logits, min(k, vocab)), by_sort.indices[:, :k])
    found = kernels.score(logits, tokens)
    want = by_sort.values.double().log_softmax(1)[:, 0]
    assert found.normalised(by_sort.values[:, :1]).flatten().tolist() == pytest.approx(
        want.tolist(), abs=1e-6
    )
    assert torch.equal(by_sort.indices.gather(1, found.ranks.unsqueeze(1) - 1).squeeze(1), tokens)


def test_rows_that_are_not_finite_have_no_normaliser(kernels: SamplingKernels) -> None:
    logits = torch.zeros(4, 5000)
    logits[0, 4999], logits[1, 7], logits[2] = math.nan, math.inf, -math.inf
    found = kernels.score(logits, torch.zeros(4, dtype=torch.int64))
    told = found.normalised(logits[:, 7:8]).squeeze(1)
    assert told.isnan().tolist() == [True, True, True, False]
    best = kernels.best_tokens(logits, 3)
    assert ((best >= 0) & (best < 5000)).all()


def test_logits_far_from_zero_lose_no_digits(kernels: SamplingKernels) -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)) * 3
    far = logits.double() + 10_000
    found = kernels.score(far.float(), torch.zeros(3, dtype=torch.int64))
    want = far.float().double().log_softmax(1)
    assert found.normalised(far.float()).numpy() == pytest.approx(want.numpy(), abs=1e-5)


def test_no_rows_have_no_scores(kernels: SamplingKernels) -> None:
    nothing = torch.empty(0, 300)
    assert len(kernels.score(nothing, torch.empty(0, dtype=torch.int64)).ranks) == 0
    assert [len(kernels.best_tokens(nothing, k)) for k in (0, 3, 30)] == [0] * 3


# -- bias and stop ids ------------------------------------------------------------------------------


def adjusted(
    sampler: Sampler, logits: torch.Tensor, position: int = 3, masks: Masks | None = None, live: int = -1
) -> torch.Tensor:
    """`logits` [n, vocab] of slots 1, 2, ... as `adjust` leaves them."""
    rows, stage = len(logits), sampler.stage
    slots = torch.arange(1, rows + 1, dtype=torch.int32)
    positions = torch.full((rows,), position, dtype=torch.int32)
    stage._write_masks(masks)
    count = torch.tensor([rows if live < 0 else live], dtype=torch.int32)
    changed, device = logits.clone(), stage._device
    given = Rows(slots, positions, count, device.rows.tables)
    device.kernels.adjust(changed, given, stage._tokens, stage._masks)
    return changed


def changes(sampler: Sampler, vocab: int) -> tuple[dict[int, float], set[int]]:
    """Values that slot 1 adds to zeros, by id, and the ids it forbids."""
    row = adjusted(sampler, torch.zeros(1, vocab))[0]
    forbidden = set(row.isneginf().nonzero().squeeze(1).tolist())
    added = {i: float(row[i]) for i in row.nonzero().squeeze(1).tolist() if i not in forbidden}
    return added, forbidden


FIRST = SamplingParams(logit_bias=((2, 1.5), (4, -3.0)), min_tokens=2, stop_ids=frozenset({7, 8}))
SECOND = SamplingParams(logit_bias=((4, 2.0),), min_tokens=1, stop_ids=frozenset({8}))


def test_a_slot_adds_its_own_until_it_has_a_new_owner(kernels: SamplingKernels) -> None:
    sampler = Sampler(2, 10, CPU, kernels=kernels)
    start(sampler, FIRST, SamplingParams())
    assert changes(sampler, 10) == ({2: 1.5, 4: -3.0}, {7, 8})
    both = adjusted(sampler, torch.zeros(2, 10))
    assert not both[1].any(), "a neighbour changed"
    assert not adjusted(sampler, torch.zeros(2, 10), live=0).any(), "a padded row changed"
    start(sampler, SECOND)
    assert changes(sampler, 10) == ({4: 2.0}, {8})
    start(sampler, SamplingParams(stop_ids=frozenset({7})))
    assert changes(sampler, 10) == ({}, set())


def test_an_id_named_twice_is_added_twice(kernels: SamplingKernels) -> None:
    sampler = Sampler(1, 10, CPU, kernels=kernels)
    start(sampler, SamplingParams(logit_bias=((3, 1.0), (3, 0.5))))
    assert changes(sampler, 10) == ({3: 1.5}, set())


def test_as_many_entries_as_a_request_may_have(kernels: SamplingKernels) -> None:
    bias = tuple((2 * i, i / 16 - 30) for i in range(MAX_BIAS))
    sampler = Sampler(1, 3_000, CPU, kernels=kernels)
    start(sampler, SamplingParams(logit_bias=bias))
    row = adjusted(sampler, torch.ones(1, 3_000))[0]
    assert row[0 : 2 * MAX_BIAS : 2].tolist() == [1 + value for _, value in bias]
    assert (row[1::2] == 1).all()


def test_stop_ids_hide_neither_nan_nor_infinity_and_end_with_their_position(kernels: SamplingKernels) -> None:
    sampler = Sampler(1, 10, CPU, kernels=kernels)
    start(sampler, FIRST)
    logits = torch.zeros(1, 10)
    logits[0, 7], logits[0, 8] = torch.nan, torch.inf
    assert adjusted(sampler, logits)[0, 7:9].isnan().all()
    for position, held in ((4, True), (5, False)):
        assert adjusted(sampler, torch.zeros(1, 10), position).isneginf().any() == held


def test_a_bias_on_a_stop_id_does_not_free_it(kernels: SamplingKernels) -> None:
    sampler = Sampler(1, 10, CPU, kernels=kernels)
    start(sampler, SamplingParams(min_tokens=1, stop_ids=frozenset({7}), logit_bias=((7, 100.0),)))
    assert changes(sampler, 10) == ({}, {7})


@pytest.mark.parametrize(
    ("allowed", "held"),
    [([31, 32], True), ([31, 64, 32], True), ([31], False), ([31, 69], False), ([], False), ([0], True)],
)
def test_where_a_grammar_allows_nothing_else_the_end_may_come(
    kernels: SamplingKernels, allowed: list[int], held: bool
) -> None:
    sampler = Sampler(2, 70, CPU, kernels=kernels)
    params = SamplingParams(min_tokens=9, stop_ids=frozenset({31, 69}))
    start(sampler, params, params)
    rows = adjusted(sampler, torch.zeros(2, 70), masks=masks_of(70, {0: allowed}))
    assert rows[0, [31, 69]].isneginf().tolist() == [held, held]
    assert rows[1, [31, 69]].isneginf().all(), "a row without a mask"


def test_a_mask_adds_minus_infinity_and_forbids_what_lies_behind_it(kernels: SamplingKernels) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0] + [0.0] * 66, [1.0] * 70])
    logits[0, 0] = torch.nan
    sampler = Sampler(2, 70, CPU, kernels=kernels)
    stage = sampler.stage
    stage._write_masks(masks_of(70, {0: list(range(70))}))
    stage._write_masks(masks_of(40, {0: [1, 3]}))
    kernels.mask_rows(logits, stage._masks, torch.tensor([2], dtype=torch.int32))
    assert logits[0, [1, 3]].tolist() == [2.0, 4.0]
    assert logits[0, 0].isnan()
    assert (logits[0, [2, *range(4, 70)]] == -torch.inf).all()
    assert (logits[1] == 1.0).all()


@pytest.mark.parametrize("vocab", [12, 5000])
def test_the_penalties_of_a_draft_count_those_before_it(kernels: SamplingKernels, vocab: int) -> None:
    """Penalties count as if the drafts had been taken one step after another; a prompt's end has none before
    it."""
    tables = SlotTables(3, 1, CPU, 3)
    tables.count_row[1:] = torch.tensor([0, -1, 1])
    tables.repetition[1:], tables.frequency[1:], tables.presence[1:] = 1.5, 0.25, 0.5
    tables.length[1:] = torch.tensor([5, 5, 0])
    tables.drafts[1:] = torch.tensor([[3, 7, 7, 9], [3, 7, 7, 9], [3, 4, 4, 4]])
    counts = Counts(2, vocab, CPU)
    counts.mark(torch.tensor([[0, 2], [0, ~7], [1, 4], [1, ~8]]))
    slots = torch.tensor([1, 2, 3, 1, 1, 1, 2, 2, 2, 0], dtype=torch.int32)
    positions = torch.tensor([6, 6, 3, 7, 8, 9, 7, 8, 9, 0], dtype=torch.int32)
    live, sampling = (torch.tensor([n], dtype=torch.int32) for n in (9, 3))
    drafts = DraftSamples(sampling, torch.tensor([0, 3, 6, 6], dtype=torch.int32), sampling)
    logits = torch.randn(10, vocab, generator=torch.Generator().manual_seed(1))
    expected, penalty = logits.clone(), Penalty(1.5, 0.25, 0.5)
    kernels.penalise(logits, Rows(slots, positions, live, tables, drafts), counts)
    counts.penalise(expected[2], 1, penalty)
    for row, draft in ((0, 7), (3, 7), (4, 9), (5, 0)):
        counts.penalise(expected[row], 0, penalty)
        counts.add(torch.tensor([0]), torch.tensor([draft]))
    torch.testing.assert_close(logits, expected)


# -- the whole stage --------------------------------------------------------------------------------


def favour(logits: torch.Tensor, output: list[int], params: dict[str, Any]) -> None:
    """Lift a token that follows from the output."""
    logits[(7 * len(output) + sum(output)) % len(logits)] += 4.0


def broken(logits: torch.Tensor, output: list[int], params: dict[str, Any]) -> None:
    if len(output) == 2:
        raise ValueError("broken")


GREEDY = SamplingParams(temperature=0.0)
STOPS = frozenset(range(0, 40, 3))
OPTIONS = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_p=0.8, logprobs=3),
    SamplingParams(seed=3, top_k=9, support=True, entropy=True, logprobs=2, logprob_ids=(5, 0)),
    SamplingParams(temperature=0.0, logprobs=20, logit_bias=((4, 3.0), (9, -100.0))),
    SamplingParams(seed=4, min_p=0.05, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(temperature=0.0, presence_penalty=1.0, logprobs=1, logprobs_mode="processed_logprobs"),
    SamplingParams(temperature=0.0, min_tokens=3, stop_ids=STOPS),
    SamplingParams(seed=5, temperature=1.4, top_k=30, top_p=0.9, min_p=0.02, logit_bias=((11, 2.5),)),
    SamplingParams(temperature=0.0, processor="favour", logprobs=0),
    SamplingParams(seed=6, top_k=25, top_p=0.9, logprobs=128, logprobs_mode="processed_logprobs"),
    SamplingParams(temperature=0.0, logprobs=5, logprobs_mode="masked_logprobs", entropy=True),
    SamplingParams(temperature=0.0, processor="broken"),
    SamplingParams(temperature=0.0, support=True),
]


def agree(got: Sampled, want: Sampled) -> None:
    assert got.tokens.tolist() == want.tokens.tolist()
    assert got.failed == want.failed
    assert got.logprobs.keys() == want.logprobs.keys()
    for row, mine in got.logprobs.items():
        theirs = want.logprobs[row]
        assert mine.chosen == pytest.approx(theirs.chosen, abs=1e-4)
        assert mine.top_ids.tolist() == theirs.top_ids.tolist()
        np.testing.assert_allclose(mine.top_values, theirs.top_values, atol=1e-4)
        assert mine.entropy == pytest.approx(theirs.entropy, abs=1e-4)
        assert (mine.support is None) == (theirs.support is None)
        if mine.support is not None and theirs.support is not None:
            assert mine.support.ids.tolist() == theirs.support.ids.tolist()
            assert mine.support.chosen == pytest.approx(theirs.support.chosen, abs=1e-4)


def only(sampled: Sampled, row: int) -> Sampled:
    """The part of the result that belongs to `row`."""
    logprobs = {0: sampled.logprobs[row]} if row in sampled.logprobs else {}
    failed = {0: sampled.failed[row]} if row in sampled.failed else {}
    return Sampled(sampled.tokens[row : row + 1], logprobs, failed)


@pytest.mark.parametrize(("vocab", "rows"), [(40, 14), (4_097, 14), (9_000, 5)])
def test_rows_of_every_option_beside_each_other(vocab: int, rows: int) -> None:
    """Across the kernels' blocks; masks come and go; every row's tokens are those that it has alone."""
    generator = torch.Generator().manual_seed(vocab)
    options = OPTIONS[-rows:]
    known = {"favour": favour, "broken": broken}
    samplers = [Sampler(len(OPTIONS), vocab, CPU, known, each) for each in SETS.values()]
    alone = Sampler(len(OPTIONS), vocab, CPU, known)
    for sampler in (*samplers, alone):
        start(sampler, *options)
    for step in range(4):
        # bfloat16 logits have ties, also at the cuts
        logits = (torch.randn(rows, vocab, generator=generator) * 2).bfloat16().float()
        masks = masks_of(vocab, {0: [1, 2, 39], rows - 3: list(range(5, 30))}) if step in (1, 2) else None
        slots, positions = torch.arange(1, rows + 1), torch.full((rows,), 3 + step)
        twins, fused = (each.sample(logits.clone(), slots, positions, masks) for each in samplers)
        agree(fused, twins)
        for row in range(rows):
            own = None
            if masks is not None and row in masks.rows:
                own = Masks([0], [1], masks.bits[masks.rows.index(row)][None])
            one = alone.sample(logits[row : row + 1].clone(), slots[row : row + 1], positions[:1], own)
            agree(one, only(twins, row))


def test_weights_are_those_that_the_filters_leave() -> None:
    """Logits have ties at every cut."""
    params = [
        SamplingParams(temperature=heat, top_k=k, top_p=p, min_p=least)
        for heat in (0.5, 1.0, 3.0) for k in (0, 2, 9) for p in (1.0, 0.9, 0.2) for least in (0.0, 0.1)
    ]  # fmt: skip
    sampler = Sampler(len(params) + 1, 60, CPU)
    start(sampler, *params, GREEDY)
    logits = (torch.randn(len(params) + 1, 60, generator=torch.Generator().manual_seed(3)) * 2).round()
    logits[:, 50:] = -math.inf
    slots, best = torch.arange(1, len(params) + 2), logits.argmax(1)
    rows = sampler.stage._device.rows._replace(slots=slots, live=torch.tensor([len(slots)]))
    got = weights.draw_weights(logits.clone(), rows, best)
    torch.testing.assert_close(got, torch_kernels.draw_weights(logits, rows, best))
    forced = weights.draw_weights(logits, rows, torch.full_like(best, 49))
    assert (forced[:, 49] > 0).all(), "a drawn token has no weight"
