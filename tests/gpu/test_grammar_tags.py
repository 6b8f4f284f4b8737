"""Structural tags: which library carries them out, and that both let the same texts through."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from app.helper.process import HelperProcess
from core.errors import RequestError
from core.grammar import BROKEN, GrammarSpec, TokenRules
from gpu.grammar import Compiler
from gpu.grammar.llguidance_backend import LlguidanceBackend
from gpu.grammar.matchers import Matchers
from gpu.grammar.schema import Refused
from gpu.grammar.stepper import Grammar
from gpu.grammar.structural_tag_lark import NotInLark, lark_of
from gpu.grammar.xgrammar_backend import XgrammarBackend
from gpu.sample.rows import RowTokens
from tests.rigs.grammars import END, THINK, TOOL, TURN, UNTHINK, accepts, allowed, decode, new_slot, table

TABLE = table()
LLGUIDANCE, XGRAMMAR = LlguidanceBackend(TABLE, 1), XgrammarBackend(TABLE, 1)
MARKS = {"<think>": THINK, "</think>": UNTHINK, "<tool>": TOOL}
DATED = {"type": "object", "properties": {"d": {"type": "string", "format": "date"}}, "required": ["d"]}
PLAIN = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
THOUGHT = {
    "type": "tag",
    "begin": "<think>",
    "content": {"type": "any_text", "excludes": [*MARKS]},
    "end": "</think>",
}


def js(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 2}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def row(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Any) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": f"<tool>{name}(", "content": js(PLAIN), "end": ")", **more}


def ids(text: str) -> list[int]:
    """`text` as tokens: marks whole, the rest in bytes."""
    out: list[int] = []
    while text:
        mark = next((mark for mark in MARKS if text.startswith(mark)), "")
        out += [MARKS[mark]] if mark else list(text[0].encode())
        text = text[len(mark) or 1 :]
    return out


def text_of(form: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


def both(form: Any) -> list[Grammar]:
    source = LLGUIDANCE.tag_source(text_of(form)).text
    return [LLGUIDANCE.compile("lark", source), XGRAMMAR.compile("structural_tag", text_of(form))]


TOOLS = {"tags": [tool("f"), tool("fg")], "at_least_one": True}
FORMS: dict[str, tuple[Any, list[str], list[str]]] = {
    "thinking, then an answer or calls": (
        row(
            {"type": "optional", "content": THOUGHT},
            either(js(PLAIN), {"type": "tags_with_separator", "separator": "\n", **TOOLS}),
        ),
        [
            '{"a":1}',
            '<think>so < 1 <b> </th <</think>{"a": 1}',
            '<think></think><tool>f({"a":1})',
            '<tool>f({"a":1})\n<tool>fg({"a":2})',
        ],
        [
            '<think>so{"a":1}',
            '<think>a<think></think>{"a":1}',
            '<tool>f({"a":"x"})',
            '<tool>g({"a":1})',
            '{"a":1}<tool>f({"a":1})',
            "so",
            "",
        ],
    ),
    "calls in a text": (
        {
            "type": "triggered_tags",
            "triggers": ["<tool>"],
            "tags": [tool("f"), tool("fg")],
            "at_least_one": False,
        },
        ["", "Well <to> said.", 'So. <tool>f({"a":1}) And <tool>fg({"a":1})', '<tool>f({"a":1})'],
        ["<tool>", '<tool>f({"a":"x"})', '<tool>h({"a":1})'],
    ),
    "one call in a text": (
        {"type": "triggered_tags", "triggers": ["<tool>"], "tags": [tool("f")], "stop_after_first": True},
        ["Well.", 'So. <tool>f({"a":1})'],
        ['<tool>f({"a":1}) more', '<tool>f({"a":1})<tool>f({"a":1})'],
    ),
    "a trigger of letters": (
        {
            "type": "triggered_tags",
            "triggers": ["<fn"],
            "tags": [{"type": "tag", "begin": "<fn=x>", "content": js(PLAIN), "end": "</fn>"}],
        },
        ["a < b <f", '<fn=x>{"a":1}</fn>', 'a <<fn=x>{"a":1}</fn> b <fn=x>{"a":1}</fn>'],
        ["<fn", "<fn>", '<fn=x>{"a":1}', '<fn=y>{"a":1}</fn>'],
    ),
    "text between letters": (
        row({"type": "tag", "begin": "<p>", "content": {"type": "any_text"}, "end": "</p>"}, const("\nend")),
        ["<p></p>\nend", "<p>a </p <p></p>\nend"],
        ["<p>a\nend", "<p>a</p>b</p>\nend", "<p>a</p>"],
    ),
    "a pattern and choices": (
        row(
            {"type": "regex", "pattern": "[a/b]+\\.?"}, const("<tool>"), either(const("yes"), const("yesno"))
        ),
        ["a/b.<tool>yes", "b<tool>yesno"],
        [".<tool>yes", "a<tool>no", "a<tool>"],
    ),
    "one or more": (
        row({"type": "plus", "content": const("ab")}, {"type": "star", "content": const("<tool>")}),
        ["ab", "abab<tool><tool>"],
        ["", "a", "<tool>"],
    ),
    "two calls at most one of which": (
        {"type": "tags_with_separator", "separator": ",", "tags": [tool("f")], "stop_after_first": True},
        ["", '<tool>f({"a":1})'],
        ['<tool>f({"a":1}),<tool>f({"a":1})'],
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_both_libraries_let_the_same_texts_through(name: str) -> None:
    form, right, wrong = FORMS[name]
    for grammar in both(form):
        for text in right:
            assert accepts(grammar, ids(text)), text
        for text in wrong:
            assert not accepts(grammar, ids(text)), text


def test_a_mark_is_its_token_and_never_its_letters() -> None:
    grammar = both(row(THOUGHT, js(PLAIN)))[0]
    assert allowed(grammar) == {THINK}
    spelled = [THINK, *b"</think"]
    assert UNTHINK in allowed(grammar, spelled) and ord(">") not in allowed(grammar, spelled)
    assert not {THINK, TOOL, END, TURN} & allowed(grammar, [THINK, *b"so"])


def test_blanks_are_as_many_as_the_tag_says() -> None:
    for grammar in both(row(THOUGHT, js(PLAIN))):
        assert accepts(grammar, ids('<think></think>{\n "a":1}'))
        assert not accepts(grammar, ids('<think></think>{\n  "a":1}'))


MIXED = {
    "JSON or letters": either(js(PLAIN), const("none")),
    "text before JSON": row({"type": "any_text"}, js(PLAIN)),
    "text before letters": row({"type": "regex", "pattern": "a*"}, const("ab")),
    "JSON that may be left out": row({"type": "optional", "content": js(PLAIN)}, const("x")),
    "two triggers": {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": [tool("f")]},
    "another trigger": {"type": "triggered_tags", "triggers": ["<a"], "tags": [tool("f")]},
    "a grammar": {"type": "grammar", "grammar": 'root ::= "x"'},
    "an unknown key": const("x") | {"more": 1},
    "no blanks": js(PLAIN) | {"max_whitespace_cnt": 0},
    "half a tag": {"type": "tag", "begin": "x", "content": const("x")},
    "nothing": either(),
    "no format": [],
}


@pytest.mark.parametrize("name", MIXED)
def test_what_llguidance_would_mix_up_is_not_written(name: str) -> None:
    with pytest.raises(NotInLark):
        lark_of({"format": MIXED[name]}, MARKS, lambda part: json.dumps(part.schema))


@pytest.fixture
async def compiler() -> AsyncIterator[Compiler]:
    compiler = Compiler(TABLE, HelperProcess())
    yield compiler
    compiler.close()


async def made(compiler: Compiler, form: Any) -> Grammar:
    grammar = await compiler.compile(GrammarSpec("structural_tag", text_of(form)))
    assert isinstance(grammar, Grammar)
    return grammar


async def test_patterns_lengths_and_dates_hold_behind_a_thinking(compiler: Compiler) -> None:
    properties = {
        "p": {"type": "string", "pattern": "^[ab]+$"},
        "l": {"type": "string", "maxLength": 2},
        "d": {"type": ["string", "null"], "format": "date"},
    }
    schema = {"type": "object", "properties": properties, "required": ["p", "l", "d"]}
    grammar = await made(compiler, row(THOUGHT, js(schema)))
    assert accepts(grammar, ids('<think>x</think>{"p":"ab","l":"é\\n","d":"2024-02-29"}'))
    for wrong in (
        '{"p":"c","l":"","d":null}',
        '{"p":"a","l":"abc","d":null}',
        '{"p":"a","l":"","d":"30 May"}',
    ):
        assert not accepts(grammar, ids(f"<think>x</think>{wrong}"))


async def test_what_only_xgrammar_takes_is_still_taken(compiler: Compiler) -> None:
    mixed = await made(compiler, either(js(PLAIN), const("none")))
    assert accepts(mixed, "none") and accepts(mixed, '{"a":1}')
    kinds = [
        {"type": "string"},
        {"type": "integer"},
        {"type": "object", "properties": {"a": {"type": "null"}}},
    ]
    disjoint = await made(compiler, row(THOUGHT, js({"oneOf": kinds})))
    assert accepts(disjoint, ids("<think></think>5")) and not accepts(disjoint, ids("<think></think>[]"))


async def test_types_in_lists_do_not_trip_the_look_at_a_tag(compiler: Compiler) -> None:
    """Such types work both when llguidance writes the grammar and when it is left to xgrammar."""
    schema = {"type": "object", "properties": {"a": {"type": ["string", "null"]}}, "required": ["a"]}
    for form in (row(THOUGHT, js(schema)), either(js(schema), const("none"))):
        assert await made(compiler, form)


async def test_a_refusal_behind_a_thinking_names_keyword_and_place(compiler: Compiler) -> None:
    bad = {"type": "object", "properties": {"a": {"not": {}}}}
    with pytest.raises(RequestError, match="'not' at #/properties/a"):
        await made(compiler, row(THOUGHT, js(bad)))
    with pytest.raises(RequestError, match="false"):
        await made(compiler, row(THOUGHT, js(False)))


# -- matchers that break ---------------------------------------------------------------------------

GROWS = {"type": "string", "minLength": 1, "maxLength": 5000, "pattern": r"^$|(^(?:\S+\s+){0,99}\S+$)"}
"""A real schema whose lexer passes the limit of expressions when the string begins."""


async def broken(compiler: Compiler) -> Grammar:
    schema = {"type": "object", "properties": {"q": GROWS}, "required": ["q"], "additionalProperties": False}
    grammar = await compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))
    assert isinstance(grammar, Grammar)
    return grammar


def run(grammar: Any, tokens: list[int]) -> dict[int, str]:
    """Failures of a slot that takes `tokens`, whatever its masks say, up to the first."""
    matchers = Matchers()
    matchers.apply([new_slot(1, grammar)])
    for token in tokens:
        masks = matchers.fill(decode(1))
        assert masks is not None
        if failed := matchers.accept(masks, RowTokens(np.array([token], np.int32))):
            return failed
    return {}


async def test_half_an_answer_of_a_broken_matcher_does_not_end_well(compiler: Compiler) -> None:
    """The library's mask allows an end only then, and its matcher takes it."""
    failed = run(await broken(compiler), [*b'{"q":"W', END])
    assert failed[0].startswith(f"{BROKEN}: ") and "too many expressions" in failed[0]


@pytest.mark.parametrize("ruled", [False, True])
async def test_a_grammar_that_broke_is_compiled_anew(compiler: Compiler, ruled: bool) -> None:
    """The grammar's matchers share a lexer, which stays broken: the next request would fail at its first
    token."""
    first = await broken(compiler)
    assert await broken(compiler) is first
    before = compiler.cached_bytes
    rules = TokenRules(banned=((5,),))
    run(await compiler.restrict(first, rules, "bad_words") if ruled else first, [*b'{"q":"W', END])
    second = await broken(compiler)
    assert second is not first and compiler.cached_bytes == before
    assert not run(second, list(b'{"q'))


def test_rows_of_a_step_are_written_over_by_the_next() -> None:
    """The bits of a slot that failed before its turn are empty, whatever stood there."""
    grammar = LLGUIDANCE.compile("regex", "a+")
    matchers = Matchers()
    matchers.apply([new_slot(1, grammar), new_slot(2, grammar)])
    masks = matchers.fill(decode(1, 2))
    assert masks is not None and masks.bits.any(axis=1).all()
    matchers.apply([new_slot(1, grammar, list(b"b"))])
    masks = matchers.fill(decode(1, 2))
    assert masks is not None and np.flatnonzero(masks.bits.any(axis=1)).tolist() == [1]
    assert list(matchers.accept(masks, RowTokens(np.array([ord("a"), ord("a")], np.int32)))) == [0]


def test_a_schema_in_a_tag_is_refused_before_it_is_written() -> None:
    with pytest.raises(Refused, match="if"):
        LLGUIDANCE.tag_source(text_of(js({"if": {}})))
    assert DATED["type"] == "object" and "pattern" in LLGUIDANCE.tag_source(text_of(js(DATED))).text
