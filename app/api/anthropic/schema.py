"""The body of `/v1/messages`, and its translation to chat's fields."""

from __future__ import annotations

from typing import Any

import msgspec

from app.api.request.reasoning import thinking_fields
from app.api.request.schema import ChatBody, Int
from app.http.errors import THREAD_UNSUPPORTED
from app.service import Loaded
from core.errors import RequestError, field_error

Block = dict[str, Any]


class Thinking(msgspec.Struct, kw_only=True):
    """`thinking`. `adaptive` leaves it to the model."""

    type: str = "disabled"
    budget_tokens: Int | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """`output_config`."""

    format: dict[str, Any] | None = None
    effort: str | None = None


class MessagesBody(msgspec.Struct, kw_only=True):
    """`/v1/messages` and `/v1/messages/count_tokens`."""

    model: str | None = None
    messages: list[Block] | None = None
    max_tokens: Int | None = None
    system: str | list[Block] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    thinking: Thinking | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    cache_control: Any = None
    thread: Any = None
    compaction: Any = None
    metadata: dict[str, Any] | None = None
    priority: Int | None = None
    timeout: float | None = None
    custom_logit_processor: str | None = None
    custom_params: dict[str, Any] | None = None


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_body(body: MessagesBody, messages: list[Block], id: str, loaded: Loaded) -> ChatBody:
    """The request as a body of chat; it can be aborted by `id`."""
    _check_whole(body)
    choice, last = body.tool_choice, messages[-1]
    prefilled = last["role"] == "assistant" and not last.get("tool_calls")
    budget, arguments = _thinking(body, loaded)
    return ChatBody(
        rid=id,
        messages=messages,
        max_completion_tokens=body.max_tokens,
        stop=body.stop_sequences or None,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        tools=functions(body.tools),
        tool_choice=_choice(choice),
        parallel_tool_calls=False if (choice or {}).get("disable_parallel_tool_use") is True else None,
        max_thinking_tokens=budget,
        reasoning_effort=body.output_config.effort if body.output_config is not None else None,
        chat_template_kwargs=arguments,
        response_format=_format(body),
        priority=body.priority,
        custom_logit_processor=body.custom_logit_processor,
        custom_params=body.custom_params,
        # A final assistant message is continued.
        continue_final_message=True if prefilled else None,
    )


def _check_whole(body: MessagesBody) -> None:
    """Raise `RequestError` for a conversation that the server is to store or compact. If `thread` were
    ignored, the client would send new messages only and the model would not see the rest; refused with
    this code, the client sends all of them."""
    if body.thread is not None:
        message = "Conversations are not held here: send all messages, without 'thread'."
        raise RequestError(message, "thread", THREAD_UNSUPPORTED)
    if body.compaction is not None:
        raise field_error("compaction", "is not supported", "unsupported")


def functions(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools with a schema as chat has them. Those without are Anthropic's own (`bash_20250124`,
    `web_search_20250305`): only its models know them."""
    made = []
    for at, tool in enumerate(tools or ()):
        if tool.get("input_schema") is None and not isinstance(tool.get("type"), str):
            raise field_error(f"tools[{at}].input_schema", "is required")
        if tool.get("input_schema") is not None:
            function = {name: tool.get(name) for name in ("name", "description", "strict")}
            made.append({"type": "function", "function": {**function, "parameters": tool["input_schema"]}})
    return made or None


def _choice(choice: dict[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise field_error("tool_choice.type", "must be 'auto', 'any', 'tool' or 'none'")
    return _CHOICES[kind]


def _thinking(body: MessagesBody, loaded: Loaded) -> tuple[int | None, dict[str, Any]]:
    """(limit of thinking tokens, template arguments). Clients send `thinking` to every model: it is ignored
    for a model without."""
    thinking = body.thinking
    if thinking is not None and thinking.type not in ("enabled", "disabled", "adaptive"):
        raise field_error("thinking.type", "must be 'enabled', 'disabled' or 'adaptive'")
    budget = thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None
    if budget is not None:
        if budget < 1:
            raise field_error("thinking.budget_tokens", "must be at least 1")
        if body.max_tokens is not None and budget >= body.max_tokens:
            raise field_error("max_tokens", "must be greater than 'thinking.budget_tokens'")
    if loaded.reasoning is not None and thinking is None:
        # No thinking unless requested, where the template leaves the choice.
        return None, {"enable_thinking": False}
    return thinking_fields(thinking is not None and thinking.type != "disabled", budget, loaded)


def _format(body: MessagesBody) -> Any:
    output_format = body.output_config.format if body.output_config is not None else None
    output_format = output_format or body.output_format
    if output_format is None:
        return None
    if output_format.get("type") != "json_schema" or "schema" not in output_format:
        where = "output_config.format"
        raise field_error(where, "must be of type 'json_schema' and have a 'schema'")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": output_format["schema"]}}


NAMES = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "max_completion_tokens": "max_tokens",
    "max_thinking_tokens": "thinking.budget_tokens",
    "stop": "stop_sequences",
    ".function.parameters": ".input_schema",
    ".function.": ".",
}
"""Chat's names of fields and ours, as `fields_named` takes them."""
