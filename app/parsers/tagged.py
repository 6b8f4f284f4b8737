"""Calls whose arguments are written one by one between tags, as JSON while they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from app.parsers.calls import CallParser, Format
from app.parsers.cursor import Cursor, Malformed, Steps, checked_name
from app.parsers.formats import arguments
from app.parsers.pythonic import json_argument
from app.parsers.typed import Types, inside, quoted


class Tags(NamedTuple):
    """Tags around calls, around each call, and around each of its arguments."""

    calls: tuple[str, str]
    call: tuple[str, str]
    """Tags around a call; the first goes up to the name."""
    argument: tuple[str, str]
    named: str
    """Text behind a name."""
    line: str = ""
    """Inside a tag, around what it encloses."""


TOOL_CALL = ("<tool_call>", "</tool_call>")
QWEN_CODER = Tags(
    calls=TOOL_CALL,
    call=("<function=", "</function>"),
    argument=("<parameter=", "</parameter>"),
    named=">",
    line="\n",
)
MINIMAX = Tags(
    calls=("<minimax:tool_call>", "</minimax:tool_call>"),
    call=('<invoke name="', "</invoke>"),
    argument=('<parameter name="', "</parameter>"),
    named='">',
)
SEED = QWEN_CODER._replace(calls=("<seed:tool_call>", "</seed:tool_call>"), line="")
DSML = Tags(
    calls=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    call=('<｜DSML｜invoke name="', "</｜DSML｜invoke>"),
    argument=('<｜DSML｜parameter name="', "</｜DSML｜parameter>"),
    named='">',
)
DSML_4 = DSML._replace(calls=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"))
DSML_PLAIN = MINIMAX._replace(calls=("<function_calls>", "</function_calls>"))
"""DeepSeek's tags as models write them without the special token (vLLM issue 30541)."""
_IS_STRING = '" string="'
"""Text in DeepSeek's tags between an argument's name and `true` or `false`."""
_KEY = ("<arg_key>", "</arg_key>")
_VALUE = ("<arg_value>", "</arg_value>")
_STRING: Types = frozenset(("string",))
MAX_AHEAD = 64
"""Arguments of a function that are looked for by their names behind a value without its end: the search for
more is slow to prepare, for 1,000 of them 50 to 100 ms at every argument."""


def tagged(tags: Tags) -> Format:
    """`<calls><call name><argument key>value</argument>...</call>...</calls>`, or one JSON object in place of
    the arguments, as DeepSeek V3.2 sometimes writes. Models omit the outer tag; then functions must be
    declared."""

    def read(calls: CallParser) -> Steps[None]:
        cursor = calls.cursor
        marked = yield from cursor.skip(tags.calls[0])
        while True:
            yield from cursor.spaces()
            yield from cursor.expect(tags.call[0])
            name = calls.named((yield from cursor.until(tags.named)), declared=not marked)
            if (yield from cursor.spaces()) == "{":
                yield from arguments(calls, name)
                yield from calls.tail(tags.call[1])
            else:
                calls.start(name)
                yield from _arguments(calls, name, tags)
                calls.whole()
            if (yield from calls.tail(tags.calls[1])):
                return
            if (yield from cursor.ahead(len(tags.call[0]))) != tags.call[0]:
                return
            cursor.record()

    return read


def dsml(calls: CallParser) -> Steps[None]:
    """Calls in any of DeepSeek's spellings: models of one version write another's."""
    for tags in (DSML, DSML_4, DSML_PLAIN):
        for mark in (tags.calls[0], tags.call[0]):
            if (yield from calls.cursor.ahead(len(mark))) == mark:
                yield from tagged(tags)(calls)
                return
    yield from calls.cursor.expect(DSML.calls[0])


DSML_MARKS = tuple(
    dict.fromkeys(mark for each in (DSML, DSML_4, DSML_PLAIN) for mark in (each.calls[0], each.call[0]))
)


def _arguments(calls: CallParser, name: str, tags: Tags) -> Steps[None]:
    cursor, before = calls.cursor, "{"
    begin, end = tags.argument
    declared = calls.properties(name)
    ahead = dict.fromkeys(declared)
    while (yield from cursor.spaces()) == "<" and (yield from cursor.skip(begin)):
        key, _, is_string = (yield from cursor.until(tags.named)).partition(_IS_STRING)
        key = checked_name(key)
        ahead.pop(key, None)
        calls.arguments(f"{before}{quoted(key)}: ")
        if tags.line and (yield from cursor.peek()) == tags.line:
            cursor.take(cursor.at + 1)
        # A missing end is where the next argument begins, or where the call ends.
        following = [f"\n{begin}"]
        if declared and len(ahead) <= MAX_AHEAD:
            following = [f"{begin}{each}{tags.named[0]}" for each in ahead]
        last = (f"{tags.call[1]}{gap}{tags.calls[1]}" for gap in ("", "\n"))
        types = _TYPES[is_string] if is_string in _TYPES else calls.types(name, key)
        yield from _value(calls, types, (end, *following, *last), tags.line)
        before = ", "
    yield from cursor.expect(tags.call[1])
    calls.arguments("{}" if before == "{" else "}")


_TYPES: Mapping[str, Types] = {"true": _STRING, "false": None}
"""Types of a value, by what its tag says of it."""


def glm(calls: CallParser) -> Steps[None]:
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>`, in 4.5 with line
    breaks between the parts. Any text could be a name, so functions must be declared."""
    cursor = calls.cursor
    yield from cursor.expect(TOOL_CALL[0])
    found = yield from cursor.run(lambda sign: sign not in "\n<")
    if not (yield from cursor.peek()):
        raise Malformed
    name = calls.named(found, declared=True)
    calls.start(name)
    before = "{"
    while (yield from cursor.spaces()) == "<" and (yield from cursor.skip(_KEY[0])):
        key = checked_name((yield from cursor.until(_KEY[1])))
        calls.arguments(f"{before}{quoted(key)}: ")
        yield from cursor.spaces()
        yield from cursor.expect(_VALUE[0])
        yield from _value(calls, calls.types(name, key), _VALUE[1:])
        before = ", "
    yield from cursor.expect(TOOL_CALL[1])
    calls.arguments("{}" if before == "{" else "}")
    calls.whole()


def _value(calls: CallParser, types: Types, ends: tuple[str, ...], last: str = "") -> Steps[None]:
    """A value: strings as they come, others whole. See `_until`."""
    if types == _STRING:
        calls.arguments('"')
        yield from _until(calls.cursor, ends, last, lambda span: calls.arguments(inside(span)))
        calls.arguments('"')
        return
    parts: list[str] = []
    yield from _until(calls.cursor, ends, last, parts.append)
    calls.arguments(json_argument("".join(parts), types))


def _until(cursor: Cursor, ends: tuple[str, ...], last: str, out: Callable[[str], None]) -> Steps[None]:
    """Pass on the text up to one of `ends`, of which the first alone is taken, without `last` before it."""
    keep = ""

    def trimmed(span: str) -> None:
        nonlocal keep
        span = keep + span
        keep = last if last and span.endswith(last) else ""
        if span := span.removesuffix(keep):
            out(span)

    mark = yield from cursor.upto(ends, trimmed)
    if not mark:
        raise Malformed
    if mark == ends[0]:
        cursor.take(cursor.at + len(mark))
