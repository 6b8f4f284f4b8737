"""Tools in the messages, in Hermes' format, for chat templates that do not render them.

Most models have seen this format in training, and a grammar can enforce it for any model. The wording is
that of Qwen's templates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, system: bool
) -> list[dict[str, Any]]:
    """The conversation with tools, calls and their results as text. `system`: the template renders system
    messages; otherwise the tools go into the first user message."""
    texts = list(_as_text(messages))
    if not tools:
        return texts
    prompt = _PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    role = "system" if system else "user"
    first = next((at for at, each in enumerate(texts) if each.get("role") in ("system", "user")), 0)
    if texts and texts[first].get("role") == role:
        content = texts[first].get("content")
        parts = [content, prompt] if system else [prompt, content]
        texts[first] = {**texts[first], "content": "\n\n".join(filter(None, parts))}
        return texts
    return [{"role": role, "content": prompt}, *texts]


def _as_text(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    results: list[str] = []
    for message in messages:
        if message.get("role") == "tool":
            results.append(f"<tool_response>\n{message.get('content') or ''}\n</tool_response>")
            continue
        if results:  # one message: many templates want user and assistant to take turns
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        yield _called(message)
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _called(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    parts = [text] if (text := message.get("content")) else []
    for call in calls:
        function = call["function"]
        asked = {"name": function["name"], "arguments": parsed_arguments(function["arguments"])}
        parts.append(f"<tool_call>\n{json.dumps(asked, ensure_ascii=False)}\n</tool_call>")
    return {key: value for key, value in message.items() if key != "tool_calls"} | {
        "content": "\n".join(parts)
    }


def parsed_arguments(arguments: object) -> object:
    """A call's arguments parsed, where they are text that is JSON; otherwise as they are."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
