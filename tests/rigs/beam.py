"""A model for beam search, and the search written as plainly as can be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.engine.beam_search import Rules
from core.plan import RowLogprobs


class Model:
    """Log-probabilities that depend on all tokens before: those of a random model over few tokens. With
    `steps` they are multiples of a quarter, so that sums tie and are exact."""

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
        """As the sampler ranks: best first, of equal ones the lower id."""
        values = self.logprobs(tokens)
        ids = np.lexsort((np.arange(self.vocab), -values))[:k].astype(np.int32)
        return RowLogprobs(0.0, ids, values[ids])


def plainly(model: Model, rules: Rules) -> list[tuple[int, ...]]:
    """vLLM's loop, token lists and all, without an early end."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    complete: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(rules.limit):
        going = []
        for total, tokens in live:
            row = model.row(tokens, 2 * rules.width)
            for token, value in zip(row.top_ids.tolist(), row.top_values.tolist(), strict=True):
                new = (total + value, (*tokens, token))
                (complete if token in rules.ends else going).append(new)
        live = sorted(going, key=lambda each: each[0], reverse=True)[: rules.width]

    def rank(each: tuple[float, tuple[int, ...]]) -> float:
        total, tokens = each
        length = rules.prompt + len(tokens) - (tokens[-1] in rules.ends)
        return total / length**rules.penalty

    best = sorted(complete + live, key=rank, reverse=True)[: rules.width]
    return [tokens for _, tokens in best]
