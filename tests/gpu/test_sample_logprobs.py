"""Log-probabilities of the raw distribution: values, order, ties, blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import pytest
import torch

from core.plan import PromptLogprobs
from core.request.params import SamplingParams
from gpu.sample import torch_kernels
from gpu.sample.logprobs import Ranked, keys_of, read_keys
from gpu.sample.logprobs import prompt_logprobs as launch_prompt_logprobs
from tests.rigs.sampler import Sampled
from tests.rigs.sampling import make, sample


def logits_like_bfloat16(n: int, vocab: int) -> torch.Tensor:
    return (torch.randn(n, vocab, generator=torch.Generator().manual_seed(n)) * 4).bfloat16().float()


def prompt_logprobs(
    start: int, logits: Iterable[torch.Tensor], targets: torch.Tensor, k: int, named: Sequence[int] = ()
) -> PromptLogprobs:
    return launch_prompt_logprobs(torch_kernels, start, logits, targets, k, named).read()


def rank(logits: torch.Tensor, k: int) -> Ranked:
    """The best `k` of each row."""
    raw = logits.log_softmax(-1)
    best = torch_kernels.best_tokens(raw, min(k, raw.shape[1]))
    return read_keys(keys_of(raw.gather(1, best), best).numpy())


@pytest.mark.parametrize("k", [1, 5, 128])
def test_rank_is_the_head_of_a_stable_sort(k: int) -> None:
    logits = logits_like_bfloat16(40, 3_000)
    logits[3] = -math.inf
    logits[3, 7] = 2.0  # a log-probability of 0
    ranked = rank(logits, k)
    by_sort = logits.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    assert np.array_equal(ranked.ids, by_sort.indices[:, :k].numpy())
    assert np.array_equal(ranked.values, by_sort.values[:, :k].numpy())
    assert not np.signbit(ranked.values[3, 0])


def test_rank_of_equals_names_the_lowest_ids() -> None:
    assert rank(torch.zeros(2, 1_000), 3).ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert rank(torch.zeros(1, 4), 128).ids.tolist() == [[0, 1, 2, 3]]
    assert rank(torch.zeros(2, 4), 0).ids.shape == (2, 0)


def tell(logits: torch.Tensor, *params: SamplingParams) -> Sampled:
    """Greedy tokens of `logits` [n, 500], of which each row wants what its `params` say."""
    asked = [msgspec.structs.replace(each, temperature=0.0) for each in params]
    rows = list(range(1, len(asked) + 1))
    return sample(make(*asked, vocab=logits.shape[1]), logits, rows, [3] * len(rows))


def test_row_logprobs_are_those_of_log_softmax() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)) * 5
    logits[2, 3] = math.nan
    expected = logits.double().log_softmax(-1)
    got = tell(logits, *(SamplingParams(logprobs=k) for k in (0, 128, 2)))
    assert sorted(got.logprobs) == [0, 1]
    first, second = got.logprobs[0], got.logprobs[1]
    assert first.chosen == pytest.approx(float(expected[0, got.tokens[0]]), abs=1e-5)
    assert (len(first.top_ids), len(first.top_values)) == (0, 0)
    assert second.chosen == pytest.approx(float(expected[1, got.tokens[1]]), abs=1e-5)
    assert (second.top_ids.dtype, second.top_values.dtype) == (np.int32, np.float32)
    assert (np.diff(second.top_values) <= 0).all()
    assert second.top_values == pytest.approx(expected[1].numpy()[second.top_ids], abs=1e-5)
    everything = tell(logits[:1, :100], SamplingParams(logprobs=128)).logprobs[0]
    assert sorted(everything.top_ids.tolist()) == list(range(100))
    assert np.exp(everything.top_values.astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("n", [1, 64, 150])
@pytest.mark.parametrize("k", [0, 4])
def test_prompt_logprobs_row_by_row(n: int, k: int) -> None:
    logits = logits_like_bfloat16(n, 300)
    targets = torch.arange(n) * 7 % 300
    before = logits.clone()
    answer = prompt_logprobs(11, [logits], targets, k)
    expected = logits.double().log_softmax(-1)
    assert answer.start == 11
    assert answer.values == pytest.approx(expected[torch.arange(n), targets].numpy(), abs=1e-5)
    assert answer.top_ids.shape == answer.top_values.shape == (n, k)
    order = expected.sort(dim=-1, descending=True, stable=True)
    assert np.array_equal(answer.top_ids, order.indices[:, :k].numpy())
    assert answer.top_values == pytest.approx(order.values[:, :k].numpy(), abs=1e-5)
    assert [order.indices[row, rank - 1] for row, rank in enumerate(answer.ranks)] == targets.tolist()
    assert torch.equal(logits, before)


def test_prompt_logprobs_do_not_depend_on_the_chunking() -> None:
    logits, targets = logits_like_bfloat16(130, 300), torch.arange(130)
    whole = prompt_logprobs(1, [logits], targets, 3)
    for first, last in ((0, 1), (1, 70), (70, 130)):
        part = prompt_logprobs(1 + first, [logits[first:last]], targets[first:last], 3)
        assert np.array_equal(part.values, whole.values[first:last])
        assert np.array_equal(part.ranks, whole.ranks[first:last])
        assert np.array_equal(part.top_ids, whole.top_ids[first:last])
        assert np.array_equal(part.top_values, whole.top_values[first:last])
    sliced = prompt_logprobs(1, logits.split(50), targets, 3)
    for name in ("values", "ranks", "top_ids", "top_values"):
        assert np.array_equal(getattr(sliced, name), getattr(whole, name))


def test_prompt_logprobs_of_named_tokens_come_after_the_best() -> None:
    logits, targets = logits_like_bfloat16(130, 300), torch.arange(130)
    plain, named = (prompt_logprobs(1, [logits], targets, 2, ids) for ids in ((), (299, 0, 299)))
    assert np.array_equal(named.values, plain.values)
    assert np.array_equal(named.top_ids[:, :2], plain.top_ids)
    assert np.array_equal(named.top_values[:, :2], plain.top_values)
    assert named.top_ids[:, 2:].tolist() == [[299, 0, 299]] * 130
    raw = logits.log_softmax(-1)[:, [299, 0, 299]].numpy()
    assert named.top_values[:, 2:] == pytest.approx(raw)
    assert named.top_ids.dtype == np.int32 and not named.top_values.flags.writeable
    alone = prompt_logprobs(1, [logits], targets, 0, (5,))
    assert alone.top_ids.shape == alone.top_values.shape == (130, 1)


def test_prompt_logprobs_of_nothing_and_of_nan() -> None:
    nothing = prompt_logprobs(1, [torch.empty(0, 300)], torch.empty(0, dtype=torch.int64), 3)
    assert (len(nothing.values), nothing.top_ids.shape) == (0, (0, 3))
    logits = logits_like_bfloat16(3, 300)
    logits[1, 0] = math.nan
    values = prompt_logprobs(1, [logits], torch.tensor([4, 5, 6]), 3).values
    assert np.isnan(values).tolist() == [False, True, False]


def test_what_crosses_the_threads_is_read_only() -> None:
    answer = prompt_logprobs(1, [logits_like_bfloat16(2, 300)], torch.tensor([0, 1]), 2)
    row = tell(logits_like_bfloat16(1, 300), SamplingParams(logprobs=2)).logprobs[0]
    arrays = (answer.values, answer.ranks, answer.top_ids, answer.top_values, row.top_ids, row.top_values)
    assert not any(array.flags.writeable for array in arrays)


def test_named_tokens_come_after_the_best_in_the_order_of_their_names() -> None:
    logits = logits_like_bfloat16(3, 300)
    raw = logits.log_softmax(-1)
    ks, names = (2, 0, 0), ((), (4,), (299, 0))
    plain = tell(logits, *(SamplingParams(logprobs=k) for k in ks)).logprobs
    asked = (SamplingParams(logprobs=k, logprob_ids=ids) for k, ids in zip(ks, names, strict=True))
    named = tell(logits, *asked).logprobs
    assert named[0].top_ids.tolist() == plain[0].top_ids.tolist()
    assert named[1].top_ids.tolist() == [4]
    assert named[2].top_ids.tolist() == [299, 0]
    assert named[2].top_values.tolist() == [float(raw[2, 299]), float(raw[2, 0])]
    assert not named[2].top_ids.flags.writeable


def test_more_rows_than_are_normalised_at_once() -> None:
    logits = logits_like_bfloat16(150, 200)
    got = tell(logits, *(SamplingParams(logprobs=1 + i % 3, entropy=i % 2 == 0) for i in range(150)))
    best = logits.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    assert sorted(got.logprobs) == list(range(150))
    for i, row in got.logprobs.items():
        k = 1 + i % 3
        assert row.top_ids.tolist() == best.indices[i, :k].tolist()
        assert row.top_values.tolist() == best.values[i, :k].tolist()
        assert (row.entropy is None) == (i % 2 == 1)
