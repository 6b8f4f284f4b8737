"""Structural tags as Lark grammars of llguidance: text, control tokens and schemas in one grammar.

Literal text is split at the names of control tokens: one that is a token matches as that token only,
never as the same letters. Tags with other formats go to xgrammar (`gpu/grammar/xgrammar_backend.py`),
which is slower and takes fewer schemas.
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
    """Unsupported keywords are dropped."""


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
"""The supported formats, each with its supported keys."""

_ESCAPED = re.compile(r"\\.|/|\n", re.DOTALL)


class NotInLark(Exception):
    """The tag uses something that is not translated to Lark: it is compiled by xgrammar."""


def control_token_ids(table: TokenTable) -> dict[str, int]:
    """Ids of control tokens that a text may name, by name. Added tokens without a bracket in their name
    are left out: they are runs of blanks or words, which text matches through other tokens."""
    names = {table.raw[token].decode(errors="replace"): token for token in table.control}
    return {name: token for name, token in names.items() if any(sign in name for sign in "<[|｜")}


class Part(NamedTuple):
    """An expression, and what its neighbours in a sequence have to know.

    Letters and JSON are read by two lexers: where both may begin, the library follows one of them and
    drops the other. Free text without an end of its own takes all letters that follow.
    """

    text: str
    begins: frozenset[str]
    """The kinds that it may begin with, of "token", "letters", "json"."""
    empty: bool = False
    """May be nothing."""
    open: bool = False
    """May end with a text that letters only make longer."""


_TOKEN, _LETTERS, _JSON = frozenset(("token",)), frozenset(("letters",)), frozenset(("json",))
_NOTHING = Part('""', frozenset(), empty=True)


def lark_of(tag: Json, tokens: Mapping[str, int], schema_text: SchemaText) -> str:
    """A structural tag as Lark. `tokens` are the ids of control tokens by their names. Raises
    `NotInLark`, and `Refused` for a schema that cannot be honoured."""
    writer = _Writer(tokens, schema_text)
    start = writer.element(tag.get("format"))
    lines = [f"start: {start.text}", *(f"{name}: {body}" for body, name in writer.rules.items())]
    return "\n".join(lines)


class _Writer:
    """The rules of one grammar, from body to name: equal bodies share a rule. Owner: one compile."""

    __slots__ = ("_marks", "_schema_text", "_tokens", "rules")

    def __init__(self, tokens: Mapping[str, int], schema_text: SchemaText) -> None:
        self._tokens = tokens
        self._schema_text = schema_text
        marks = sorted(map(re.escape, tokens), key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(marks) or '(?!)'})")
        self.rules: dict[str, str] = {}

    def element(self, node: Json) -> Part:
        """The part for one format."""
        kind = node.get("type") if isinstance(node, Mapping) else None
        _check_keys(node, kind)
        match kind:
            case "const_string":
                return self._literal_text(_string(node, "value"))
            case "any_text":
                return self._text_rule(_text_excluding(_strings(node, "excludes")))
            case "regex":
                pattern = ascii_classes(_string(node, "pattern"))
                return self._text_rule(f"/{_ESCAPED.sub(_escape_slash, pattern)}/")
            case "json_schema":
                return self._json(node)
            case "sequence":
                return _sequence([self.element(each) for each in _list(node, "elements")])
            case "or":
                return self._alternatives([self.element(each) for each in _list(node, "elements")])
            case "tag":
                return self._tag(node, _string(node, "begin"))
            case "triggered_tags":
                return self._triggered(node)
            case "tags_with_separator":
                return self._separated(node)
        return _repeated(self.element(node.get("content")), _SIGNS[str(kind)])

    # -- leaves ------------------------------------------------------------------------------------

    def _literal_text(self, text: str) -> Part:
        """Control tokens where the text names them, letters elsewhere."""
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
            raise NotInLark
        part = SchemaPart(node.get("json_schema"), blanks, node.get("lenient") is True)
        return Part(self._rule(f"%json {self._schema_text(part)}"), _JSON)

    def _text_rule(self, body: str) -> Part:
        return Part(self.rules.setdefault(body, f"T{len(self.rules)}"), _LETTERS, empty=True, open=True)

    def _text_up_to(self, text: str, end: str) -> Part:
        """Text up to the first `end`, that included."""
        name = self._text_rule(f"{text} {json.dumps(end)}").text
        lazy = self.rules.setdefault(f"{name} ", f"l{len(self.rules)}[lazy]")
        return Part(lazy.partition("[")[0], _LETTERS)

    def _rule(self, body: str) -> str:
        return self.rules.setdefault(body, f"r{len(self.rules)}")

    # -- tags --------------------------------------------------------------------------------------

    def _alternatives(self, parts: list[Part]) -> Part:
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
            return _sequence([self._literal_text(begin), self.element(content), self._literal_text(end)])
        _check_keys(content, "any_text")
        others = [mark for mark in _strings(content, "excludes") if mark not in end]
        text = self._text_up_to(_text_excluding(others), letters)
        return _sequence([self._literal_text(begin), text, self._literal_text(end[len(letters) :])])

    def _triggered(self, node: Mapping[str, Json]) -> Part:
        """Text, and a tag wherever the trigger comes."""
        triggers, tags = _strings(node, "triggers"), _list(node, "tags")
        if len(triggers) != 1 or not all(_string(tag, "begin").startswith(triggers[0]) for tag in tags):
            raise NotInLark
        trigger, others = triggers[0], _strings(node, "excludes")
        rest = self._alternatives([self._tag(tag, _string(tag, "begin")[len(trigger) :]) for tag in tags])
        text = self._text_rule(_text_excluding([*others, trigger]))
        if trigger in self._tokens:
            head = _sequence([text, self._literal_text(trigger)])
        elif self._marks.search(trigger):
            raise NotInLark
        else:
            head = self._text_up_to(_text_excluding(others), trigger)
        least = node.get("at_least_one") is True
        call = _sequence([head, rest])
        if node.get("stop_after_first") is True:
            return call if least else self._alternatives([text, call])
        # Not as a row: where the trigger is letters too, both begin alike and the trigger decides.
        return Part(f"({call.text}){'+' if least else '*'} {text.text}", _LETTERS, not least, open=True)

    def _separated(self, node: Mapping[str, Json]) -> Part:
        one = self._alternatives([self._tag(tag, _string(tag, "begin")) for tag in _list(node, "tags")])
        listed = one
        if node.get("stop_after_first") is not True:
            more = _sequence([self._literal_text(_string(node, "separator")), one])
            listed = _sequence([one, _repeated(more, "*")])
        return listed if node.get("at_least_one") is True else _repeated(listed, "?")


_SIGNS = {"optional": "?", "plus": "+", "star": "*"}


def _sequence(parts: list[Part]) -> Part:
    """Parts in sequence. Raises `NotInLark` where the lexers could not tell two of them apart."""
    row = _NOTHING
    for part in reversed(parts):
        if part is _NOTHING:
            continue
        if part.open and not row.begins <= _TOKEN:
            raise NotInLark
        row = Part(
            part.text if row is _NOTHING else f"{part.text} {row.text}",
            _one_lexer(part.begins | row.begins) if part.empty else part.begins,
            part.empty and row.empty,
            row.open or (part.open and row.empty),
        )
    return row


def _repeated(part: Part, sign: str) -> Part:
    loops = sign != "?"
    # What follows the repetition is unknown here and may be letters.
    if part.begins & _JSON or part.empty or (part.open and loops and not part.begins <= _TOKEN):
        raise NotInLark
    return Part(f"({part.text}){sign}", part.begins, empty=sign != "+", open=part.open)


def _one_lexer(begins: frozenset[str]) -> frozenset[str]:
    if begins >= _LETTERS | _JSON:
        raise NotInLark
    return begins


def _text_excluding(excludes: Iterable[str]) -> str:
    """Any text that contains none of these."""
    marks = sorted(set(excludes))
    if not marks:
        return "/(?s:.*)/"
    first = marks[0][0]
    if all(mark.rfind(first) == 0 for mark in marks):
        return f"/{_text_without_complement(first, marks)}/"
    return f"/(?s:.*)/ & ~/(?s:.*)({'|'.join(map(literal, marks))})(?s:.*)/"


def _text_without_complement(first: str, marks: list[str]) -> str:
    """Any text that contains none of `marks`, written without a complement, for marks whose `first` character
    occurs nowhere else in them: runs without it, and it followed by what no mark continues with. The library
    sees at once that such a text takes nearly all tokens, which it does not for a complement: 1.4 ms less
    wherever a mark might have begun and has not."""
    rests = [mark[1:] for mark in marks]
    begun = sorted({rest[:at] for rest in rests for at in range(len(rest))})
    begun = [part for part in begun if not any(part.startswith(rest) for rest in rests)]
    away = []
    for part in begun:
        nexts = {rest[len(part)] for rest in rests if rest.startswith(part) and len(rest) > len(part)}
        away.append(literal(part) + _any_char_except({first, *nexts}))
    run = f"{_any_char_except({first})}*"
    return f"(?s:{run}({literal(first)}({'|'.join(map(literal, begun))}|({'|'.join(away)}){run}))*)"


def _any_char_except(signs: Iterable[str]) -> str:
    return "[^" + "".join(rf"\x{{{ord(sign):x}}}" for sign in sorted(signs)) + "]"


def _escape_slash(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(found[0], found[0])


def _check_keys(node: Json, kind: Json) -> None:
    known = _KEYS.get(kind) if isinstance(kind, str) else None
    if known is None or not isinstance(node, Mapping) or set(node) - known - {"type"}:
        raise NotInLark


def _string(node: Json, key: str) -> str:
    found = node.get(key) if isinstance(node, Mapping) else None
    if not isinstance(found, str):
        raise NotInLark
    return found


def _list(node: Mapping[str, Json], key: str) -> list[Any]:
    found = node.get(key)
    if not isinstance(found, list) or not found:
        raise NotInLark
    return found


def _strings(node: Mapping[str, Json], key: str) -> list[str]:
    found = node.get(key, [])
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise NotInLark
    return found
