"""Prompt log-probabilities of the chunks that ask, a slice at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from core.plan import Chunk, StepPlan
from gpu.models.base import CausalModel
from gpu.sample.logprobs import PromptScores, prompt_logprobs
from gpu.state.view import ChunkRow
from gpu.transfer import upload

POSITIONS = 256
"""Logits held at once: 256 × 152,000 floats are 148 MiB, a whole step's would be 1.2 GiB."""


def score_prompts(
    model: CausalModel, hidden: torch.Tensor, plan: StepPlan, rows: Sequence[ChunkRow]
) -> dict[int, PromptScores]:
    """Of every asking chunk, by its slot; `hidden` [n, hidden] is the step's, and `rows` say where in it
    the chunks lie."""
    return {
        chunk.slot: _score(model, hidden, chunk, row)
        for chunk, row in zip(plan.chunks, rows, strict=True)
        if chunk.logprobs >= 0
    }


def _score(model: CausalModel, hidden: torch.Tensor, chunk: Chunk, row: ChunkRow) -> PromptScores:
    # Positions:  start   start+1 ... end-1   end
    # tokens:     t0      t1      ... tn-1    target, or none
    # The token at p is scored by the hidden state at p - 1, so t0 was the chunk before's business.
    end = chunk.start + row.tokens
    first = max(chunk.start + 1, chunk.logprobs_start)
    last = end if chunk.target >= 0 else end - 1
    known = np.append(chunk.tokens, chunk.target)[first - chunk.start : last + 1 - chunk.start]
    targets = upload(known.astype(np.int64), hidden.device)
    at = row.first + first - 1 - chunk.start
    scored = hidden[at : at + len(known)]
    logits = (model.logits(scored[i : i + POSITIONS]) for i in range(0, max(len(known), 1), POSITIONS))
    return prompt_logprobs(first, logits, targets, chunk.logprobs, chunk.logprob_ids)
