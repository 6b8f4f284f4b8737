"""`suffix` of `/v1/completions`: text that follows the generated text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from app.api.request.schema import CompletionBody, refuse
from app.engine.job import Job
from app.service import Loaded
from app.text.infill import find_marks
from core.errors import field_error, unsupported

_BESIDE = {
    "truncate_prompt_tokens": "truncation would remove the marks around the text",
    "thinking_token_budget": "text is inserted without thinking",
    "max_thinking_tokens": "text is inserted without thinking",
    "prompt_embeds": "prompts must be texts",
}


def with_suffix(job: Job, body: CompletionBody, prompts: Sequence[object], loaded: Loaded) -> Job:
    """The job with its suffix, where the body has one, and the tokens that end such a text as stop ids.
    Raises `RequestError` where the model or the rest of the body cannot have it."""
    if not body.suffix:
        return job
    marks = find_marks(loaded.tokenizer)
    if marks is None or max(marks.ends) >= loaded.card.vocab_size:  # some tokenizers know more than the model
        raise unsupported("suffix", "this model's vocabulary has no marks for text insertion")
    refuse(body, _BESIDE, "suffix")
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise field_error("suffix", "needs a 'prompt' that is text, not token ids")
    stops = job.sampling.stop_ids if job.ignore_eos else job.sampling.stop_ids | marks.ends
    sampling = msgspec.structs.replace(job.sampling, stop_ids=stops)
    return msgspec.structs.replace(job, suffix=body.suffix, sampling=sampling)
