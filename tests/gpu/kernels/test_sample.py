"""The sampler's kernels: the same noise words as the CPU's, hence the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl

from bench.kernels import reference
from bench.kernels.inputs import choose_tokens, sampling_rows
from gpu.kernels.jit import jit
from gpu.kernels.sampling.sample import _bits, _keys
from gpu.sample.filters import Rule, survivors
from gpu.sample.noise import bits, exponential, row_keys

LAST = 2**63 - 1


@jit
def _words(seeds: tl.tensor, positions: tl.tensor, out: tl.tensor, N: tl.constexpr) -> None:
    row = tl.program_id(0)
    key0, key1 = _keys(seeds, positions, row, row)
    tokens = tl.arange(0, N)
    tl.store(out + row * N + tokens, _bits(key0, key1, tokens))


def test_noise_words_are_those_of_the_cpu(device: torch.device) -> None:
    seeds = np.array([0, 1, 2**32, 0x0123_4567_89AB_CDEF, LAST, 2**31], np.int64)
    positions = np.array([0, 5, 40_961, 2**31 - 1, 7, 2**32 + 3], np.int64)
    out = torch.zeros(len(seeds), 1024, dtype=torch.int32, device=device)
    on_device = (torch.from_numpy(side).to(device) for side in (seeds, positions))
    _words[(len(seeds),)](*on_device, out, N=1024)
    tokens = torch.arange(1024, dtype=torch.int32)
    assert torch.equal(out.cpu(), bits(row_keys(seeds, positions), tokens))


def test_tokens(device: torch.device) -> None:
    vocab, rows, live = 9000, 6, 5
    logits = torch.randn(rows, vocab, device=device) * 3
    logits[0, [17, 8000]] = 30.0  # a tie, in different programs
    slots = torch.tensor([4, 2, 7, 1, 5, 3], device=device)
    positions = torch.tensor([10, 11, 12, 13, 14, 15], device=device)
    heat = torch.zeros(8, device=device)
    heat[[2, 7, 5]] = torch.tensor([1.0, 0.6, 1.7], device=device)
    seeds = torch.arange(8, device=device) * 1_000_003 + LAST // 2
    drawn = sampling_rows(slots, positions, live, temperature=heat, seed=seeds)
    found = choose_tokens(logits, drawn)
    keys = row_keys(seeds[slots].cpu().numpy(), positions.cpu().numpy())
    noise = bits(keys, torch.arange(vocab, dtype=torch.int32))
    scores = reference.race(logits.cpu(), noise, heat[slots].cpu())
    assert found[:live].tolist() == scores[:live].argmax(-1).tolist()
    assert int(found[0]) == 17
    assert int(found[live]) == 0, "a padded row was written"


def by_the_cpu(row: torch.Tensor, words: torch.Tensor, rule: Rule) -> int:
    """The token that `tests.rigs.sampler` draws."""
    field = survivors(row, torch.arange(len(row), dtype=torch.int32), float(row.max()), rule)
    race = field.weights / exponential(words[field.ids.long()])
    return int(field.ids[race.argmax()])


@pytest.mark.parametrize("spread", [0.3, 4.0])  # a flat row is looked at often, a peaked one once
def test_filters(spread: float, device: torch.device) -> None:
    rules = [
        Rule(1.0, 0, 1.0, 0.0),
        Rule(1.0, 3, 1.0, 0.0),
        Rule(0.7, 0, 0.5, 0.0),
        Rule(1.3, 0, 1.0, 0.4),
        Rule(1.0, 40, 0.3, 0.0),
        Rule(0.9, 25, 0.8, 0.2),
        Rule(1.0, 1, 1.0, 0.0),
        Rule(1.0, 5000, 0.999, 0.0),
    ]
    rows, vocab = len(rules), 700
    # bfloat16 logits have ties, also at the cuts
    logits = (torch.randn(rows, vocab) * spread).bfloat16().float()
    seeds, positions = torch.arange(rows) + LAST // 3, torch.arange(rows) * 7
    columns = list(zip(*rules, strict=True))
    heat, top_p, min_p = (torch.tensor(columns[i], device=device) for i in (0, 2, 3))
    top_k = torch.tensor(columns[1], device=device)
    slots = torch.arange(rows, device=device)
    positions, seeds = positions.to(device), seeds.to(device)
    cut = sampling_rows(slots, positions, temperature=heat, seed=seeds, top_k=top_k, top_p=top_p, min_p=min_p)
    found = choose_tokens(logits.to(device), cut, filtered=True)
    words = bits(
        row_keys(seeds.cpu().numpy(), positions.cpu().numpy()), torch.arange(vocab, dtype=torch.int32)
    )
    expected = [by_the_cpu(logits[i].clone(), words[i], rule) for i, rule in enumerate(rules)]
    assert found.tolist() == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_row_that_is_not_finite_has_no_token(bad: float, heat: float, device: torch.device) -> None:
    logits = torch.randn(3, 5000, device=device)
    logits[0, 4321] = bad
    logits[1] = float("-inf")
    logits[2, 1:] = float("-inf")  # one token is left
    one = torch.arange(3, device=device)
    heats = torch.full((3,), heat, device=device)
    rows = sampling_rows(one, one, temperature=heats, seed=one)
    assert choose_tokens(logits, rows).tolist() == [-1, -1, 0]
