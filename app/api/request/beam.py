"""`use_beam_search` and `length_penalty`, after vLLM, and what has no meaning beside them."""

from __future__ import annotations

import math

from app.api.request.schema import Generation
from app.engine.job import BeamOptions, Job
from core.errors import RequestError

MAX_PENALTY = 16.0
"""On either side of 0: a length of 10 million to that power is still a number."""

_DRAWN = "nothing is drawn in a search"
_OWN = "beams are compared by what the model itself says"
_ENDS = "beams end with the model's end of text, or at 'max_tokens'"
_FREE = "beams cannot be constrained"
_MUCH = "a search reads its prompt many times, and keeps none of it"

_BESIDE: dict[str, tuple[str, tuple[object, ...]]] = {
    "stream": ("a search has nothing to tell before its end", ()),
    "top_p": (_DRAWN, (1.0,)),
    "top_k": (_DRAWN, (0, -1)),
    "min_p": (_DRAWN, (0.0,)),
    "presence_penalty": (_OWN, (0.0,)),
    "frequency_penalty": (_OWN, (0.0,)),
    "repetition_penalty": (_OWN, (1.0,)),
    "logit_bias": (_OWN, ()),
    "bad_words": (_FREE, ()),
    "allowed_token_ids": (_FREE, ()),
    "custom_logit_processor": (_OWN, ()),
    "stop": (_ENDS, ()),
    "stop_token_ids": (_ENDS, ()),
    "stop_regex": (_ENDS, ()),
    "min_tokens": (_ENDS, (0,)),
    "repetition_detection": (_ENDS, ()),
    "response_format": (_FREE, ({"type": "text"},)),
    "regex": (_FREE, ()),
    "ebnf": (_FREE, ()),
    "json_schema": (_FREE, ()),
    "structural_tag": (_FREE, ()),
    "structured_outputs": (_FREE, ()),
    "guided_json": (_FREE, ()),
    "guided_regex": (_FREE, ()),
    "guided_choice": (_FREE, ()),
    "guided_grammar": (_FREE, ()),
    "thinking_token_budget": ("a beam's thinking cannot be cut", ()),
    "max_thinking_tokens": ("a beam's thinking cannot be cut", ()),
    "logprob_token_ids": ("only the best tokens of a beam are told", ()),
    "return_hidden_states": (_MUCH, ()),
    "return_routed_experts": (_MUCH, ()),
    "return_entropy": (_MUCH, ()),
    "return_sampling_mask": (_DRAWN, ()),
    "prompt_embeds": ("beams are found again by the ids of their tokens", ()),
}
"""Field to the reason and the values that ask for nothing."""

_UNSET: tuple[object, ...] = (None, False, "", [], {})


def beam_options(body: Generation) -> BeamOptions | None:
    """How to search, where a body asks for it. Raises `RequestError` for the first field that a search
    cannot honour. A seed and a temperature are honoured by there being nothing to draw."""
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    if not math.isfinite(penalty) or abs(penalty) > MAX_PENALTY:
        raise RequestError(
            f"'length_penalty' must be between -{MAX_PENALTY:g} and {MAX_PENALTY:g}.", "length_penalty"
        )
    if not body.use_beam_search:
        return None
    for name, (reason, neutral) in _BESIDE.items():
        value = getattr(body, name, None)
        if value not in _UNSET and value not in neutral:
            raise RequestError(
                f"'{name}' is not supported with 'use_beam_search': {reason}.", name, "unsupported"
            )
    return BeamOptions(length_penalty=penalty, include_end=body.include_stop_str_in_output is True)


def check_beam(job: Job) -> None:
    """Raise `RequestError` for a constraint that came about otherwise: of tools that must be called."""
    if job.beam is not None and job.grammar is not None:
        param = job.grammar.param
        raise RequestError(
            f"'{param}' is not supported with 'use_beam_search': {_FREE}.", param, "unsupported"
        )


def check_streamed(job: Job, stream: bool | None) -> None:
    """The same for those whose jobs are made of bodies that do not say whether they are streamed."""
    if job.beam is not None and stream:
        reason = _BESIDE["stream"][0]
        raise RequestError(
            f"'stream' is not supported with 'use_beam_search': {reason}.", "stream", "unsupported"
        )
