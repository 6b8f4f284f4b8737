"""Anthropic's messages to chat messages: blocks of text, thinking, calls and their results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from app.api.anthropic.schema import Block, MessagesBody
from app.api.request.messages import string_in
from app.http.body import check_depth
from core.errors import RequestError, field_error

Message = dict[str, Any]

_VOLATILE = "x-anthropic-billing-header:"
"""Start of a system block of Claude Code that differs in every request. It means nothing to the model, and
at the front of the prompt it would defeat the prefix cache."""

_MEDIA = frozenset({"image", "document", "audio", "video"})
"""Blocks that are refused, since a text model cannot see them. Blocks of unknown types are skipped: newer
clients send some of their own, and those of Anthropic's servers (`redacted_thinking`, `server_tool_use`,
`mcp_tool_result`) mean nothing to another model."""


def chat_messages(body: MessagesBody) -> list[Message]:
    """System prompt and messages as chat has them. Raises `RequestError` naming message and block."""
    if not body.messages:
        raise field_error("messages", "must have at least one message")
    check_depth(body.messages, "messages")
    made: list[Message] = []
    if system := _system(body.system):
        made.append({"role": "system", "content": system})
    for i, message in enumerate(body.messages):
        param = f"messages[{i}]"
        content, role = message.get("content"), message.get("role")
        if role not in ("user", "assistant", "system"):
            raise field_error(f"{param}.role", "must be 'user' or 'assistant'")
        if isinstance(content, str):
            made.append({"role": role, "content": content})
        elif not isinstance(content, list):
            raise field_error(f"{param}.content", "must be a string or a list")
        elif role == "assistant":
            made.append(_assistant(content, f"{param}.content"))
        else:
            made += _user(content, str(role), f"{param}.content")
    return made


def _system(system: str | list[Block] | None) -> str:
    if isinstance(system, str) or system is None:
        return system or ""
    check_depth(system, "system")
    texts = _texts((block, f"system[{i}]") for i, block in enumerate(system))
    return "\n".join(text for text in texts if not text.startswith(_VOLATILE))


def _assistant(blocks: list[Block], param: str) -> Message:
    texts: list[str] = []
    thinking: list[str] = []
    calls: list[Message] = []
    for block, where in _blocks(blocks, param):
        match block["type"]:
            case "thinking":
                thinking.append(string_in(block, "thinking", where))
            case "tool_use":
                calls.append(_call(block, where))
            case _:
                texts += _texts([(block, where)])
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thinking:
        message["reasoning_content"] = message["reasoning"] = "".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Block, param: str) -> Message:
    given = block.get("input")
    if not isinstance(given, dict | None):
        raise field_error(f"{param}.input", "must be an object")
    function = {"name": string_in(block, "name", param), "arguments": given or {}}
    return {"id": string_in(block, "id", param), "type": "function", "function": function}


def _user(blocks: list[Block], role: str, param: str) -> Iterator[Message]:
    """Results of calls, each as a message, and the text around them."""
    texts: list[str] = []
    for block, where in _blocks(blocks, param):
        if block["type"] != "tool_result":
            texts += _texts([(block, where)])
            continue
        if texts:
            yield {"role": role, "content": "\n".join(texts)}
            texts = []
        id = string_in(block, "tool_use_id", where)
        yield {"role": "tool", "tool_call_id": id, "content": _result(block, f"{where}.content")}
    # An empty message is kept: without it the list of messages could end with another turn.
    if texts or all(block["type"] != "tool_result" for block in blocks):
        yield {"role": role, "content": "\n".join(texts)}


def _result(block: Block, param: str) -> str:
    content = block.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise field_error(param, "must be a string or a list")
    return "\n".join(_texts(_blocks(content, param)))


def _blocks(blocks: list[Block], param: str) -> Iterator[tuple[Block, str]]:
    for j, block in enumerate(blocks):
        where = f"{param}[{j}]"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise RequestError(f"'{where}' must be an object with a 'type'.", f"{where}.type")
        yield block, where


def _texts(blocks: Iterable[tuple[Block, str]]) -> Iterator[str]:
    """The text of blocks. Raises `RequestError` for media."""
    for block, param in blocks:
        kind, source = str(block.get("type")), block.get("source")
        if kind == "text":
            yield string_in(block, "text", param)
        elif kind == "document" and isinstance(source, dict) and source.get("type") == "text":
            yield string_in(source, "data", f"{param}.source")
        elif kind == "search_result":
            yield string_in(block, "title", param)
            yield _result(block, f"{param}.content")
        elif kind == "tool_reference":
            yield string_in(block, "tool_name", param)
        elif kind in _MEDIA:
            raise field_error(param, f"is of type '{kind}', but this model takes text only", "unsupported")
