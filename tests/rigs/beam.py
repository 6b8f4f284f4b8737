"""A fake model for beam search, and a simple reference implementation of the search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.engine.beam_search import Rules
from core.plan import RowLogprobs


class Model:
    """A random model over few tokens whose log-probabilities depend on all previous tokens. With `steps` they
    are multiples of a quarter, so that sums are exact and ties occur."""

    def __init__(self, seed: int, vocab: int, steps: bool = False) -> None:
        self._seed = seed
        self._steps = steps
        self.vocab = vocab

    def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        random = np.random.default_rng([self._seed, *tokens])
        if self._steps:
            return -random.integers(1, 4, self.vocab).astype(np.float32) / 4
        logits = random.normal(0, 2, self.vocab)
        return (logits - np.log(np.exp(logits).sum())).astype(np.float32)

    def row(self, tokens: Sequence[int], k: int) -> RowLogprobs:
        """Top `k` in the order of the sampler: best first, the lower id first on ties."""
        values = self.logprobs(tokens)
        ids = np.lexsort((np.arange(self.vocab), -values))[:k].astype(np.int32)
        return RowLogprobs(0.0, ids, values[ids])


def plainly(model: Model, rules: Rules) -> list[tuple[int, ...]]:
    """Beam search as in vLLM, with token lists and without early stopping."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    complete: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(rules.limit):
        unfinished = []
        for total, tokens in live:
            row = model.row(tokens, 2 * rules.width)
            for token, value in zip(row.top_ids.tolist(), row.top_values.tolist(), strict=True):
                new = (total + value, (*tokens, token))
                (complete if token in rules.ends else unfinished).append(new)
        live = sorted(unfinished, key=lambda each: each[0], reverse=True)[: rules.width]

    def rank(each: tuple[float, tuple[int, ...]]) -> float:
        total, tokens = each
        length = rules.prompt + len(tokens) - (tokens[-1] in rules.ends)
        return total / length**rules.penalty

    best = sorted(complete + live, key=rank, reverse=True)[: rules.width]
    return [tokens for _, tokens in best]
