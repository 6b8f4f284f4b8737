"""`use_beam_search` and `length_penalty`, after vLLM, and the fields that they exclude."""

from __future__ import annotations

import math

from app.api.request.constraint import CONSTRAINTS
from app.api.request.schema import UNSET, Generation
from app.engine.job import BeamOptions, Job
from core.errors import field_error, unsupported

MAX_PENALTY = 16.0
"""Largest penalty on either side of 0: a length of 10 million to that power is still a number."""

_STREAM = "a beam search has no output before its end"
_FREE = "beams cannot be constrained"

_BESIDE = {
    _STREAM: ("stream",),
    "a beam search does not sample": ("top_p", "top_k", "min_p", "return_sampling_mask"),
    "beams are ranked by the model's own probabilities": (
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("logit_bias", "custom_logit_processor"),
    ),
    _FREE: ("bad_words", "allowed_token_ids", *sorted(CONSTRAINTS)),
    "beams end with the model's end-of-sequence token, or at 'max_tokens'": (
        *("stop", "stop_token_ids", "stop_regex", "min_tokens", "repetition_detection"),
    ),
    "a beam's thinking cannot be cut": ("thinking_token_budget", "max_thinking_tokens"),
    "only the best tokens of a beam are reported": ("logprob_token_ids",),
    "a beam search runs its prompt many times": (
        *("return_hidden_states", "return_routed_experts", "return_entropy"),
    ),
    "the prefix cache finds beams by their token ids": ("prompt_embeds",),
}
"""Reason to the fields that a search cannot honour."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "top_p": (1.0,),
    "top_k": (-1,),
    "repetition_penalty": (1.0,),
    "response_format": ({"type": "text"},),
}
"""Values of such fields that have no effect, besides those that mean "unset" in every field."""


def beam_options(body: Generation) -> BeamOptions | None:
    """The options of a beam search, where a body requests one. Raises `RequestError` for the first field that
    it cannot honour. A seed and a temperature have no effect: nothing is sampled."""
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    if not math.isfinite(penalty) or abs(penalty) > MAX_PENALTY:
        raise field_error("length_penalty", f"must be between -{MAX_PENALTY:g} and {MAX_PENALTY:g}")
    if not body.use_beam_search:
        return None
    for reason, name in ((reason, name) for reason, names in _BESIDE.items() for name in names):
        if getattr(body, name, None) not in (*UNSET, *_NEUTRAL.get(name, ())):
            raise unsupported(name, reason, "use_beam_search")
    return BeamOptions(length_penalty=penalty, include_end=body.include_stop_str_in_output is True)


def check_beam(job: Job) -> None:
    """Raise `RequestError` for a constraint that no field shows: tools that must be called."""
    if job.beam is not None and job.grammar is not None:
        raise unsupported(job.grammar.param, _FREE, "use_beam_search")


def check_streamed(job: Job, stream: bool | None) -> None:
    """Raise `RequestError` for `stream`, on routes that have it outside of the sampling parameters."""
    if job.beam is not None and stream:
        raise unsupported("stream", _STREAM, "use_beam_search")
