"""Structural tags in llguidance's notation: text, marks and schemas in one grammar.

What a tag spells is cut at the names of control tokens: a mark that is a token matches as that token
only, never as the same letters. Tags with more than this knows are xgrammar's
(`gpu/grammar/xgrammar_backend.py`), which is slower and takes fewer schemas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from core.grammar import TokenTable
from gpu.grammar.regex import ascii_classes, literal
from gpu.grammar.schema import Json


class SchemaPart(NamedTuple):
    """A schema within a tag."""

    schema: Json
    blanks: int | None
    """White space in a row, at most; None: the usual."""
    lenient: bool
    """What cannot be held to is left out."""


SchemaText = Callable[[SchemaPart], str]
"""The schema as JSON with its options; raises `Refused`."""

_KEYS: Mapping[str, frozenset[str]] = {
    "const_string": frozenset(("value",)),
    "json_schema": frozenset(("json_schema", "max_whitespace_cnt", "lenient")),
    "any_text": frozenset(("excludes",)),
    "regex": frozenset(("pattern",)),
    "sequence": frozenset(("elements",)),
    "or": frozenset(("elements",)),
    "optional": frozenset(("content",)),
    "plus": frozenset(("content",)),
    "star": frozenset(("content",)),
    "tag": frozenset(("begin", "content", "end")),
    "triggered_tags": frozenset(("triggers", "tags", "at_least_one", "stop_after_first", "excludes")),
    "tags_with_separator": frozenset(("tags", "separator", "at_least_one", "stop_after_first")),
}
"""Formats that can be written, and the keys of theirs that are honoured."""

_ESCAPED = re.compile(r"\\.|/|\n", re.DOTALL)


class Unwritten(Exception):
    """The tag has something that this notation is not used for."""


def marks_of(table: TokenTable) -> dict[str, int]:
    """Control tokens that a text may name, by their names. Those without a sign of a mark are text (runs
    of blanks, words), and text finds other tokens."""
    names = {table.raw[token].decode(errors="replace"): token for token in table.control}
    return {name: token for name, token in names.items() if any(sign in name for sign in "<[|｜")}


class Part(NamedTuple):
    """An expression, and what matters of it to what stands beside it.

    Letters and JSON are read by two lexers: where both may begin, the library follows one of them and
    forgets the other. And a text without an own end takes all letters that come.
    """

    text: str
    begins: frozenset[str]
    """Of "token", "letters", "json"."""
    empty: bool = False
    """May be nothing."""
    open: bool = False
    """May end with a text that letters only make longer."""


_TOKEN, _LETTERS, _JSON = frozenset(("token",)), frozenset(("letters",)), frozenset(("json",))
_NOTHING = Part('""', frozenset(), empty=True)


def lark_of(tag: Json, tokens: Mapping[str, int], schema_text: SchemaText) -> str:
    """A structural tag as Lark. `tokens` are the ids of control tokens by their names. Raises
    `Unwritten`, and `Refused` for a schema that cannot be honoured."""
    writer = _Writer(tokens, schema_text)
    start = writer.element(tag.get("format"))
    lines = [f"start: {start.text}", *(f"{name}: {body}" for body, name in writer.rules.items())]
    return "\n".join(lines)


class _Writer:
    """Bodies of rules and their names, equal ones once. Owner: one compile."""

    __slots__ = ("_marks", "_schema_text", "_tokens", "rules")

    def __init__(self, tokens: Mapping[str, int], schema_text: SchemaText) -> None:
        self._tokens = tokens
        self._schema_text = schema_text
        marks = sorted(map(re.escape, tokens), key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(marks) or '(?!)'})")
        self.rules: dict[str, str] = {}

    def element(self, node: Json) -> Part:
        """One format."""
        kind = node.get("type") if isinstance(node, Mapping) else None
        _check_keys(node, kind)
        match kind:
            case "const_string":
                return self._spelled(_string(node, "value"))
            case "any_text":
                return self._letters(_text(_strings(node, "excludes")))
            case "regex":
                return self._letters(f"/{_ESCAPED.sub(_slash, ascii_classes(_string(node, 'pattern')))}/")
            case "json_schema":
                return self._json(node)
            case "sequence":
                return _row([self.element(each) for each in _list(node, "elements")])
            case "or":
                return self._either([self.element(each) for each in _list(node, "elements")])
            case "tag":
                return self._tag(node, _string(node, "begin"))
            case "triggered_tags":
                return self._triggered(node)
            case "tags_with_separator":
                return self._separated(node)
        return _repeated(self.element(node.get("content")), _SIGNS[str(kind)])

    # -- leaves ------------------------------------------------------------------------------------

    def _spelled(self, text: str) -> Part:
        """Tokens where the text names them, letters elsewhere."""
        parts = [part for part in self._marks.split(text) if part]
        spelled = [
            f"<[{self._tokens[part]}]>" if part in self._tokens else json.dumps(part) for part in parts
        ]
        if not parts:
            return _NOTHING
        return Part(" ".join(spelled), _TOKEN if parts[0] in self._tokens else _LETTERS)

    def _json(self, node: Mapping[str, Json]) -> Part:
        blanks = node.get("max_whitespace_cnt")
        if blanks is not None and (not isinstance(blanks, int) or blanks < 1):
            raise Unwritten
        part = SchemaPart(node.get("json_schema"), blanks, node.get("lenient") is True)
        return Part(self._rule(f"%json {self._schema_text(part)}"), _JSON)

    def _letters(self, body: str) -> Part:
        return Part(self.rules.setdefault(body, f"T{len(self.rules)}"), _LETTERS, empty=True, open=True)

    def _until(self, text: str, end: str) -> Part:
        """Text up to the first `end`, that included."""
        name = self._letters(f"{text} {json.dumps(end)}").text
        lazy = self.rules.setdefault(f"{name} ", f"l{len(self.rules)}[lazy]")
        return Part(lazy.partition("[")[0], _LETTERS)

    def _rule(self, body: str) -> str:
        return self.rules.setdefault(body, f"r{len(self.rules)}")

    # -- tags --------------------------------------------------------------------------------------

    def _either(self, parts: list[Part]) -> Part:
        return Part(
            self._rule(" | ".join(part.text for part in parts)),
            _one_lexer(frozenset().union(*(part.begins for part in parts))),
            any(part.empty for part in parts),
            any(part.open for part in parts),
        )

    def _tag(self, node: Json, begin: str) -> Part:
        """A tag whose beginning, as far as it has not been read, is `begin`."""
        _check_keys(node, "tag")
        content, end = node.get("content"), _string(node, "end")
        letters = self._marks.split(end)[0]
        if not letters or not isinstance(content, Mapping) or content.get("type") != "any_text":
            return _row([self._spelled(begin), self.element(content), self._spelled(end)])
        _check_keys(content, "any_text")
        others = [mark for mark in _strings(content, "excludes") if mark not in end]
        text = self._until(_text(others), letters)
        return _row([self._spelled(begin), text, self._spelled(end[len(letters) :])])

    def _triggered(self, node: Mapping[str, Json]) -> Part:
        """Text, and a tag wherever the trigger comes."""
        triggers, tags = _strings(node, "triggers"), _list(node, "tags")
        if len(triggers) != 1 or not all(_string(tag, "begin").startswith(triggers[0]) for tag in tags):
            raise Unwritten
        trigger, others = triggers[0], _strings(node, "excludes")
        rest = self._either([self._tag(tag, _string(tag, "begin")[len(trigger) :]) for tag in tags])
        text = self._letters(_text([*others, trigger]))
        if trigger in self._tokens:
            head = _row([text, self._spelled(trigger)])
        elif self._marks.search(trigger):
            raise Unwritten
        else:
            head = self._until(_text(others), trigger)
        least = node.get("at_least_one") is True
        call = _row([head, rest])
        if node.get("stop_after_first") is True:
            return call if least else self._either([text, call])
        # Not as a row: where the trigger is letters too, both begin alike and the trigger decides.
        return Part(f"({call.text}){'+' if least else '*'} {text.text}", _LETTERS, not least, open=True)

    def _separated(self, node: Mapping[str, Json]) -> Part:
        one = self._either([self._tag(tag, _string(tag, "begin")) for tag in _list(node, "tags")])
        listed = one
        if node.get("stop_after_first") is not True:
            more = _row([self._spelled(_string(node, "separator")), one])
            listed = _row([one, _repeated(more, "*")])
        return listed if node.get("at_least_one") is True else _repeated(listed, "?")


_SIGNS = {"optional": "?", "plus": "+", "star": "*"}


def _row(parts: list[Part]) -> Part:
    """One after the other. Raises `Unwritten` where two of them would be mixed up."""
    row = _NOTHING
    for part in reversed(parts):
        if part is _NOTHING:
            continue
        if part.open and not row.begins <= _TOKEN:
            raise Unwritten
        row = Part(
            part.text if row is _NOTHING else f"{part.text} {row.text}",
            _one_lexer(part.begins | row.begins) if part.empty else part.begins,
            part.empty and row.empty,
            row.open or (part.open and row.empty),
        )
    return row


def _repeated(part: Part, sign: str) -> Part:
    loops = sign != "?"
    # What follows is not known here: it may be letters.
    if part.begins & _JSON or part.empty or (part.open and loops and not part.begins <= _TOKEN):
        raise Unwritten
    return Part(f"({part.text}){sign}", part.begins, empty=sign != "+", open=part.open)


def _one_lexer(begins: frozenset[str]) -> frozenset[str]:
    if begins >= _LETTERS | _JSON:
        raise Unwritten
    return begins


def _text(excludes: Iterable[str]) -> str:
    """Any text in which none of these comes about."""
    marks = sorted(set(excludes))
    if not marks:
        return "/(?s:.*)/"
    first = marks[0][0]
    if all(mark.rfind(first) == 0 for mark in marks):
        return f"/{_beside(first, marks)}/"
    return f"/(?s:.*)/ & ~/(?s:.*)({'|'.join(map(literal, marks))})(?s:.*)/"


def _beside(first: str, marks: list[str]) -> str:
    """The same without a complement, for marks that have their `first` character in no other place: runs
    without it, and it with what leads away from every mark. Of such a text the library knows at once
    that it takes nearly all tokens, of a complement it does not: 1.4 ms less wherever a mark might
    have begun and has not."""
    rests = [mark[1:] for mark in marks]
    begun = sorted({rest[:at] for rest in rests for at in range(len(rest))})
    begun = [part for part in begun if not any(part.startswith(rest) for rest in rests)]
    away = []
    for part in begun:
        nexts = {rest[len(part)] for rest in rests if rest.startswith(part) and len(rest) > len(part)}
        away.append(literal(part) + _other({first, *nexts}))
    run = f"{_other({first})}*"
    return f"(?s:{run}({literal(first)}({'|'.join(map(literal, begun))}|({'|'.join(away)}){run}))*)"


def _other(signs: Iterable[str]) -> str:
    return "[^" + "".join(rf"\x{{{ord(sign):x}}}" for sign in sorted(signs)) + "]"


def _slash(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(found[0], found[0])


def _check_keys(node: Json, kind: Json) -> None:
    known = _KEYS.get(kind) if isinstance(kind, str) else None
    if known is None or not isinstance(node, Mapping) or set(node) - known - {"type"}:
        raise Unwritten


def _string(node: Json, key: str) -> str:
    found = node.get(key) if isinstance(node, Mapping) else None
    if not isinstance(found, str):
        raise Unwritten
    return found


def _list(node: Mapping[str, Json], key: str) -> list[Any]:
    found = node.get(key)
    if not isinstance(found, list) or not found:
        raise Unwritten
    return found


def _strings(node: Mapping[str, Json], key: str) -> list[str]:
    found = node.get(key, [])
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise Unwritten
    return found
