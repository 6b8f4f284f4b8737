"""What is told of a token: log-probabilities, of the model's raw distribution unless a request wants them
after mask, bias, penalties and temperature; its entropy; what all these left to choose from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from core.plan import PromptLogprobs, RowLogprobs, Support
from core.types import NAN_TOKEN, Floats, Ints
from gpu.sample.select import largest, where

Array = TypeVar("Array", Ints, Floats)

_BLOCK = 64
"""Prompt rows normalised at once: bounds the copy to 39 MB at a vocabulary of 151,936."""


class Ranked(NamedTuple):
    """The k best of each row, best first, lowest id first among equals: [n, k] each."""

    ids: Ints
    values: Floats


def raw_logprobs(logits: Tensor) -> Tensor:
    """Log-softmax of `logits` float32 [n, vocab], in new memory: sampling changes the logits."""
    return logits.log_softmax(-1)


def entropies(raw: Tensor) -> list[float]:
    """-Σ p log p of each row of log-probabilities `raw` float32 [m, vocab], in nats."""
    found: list[float] = torch.special.entr(raw.exp()).sum(-1).tolist()
    return found


def support(ids: Tensor, weights: Tensor, at: int) -> Support:
    """Of the token `ids[at]`, drawn from `ids` int32 [m], ascending, by `weights` float32 [m]. What a grammar
    forbade weighs nothing, and is no part of it, though top_k may have kept it."""
    chosen = math.log(float(weights[at]) / float(weights.sum(dtype=torch.float64)))
    return Support(_frozen(ids.index_select(0, where(weights > 0)).cpu().numpy()), min(chosen, 0.0))


def only(token: int) -> Support:
    """Of a greedy token: nothing else could have been chosen."""
    return Support(_frozen(np.array([token], np.int32)), 0.0)


def rank(values: Tensor, k: int) -> Ranked:
    """The `k` best (at most vocab) of `values` float32 [n, vocab].

    topk alone breaks ties as it likes, and logits that were bfloat16 tie often: the first of the
    list must be the token that greedy takes. So one more is fetched, and only the rows where the
    last one in equals the first one out are looked through.
    """
    k = min(k, values.shape[-1])
    if k == 0:
        nothing = np.zeros((len(values), 0))
        return Ranked(_frozen(nothing.astype(np.int32)), _frozen(nothing.astype(np.float32)))
    top = values.topk(min(k + 1, values.shape[-1]), dim=-1)
    top_ids, top_values = top.indices.cpu().numpy(), top.values.cpu().numpy()
    order = np.lexsort((top_ids, -top_values))
    ids = np.take_along_axis(top_ids, order, -1).astype(np.int32)
    best = np.take_along_axis(top_values, order, -1)
    if k < best.shape[-1]:
        for row in np.flatnonzero(best[:, k - 1] == best[:, k]):
            picked = largest(values[row], float(best[row, k - 1]), k)
            worth, by_worth = values[row].index_select(0, picked).sort(descending=True, stable=True)
            ids[row, :k] = picked[by_worth].cpu().numpy()
            best[row, :k] = worth.cpu().numpy()
    return Ranked(_frozen(ids[:, :k]), _frozen(best[:, :k]))


def row_logprobs(
    raw: Tensor, tokens: Sequence[int], ks: Sequence[int], more: Sequence[Sequence[int]] = ()
) -> list[RowLogprobs | None]:
    """One answer per row of `raw` float32 [m, vocab]: of the sampled token, the `ks` best, and after
    them the tokens `more` [m][any], where anybody asked for some.

    None where the token is -1: a distribution that is not finite has no log-probabilities.
    """
    ids = torch.tensor(tokens, dtype=torch.int64, device=raw.device).clamp_(min=0)
    chosen = raw.gather(1, ids.unsqueeze(1)).squeeze(1).tolist()
    ranked = rank(raw, max(ks))
    answers: list[RowLogprobs | None] = [
        None if token == NAN_TOKEN else RowLogprobs(chosen[i], ranked.ids[i, :k], ranked.values[i, :k])
        for i, (token, k) in enumerate(zip(tokens, ks, strict=True))
    ]
    for i, named in enumerate(more):
        answer = answers[i]
        if named and answer is not None:
            answers[i] = _with(answer, raw[i], named)
    return answers


def _with(answer: RowLogprobs, raw: Tensor, named: Sequence[int]) -> RowLogprobs:
    ids = np.array(named, np.int32)
    values = raw[torch.tensor(named, device=raw.device)].cpu().numpy()
    return RowLogprobs(
        answer.chosen,
        _frozen(np.concatenate([answer.top_ids, ids])),
        _frozen(np.concatenate([answer.top_values, values])),
    )


def prompt_logprobs(
    start: int, logits: Iterable[Tensor], targets: Tensor, k: int, named: Sequence[int] = ()
) -> PromptLogprobs:
    """Of the prompt tokens `targets` int64 [n], each predicted by its row of `logits`, which come in
    slices [any, vocab], in order: all of a long chunk at once would be gigabytes.

    `start` is the position of the first target. `k` = 0 gives the targets' values only. The tokens
    `named` come after the `k` best of every row. Rows that are not finite give NaN.
    """
    parts: list[tuple[Floats, Ints, Ints, Floats]] = []
    more = torch.tensor(named, dtype=torch.int64, device=targets.device)
    blocks = (piece[at : at + _BLOCK] for piece in logits for at in range(0, max(len(piece), 1), _BLOCK))
    first = 0
    for raw in map(raw_logprobs, blocks):
        wanted = targets[first : first + len(raw)].unsqueeze(1)
        first += len(raw)
        value = raw.gather(1, wanted)
        ranked = rank(raw, k)
        told, worth = ranked.ids, ranked.values
        if named:
            told = np.concatenate([told, np.tile(np.array(named, np.int32), (len(raw), 1))], axis=1)
            worth = np.concatenate([worth, raw[:, more].cpu().numpy()], axis=1)
        parts.append((value.squeeze(1).cpu().numpy(), _places(raw, wanted, value), told, worth))
    values, ranks, ids, best = zip(*parts, strict=True)
    return PromptLogprobs(start, _joined(values), _joined(ranks), _joined(ids), _joined(best))


def _places(raw: Tensor, tokens: Tensor, values: Tensor) -> Ints:
    """Where in the order of `rank` the `tokens` [n, 1] of `values` [n, 1] stand, from 1: int32 [n]."""
    ids = torch.arange(raw.shape[1], device=raw.device)
    before = (raw > values) | ((raw == values) & (ids < tokens))
    return (before.sum(1) + 1).int().cpu().numpy()


def _joined(parts: Sequence[Array]) -> Array:
    return _frozen(np.concatenate(parts))


def _frozen(array: Array) -> Array:
    array.setflags(write=False)
    return array
