"""Anthropic's `cache_control`: which prefixes of a prompt it marks, and the cache's counts in `usage`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from app.api.anthropic.input import chat_messages
from app.api.anthropic.schema import Block, MessagesBody
from app.api.request.sampling import MAX_NAME
from app.engine.job import Keep, Run
from app.http.tenant import tenant
from core.errors import RequestError, field_error

SECONDS = {"5m": 300.0, "1h": 3600.0}
"""`ttl`."""

MAX_MISSED = 16
"""Texts that may be missing from the rendered prompt before the search ends: each miss scans all of the
prompt, and a body may have 100,000 texts."""

_Place = tuple[int, int, int]
"""Place of a mark, in the order of the prompt: part (tools, system, messages, all), message, block."""

_TOOLS, _SYSTEM, _MESSAGES, _ALL = range(4)


_Mark = tuple[_Place, float]
"""Place of a mark and its TTL in seconds."""


def kept(body: MessagesBody, prompt: str) -> Keep | None:
    """Which prefixes of the rendered `prompt` the marks of `body` ask to keep; None without marks. Raises
    `RequestError` naming a mark that is not one.

    Among marks of equal TTL only the last one counts: its prefix contains the others'.
    """
    last: dict[float, _Place] = {}
    for place, seconds in _marks(body):
        last[seconds] = max(place, last.get(seconds, place))
    if not last:
        return None
    marks = tuple((_position(body, prompt, place), seconds) for seconds, place in last.items())
    user = (body.metadata or {}).get("user_id")
    named = user[:MAX_NAME] if isinstance(user, str) else ""
    return Keep(owner=tenant() or named, marks=marks)


def _marks(body: MessagesBody) -> Iterator[_Mark]:
    if body.cache_control is not None:
        yield (_ALL, 0, 0), _seconds(body.cache_control, "cache_control")
    yield from _of_blocks(body.tools, (_TOOLS, 0), "tools")
    yield from _of_blocks(body.system, (_SYSTEM, 0), "system")
    for i, message in enumerate(body.messages or ()):
        yield from _of_blocks(message.get("content"), (_MESSAGES, i), f"messages[{i}].content")


def _of_blocks(blocks: object, where: tuple[int, int], param: str) -> Iterator[_Mark]:
    if not isinstance(blocks, list):
        return
    for j, block in enumerate(blocks):
        name = f"{param}[{j}]"
        if not isinstance(block, dict):
            continue
        if block.get("cache_control") is not None:
            yield (*where, j), _seconds(block["cache_control"], f"{name}.cache_control")
        if block.get("type") == "tool_result":  # what is inside ends with the result
            for _, seconds in _of_blocks(block.get("content"), where, f"{name}.content"):
                yield (*where, j), seconds


def _seconds(mark: Any, param: str) -> float:
    if not isinstance(mark, dict) or mark.get("type") != "ephemeral":
        raise RequestError(f"'{param}' must be an object of type 'ephemeral'.", f"{param}.type")
    ttl = mark.get("ttl")
    if ttl is None:
        return SECONDS["5m"]
    if not isinstance(ttl, str) or ttl not in SECONDS:
        raise field_error(f"{param}.ttl", "must be '5m' or '1h'")
    return SECONDS[ttl]


def _position(body: MessagesBody, prompt: str, place: _Place) -> int | None:
    """Characters of `prompt` up to the mark; None: all of them."""
    part, i, j = place
    messages = body.messages or []
    if part == _ALL:
        return None
    if part == _MESSAGES:
        if i == len(messages) - 1 and j == len(messages[i]["content"]) - 1:
            return None
        cut = {**messages[i], "content": messages[i]["content"][: j + 1]}
        return _end(prompt, msgspec.structs.replace(body, messages=[*messages[:i], cut]))
    system = body.system
    if part == _SYSTEM and isinstance(system, list) and j < len(system) - 1:
        return _end(prompt, msgspec.structs.replace(body, system=system[: j + 1], messages=messages[:1]), 1)
    # Templates write tools before the system prompt or after it: both are over where messages begin.
    at = _end(prompt, msgspec.structs.replace(body, messages=messages[:1]), 1)
    first = _texts(body, messages[:1])[-1]
    found = prompt.find(first, at) if first else -1
    return found if found >= 0 else at


def _end(prompt: str, body: MessagesBody, without: int = 0) -> int:
    """Where the texts of `body`'s messages, but for the last `without`, are over in `prompt`. A text that
    its template changed or left out is passed over: then less is kept, never more."""
    texts = _texts(body, body.messages or [])
    at = missed = 0
    for text in texts[: len(texts) - without]:
        found = prompt.find(text, at)
        if found >= 0:
            at = found + len(text)
        elif (missed := missed + 1) > MAX_MISSED:
            break
    return at


def _texts(body: MessagesBody, messages: list[Block]) -> list[str]:
    made = chat_messages(msgspec.structs.replace(body, messages=messages))
    return [message["content"].strip() for message in made]


def prompt_usage(run: Run) -> dict[str, object]:
    """Tokens of the prompt as Anthropic counts them; the three counts add up to all of them.

    Read tokens were found in the cache; created ones were not found and are pinned now by a mark, the
    longer time first; the rest was computed, and may or may not be found again.
    """
    made: dict[str, int] = {}
    read = end = run.cached
    for ttl in ("1h", "5m"):
        upto = run.kept(SECONDS[ttl])
        made[ttl] = max(upto - end, 0)
        end = max(end, upto)
    return {
        "input_tokens": len(run.prompt) - end,
        "cache_creation_input_tokens": end - read,
        "cache_read_input_tokens": read,
        "cache_creation": {"ephemeral_5m_input_tokens": made["5m"], "ephemeral_1h_input_tokens": made["1h"]},
    }
