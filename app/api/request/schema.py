"""Fields of request bodies. Unknown ones are ignored, null means unset.

Fields of other servers that ask for something this build cannot do are declared too, as `object`,
so that they are refused by name (`refuse_unsupported`) and never silently dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

import msgspec

from core.errors import unsupported
from core.types import LogprobsMode

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Python integers have no bound, numpy's and the device's do: anything larger is a type error."""

Text = str | list[str]

Rows = Annotated[
    msgspec.Raw,
    msgspec.Meta(
        extra_json_schema={
            "type": ["array", "null"],
            "items": {
                "type": "array",
                "items": {"anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "number"}}]},
            },
        }
    ),
]
"""Embeddings, or lists of them, as they came: `app/api/request/embeds.py` reads them row by row."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """OpenAI's, and `continuous_usage_stats`, which guidellm sends."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SessionParams(msgspec.Struct, kw_only=True):
    """The turn of a session that a request continues."""

    id: str | None = None
    rid: str | None = None
    """The turn to continue; none begins afresh."""
    offset: int | None = None
    """How many tokens of that turn, prompt and output, to keep; 0, -1 and none: all."""
    replace: bool | None = None
    """Forget what already continues that turn, or without one everything."""
    drop_previous_output: bool | None = None


class RepetitionDetection(msgspec.Struct, kw_only=True):
    """vLLM's: sizes in tokens. A size or count of 0 turns it off."""

    max_pattern_size: Int | None = None
    min_pattern_size: Int | None = None
    min_count: Int | None = None


class ExtensionFields(msgspec.Struct, kw_only=True):
    """Fields that constrain the output (`app/api/request/constraint.py`, `processor_fields` of
    `app/api/request/sampling.py`), bound its thinking (`app/api/request/reasoning.py`) or change the model,
    most of which this build refuses (`refuse_unsupported`)."""

    response_format: Any = None
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None
    json_schema: Any = None
    structural_tag: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[Int] | None = None
    logit_processors: Any = None
    logits_processors: Any = None
    custom_logit_processor: str | None = None
    custom_params: dict[str, Any] | None = None
    use_beam_search: Any = None
    lora_path: Any = None
    prompt_embeds: Any = None
    input_embeds: Any = None
    return_hidden_states: bool | list[bool] | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: Int | None = None
    return_entropy: bool | None = None
    return_sampling_mask: bool | None = None
    thinking_token_budget: Int | None = None
    max_thinking_tokens: Int | None = None
    chat_template: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    suffix: Any = None


class Sampling(ExtensionFields, kw_only=True):
    """How tokens are chosen and where they end, under the names that all routes share."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: Int | None = None
    stop: Text | None = None
    stop_token_ids: list[Int] | None = None
    stop_regex: Text | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs_mode: LogprobsMode | None = None
    stream_interval: Int | None = None


class Generation(Sampling, kw_only=True):
    """Fields that `/v1/chat/completions` and `/v1/completions` share."""

    model: str | None = None
    lora_path: str | None = None
    seed: Int | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Int | None = None
    truncation_side: str | None = None
    prompt_logprobs: Int | None = None
    logprob_token_ids: list[Int] | None = None
    repetition_detection: RepetitionDetection | None = None
    timeout: float | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int | None = None
    routed_dp_rank: Int | None = None
    data_parallel_rank: Int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    rid: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_prompt_text: bool | None = None


class ChatBody(Generation, kw_only=True):
    """`/v1/chat/completions`."""

    messages: list[dict[str, Any]] | None = None
    input_ids: list[Int] | None = None
    echo: bool | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    return_token_offsets: bool | None = None
    return_meta_info: bool | None = None
    return_cached_tokens_details: bool | None = None


class CompletionBody(Generation, kw_only=True):
    """`/v1/completions`. `prompt`: a text, texts, token ids, or lists of token ids. `prompt_embeds`: tensors
    in base64, which come before them."""

    prompt: str | list[str | Int | list[Int]] | None = None
    suffix: str | None = None
    prompt_embeds: Text | None = None
    best_of: Int | None = None
    logprobs: Int | None = None
    echo: bool | None = None
    return_token_offsets: bool | None = None
    return_meta_info: bool | None = None
    return_cached_tokens_details: bool | None = None


class NativeSampling(Sampling, kw_only=True):
    """`sampling_params` of `/generate`."""

    max_new_tokens: Int | None = None
    min_new_tokens: Int | None = None
    sampling_seed: Int | None = None


class NativeBody(ExtensionFields, kw_only=True):
    """`/generate`, after SGLang."""

    text: Text | None = None
    input_ids: list[Int | list[Int]] | None = None
    input_embeds: Rows = msgspec.field(default_factory=msgspec.Raw)
    lora_path: str | list[str | None] | None = None
    sampling_params: NativeSampling | None = None
    stream: bool | None = None
    rid: Text | None = None
    return_logprob: bool | None = None
    logprob_start_len: Int | None = None
    top_logprobs_num: Int | None = None
    token_ids_logprob: list[Int] | None = None
    return_text_in_logprobs: bool | None = None
    session_params: SessionParams | None = None
    timeout: float | None = None
    priority: Int | None = None
    routed_dp_rank: Int | None = None
    data_parallel_rank: Int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`/tokenize`: a prompt, prompts, or messages."""

    model: str | None = None
    prompt: Text | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """`/detokenize`."""

    model: str | None = None
    tokens: list[Int | list[Int]] | None = None
    skip_special_tokens: bool | None = None


class AbortBody(msgspec.Struct, kw_only=True):
    """`/abort_request`."""

    rid: str | None = None
    abort_all: bool | None = None


class AbortManyBody(msgspec.Struct, kw_only=True):
    """`/abort_requests`."""

    request_ids: list[str] | None = None


_FIELDS: dict[str, str] = {
    "logit_processors": "logits processors cannot be sent with a request",
    "logits_processors": "logits processors cannot be sent with a request",
    "use_beam_search": "beams are searched by /v1/completions and /v1/chat/completions",
    "lora_path": "an adapter is named at the top of the body",
    "prompt_embeds": "embeddings are taken by /v1/completions",
    "input_embeds": "embeddings are taken by /generate",
    "chat_template": "a chat template is taken where messages are",
    "image_data": "this model takes text only",
    "video_data": "this model takes text only",
    "audio_data": "this model takes text only",
    "suffix": "text is inserted by /v1/completions",
}


UNSET: tuple[object, ...] = (None, False, "", [], {})
"""Values that clients send for "unset"."""


def refuse(body: object, reasons: Mapping[str, str], beside: str = "") -> None:
    """Raise `RequestError` for the first of the fields that is set (0 counts as set), with its reason."""
    for name, reason in reasons.items():
        value = getattr(body, name)
        if value is not False and (value == 0 or value not in UNSET):
            raise unsupported(name, reason, beside)


def refuse_unsupported(body: ExtensionFields, prefix: str = "", takes: Collection[str] = ()) -> None:
    """Raise `RequestError` for the first field that this server does not support. `takes` are those that the
    route does."""
    for name, reason in _FIELDS.items():
        if name not in takes and getattr(body, name) not in UNSET:
            raise unsupported(prefix + name, reason)
