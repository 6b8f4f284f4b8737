"""Scores of rows of logits: the normaliser, the rank of a token, the best tokens."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import cdiv, jit, jit_loose, options, pow2
from gpu.kernels.sampling.sample import float_order
from gpu.sample.kernels import Scores

PART = 4096
"""Entries of a row that a program looks at."""

FEW = 20
"""Maximum `k` for which each program picks tokens one by one. Larger ones use keys of whole rows."""

ROWS = 64
"""Rows whose keys are held at once: 78 MB at a vocabulary of 151,936."""

_LAST: tl.constexpr = tl.constexpr(9223372036854775807)


@jit
def _score(
    logits: tl.tensor,
    tokens: tl.tensor,
    highs: tl.tensor,
    sums: tl.tensor,
    ahead: tl.tensor,
    vocab: int,
    PART: tl.constexpr,
) -> None:
    row, part = tl.program_id(0), tl.program_id(1)
    at = row * tl.num_programs(1) + part
    ids = part * PART + tl.arange(0, PART)
    own = logits + row.to(tl.int64) * vocab
    x = tl.load(own + ids, mask=ids < vocab, other=float("-inf"))
    token = tl.load(tokens + row)
    value = tl.load(own + token)
    before = (x > value) | ((x == value) & (ids < token))
    tl.store(ahead + at, tl.sum(before.to(tl.int32), 0))
    high = tl.max(x, 0)
    high = tl.where(high == float("-inf"), 0.0, high)
    tl.store(highs + at, high)
    tl.store(sums + at, tl.sum(tl.exp(x - high), 0))


def score(logits: Tensor, tokens: Tensor) -> Scores:
    """See `SamplingKernels.score`: reads each row once."""
    n, vocab = logits.shape
    part = min(PART, pow2(vocab))
    shape = n, cdiv(vocab, part)
    highs, sums = (logits.new_empty(shape) for _ in range(2))
    ahead = torch.empty(shape, dtype=torch.int32, device=logits.device)
    if n:
        _score[shape](logits.contiguous(), tokens, highs, sums, ahead, vocab, PART=part, **options(4))
    high = highs.amax(1)
    return Scores(high, (highs - high.unsqueeze(1) + sums.log()).logsumexp(1), ahead.sum(1) + 1)


@jit_loose("k")
def _best(logits: tl.tensor, found: tl.tensor, vocab: int, k: tl.tensor, PART: tl.constexpr) -> None:
    row, part = tl.program_id(0), tl.program_id(1)
    ids = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=0.0)
    # Ascending from the largest logit, lowest id first among equals.
    keys = tl.where(ids < vocab, ((2147483647 - float_order(x)) << 32) | ids, _LAST)
    own = found + (row.to(tl.int64) * tl.num_programs(1) + part) * k
    for i in range(k):
        least = tl.min(keys, 0)
        tl.store(own + i, least)
        keys = tl.where(keys == least, _LAST, keys)


def best_tokens(logits: Tensor, k: int) -> Tensor:
    """See `SamplingKernels.best_tokens`: the best of each part of a row, then the best of these."""
    n, vocab = logits.shape
    if k > FEW:
        found = [_keys(rows).topk(k, largest=False).values for rows in torch.split(logits, ROWS)]
        return torch.cat(found) & 0xFFFFFFFF
    part = min(PART, pow2(vocab))
    parts = cdiv(vocab, part)
    keys = torch.empty(n, parts * k, dtype=torch.int64, device=logits.device)
    if n and k:
        _best[(n, parts)](logits.contiguous(), keys, vocab, k, PART=part, **options(4))
    return keys.topk(k, largest=False).values & 0xFFFFFFFF


def _keys(logits: Tensor) -> Tensor:
    """Sort keys int64 [n, vocab] of all logits, as `_best` makes them."""
    word = (logits + 0.0).view(torch.int32)
    order = (word ^ ((word >> 31) & 0x7FFFFFFF)).long()
    return torch.arange(logits.shape[1], device=logits.device) + (-1 - order) * 2**32
