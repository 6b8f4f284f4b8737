"""Cohere's messages to chat messages: blocks of text and thinking, plans, documents as results of calls.
Each stays one message, and what chat has as well is left for it to check."""

from __future__ import annotations

from typing import Any

import msgspec

from app.http.body import check_depth
from app.http.messages import check_known_role
from core.errors import RequestError

Message = dict[str, Any]


def chat_messages(messages: list[Message] | None) -> list[Message]:
    """Messages as chat has them. Raises `RequestError` naming message and block."""
    check_depth(messages, "messages")
    for i, message in enumerate(messages or ()):
        check_known_role(message, f"messages[{i}].role")
    return [
        _assistant(message, f"messages[{i}]")
        if message.get("role") == "assistant"
        else _other(message, f"messages[{i}]")
        for i, message in enumerate(messages or ())
    ]


def _assistant(message: Message, param: str) -> Message:
    """Citations are left out: they say where in the text, not what."""
    content = message.get("content")
    thinking: list[str] = []
    if isinstance(content, list):
        texts: list[str] = []
        for j, block in enumerate(content):
            where = f"{param}.content[{j}]"
            kind = block.get("type") if isinstance(block, dict) else None
            if kind not in ("text", "thinking"):
                raise RequestError(f"'{where}.type' must be 'text' or 'thinking'.", f"{where}.type")
            (texts if kind == "text" else thinking).append(_string(block, kind, where))
        content = "".join(texts)
    if message.get("tool_plan") is not None:
        thinking.append(_string(message, "tool_plan", param))
    made = {"role": "assistant", "content": content, "tool_calls": message.get("tool_calls")}
    if thinking:
        made["reasoning_content"] = made["reasoning"] = "".join(thinking)
    return made


def _other(message: Message, param: str) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    told = [
        {"type": "text", "text": _document(block, f"{param}.content[{j}].document")}
        if isinstance(block, dict) and block.get("type") == "document"
        else block
        for j, block in enumerate(content)
    ]
    return {**message, "content": told}


def _document(block: Message, param: str) -> str:
    """What a document says: its text, or its fields as JSON."""
    document = block.get("document")
    data = document.get("data") if isinstance(document, dict) else None
    if isinstance(data, dict):
        return msgspec.json.encode(data).decode()
    if not isinstance(data, str):
        raise RequestError(f"'{param}.data' must be an object or a string.", f"{param}.data")
    return data


def _string(block: Message, name: str, param: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"'{param}.{name}' must be a string.", f"{param}.{name}")
    return value
