"""Reasoning, tool calls and the answer's own constraint in one grammar.

    think? (answer | calls)

written as a structural tag, in the family's own format, which its parsers read. Servers with several
separate constraints drop one of them or refuse.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from app.parsers.fields import Element, Unsupported, arguments, const_element, joined, json_element, optional
from app.parsers.harmony import ASSISTANT, BEGINS, COMMENTARY, END, ENDS, FINAL
from app.parsers.registry import ReasoningFamily, ToolFamily, Writing
from core.errors import RequestError, field_error
from core.grammar import GrammarSpec

_encode = msgspec.json.Encoder().encode

MAX_SCHEMAS = 256 * 1024
"""Bytes of the schemas that calls are held to. They stand in the grammar, which may have no more
(`gpu/grammar/limits.py`); for some families it is ten times as long."""


class Tool(msgspec.Struct, frozen=True):
    """A function that may be called."""

    name: str
    schema: dict[str, Any]
    strict: bool = False
    lenient: bool = False
    """`strict` was sent as false: keywords that cannot be enforced are left out, with a warning."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that one answer may contain."""

    answer: GrammarSpec | None = None
    tools: tuple[Tool, ...] = ()
    """Functions that may be called."""
    calls: Literal["none", "auto", "required"] = "none"
    many: bool = True
    """Whether more than one call is allowed."""
    thinking: Literal["none", "possible", "open"] = "none"
    """`open`: the prompt has opened the reasoning."""
    over: bool = False
    """The reasoning was cut or skipped: no other may follow, in formats that would allow it."""


def constraint(
    wanted: Wanted, tools: ToolFamily | None, reasoning: ReasoningFamily | None
) -> GrammarSpec | None:
    """The grammar for `wanted`, None when nothing is constrained. Raises `RequestError` for calls that the
    model's family has no grammar for."""
    choices = _calls(wanted, tools)
    if wanted.answer is None and choices is None:
        return None
    if choices is None and wanted.thinking == "none" and not _headed(wanted, tools, reasoning):
        return wanted.answer
    elements = [joined("or", _alternatives(wanted, choices, tools, reasoning))]
    if wanted.thinking != "none" and reasoning is not None:
        elements[:0] = _thinking(reasoning, wanted.thinking == "open", tools)
    tag = {"type": "structural_tag", "format": joined("sequence", elements)}
    param = "tools" if choices is not None or wanted.answer is None else wanted.answer.param
    return GrammarSpec("structural_tag", _encode(tag).decode(), param)


def _alternatives(
    wanted: Wanted, choices: Element | None, tools: ToolFamily | None, reasoning: ReasoningFamily | None
) -> list[Element]:
    """The grammar of what may follow the reasoning: the answer, and the calls that are its `choices`."""
    headed, made = _headed(wanted, tools, reasoning), []
    if wanted.answer is not None and wanted.calls != "required":
        made.append(_final(answer_element(wanted.answer), headed))
    if choices is not None:
        made.append(_final(choices, headed and tools is not None and not tools.channels))
    return made


def _headed(wanted: Wanted, tools: ToolFamily | None, reasoning: ReasoningFamily | None) -> bool:
    """Whether an answer's text has a header. Where no call can come either, reasoning that was cut or skipped
    has brought it into the prompt."""
    if tools is not None and tools.channels:
        return True
    return reasoning is not None and reasoning.channels and wanted.thinking != "none"


def _final(answer: Element, headed: bool = True) -> Element:
    """An answer's text as the message of a channel."""
    return joined("sequence", [const_element(FINAL), answer]) if headed else answer


def answer_element(answer: GrammarSpec) -> Element:
    """A constraint as part of a structural tag."""
    match answer.kind:
        case "json_object":
            return json_element({"type": "object", "additionalProperties": True})
        case "json_schema":
            return json_element(_decoded(answer), answer.lenient)
        case "regex":
            return {"type": "regex", "pattern": answer.text}
        case "ebnf":
            return {"type": "grammar", "grammar": answer.text}
        case "choice":
            return joined("or", [const_element(text) for text in _decoded(answer)])
        case "structural_tag":
            tag = _decoded(answer)
            if not isinstance(tag, dict) or not isinstance(tag.get("format"), dict):
                raise RequestError(
                    "A structural tag without a 'format' cannot be combined with tools or reasoning.",
                    answer.param,
                )
            return dict(tag["format"])


def _decoded(answer: GrammarSpec) -> Any:
    try:
        return msgspec.json.decode(answer.text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise field_error(answer.param, f"is not valid JSON: {error}") from error


def _thinking(family: ReasoningFamily, open: bool, tools: ToolFamily | None) -> list[Element]:
    marks = [*family.begins, *family.ends, *(tools.markers if tools is not None else ())]
    think: list[Element] = [
        {
            "type": "tag",
            "begin": "" if open else family.begin,
            "content": {"type": "any_text", "excludes": marks},
            "end": family.end,
        }
    ]
    if family.gap:
        think.append(const_element(family.gap))
    return think if open else [optional(joined("sequence", think))]


def _calls(wanted: Wanted, family: ToolFamily | None) -> Element | None:
    """The calls, or free text with calls in it; None when they are not constrained."""
    if wanted.calls == "none" or not wanted.tools:
        return None
    free = wanted.calls == "auto" and wanted.answer is None
    if free and not _held(wanted, family):
        return None
    param = "tools" if wanted.calls == "auto" else "tool_choice"
    if family is None:
        raise RequestError(
            "Tool calls are turned off on this server (--tool-parser none), so none can be required.",
            param,
            "unsupported",
        )
    _check_schemas(wanted.tools, free)
    tags = [_tag(tool, family.writing, free, param) for tool in wanted.tools]
    if not free:
        return _group(tags, family.writing, wanted.many)
    return _within_text(tags, family, family.begun(tool.name for tool in wanted.tools), wanted.many)


def _check_schemas(tools: tuple[Tool, ...], free: bool) -> None:
    """Raise `RequestError` for too long schemas of the tools that are held to them."""
    size = sum(len(_encode(without_notes(tool.schema))) for tool in tools if tool.strict or not free)
    if size > MAX_SCHEMAS:
        what = f"have schemas of {size:,} bytes; calls can be held to at most {MAX_SCHEMAS:,}"
        raise field_error("tools", what)


def _held(wanted: Wanted, family: ToolFamily | None) -> bool:
    """Whether anything of free text with calls in it is constrained."""
    apart = wanted.over and family is not None and family.channels
    return apart or any(tool.strict for tool in wanted.tools)


def _tag(tool: Tool, writing: Writing, free: bool, param: str) -> Element:
    loose = free and not tool.strict
    schema = without_notes(tool.schema)
    if writing.fields is not None:
        try:
            content = arguments(schema, writing.fields, tool.strict, loose)
        except Unsupported as error:
            raise RequestError(f"The function '{tool.name}': {error}", param, "unsupported") from None
    elif loose:
        content = json_element({"type": "object", "additionalProperties": True}, tool.lenient)
    else:
        # Structural tags allow no further properties where a schema does not mention them.
        closed = {"additionalProperties": not tool.schema.get("properties"), **schema}
        content = json_element(closed, tool.lenient)
    if writing.numbered:
        number = {"type": "regex", "pattern": "[0-9]{1,4}"}
        content = joined("sequence", [number, const_element(writing.numbered), content])
    return {"type": "tag", "begin": writing.begin % tool.name, "content": content, "end": writing.end}


def without_notes(schema: Any) -> Any:
    """A schema without its annotations. Equal constraints are then equal texts, which are compiled once, and
    no description can name a special token, which the grammar would allow."""
    if not isinstance(schema, dict):
        return [without_notes(each) for each in schema] if isinstance(schema, list) else schema
    bare: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _VALUES:
            bare[key] = value
        elif key in _MAPS and isinstance(value, dict):
            bare[key] = {name: without_notes(each) for name, each in value.items()}
        elif key not in _NOTES:
            bare[key] = without_notes(value)
    return bare


_NOTES = frozenset({"description", "title", "examples", "default", "$comment"})
_VALUES = frozenset({"enum", "const", "required"})
"""Keywords whose values are not schemas."""
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values map names to schemas: a name may be that of an annotation."""


def _group(tags: list[Element], writing: Writing, many: bool) -> Element:
    calls: Element = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": writing.separator,
        "at_least_one": True,
        "stop_after_first": writing.last or not many,
    }
    if not writing.opening:
        return calls
    return {"type": "tag", "begin": writing.opening, "content": calls, "end": writing.closing}


def _beside_text(tags: list[Element], writing: Writing) -> Element:
    """Free text, or a call, which text may precede, in messages of their own."""
    text: Element = {"type": "any_text", "excludes": [*BEGINS, *ENDS]}
    before: Element = {"type": "tag", "begin": COMMENTARY, "content": text, "end": END}
    preamble = optional(joined("sequence", [before, const_element(ASSISTANT)]))
    return joined("or", [_final(text), joined("sequence", [preamble, _group(tags, writing, False)])])


def _within_text(tags: list[Element], family: ToolFamily, begins: tuple[str, ...], many: bool) -> Element:
    """Free text in which a call, once begun, is valid. `begins`: the starts of one without a marker."""
    writing = family.writing
    if family.channels:
        return _beside_text(tags, writing)
    if family.bare is not None:
        # Without a marker an answer that begins like a call is one, and no other answer has calls.
        sign = (writing.opening or writing.begin)[0]
        start = {"type": "regex", "pattern": rf"[^\s\{sign}]"}
        rest = {"type": "any_text", "excludes": [*family.markers, *begins]}
        text = optional(joined("sequence", [start, rest]))
        return joined("or", [text, _group(tags, writing, many)])
    if writing.opening:
        tags = [_group(tags, writing, many)]
    return {
        "type": "triggered_tags",
        "triggers": [family.markers[0]],
        "tags": tags,
        "excludes": list(family.markers[1:]),
        "at_least_one": False,
        "stop_after_first": not many,
    }
