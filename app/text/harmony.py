"""Conversations as gpt-oss' chat template takes them.

It shows one call of a message, and names a result after the call before it; takes reasoning from `thinking`,
and refuses it beside text and a call; shows instructions of the first message only; fails for a tool without
a description.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MARK = "<|channel|>"
"""Text that only gpt-oss templates contain."""

Messages = Sequence[Mapping[str, Any]]

_INSTRUCTIONS = ("system", "developer")
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that the models were not trained with, to the closest that they were."""


def adapted(
    messages: Messages, tools: Messages | None, arguments: Mapping[str, Any]
) -> tuple[Messages, Messages | None, dict[str, Any]]:
    """The messages, the tools and the template's other arguments."""
    described = [{**tool, "function": _described(tool["function"])} for tool in tools or ()]
    arguments = dict(arguments)
    if (effort := arguments.pop("reasoning_effort", None)) is not None:
        arguments["reasoning_effort"] = _EFFORTS.get(str(effort), effort)
    return turns(messages), described or None, arguments


def turns(messages: Messages) -> list[dict[str, Any]]:
    """The conversation with all instructions in its first message, and with one call in a message of the
    assistant, its results behind it. Text beside a call becomes part of the reasoning: there the template
    shows text that comes without any. Never empty: the template reads the first message."""
    told = [each for each in messages if each.get("role") in _INSTRUCTIONS and each.get("content")]
    made: list[dict[str, Any]] = []
    if told:
        made.append({"role": "system", "content": "\n\n".join(str(each["content"]) for each in told)})
    others = [each for each in messages if each.get("role") not in _INSTRUCTIONS]
    at = 0
    while at < len(others):
        message = dict(others[at])
        if reasoning := message.get("reasoning_content"):
            message.setdefault("thinking", reasoning)
        at = end = at + 1
        if not message.get("tool_calls"):
            made.append(message)
            continue
        while end < len(others) and others[end].get("role") == "tool":
            end += 1
        made += _called(message, others[at:end])
        at = end
    return made or [{"role": "system", "content": ""}]


def _called(message: dict[str, Any], results: Messages) -> Iterator[dict[str, Any]]:
    """A message for each call, and the results of each."""
    left = [dict(each) for each in results]
    before = [text for text in (message.pop("thinking", None), message["content"]) if text]
    message["content"] = ""
    for at, call in enumerate(message["tool_calls"]):
        thinking = {"thinking": "\n".join(map(str, before))} if before and not at else {}
        yield {**message, **thinking, "tool_calls": [call]}
        id = call.get("id")
        own = left[:1] if id is None else [each for each in left if each.get("tool_call_id") == id]
        yield from own
        left = [each for each in left if all(each is not other for other in own)]
    yield from left


def _described(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "description": function.get("description") or ""}
