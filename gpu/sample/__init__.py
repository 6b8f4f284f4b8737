"""Choosing the next token: a pure function of logits, parameters, seed and position."""

from gpu.sample.logprobs import prompt_logprobs
from gpu.sample.sampler import Sampled, Sampler

__all__ = ["Sampled", "Sampler", "prompt_logprobs"]
