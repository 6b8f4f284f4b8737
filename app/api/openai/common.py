"""Functions that chat and completions share."""

from __future__ import annotations

from app.api.request.beam import beam_options
from app.api.request.constraint import constraint_of
from app.api.request.experts import experts_start
from app.api.request.sampling import (
    allowed_ids,
    bad_words,
    keep,
    priority,
    root_key,
    sampling_params,
    text_options,
    truncation,
)
from app.api.request.schema import ChatBody, CompletionBody
from app.engine.job import Job
from app.http.tenant import tenant
from app.service import Loaded
from core.errors import field_error, unsupported


def check_stream_fields(body: ChatBody | CompletionBody) -> None:
    """Raise `RequestError` for fields that a stream does not support."""
    if body.stream and body.return_meta_info:
        raise field_error("return_meta_info", "is not available with 'stream'", "unsupported")


def logprob_count(value: int | None, param: str) -> int:
    """Log-probabilities that the field `param` asks for, as the sampling parameter: -1 for none."""
    if value is None:
        return -1
    if value < 0:
        raise field_error(param, "must not be negative")
    return value


def base_job(
    body: ChatBody | CompletionBody,
    loaded: Loaded,
    *,
    id: str,
    n: int,
    max_tokens: int | None,
    logprobs: int,
    prompt_logprobs: int = -1,
) -> Job:
    """The job of a request of either route, without its prompt: everything is checked that can be checked
    without tokens. Log-probabilities are counts of alternatives, -1 for none."""
    card = loaded.card
    if body.lora_path and (loaded.adapter is None or loaded.adapter.name != body.lora_path):
        raise unsupported("lora_path", "an adapter is named at the top of the body")
    root = root_key(loaded, body.cache_salt, body.extra_key)
    return Job(
        id=id,
        prompt="",
        sampling=sampling_params(
            body,
            card,
            min_tokens=body.min_tokens or 0,
            logprobs=logprobs,
            prompt_logprobs=max(logprob_count(body.prompt_logprobs, "prompt_logprobs"), prompt_logprobs),
            experts_from=experts_start(body, card),
        ),
        text=text_options(body),
        max_tokens=max_tokens,
        seed=body.seed,
        n=n,
        ignore_eos=body.ignore_eos is True,
        truncate_prompt=truncation(body, card.context_length),
        truncate_end=body.truncation_side == "right",
        allowed_ids=allowed_ids(body, card.vocab_size),
        bad_words=bad_words(body),
        grammar=constraint_of(body),
        priority=priority(body.priority),
        root=root,
        owner=tenant(),
        keep=keep(body.prompt_cache_key, body.prompt_cache_retention, root),
        beam=beam_options(body),
    )
