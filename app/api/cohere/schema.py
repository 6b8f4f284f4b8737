"""The body of `/v2/chat`, and its translation to chat's fields."""

from __future__ import annotations

from typing import Any

import msgspec

from app.api.request.messages import check_known_role, string_in
from app.api.request.reasoning import thinking_fields
from app.api.request.schema import ChatBody, Int
from app.http.body import check_depth
from app.service import Loaded
from core.errors import field_error

Message = dict[str, Any]


class CohereThinking(msgspec.Struct, kw_only=True):
    """`thinking`."""

    type: str = "enabled"
    token_budget: Int | None = None


class CohereBody(msgspec.Struct, kw_only=True):
    """`/v2/chat`: Cohere's fields, and those that vLLM adds. `citation_options` is ignored: it is for models
    that were trained to cite."""

    model: str | None = None
    messages: list[Message] | None = None
    stream: bool | None = None
    max_tokens: Int | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    k: Int | None = None
    p: float | None = None
    seed: Int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logprobs: bool | None = None
    response_format: dict[str, Any] | None = None
    documents: list[str | dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    strict_tools: bool | None = None
    tool_choice: str | None = None
    thinking: CohereThinking | None = None
    safety_mode: str | None = None
    citation_options: Any = None
    priority: Int | None = None
    timeout: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_CHOICES = {"REQUIRED": "required", "NONE": "none"}


def chat_body(body: CohereBody, loaded: Loaded) -> ChatBody:
    """The request as a body of chat."""
    if body.tool_choice is not None and body.tool_choice not in _CHOICES:
        raise field_error("tool_choice", "must be 'REQUIRED' or 'NONE'")
    budget, arguments = _thinking(body.thinking, loaded)
    if body.safety_mode is not None:
        arguments["safety_mode"] = body.safety_mode  # read by the templates of Cohere's models
    return ChatBody(
        messages=chat_messages(body.messages),
        max_completion_tokens=body.max_tokens,
        stop=body.stop_sequences or None,
        temperature=body.temperature,
        top_k=body.k,
        top_p=body.p,
        seed=body.seed,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        logprobs=body.logprobs,
        response_format=_format(body.response_format),
        documents=_documents(body.documents),
        tools=_strict(body.tools) if body.strict_tools else body.tools,
        tool_choice=_CHOICES.get(body.tool_choice or ""),
        max_thinking_tokens=budget,
        priority=body.priority,
        chat_template_kwargs=arguments | (body.chat_template_kwargs or {}),
    )


def _thinking(thinking: CohereThinking | None, loaded: Loaded) -> tuple[int | None, dict[str, Any]]:
    """(limit of thinking tokens, template arguments). Unset leaves it to the model; ignored for a model
    without thinking."""
    if thinking is None:
        return None, {}
    if thinking.type not in ("enabled", "disabled"):
        raise field_error("thinking.type", "must be 'enabled' or 'disabled'")
    budget = thinking.token_budget
    if budget is not None and budget < 1:
        raise field_error("thinking.token_budget", "must be at least 1")
    return thinking_fields(thinking.type != "disabled", budget, loaded)


def _format(format: dict[str, Any] | None) -> Any:
    """`json_object` may bring a schema."""
    if format is None or format.get("type") != "json_object" or format.get("json_schema") is None:
        return format
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": format["json_schema"]}}


def _documents(documents: list[str | dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The documents as flat objects, as templates print them or look for `title` and `text`. (vLLM leaves the
    data inside `data`, for a renderer of its own.)"""
    check_depth(documents, "documents")
    return [_document(each, f"documents[{i}]") for i, each in enumerate(documents or ())] or None


def _document(document: str | dict[str, Any], param: str) -> dict[str, Any]:
    if isinstance(document, str):
        return {"text": document}
    data = _data(document, param)
    named = {} if document.get("id") is None else {"id": document["id"]}
    return named | (data if isinstance(data, dict) else {"text": data})


def _data(document: object, param: str) -> str | dict[str, Any]:
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, str | dict):
        raise field_error(f"{param}.data", "must be an object or a string")
    return data


def _strict(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The tools, each held to its schema."""
    made = []
    for tool in tools or ():
        named = tool.get("function")
        made.append({**tool, "function": {**named, "strict": True}} if isinstance(named, dict) else tool)
    return made


NAMES = {
    "max_completion_tokens": "max_tokens",
    "max_thinking_tokens": "thinking.token_budget",
    "stop": "stop_sequences",
    "top_k": "k",
    "top_p": "p",
}
"""Chat's names of fields and ours, as `fields_named` takes them."""


def chat_messages(messages: list[Message] | None) -> list[Message]:
    """Messages as chat has them. Raises `RequestError` naming message and block."""
    check_depth(messages, "messages")
    made = []
    for i, message in enumerate(messages or ()):
        param = f"messages[{i}]"
        check_known_role(message, f"{param}.role")
        read = _assistant if message.get("role") == "assistant" else _other
        made.append(read(message, param))
    return made


def _assistant(message: Message, param: str) -> Message:
    """Citations are left out: they are positions in the text, not text."""
    content = message.get("content")
    thinking: list[str] = []
    if isinstance(content, list):
        texts: list[str] = []
        for j, block in enumerate(content):
            where = f"{param}.content[{j}]"
            kind = block.get("type") if isinstance(block, dict) else None
            if kind not in ("text", "thinking"):
                raise field_error(f"{where}.type", "must be 'text' or 'thinking'")
            (texts if kind == "text" else thinking).append(string_in(block, kind, where))
        content = "".join(texts)
    if message.get("tool_plan") is not None:
        thinking.append(string_in(message, "tool_plan", param))
    made = {"role": "assistant", "content": content, "tool_calls": message.get("tool_calls")}
    if thinking:
        made["reasoning_content"] = made["reasoning"] = "".join(thinking)
    return made


def _other(message: Message, param: str) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [
        {"type": "text", "text": _document_text(block, f"{param}.content[{j}].document")}
        if isinstance(block, dict) and block.get("type") == "document"
        else block
        for j, block in enumerate(content)
    ]
    return {**message, "content": parts}


def _document_text(block: Message, param: str) -> str:
    """The text of a document, or its fields as JSON."""
    data = _data(block.get("document"), param)
    return data if isinstance(data, str) else msgspec.json.encode(data).decode()
