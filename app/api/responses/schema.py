"""The body of `/v1/responses`, and its translation to chat's fields."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from app.api.request.field_names import fields_named
from app.api.request.metadata import check_metadata
from app.api.request.schema import ChatBody, Generation, Int, refuse
from core.errors import RequestError, field_error, unsupported

Item = dict[str, Any]


class Reasoning(msgspec.Struct, kw_only=True):
    """`reasoning`. There are no summaries: the thinking itself is returned."""

    effort: str | None = None
    summary: str | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """`text`."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(Generation, kw_only=True):
    """`/v1/responses`, with chat's sampling extensions."""

    input: str | list[Item] | None = None
    instructions: str | None = None
    max_output_tokens: Int | None = None
    max_tool_calls: Int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextFormat | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: Int | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    truncation: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    prompt: Any = None
    conversation: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


LOGPROBS = "message.output_text.logprobs"
THINKING = "reasoning.encrypted_content"
"""Members of `include` that are supported."""

_SHARED = tuple(
    field.name
    for field in msgspec.structs.fields(Generation)
    if field.name
    not in ("n", "max_tokens", "stream", "stream_options", "response_format", "rid", "request_id")
)


_ELSEWHERE = {"max_tokens": "send 'max_output_tokens'"} | dict.fromkeys(
    (
        "prompt_logprobs",
        "logprob_token_ids",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "return_prompt_token_ids",
        "return_prompt_text",
    ),
    "/v1/chat/completions has it",
)
"""Fields of chat for which a response has no place."""


def check_body(body: ResponsesBody) -> None:
    """Raise `RequestError` for unsupported fields and values."""
    refuse(body, {"prompt": "send 'input'", "conversation": "send 'input'"})
    _check_place(body)
    for name in ("return_hidden_states", "return_entropy", "return_sampling_mask", "return_routed_experts"):
        if getattr(body, name):
            raise field_error(name, "is not supported here: /generate has it", "unsupported")
    if body.use_beam_search:
        name = "use_beam_search"
        raise field_error(name, "is not supported here; /v1/chat/completions has it", "unsupported")
    if body.response_format not in (None, {"type": "text"}):
        raise unsupported("response_format", "send 'text.format'")
    if body.truncation not in (None, "auto", "disabled"):
        raise field_error("truncation", "must be 'auto' or 'disabled'")
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise field_error("max_output_tokens", "must be at least 1")
    if body.max_tool_calls is not None and body.max_tool_calls < 1:
        raise field_error("max_tool_calls", "must be at least 1")
    if body.background and body.store is False:
        raise field_error("background", "needs 'store': the answer could not be fetched")
    check_metadata(body.metadata)


def _check_place(body: ResponsesBody) -> None:
    refuse(body, _ELSEWHERE)
    if body.n not in (None, 1):
        raise unsupported("n", "a response has one answer")


def chat_body(body: ResponsesBody, messages: list[Item], id: str) -> ChatBody:
    """The request as a body of chat; it can be aborted by `id`."""
    fields = {name: getattr(body, name) for name in _SHARED}
    return ChatBody(
        **fields,
        messages=messages,
        rid=body.rid or body.request_id or id,
        max_completion_tokens=body.max_output_tokens,
        response_format=_format(body.text),
        tools=functions(body.tools),
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        logprobs=logprobs_wanted(body) or None,
        top_logprobs=body.top_logprobs if logprobs_wanted(body) else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def logprobs_wanted(body: ResponsesBody) -> bool:
    """Whether log-probabilities are requested, by either of the two fields."""
    return LOGPROBS in (body.include or ()) or bool(body.top_logprobs)


def functions(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The function tools as chat takes them. Tools of other types run on OpenAI's servers or belong to
    clients that offer them to every server (Codex): they are left out of the prompt."""
    kept = [tool for tool in tools or () if tool.get("type", "function") == "function"]
    return [{"type": "function", "function": _function(tool)} for tool in kept] or None


def _function(tool: dict[str, Any]) -> Any:
    if "name" not in tool and "function" in tool:
        return tool["function"]  # chat's own shape, which some clients send
    return {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict) or not isinstance(listed := choice.get("tools"), list):
        return choice
    kept = [tool for tool in listed if not isinstance(tool, dict) or tool.get("type") == "function"]
    return {**choice, "tools": kept}


def _format(text: TextFormat | None) -> Any:
    wanted = text.format if text is not None else None
    if wanted is None or wanted.get("type") != "json_schema" or "json_schema" in wanted:
        return wanted
    return {"type": "json_schema", "json_schema": {k: v for k, v in wanted.items() if k != "type"}}


_NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    ".function.": ".",
}


@contextmanager
def fields_of_responses() -> Iterator[None]:
    """Replace chat's field names in errors by ours."""
    try:
        with fields_named(_NAMES):
            yield
    except RequestError as error:
        if error.param is not None and error.param.startswith("input["):
            error.param = "input"  # messages are not items one by one
        raise
