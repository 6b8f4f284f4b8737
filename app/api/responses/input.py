"""Input items to chat messages.

Items of unknown types are skipped with a warning: newer clients send items of their own (Codex's
`agent_message`), which mean nothing to another model.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from app.api.request.messages import check_known_role, text_parts
from app.api.responses.schema import Item
from app.api.responses.store import Store
from app.http.body import check_depth
from app.warning import warn
from core.errors import RequestError, field_error

Message = dict[str, Any]

_CALLS = {"function_call": "arguments", "custom_tool_call": "input", "local_shell_call": "action"}
"""Item type to the field with what a call was made with."""

_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output", "local_shell_call_output"})
_WITHOUT_CHECKS = frozenset({"reasoning", "item_reference"})
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_INSTRUCTIONS = ("system", "developer")
SLICE = 1_000
"""Items that are looked at in one turn of the loop."""
_MARK = "loom:"
"""Start of a thinking that a client keeps for us."""

_OWN_ID = re.compile(r"[a-z]+_([0-9a-f]{32})([io])\d{1,6}")

_encode = msgspec.json.Encoder().encode


def item_id(type_: str, response: str, side: str, index: int) -> str:
    """The id of an item of that type. It names the response (`resp_` and 32 digits) that the item can be
    found in, `i` or `o` for input or output, and its place there."""
    return f"{_PREFIXES.get(type_, 'item')}_{response.removeprefix('resp_')}{side}{index}"


def own_items(sent: str | list[Item] | None, response: str) -> list[Item]:
    """The items of one request, each with an id. Raises `RequestError`."""
    if isinstance(sent, str):
        sent = [{"role": "user", "content": sent}]
    if not sent:
        raise field_error("input", "must be a string or a list with at least one item")
    check_depth(sent, "input")
    return [_item(item, response, i) for i, item in enumerate(sent)]


def _item(item: Item, response: str, index: int) -> Item:
    param = f"input[{index}]"
    kind = item.get("type") or ("message" if "role" in item else None)
    if not isinstance(kind, str):
        raise RequestError(f"'{param}' must have a 'type'.", f"{param}.type")
    checked = {**item, "type": kind, "id": item.get("id") or item_id(kind, response, "i", index)}
    if kind == "message":
        check_known_role(item, f"{param}.role")
        checked["content"] = _parts(item, f"{param}.content")
    elif kind in _CALLS or kind in _OUTPUTS:
        _check_call(item, kind, param)
    elif kind not in _WITHOUT_CHECKS:
        warn(f"'{param}' is ignored: no item has the type '{kind:.40}'")
    return checked


def _check_call(item: Item, kind: str, param: str) -> None:
    if not isinstance(item.get("call_id") or item.get("id"), str):
        raise field_error(f"{param}.call_id", "must be a string")
    if kind == "function_call" and not isinstance(item.get("name"), str):
        raise field_error(f"{param}.name", "must be a string")
    if kind in _OUTPUTS:
        text_parts(item.get("output"), f"{param}.output")


def _parts(item: Item, param: str) -> list[Item]:
    content = item.get("content")
    if isinstance(content, str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        return [{"type": kind, "text": content}]
    text_parts(content, param)
    return [
        part if isinstance(part, dict) else {"type": "input_text", "text": part} for part in content or ()
    ]


async def resolve(items: list[Item], owner: str, store: Store) -> list[Item]:
    """Items with references replaced by the items that they refer to. References of another form than ours
    are skipped. Raises `NotFound` for an item that is not stored any more."""
    resolved: list[Item] = []
    for i, item in enumerate(items):
        if i % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        id = item.get("id")
        if item.get("type") != "item_reference":
            resolved.append(item)
        elif isinstance(id, str) and (found := _OWN_ID.fullmatch(id)) is not None:
            resolved.append(await store.item(owner, f"resp_{found[1]}", id, f"input[{i}]"))
    return resolved


def messages(items: Iterable[Item], instructions: str | None) -> list[Message]:
    """Chat messages. The output of one turn (thinking, text, calls) becomes one message."""
    made: list[Message] = []
    if instructions:
        made.append({"role": "system", "content": instructions})
    thinking = ""
    for item in items:
        kind, before, thinking = item["type"], thinking, ""
        if kind == "reasoning":
            thinking = _thinking(item)
        elif kind == "message":
            content = "".join(text_parts(item["content"], "input"))
            message: Message = {"role": item.get("role"), "content": content}
            if message["role"] == "assistant":
                _think(message, before)
            _append(made, message)
        elif kind in _CALLS:
            _turn(made, before).setdefault("tool_calls", []).append(_call(item, kind))
        elif kind in _OUTPUTS:
            content = "\n".join(text_parts(item.get("output"), "input"))
            made.append({"role": "tool", "tool_call_id": _call_id(item), "content": content})
        else:  # unknown ones are skipped
            thinking = before
    return made


def _append(made: list[Message], message: Message) -> None:
    """Add a message. Instructions before the conversation are joined: many templates take one only."""
    if message["role"] in _INSTRUCTIONS and len(made) == 1 and made[0]["role"] in _INSTRUCTIONS:
        made[0] = {"role": "system", "content": f"{made[0]['content']}\n\n{message['content']}"}
    else:
        made.append(message)


def _turn(made: list[Message], thinking: str) -> Message:
    """The assistant's message that a call belongs to."""
    if not made or made[-1]["role"] != "assistant" or thinking:
        made.append({"role": "assistant", "content": ""})
        _think(made[-1], thinking)
    return made[-1]


def _think(message: Message, thinking: str) -> None:
    if thinking:
        message["reasoning_content"] = message["reasoning"] = thinking


def _call_id(item: Item) -> str:
    return str(item.get("call_id") or item["id"])


def _call(item: Item, kind: str) -> Message:
    sent = item.get(_CALLS[kind])
    if kind == "custom_tool_call":
        sent = {"input": sent}
    arguments = sent if isinstance(sent, str) else _encode(sent or {}).decode()
    name = item.get("name") or "local_shell"
    return {"id": _call_id(item), "type": "function", "function": {"name": name, "arguments": arguments}}


def _thinking(item: Item) -> str:
    """The thinking: as text, as encrypted content of ours, or as a summary."""
    for field in ("content", "encrypted_content", "summary"):
        value = item.get(field)
        if isinstance(value, str):
            text = _unsealed(value) if field == "encrypted_content" else value
        else:
            parts = value if isinstance(value, list) else []
            text = "".join(
                part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
        if text:
            return text
    return ""


def sealed(thinking: str) -> str:
    """Thinking for a stateless client to keep and send back. It is encoded, not encrypted."""
    return base64.b64encode((_MARK + thinking).encode("utf-8", "surrogatepass")).decode()


def _unsealed(text: str) -> str:
    try:
        plain = base64.b64decode(text, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""  # from another server
    return plain.removeprefix(_MARK) if plain.startswith(_MARK) else ""


def shortened(messages: list[Message]) -> list[Message] | None:
    """The conversation without the oldest quarter of its messages: never the instructions, never the
    last message; the results of removed calls go too. None when nothing can be removed."""
    head = 0
    while head < len(messages) and messages[head]["role"] in _INSTRUCTIONS:
        head += 1
    rest = len(messages) - head
    if rest < 2:
        return None
    start = head + max(rest // 4, 1)
    while start < len(messages) - 1 and messages[start]["role"] == "tool":
        start += 1
    return messages[:head] + messages[start:]
