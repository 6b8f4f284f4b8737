"""The sampler as the runner uses it: exact frequencies, pure function of seed and position."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch

from core.plan import NewSlot
from core.request.params import SamplingParams
from core.types import NAN_TOKEN
from gpu.sample.filters import Rule
from tests.rigs.sampler import Sampler
from tests.rigs.sampling import CPU, VOCAB, by_sorting, make, new_slot, sample
from tests.rigs.statistics import MIN_P, p_value

LAST_SEED = 2**63 - 1
GREEDY = SamplingParams(temperature=0.0)


def tokens_of(sampler: Sampler, row: torch.Tensor, positions: Sequence[int]) -> np.ndarray:
    """Slot 1's tokens at `positions`, each from the same logits `row` [vocab]."""
    n = len(positions)
    return sample(sampler, row.expand(n, -1), [1] * n, positions).tokens.numpy()


def random_logits(n: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * 2


# Frequencies


FILTERED = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=2.5),
    "top_k": SamplingParams(top_k=7),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.15),
    "top_k, top_p": SamplingParams(temperature=1.5, top_k=12, top_p=0.7),
    "top_k, min_p": SamplingParams(top_k=12, min_p=0.1),
    "top_p, min_p": SamplingParams(temperature=0.8, top_p=0.9, min_p=0.05),
    "all": SamplingParams(temperature=1.3, top_k=15, top_p=0.9, min_p=0.08),
}


@pytest.mark.parametrize(
    ("name", "seed"), [*((name, 0) for name in FILTERED), ("plain", LAST_SEED), ("all", LAST_SEED)]
)
def test_frequencies_over_positions_are_exact(name: str, seed: int) -> None:
    params = FILTERED[name]
    row, n = random_logits(1)[0], 2_000
    tokens = tokens_of(make(msgspec.structs.replace(params, seed=seed)), row, range(3, 3 + n))
    expected = np.zeros(VOCAB)
    shares = by_sorting(row, Rule(params.temperature, params.top_k, params.top_p, params.min_p))
    expected[list(shares)] = list(shares.values())
    counts = np.bincount(tokens, minlength=VOCAB)
    assert p_value(counts, expected * n) > MIN_P


@pytest.mark.parametrize("first", [0, LAST_SEED - 1_999])
def test_frequencies_over_seeds_are_exact(first: int) -> None:
    # What `n` completions of one prompt are: one position, neighbouring seeds.
    n = 2_000
    sampler = make(*(SamplingParams(seed=first + i) for i in range(n)))
    row = random_logits(1)[0]
    tokens = sample(sampler, row.expand(n, -1), range(1, n + 1), [9] * n).tokens.numpy()
    assert p_value(np.bincount(tokens, minlength=VOCAB), row.softmax(-1).double().numpy() * n) > MIN_P


def test_frequencies_in_a_real_vocabulary() -> None:
    vocab, n = 49_152, 500
    row = -1.1 * torch.arange(1, vocab + 1).float().log()  # Zipf
    tokens = tokens_of(make(SamplingParams(seed=3), vocab=vocab, rows=n), row, range(n))
    edges = np.unique(np.geomspace(1, vocab, 25).astype(np.int64))
    mass = np.add.reduceat(row.double().softmax(-1).numpy(), np.append(0, edges[:-1]))
    counts = np.bincount(np.searchsorted(edges, tokens, side="right"), minlength=len(edges))
    assert p_value(counts, mass * n) > MIN_P


@pytest.mark.parametrize("neighbour", ["position", "seed"])
def test_successive_draws_are_independent(neighbour: str) -> None:
    n, size = 4_000, 4
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    if neighbour == "position":
        tokens = tokens_of(make(SamplingParams(seed=5), vocab=size), row, range(n))
    else:
        sampler = make(*(SamplingParams(seed=i) for i in range(n)), vocab=size)
        tokens = sample(sampler, row.expand(n, -1), range(1, n + 1), [9] * n).tokens.numpy()
    pairs = np.bincount(tokens[:-1] * size + tokens[1:], minlength=size * size)
    p = row.exp().double().numpy()
    assert p_value(pairs, np.outer(p, p).ravel() * (n - 1)) > MIN_P


# A pure function


MIXED = [
    SamplingParams(seed=0),
    SamplingParams(seed=LAST_SEED, temperature=0.7, top_p=0.9),
    GREEDY,
    SamplingParams(seed=3, top_k=5, logprobs=2),
    SamplingParams(seed=3, min_p=0.1, repetition_penalty=1.2),
    SamplingParams(seed=8, temperature=1.5, presence_penalty=0.5, logit_bias=((4, 5.0),)),
    SamplingParams(temperature=0.0, frequency_penalty=1.0, logprobs=0),
    SamplingParams(seed=9, top_k=30, top_p=0.8, min_tokens=9, max_tokens=20, stop_ids=frozenset({0, 1})),
]


@pytest.mark.parametrize("vocab", [VOCAB, 6_000])
def test_tokens_do_not_depend_on_the_batch(vocab: int) -> None:
    logits, n = random_logits(len(MIXED), vocab), len(MIXED)
    slots, positions = list(range(1, n + 1)), [5 + 3 * i for i in range(n)]
    together, shuffler, alone = (make(*MIXED, vocab=vocab, rows=n) for _ in range(3))
    expected = sample(together, logits, slots, positions)
    order = np.random.default_rng(0).permutation(n)
    shuffled = sample(shuffler, logits[order], [slots[i] for i in order], [positions[i] for i in order])
    assert shuffled.tokens.tolist() == expected.tokens[order].tolist()
    for i in range(n):
        one = sample(alone, logits[i : i + 1], [slots[i]], [positions[i]])
        assert one.tokens.tolist() == [int(expected.tokens[i])]
        assert (0 in one.logprobs) == (i in expected.logprobs)
        if i in expected.logprobs:
            assert one.logprobs[0].chosen == expected.logprobs[i].chosen


def test_equal_seed_and_position_draw_equal_noise_in_any_slot() -> None:
    params = SamplingParams(seed=77)
    sampler = make(params, params, SamplingParams(seed=78))
    rows = random_logits(1).expand(3, -1)
    differ = 0
    for position in range(30):
        a, b, c = sample(sampler, rows, [1, 2, 3], [position] * 3).tokens.tolist()
        assert a == b
        differ += a != c
    assert differ > 10


def test_the_step_in_which_a_position_is_sampled_does_not_matter() -> None:
    row = random_logits(1)[0]
    forwards = tokens_of(make(SamplingParams(seed=4)), row, range(50))
    backwards = tokens_of(make(SamplingParams(seed=4)), row, range(49, -1, -1))
    assert forwards.tolist() == backwards[::-1].tolist()
    assert len(set(forwards.tolist())) > 5


# Greedy


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, [30, 12]] = 4.0
    logits[2] = -torch.inf
    logits[2, [9, 8]] = -100.0
    assert sample(make(GREEDY), logits, [1, 1, 1], [3, 4, 5]).tokens.tolist() == [0, 12, 8]


def test_top_k_1_is_greedy_at_any_temperature() -> None:
    logits = random_logits(20)
    tokens = sample(make(SamplingParams(temperature=100.0, top_k=1)), logits, [1] * 20, range(20)).tokens
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_padded_rows_are_greedy_and_an_empty_batch_is_empty() -> None:
    sampler = make(SamplingParams())
    logits = random_logits(4)
    assert sample(sampler, logits, [0] * 4, [0] * 4).tokens.tolist() == logits.argmax(-1).tolist()
    nothing = sampler.sample(logits[:0], torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    assert nothing.tokens.tolist() == []
    assert nothing.tokens.dtype == torch.int64


# Bias, min_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logit_bias_bans_and_forces(temperature: float) -> None:
    logits = random_logits(200)
    best = int(logits[0].argmax())
    ban = make(SamplingParams(temperature=temperature, logit_bias=((best, -100.0), (2, 1.5))))
    force = make(SamplingParams(temperature=temperature, logit_bias=((33, 100.0),)))
    positions = range(200)
    assert best not in sample(ban, logits[:1].expand(200, -1), [1] * 200, positions).tokens.tolist()
    assert set(sample(force, logits, [1] * 200, positions).tokens.tolist()) == {33}


def test_logit_bias_is_added() -> None:
    row, n = torch.zeros(4), 4_000
    sampler = make(SamplingParams(logit_bias=((1, 1.0), (3, -1.0))), vocab=4)
    expected = torch.tensor([0.0, 1.0, 0.0, -1.0], dtype=torch.float64).softmax(-1).numpy()
    counts = np.bincount(tokens_of(sampler, row, range(n)), minlength=4)
    assert p_value(counts, expected * n) > MIN_P


def test_stop_ids_wait_for_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, max_tokens=9, stop_ids=frozenset({6, 11}))
    logits = torch.zeros(1, VOCAB)
    logits[0, [6, 11, 20]] = torch.tensor([9.0, 8.0, 7.0])
    # The prompt has 3 tokens: position 3 is the first of the output.
    assert tokens_of(make(params), logits[0], [3, 4, 5, 6]).tolist() == [20, 20, 6, 6]


def test_min_tokens_that_forbids_everything_gives_no_token() -> None:
    params = SamplingParams(min_tokens=1, max_tokens=9, stop_ids=frozenset(range(VOCAB)))
    assert tokens_of(make(params), torch.zeros(VOCAB), [3]).tolist() == [NAN_TOKEN]


# Broken rows


@pytest.mark.parametrize("params", MIXED)
def test_a_broken_row_has_no_token_and_disturbs_nobody(params: SamplingParams) -> None:
    logits = random_logits(6)
    healthy = sample(make(*[params] * 6), logits, range(1, 7), [5] * 6)
    broken = logits.clone()
    broken[0, 3] = torch.nan
    broken[2, 4] = torch.inf
    broken[3] = -torch.inf
    broken[4, 0], broken[4, 1] = torch.inf, -torch.inf
    tokens, logprobs, _ = sample(make(*[params] * 6), broken, range(1, 7), [5] * 6)
    assert [int(tokens[i]) for i in (0, 2, 3, 4)] == [NAN_TOKEN] * 4
    for i in (1, 5):
        assert int(tokens[i]) == int(healthy.tokens[i])
    assert set(logprobs) == ({1, 5} if params.logprobs >= 0 else set())


def test_a_missing_token_is_not_counted() -> None:
    sampler = make(SamplingParams(temperature=0.0, presence_penalty=1.0))
    broken = torch.full((1, VOCAB), torch.nan)
    assert sample(sampler, broken, [1], [3]).tokens.tolist() == [NAN_TOKEN]
    row = torch.zeros(1, VOCAB)
    row[0, 0], row[0, -1] = 0.5, 0.4
    assert sample(sampler, row, [1], [4]).tokens.tolist() == [0]


# Penalties through the sampler


PENALISED = SamplingParams(
    seed=6, temperature=0.9, frequency_penalty=0.6, presence_penalty=0.3, repetition_penalty=1.15
)


def generate(sampler: Sampler, slot: int, first: int, count: int, row: torch.Tensor) -> list[int]:
    """`count` tokens of `slot` from position `first` on, each from `row` rolled by its position."""
    return [
        int(sample(sampler, row.roll(position % 5)[None], [slot], [position]).tokens)
        for position in range(first, first + count)
    ]


@pytest.mark.parametrize("params", [PENALISED, SamplingParams(temperature=0.0, frequency_penalty=1.5)])
def test_after_a_retraction_the_text_goes_on_as_if_uninterrupted(params: SamplingParams) -> None:
    row = random_logits(1)[0]
    prompt = (1, 2, 3)
    whole = generate(make(params), 1, len(prompt), 30, row)
    sampler = Sampler(2, VOCAB, CPU)
    sampler.apply([new_slot(1, params, prompt)])
    text = generate(sampler, 1, len(prompt), 12, row)
    # Another request takes the slot; the retracted one comes back elsewhere.
    sampler.apply([new_slot(1, PENALISED, (9, 9))])
    generate(sampler, 1, 2, 5, row)
    sampler.apply([new_slot(2, params, prompt, text)])
    text += generate(sampler, 2, len(prompt) + 12, 18, row)
    assert text == whole
    unpenalised = SamplingParams(seed=params.seed, temperature=params.temperature)
    assert whole != generate(make(unpenalised), 1, len(prompt), 30, row)


def test_penalties_touch_only_their_own_row() -> None:
    row = random_logits(1)
    sampler = make(GREEDY, SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0))
    both = [sample(sampler, row.expand(2, -1), [1, 2], [p, p]).tokens.tolist() for p in range(3, 23)]
    assert {a for a, _ in both} == {int(row.argmax())}
    assert len({b for _, b in both}) > 5


# Slots


def everything(slot: int) -> NewSlot:
    params = SamplingParams(
        seed=5,
        temperature=0.3,
        top_k=3,
        top_p=0.5,
        min_p=0.5,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        repetition_penalty=3.0,
        logit_bias=((7, 100.0), (8, 90.0)),
        min_tokens=50,
        max_tokens=90,
        stop_ids=frozenset({7}),
        logprobs=3,
    )
    return new_slot(slot, params, range(10), (4, 4))


OTHER_BIAS = SamplingParams(
    seed=1, logit_bias=((9, 2.0),), min_tokens=20, max_tokens=30, stop_ids=frozenset({5})
)


@pytest.mark.parametrize("params", [SamplingParams(seed=1), GREEDY, PENALISED, OTHER_BIAS])
def test_a_slot_forgets_its_former_owner(params: SamplingParams) -> None:
    sampler = Sampler(1, VOCAB, CPU)
    sampler.apply([everything(1)])
    row = random_logits(1)[0]
    assert set(generate(sampler, 1, 12, 3, row)) == {8}
    # Its prompt repeats what the former owner generated.
    sampler.apply([new_slot(1, params, (4, 4, 8))])
    fresh = Sampler(1, VOCAB, CPU)
    fresh.apply([new_slot(1, params, (4, 4, 8))])
    assert generate(sampler, 1, 3, 30, row) == generate(fresh, 1, 3, 30, row)
    assert sample(sampler, row[None], [1], [40]).logprobs == {}


def test_new_slots_leave_the_others_alone() -> None:
    rows = random_logits(2)

    def tokens(sampler: Sampler) -> list[int]:
        return sample(sampler, rows, [1, 2], [20, 20]).tokens.tolist()

    sampler = make(SamplingParams(seed=1), SamplingParams(seed=2))
    before = tokens(sampler)
    sampler.apply([])
    assert tokens(sampler) == before
    sampler.apply([everything(2)])
    assert tokens(sampler) == [before[0], 8]


# Log-probabilities


def test_logprobs_are_raw_and_only_for_those_who_asked() -> None:
    adjusted = SamplingParams(
        seed=2, temperature=0.4, repetition_penalty=2.0, logit_bias=((5, 4.0),), logprobs=4, top_k=3
    )
    sampler = make(adjusted, GREEDY, SamplingParams(logprobs=0))
    logits = random_logits(3)
    tokens, logprobs, _ = sample(sampler, logits, [1, 2, 3], [3, 3, 3])
    raw = logits.double().log_softmax(-1)
    assert set(logprobs) == {0, 2}
    for i, answer in logprobs.items():
        assert answer.chosen == pytest.approx(float(raw[i, int(tokens[i])]), abs=1e-5)
    best = raw[0].topk(4)
    assert logprobs[0].top_ids.tolist() == best.indices.tolist()
    assert logprobs[0].top_values == pytest.approx(best.values.numpy(), abs=1e-5)
    assert logprobs[2].top_ids.tolist() == []


def test_named_tokens_are_the_slots_own() -> None:
    sampler = make(SamplingParams(logprobs=0, logprob_ids=(3, 1)), SamplingParams(logprobs=0))
    row = random_logits(1)[0]
    told = sample(sampler, torch.stack([row, row]), [1, 2], [5, 5]).logprobs
    assert told[0].top_ids.tolist() == [3, 1]
    assert told[0].top_values.tolist() == pytest.approx(row.log_softmax(-1)[[3, 1]].tolist())
    assert told[1].top_ids.tolist() == []
    sampler.apply([new_slot(1, SamplingParams(logprobs=0))])
    assert sample(sampler, row[None], [1], [6]).logprobs[0].top_ids.tolist() == []


def test_under_inference_mode_as_the_launch_thread_runs() -> None:
    with torch.inference_mode():
        sampler = make(*MIXED)
        tokens = sample(sampler, random_logits(8), range(1, 9), [7] * 8).tokens.tolist()
    assert tokens == sample(make(*MIXED), random_logits(8), range(1, 9), [7] * 8).tokens.tolist()
