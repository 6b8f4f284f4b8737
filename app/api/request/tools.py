"""Tools as a request declares and chooses them."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from app.api.request.sampling import check_count
from app.api.request.schema import ChatBody
from app.http.body import check_depth
from app.parsers.grammar import Tool
from app.parsers.registry import TOOLS, ToolFamily
from app.warning import warn
from core.errors import field_error, unsupported

MAX_TOOLS = 128
"""OpenAI's limit."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

Calls = Literal["none", "auto", "required"]


class Tools(msgspec.Struct, frozen=True):
    """The tools of a request, checked."""

    shown: list[dict[str, Any]] | None = None
    """Declarations for the template."""
    callable: tuple[Tool, ...] = ()
    calls: Calls = "none"
    many: bool = True
    """More than one call in an answer."""


def check_tools(tools: list[dict[str, Any]] | None) -> list[Tool]:
    """Declarations as functions. Raises `RequestError` naming the first field that is wrong."""
    if not tools:
        return []
    check_count(len(tools), MAX_TOOLS, "functions", "tools")
    check_depth(tools, "tools")
    checked = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    seen: set[str] = set()
    for i, tool in enumerate(checked):
        if tool.name in seen:
            raise field_error(f"tools[{i}].function.name", f"'{tool.name}' is declared twice")
        seen.add(tool.name)
    return checked


def chosen_tools(body: ChatBody) -> Tools:
    """Tools, `tool_choice` and `parallel_tool_calls` together. Raises `RequestError`."""
    if body.functions not in (None, [], {}, "none"):
        raise unsupported("functions", "use 'tools'")
    if body.function_call not in (None, [], {}, "none"):
        raise unsupported("function_call", "use 'tool_choice'")
    tools, choice = check_tools(body.tools), body.tool_choice
    many = body.parallel_tool_calls is not False
    match choice:
        case "none":
            return Tools()
        case None | "auto":
            return Tools(body.tools or None, tuple(tools), "auto" if tools else "none", many)
        case "required":
            if not tools:
                raise field_error("tool_choice", "is 'required', but there are no 'tools'")
            return Tools(body.tools, tuple(tools), "required", many)
        case {"type": "function"}:
            name = _named(choice, "tool_choice")
            return Tools(body.tools, _among([name], tools, "tool_choice.function.name"), "required", False)
        case {"type": "allowed_tools", **rest}:
            return _allowed(body, rest.get("allowed_tools", rest), tools, many)
        case dict():
            raise field_error("tool_choice.type", "must be 'function' or 'allowed_tools'")
    raise field_error("tool_choice", "must be 'none', 'auto', 'required' or an object")


def called_in(
    family: ToolFamily | None, shows_tools: bool, shown: list[dict[str, Any]] | None
) -> ToolFamily | None:
    """How the model writes calls when it is `shown` these tools, by a template that renders tools or not."""
    if not shown or shows_tools:
        return family
    warn(
        "tools: this model's chat template does not render tools, so they were put into the prompt in a "
        "generic form"
    )
    return family and TOOLS["hermes"]


def _allowed(body: ChatBody, allowed: object, tools: list[Tool], many: bool) -> Tools:
    param = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict):
        raise field_error(param, "must be an object")
    mode, listed = allowed.get("mode", "auto"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise field_error(f"{param}.mode", "must be 'auto' or 'required'")
    if not isinstance(listed, list) or not listed or len(listed) > MAX_TOOLS:
        raise field_error(f"{param}.tools", "must be a list of functions")
    names = [_named(item, f"{param}.tools[{i}]") for i, item in enumerate(listed)]
    some = _among(names, tools, f"{param}.tools")
    shown = body.tools
    if mode == "auto" and shown:
        # No grammar holds the model to the list here, so the others are left out of the prompt, at the price
        # of its cached prefix.
        shown = [tool for tool in shown if tool["function"]["name"] in names]
    return Tools(shown, some, "required" if mode == "required" else "auto", many)


def _among(names: list[str], tools: list[Tool], param: str) -> tuple[Tool, ...]:
    if not tools:
        raise field_error("tool_choice", "names a function, but there are no 'tools'")
    declared = {tool.name for tool in tools}
    for name in names:
        if name not in declared:
            raise field_error(param, f"'{name[:64]}' is not among 'tools'")
    return tuple(tool for tool in tools if tool.name in names)


def _named(item: object, param: str) -> str:
    function = item.get("function", item) if isinstance(item, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise field_error(f"{param}.function.name", "must be a string")
    return name


def _tool(tool: dict[str, Any], param: str) -> Tool:
    if tool.get("type", "function") != "function":
        raise field_error(f"{param}.type", "must be 'function'", "unsupported")
    function = tool.get("function")
    param = f"{param}.function"
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise field_error(f"{param}.name", "must be 1 to 64 letters, digits, '_' or '-'")
    if not isinstance(function.get("description"), str | None):
        raise field_error(f"{param}.description", "must be a string")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise field_error(f"{param}.strict", "must be true or false")
    schema = function.get("parameters")
    if schema is None:
        schema = {"type": "object", "properties": {}}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise field_error(f"{param}.parameters", "must be a JSON schema of type 'object'")
    if not isinstance(schema.get("properties", {}), dict):
        raise field_error(f"{param}.parameters.properties", "must be an object")
    return Tool(name, {"type": "object", **schema}, strict is True, strict is False)
