"""Chat messages: checked by hand, because a template may read any field of a message."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from app.http.aside import aside
from app.http.body import check_depth
from app.http.pieces import MAX_VALUES
from app.parsers.registry import ToolFamily
from app.service import Loaded
from app.text.numbers import slow_numbers
from app.text.request_template import RequestTemplate
from app.text.template import ChatTemplate
from core.errors import RequestError, field_error, unsupported

Message = dict[str, Any]

_RENAMED = {"developer": "system", "function": "tool"}
"""Role to the role that templates know: most silently drop a `developer` message. Others reach the
template as they are: models have their own (Llama's `ipython`, GLM's `observation`)."""

_KNOWN = ("system", "developer", "user", "assistant", "tool", "function")

MAX_ROLE = 64
"""Characters of a role."""

MAX_SLOW = 500
"""Numbers in a call's arguments that take long to read, at 6 µs each."""
CALL = 128
"""Characters of a call's arguments that take about as long as a message: a list of 27 KB takes 0.6 ms."""

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a part to the field with its text."""

_TEMPLATE_OWN = frozenset(
    {"chat_template", "tokenize", "messages", "tools", "add_generation_prompt", "continue_final_message"}
)
"""Arguments of the renderer that `chat_template_kwargs` must not override (CVE-2025-62426)."""


def message_count(messages: list[Message] | None) -> int:
    """Items of a conversation, for `aside`: one per message and one per `CALL` characters of arguments of
    calls, which are read as JSON."""
    return sum(map(_weight, messages or ()))


def _weight(message: Message) -> int:
    calls = message.get("tool_calls")
    count = 1
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        count += 1 + (len(arguments) // CALL if isinstance(arguments, str) else 0)
    return count


def check_messages(messages: list[Message] | None) -> list[Message]:
    """Messages as templates take them: their roles, text content, tool arguments as objects.

    Raises `RequestError` naming the message and, for a part that is not text, the part.
    """
    if not messages:
        raise field_error("messages", "must have at least one message")
    check_depth(messages, "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


async def check_messages_async(messages: list[Message] | None) -> list[Message]:
    """`check_messages`, in a thread where there is much to check."""
    return await aside(message_count(messages), lambda: check_messages(messages))


def check_known_role(message: Message, param: str) -> None:
    """Raise `RequestError` naming `param` for a role that OpenAI's API does not have, for
    dialects with a fixed list of roles."""
    if message.get("role") not in _KNOWN:
        raise field_error(param, f"must be one of {', '.join(_KNOWN)}")


def _message(message: Message, param: str) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= MAX_ROLE:
        raise field_error(f"{param}.role", f"must be a text of 1 to {MAX_ROLE} characters")
    checked = {name: value for name, value in message.items() if value is not None}
    checked["role"] = _RENAMED.get(role, role)
    checked["content"] = _content(message.get("content"), role, bool(message.get("tool_calls")), param)
    if calls := _tool_calls(checked.pop("tool_calls", []), f"{param}.tool_calls"):
        checked["tool_calls"] = calls  # of an empty list several templates read the first
    for name in ("reasoning_content", "reasoning", "name", "tool_call_id"):
        if name in checked and not isinstance(checked[name], str):
            raise field_error(f"{param}.{name}", "must be a string")
    if "reasoning" in checked:  # templates know the other name
        checked.setdefault("reasoning_content", checked["reasoning"])
    return checked


def _content(content: object, role: str, calls: bool, param: str) -> str:
    if content is None and (role == "assistant" or calls):
        return ""
    return "\n".join(text_parts(content, f"{param}.content"))


def text_parts(content: object, param: str) -> list[str]:
    """The texts of a content, which is a string or a list of parts. Raises `RequestError` for other parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise field_error(param, "must be a string or a list of text parts")
    return [_part(part, f"{param}[{j}]") for j, part in enumerate(content)]


def _part(part: object, param: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise field_error(param, "must be an object with a 'type'")
    if kind not in _TEXT_PARTS:
        raise field_error(param, f"is of type '{kind[:40]}', but this model takes text only", "unsupported")
    return string_in(part, _TEXT_PARTS[kind], param)


def string_in(block: Message, name: str, param: str) -> str:
    """A field of an object that must be a string. Raises `RequestError` naming it."""
    value = block.get(name)
    if not isinstance(value, str):
        raise field_error(f"{param}.{name}", "must be a string")
    return value


def _tool_calls(calls: object, param: str) -> list[Message]:
    if not isinstance(calls, list):
        raise field_error(param, "must be a list")
    return [_tool_call(call, f"{param}[{j}]") for j, call in enumerate(calls)]


def _tool_call(call: object, param: str) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(call, dict)
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
    ):
        raise field_error(param, "must have a 'function' with a 'name'")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # Clients send JSON in a string; templates iterate over an object.
        arguments = _parsed(arguments, f"{param}.function.arguments")
        check_depth(arguments, f"{param}.function.arguments")
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _parsed(arguments: str, param: str) -> object:
    data = arguments.encode("utf-8", "replace")
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES or slow_numbers(data) > MAX_SLOW:
        raise field_error(param, f"has more values than the {MAX_VALUES:,} that a call may have")
    try:
        parsed: object = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def template_arguments(sent: dict[str, Any] | None, **named: object) -> dict[str, Any]:
    """`chat_template_kwargs` and the named fields that are set, for the template."""
    arguments = dict(sent or {})
    check_depth(arguments, "chat_template_kwargs")
    for name in arguments:
        if name in _TEMPLATE_OWN or not name.isidentifier() or name == "self":
            raise RequestError(
                f"'chat_template_kwargs' must not set '{name[:40]}'.", f"chat_template_kwargs.{name[:40]}"
            )
    arguments.update({name: value for name, value in named.items() if value is not None})
    return arguments


def chosen_template(sent: object, loaded: Loaded) -> ChatTemplate | RequestTemplate:
    """The model's template, or the one that a request brings where the operator trusts its clients with
    that (CVE-2025-61620). Raises `RequestError` naming `chat_template`."""
    if sent in (None, ""):
        return loaded.template
    if not loaded.settings.trust_request_chat_template:
        raise unsupported(
            "chat_template",
            "the operator sets the template, and has to allow requests their own with "
            "--trust-request-chat-template",
        )
    if not isinstance(sent, str):
        raise field_error("chat_template", "must be a string")
    return RequestTemplate(sent, loaded.template.special_tokens, loaded.helper)


def generation_prompt(add: bool | None, continue_final: bool | None) -> tuple[bool, bool]:
    """(add_generation_prompt, continue_final_message): one excludes the other."""
    if add and continue_final:
        raise RequestError(
            "'add_generation_prompt' and 'continue_final_message' exclude each other.",
            "continue_final_message",
        )
    continued = bool(continue_final)
    return (not continued if add is None else add), continued


def short_ids(messages: list[Message]) -> list[Message]:
    """Messages whose call ids have nine letters and digits, which Mistral's templates insist on. Equal
    ids stay equal."""
    return [_short(message) for message in messages]


def _short(message: Message) -> Message:
    short = dict(message)
    if isinstance(id := short.get("tool_call_id"), str):
        short["tool_call_id"] = _nine(id)
    if calls := short.get("tool_calls"):
        short["tool_calls"] = [
            {**call, "id": _nine(id)} if isinstance(id := call.get("id"), str) else call for call in calls
        ]
    return short


def _nine(id: str) -> str:
    if len(id) == 9 and id.isascii() and id.isalnum():
        return id
    return hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def written_calls(messages: list[Message], family: ToolFamily) -> list[Message]:
    """Messages with their calls as the model writes them, in the content."""
    return [_written(message, family) if message.get("tool_calls") else message for message in messages]


def _written(message: Message, family: ToolFamily) -> Message:
    functions = [call["function"] for call in message["tool_calls"]]
    calls = family.writing.written([(each["name"], each["arguments"]) for each in functions])
    if calls is None:
        return message
    before = f"{message['content']}{family.lead}" if message["content"] else ""
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": before + calls}
