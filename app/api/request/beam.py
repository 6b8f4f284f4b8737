"""`use_beam_search` and `length_penalty`, after vLLM, and what has no meaning beside them."""

from __future__ import annotations

import math

from app.api.request.constraint import CONSTRAINTS
from app.api.request.schema import UNSET, Generation
from app.engine.job import BeamOptions, Job
from core.errors import field_error, unsupported

MAX_PENALTY = 16.0
"""On either side of 0: a length of 10 million to that power is still a number."""

_STREAM = "a search has nothing to tell before its end"
_FREE = "beams cannot be constrained"

_BESIDE = {
    _STREAM: ("stream",),
    "nothing is drawn in a search": ("top_p", "top_k", "min_p", "return_sampling_mask"),
    "beams are compared by what the model itself says": (
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("logit_bias", "custom_logit_processor"),
    ),
    _FREE: ("bad_words", "allowed_token_ids", *sorted(CONSTRAINTS)),
    "beams end with the model's end of text, or at 'max_tokens'": (
        *("stop", "stop_token_ids", "stop_regex", "min_tokens", "repetition_detection"),
    ),
    "a beam's thinking cannot be cut": ("thinking_token_budget", "max_thinking_tokens"),
    "only the best tokens of a beam are told": ("logprob_token_ids",),
    "a search reads its prompt many times, and keeps none of it": (
        *("return_hidden_states", "return_routed_experts", "return_entropy"),
    ),
    "beams are found again by the ids of their tokens": ("prompt_embeds",),
}
"""Reason to the fields that a search cannot honour."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "top_p": (1.0,),
    "top_k": (-1,),
    "repetition_penalty": (1.0,),
    "response_format": ({"type": "text"},),
}
"""Values of theirs that ask for nothing, besides those that do in every field."""


def beam_options(body: Generation) -> BeamOptions | None:
    """How to search, where a body asks for it. Raises `RequestError` for the first field that a search
    cannot honour. A seed and a temperature are honoured by there being nothing to draw."""
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
    """Raise `RequestError` for a constraint that came about otherwise: of tools that must be called."""
    if job.beam is not None and job.grammar is not None:
        raise unsupported(job.grammar.param, _FREE, "use_beam_search")


def check_streamed(job: Job, stream: bool | None) -> None:
    """The same for those whose jobs are made of bodies that do not say whether they are streamed."""
    if job.beam is not None and stream:
        raise unsupported("stream", _STREAM, "use_beam_search")
