"""Prompt log-probabilities of the chunks that ask, a slice at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from core.plan import Chunk
from gpu.sample.kernels import SamplingKernels
from gpu.sample.logprobs import PromptScores, prompt_logprobs
from gpu.state.view import PackedRows
from gpu.transfer import upload

POSITIONS = 256
"""Logits held at once: 256 × 152,000 floats are 148 MiB, a whole step's would be 1.2 GiB."""

Head = Callable[[torch.Tensor, int], torch.Tensor]
"""Logits float32 [n, vocab] of hidden states [n, hidden] of a slot."""


def score_prompts(
    head: Head, kernels: SamplingKernels, hidden: torch.Tensor, packed: PackedRows
) -> dict[int, PromptScores]:
    """Scores of every chunk that asks for them, by its slot; `hidden` [n, hidden] is the step's, `packed`
    says whose it is."""
    return {
        chunk.slot: _score(head, kernels, packed.of_chunk(hidden, at), chunk)
        for chunk, at in zip(packed.plan.chunks, packed.chunks, strict=True)
        if chunk.logprobs >= 0
    }


def _score(head: Head, kernels: SamplingKernels, hidden: torch.Tensor, chunk: Chunk) -> PromptScores:
    # Positions:  start   start+1 ... end-1   end
    # tokens:     t0      t1      ... tn-1    target, or none
    # The token at p is scored by the hidden state at p - 1, so t0 was the chunk before's business.
    end = chunk.start + len(chunk.tokens)
    first = max(chunk.start + 1, chunk.logprobs_start)
    last = end if chunk.target >= 0 else end - 1
    known = np.append(chunk.tokens, chunk.target)[first - chunk.start : last + 1 - chunk.start]
    targets = upload(known.astype(np.int64), hidden.device)
    at = first - 1 - chunk.start
    scored = hidden[at : at + len(known)]
    slices = range(0, max(len(known), 1), POSITIONS)
    logits = (head(scored[i : i + POSITIONS], chunk.slot) for i in slices)
    return prompt_logprobs(kernels, first, logits, targets, chunk.logprobs, chunk.logprob_ids)
