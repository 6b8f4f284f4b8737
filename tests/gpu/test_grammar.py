"""Grammars: which compile, which are refused and with which words, and which tokens they allow."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from app.helper.process import HelperProcess
from core.errors import RequestError
from core.grammar import GrammarKind, GrammarSpec
from gpu.grammar import Compiler
from gpu.grammar.schema import Refused
from gpu.grammar.stepper import Grammar
from gpu.grammar.xgrammar_backend import check_tag
from gpu.grammar.xgrammar_schema import check_exact
from tests.rigs.grammars import (
    END,
    THINK,
    TOKENIZER,
    TOOL,
    TURN,
    UNTHINK,
    WIDTH,
    accepts,
    allowed,
    draw,
    table,
)

MARKS = {END, TURN, THINK, UNTHINK, TOOL}


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    made = Compiler(table(), HelperProcess())
    yield made
    made.close()


async def compiled(compiler: Compiler, kind: GrammarKind, value: Any) -> Grammar:
    text = value if isinstance(value, str) else json.dumps(value)
    grammar = await compiler.compile(GrammarSpec(kind, text, "field"))
    assert isinstance(grammar, Grammar)
    return grammar


async def refusal(compiler: Compiler, kind: GrammarKind, value: Any) -> str:
    with pytest.raises(RequestError) as caught:
        await compiled(compiler, kind, value)
    assert caught.value.param == "field"
    return caught.value.message


def tag(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


CLOSED = {"additionalProperties": False}
SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], **CLOSED},
    {"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 17}, "maxItems": 3},
    {"enum": ["a", 1, None, {"x": [True]}]},
    {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 4}]},
    {"type": "string", "pattern": "^a[0-9]{2,3}$"},
    {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}}, "$ref": "#/$defs/t"},
    {"type": "object", "properties": {"not": {"type": "boolean"}}, "required": ["not"], **CLOSED},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
async def test_whatever_is_drawn_from_a_schema_is_valid(compiler: Compiler, schema: Any) -> None:
    grammar = await compiled(compiler, "json_schema", schema)
    drawn = [out for seed in range(30) if (out := draw(grammar, seed)) is not None]
    assert len(drawn) > 10
    for out in drawn:
        jsonschema.validate(json.loads(TOKENIZER.decode(out, skip_special=False)), schema)


async def test_an_object_is_an_object(compiler: Compiler) -> None:
    grammar = await compiled(compiler, "json_object", "")
    assert accepts(grammar, '{"a": [1, {"b": null}], "c": "x"}')
    assert not accepts(grammar, "[1]")
    assert not accepts(grammar, '{"a": 1')


async def test_an_escaped_key_is_no_way_around_its_schema(compiler: Compiler) -> None:
    """Whoever parses it reads "\\u0061" as "a", which has to be a string."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": True}
    for grammar in (
        await compiled(compiler, "json_schema", schema),
        await compiled(compiler, "structural_tag", tag({"type": "json_schema", "json_schema": schema})),
    ):
        assert accepts(grammar, '{"a":"x"}')
        assert not accepts(grammar, '{"\\u0061":5}')
        assert not accepts(grammar, '{"a":"x","\\u0061":5}')
        assert not accepts(grammar, '{"a":"x","a":5}')


async def test_blanks_between_tokens_are_bounded(compiler: Compiler) -> None:
    """A weak model that may write them for ever does."""
    schema = {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}
    content = {"type": "json_schema", "json_schema": schema}
    grammars = {
        "llguidance": await compiled(compiler, "json_schema", schema),
        "llguidance, in a tag": await compiled(compiler, "structural_tag", tag(content)),
        "xgrammar": await compiled(
            compiler, "structural_tag", tag({"type": "repeat", "min": 1, "max": 1, "content": content})
        ),
    }
    for name, grammar in grammars.items():
        for blank in (" ", "\n", "\t"):
            long = blank * 25
            assert accepts(grammar, f'{{{blank}"a":{blank}[{blank}]{blank}}}'), name
            for text in (f'{{{long}"a":[]}}', f'{{"a":{long}[]}}', f'{{"a":[{long}]}}', f'{{"a":[]{long}}}'):
                assert not accepts(grammar, text), name
    for indent in (2, 4):
        pretty = json.dumps({"a": [{"b": [1, {"c": "d"}]}, 2]}, indent=indent)
        assert accepts(grammars["llguidance"], pretty)
        assert accepts(grammars["llguidance, in a tag"], pretty)


async def test_escapes_that_text_needs_are_there(compiler: Compiler) -> None:
    grammar = await compiled(compiler, "json_schema", {"type": "string"})
    assert accepts(grammar, json.dumps('a "quote", a \\ and a\nline'))
    assert not accepts(grammar, '"a\nline"')


CONTROL = "a\x1bb"
WRITTEN = '"a\\u001bb"'


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"enum": [CONTROL]}, WRITTEN, '"ab"'),
        ({"const": "\x00\x7f"}, '"\\u0000\\u007f"', '""'),
        ({"const": [{"k": CONTROL}]}, f'[{{"k":{WRITTEN}}}]', '[{"k":"ab"}]'),
        ({"type": "string", "pattern": "^a\x1bb$"}, WRITTEN, '"ab"'),
        ({"type": "string", "pattern": r"^a\x1bb$"}, WRITTEN, '"ab"'),
        ({"type": "string", "pattern": r"^a\u001bb$"}, WRITTEN, '"ab"'),
        ({"type": "string", "pattern": "^a\\u001bb$", "minLength": 3}, WRITTEN, '"ab"'),
        (
            {"type": "object", "properties": {CONTROL: {"const": CONTROL}}, "required": [CONTROL], **CLOSED},
            f"{{{WRITTEN}:{WRITTEN}}}",
            f'{{"ab":{WRITTEN}}}',
        ),
        (
            {"patternProperties": {f"^{CONTROL}$": {"type": "null"}}, **CLOSED},
            f"{{{WRITTEN}:null}}",
            '{"ab":null}',
        ),
    ],
    ids=repr,
)
async def test_control_characters_are_written_not_dropped(
    compiler: Compiler, schema: Any, right: str, wrong: str
) -> None:
    content = {"type": "json_schema", "json_schema": schema}
    for grammar in (
        await compiled(compiler, "json_schema", schema),
        await compiled(
            compiler, "structural_tag", tag({"type": "tag", "begin": "", "content": content, "end": ""})
        ),
    ):
        assert accepts(grammar, right)
        assert not accepts(grammar, wrong)


async def test_escapes_for_control_characters_are_no_way_around_a_key(compiler: Compiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"const": "\x1b"}}}
    for root in (schema, {"allOf": [schema, {"properties": {"c": {"type": "integer"}}}]}):
        grammar = await compiled(compiler, "json_schema", root)
        assert accepts(grammar, '{"a":"x","b":"\\u001b","d":5}')
        assert accepts(grammar, '{"d":5}')
        for text in ('{"\\u0061":5}', '{"a":"x","\\u0061":5}', '{"a":"x","a":5}', '{"a":5}', '{"b":""}'):
            assert not accepts(grammar, text)


async def test_further_keys_with_a_schema_beside_control_characters_are_refused(compiler: Compiler) -> None:
    schema = {"properties": {"a": {"const": "\x1b"}}, "additionalProperties": {"type": "integer"}}
    assert "'additionalProperties' at # must be false" in await refusal(compiler, "json_schema", schema)


@pytest.mark.parametrize("wrapped", [False, True], ids=["regex", "structural tag"])
async def test_classes_of_a_regex_are_ascii(compiler: Compiler, wrapped: bool) -> None:
    async def made(pattern: str) -> Grammar:
        if wrapped:
            return await compiled(compiler, "structural_tag", tag({"type": "regex", "pattern": pattern}))
        return await compiled(compiler, "regex", pattern)

    grammar = await made(r"\d[\d]\w\s")
    assert accepts(grammar, "12a\n")
    for text in ("\u06612a ", "1\u0662a ", "12\u00e9 ", "12a\u00a0"):
        assert not accepts(grammar, text)
    grammar = await made(r"\D[^\w]\S[\w-]\\d")
    assert accepts(grammar, "\u0661\u00e9\u00a0-\\d")
    assert not accepts(grammar, "1\u00e9\u00a0-\\d")


async def test_digits_in_a_schema_are_ascii(compiler: Compiler) -> None:
    grammar = await compiled(compiler, "json_schema", {"type": "string", "pattern": r"^\d\w$"})
    assert accepts(grammar, '"1a"')
    assert not accepts(grammar, '"\u0661a"')


async def test_regexes_match_the_whole_answer(compiler: Compiler) -> None:
    grammar = await compiled(compiler, "regex", r"[a-c]+@x\.(com|org)")
    assert accepts(grammar, "abc@x.com")
    assert not accepts(grammar, "abc@x.net")
    assert not accepts(grammar, "abc@x.com!")
    drawn = [out for seed in range(20) if (out := draw(grammar, seed)) is not None]
    assert drawn
    assert all(re.fullmatch(r"[a-c]+@x\.(com|org)", TOKENIZER.decode(out)) for out in drawn)
    assert accepts(await compiled(compiler, "regex", "^abc$"), "abc")


async def test_choices_are_taken_literally(compiler: Compiler) -> None:
    listed = ["a.b", "c|d", '"q"', "é😀", "x-y&z~#", "a/b", "^$", "two\nlines", "\\n"]
    grammar = await compiled(compiler, "choice", listed)
    assert all(accepts(grammar, one) for one in listed)
    assert not accepts(grammar, "axb")
    assert not accepts(grammar, "a.b" + "c|d")


@pytest.mark.parametrize(
    "source", ['root ::= "a" root "b" | "c"', 'start: "a" start "b" | "c"'], ids=["gbnf", "lark"]
)
async def test_grammars_recurse(compiler: Compiler, source: str) -> None:
    grammar = await compiled(compiler, "ebnf", source)
    assert accepts(grammar, "aacbb")
    assert not accepts(grammar, "aacb")


async def test_grammars_of_llama_cpp(compiler: Compiler) -> None:
    """GBNF as its own examples write it: comments, names with dashes, classes, repetitions, several lines."""
    source = """# a list of sums
root ::= (item "\\n"){1,2}
item ::= "- " num (
    ws [-+] ws num
  )* |
  "* " some-text
num  ::= [0-9]{1,3}
some-text ::= [^\\n0-9]+
ws   ::= [ \\t]?
"""
    grammar = await compiled(compiler, "ebnf", source)
    for text in ("- 12\n", "- 1 + 2-3\n* ab c\n"):
        assert accepts(grammar, text), text
    for text in ("- 1234\n", "- 1", "* a1\n", "- 1\n- 2\n- 3\n"):
        assert not accepts(grammar, text), text


async def test_marks_never_match_inside_strings(compiler: Compiler) -> None:
    """Neither library may write a control token where a client expects text."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], **CLOSED}
    for grammar in (
        await compiled(compiler, "json_schema", schema),
        await compiled(compiler, "structural_tag", tag({"type": "json_schema", "json_schema": schema})),
    ):
        inside = allowed(grammar, list(b'{"a":"x'))
        assert ord("<") in inside
        assert not inside & MARKS
        assert not inside & set(range(END, WIDTH)), "ids beyond the vocabulary are padding"
        assert accepts(grammar, '{"a":"<tool>"}'), "the same characters as text are text"


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        ("choice", ["<tool>"], "<tool>"),
        ("choice", ["a<tool>b"], "a<tool>b"),
        ("regex", r"a<tool>\+", "a<tool>+"),
        ("json_schema", {"const": "<tool>"}, '"<tool>"'),
    ],
)
async def test_the_name_of_a_mark_may_be_the_only_answer(
    compiler: Compiler, kind: GrammarKind, source: Any, text: str
) -> None:
    grammar = await compiled(compiler, kind, source)
    for i in range(len(text)):
        assert ord(text[i]) in allowed(grammar, list(text[:i].encode()))
    assert accepts(grammar, text)


async def test_bounds_that_llguidance_tightens_pass(compiler: Compiler) -> None:
    grammar = await compiled(compiler, "json_schema", {"type": "integer", "minimum": 0, "maximum": 2**64 - 1})
    assert accepts(grammar, "1790000000000000001")
    assert not accepts(grammar, "-1")


async def test_a_tag_may_use_the_marks_that_it_spells(compiler: Compiler) -> None:
    think = {"type": "any_text", "excludes": ["<think>", "</think>"]}
    form = {"type": "tag", "begin": "<think>", "content": think, "end": "</think>"}
    grammar = await compiled(compiler, "structural_tag", tag(form))
    assert allowed(grammar) & MARKS == {THINK}
    assert allowed(grammar, [THINK, ord("a")]) & MARKS == {UNTHINK}
    assert accepts(grammar, [THINK, ord("a"), UNTHINK])


async def test_every_end_may_follow_a_complete_answer_and_no_other(compiler: Compiler) -> None:
    grammar = await compiled(compiler, "choice", ["ab"])
    assert allowed(grammar, list(b"ab")) == {END, TURN}
    assert not allowed(grammar, list(b"a")) & {END, TURN}


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"not": {}}, "'not'"),
        ({"type": "object", "properties": {"a": {"if": {}, "then": {}}}}, "'if' at #/properties/a"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"anyOf": [{"type": "array", "contains": {}}]}, "'contains' at #/anyOf/0"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"dependencies": {}}, "dependencies"),
        ({"propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"$dynamicRef": "#x"}, "$dynamicRef"),
        ({"x-guidance": {"lenient": True}, "type": "object"}, "x-guidance"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"allOf": [{"$id": "http://a/b", "$ref": "c"}]}, "$id"),
        ({"type": "string", "format": "topic"}, "format: topic"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "pattern": "a(?=b)"}, "look-ahead"),
        ({"$ref": "http://example.com/schema"}, "http://example.com/schema"),
        ({"enum": ["a", 1790000000000000001]}, "more than 53 bits"),
        ({"properties": {"a": {"const": [-(2**53) - 1]}}}, "'const'"),
        ({"type": "integer", "minimum": 10**19, "maximum": 10**19 + 5}, "'minimum'"),
        ({"type": "integer", "exclusiveMaximum": 2**60}, "'exclusiveMaximum'"),
        ({"type": "strnig"}, "strnig"),
        ({"type": "string", "maxLength": -1}, "maxLength"),
        ({"type": "string", "enum": [1]}, "nsatisfiable"),
        ({"$ref": "#"}, "nothing can follow"),
        (False, "false"),
        ([], "object"),
        ("{", "JSON"),
        ("", "empty"),
        ("\ud800", "surrogate"),
        ('{"items":' * 3000 + "{}" + "}" * 3000, "nested"),
        (json.dumps({"description": "x" * 600_000}), "bytes"),
        (json.dumps({"enum": [0] * 150_000}), "values"),
    ],
)
async def test_what_a_schema_asks_in_vain_is_named(compiler: Compiler, schema: Any, word: str) -> None:
    assert word in await refusal(compiler, "json_schema", schema)


async def test_keywords_that_ask_for_nothing_pass(compiler: Compiler) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": False, "title": "not"}
    assert accepts(await compiled(compiler, "json_schema", schema), "[1,1]")


LONG = "a." * 126 + "ab"
"""A host name of 254 characters."""
FORMATS = [
    (
        "date",
        ["2024-02-29", "2000-02-29", "1999-12-31"],
        ["2021-02-29", "2100-02-29", "1999-04-31", "1999-1-1"],
    ),
    ("time", ["08:30:06Z", "23:59:59.123+05:30"], ["23:59:60+01:00", "24:00:00Z", "08:30:06"]),
    ("date-time", ["1963-06-19T08:30:06.28Z"], ["1990-02-31T15:59:59Z", "1998-12-31T23:58:60Z"]),
    ("json-pointer", ["", "/a/b~0~1"], ["/a~", "a"]),
    ("relative-json-pointer", ["0#", "120/a"], ["/a", "01"]),
    ("iri", ["http://a/b"], ["//a/b"]),
    ("hostname", ["a.b-c.example", "a1", "ab-c--d"], ["xn--X", "a.XN--a", "-a", "a" * 64, LONG]),
    ("idn-hostname", ["a.example"], ["xn--X"]),
    ("idn-email", ["joe@example.com"], ["2962"]),
]


@pytest.mark.parametrize(("name", "right", "wrong"), FORMATS, ids=lambda one: str(one)[:20])
async def test_formats_are_held_to(compiler: Compiler, name: str, right: list[str], wrong: list[str]) -> None:
    alone = await compiled(compiler, "json_schema", {"format": name})
    beside = await compiled(
        compiler, "json_schema", {"type": "string", "format": name, "pattern": "^[^Q]*$", "minLength": 0}
    )
    for text in right:
        assert accepts(alone, json.dumps(text)) and accepts(beside, json.dumps(text)), text
    for text in wrong:
        assert not accepts(alone, json.dumps(text)) and not accepts(beside, json.dumps(text)), text
    assert accepts(alone, "12"), "a format is about strings"
    narrowed = {"type": "string", "format": name, "pattern": "^Q"}
    if name in ("date", "time", "date-time", "relative-json-pointer"):
        assert "nsatisfiable" in await refusal(compiler, "json_schema", narrowed)


@pytest.mark.parametrize("names", [{"type": "string"}, {}, True])
async def test_names_that_may_be_any_string_pass(compiler: Compiler, names: Any) -> None:
    """zod 4 writes it for every record."""
    record = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
    schema = {
        "type": "object",
        "properties": {"r": record, "propertyNames": {"enum": [1]}},
        "required": ["r"],
    }
    content = {"type": "json_schema", "json_schema": {**schema, **CLOSED}}
    for grammar in (
        await compiled(compiler, "json_schema", schema),
        await compiled(compiler, "structural_tag", tag(content)),
    ):
        assert accepts(grammar, '{"r":{"x":1}}')
        assert accepts(grammar, '{"r":{"x":1},"propertyNames":1}')
        assert not accepts(grammar, '{"r":{"x":"1"}}')
    check_tag(json.dumps(tag(content)))


async def test_counts_may_be_written_as_floats(compiler: Compiler) -> None:
    schema = {
        "type": "array",
        "items": {"type": "string", "maxLength": 1.0},
        "minItems": 1.0,
        "maxItems": 2.0,
    }
    grammar = await compiled(compiler, "json_schema", schema)
    assert accepts(grammar, '["a","b"]')
    assert not any(accepts(grammar, text) for text in ("[]", '["ab"]', '["a","b","c"]'))
    assert "maxItems" in await refusal(compiler, "json_schema", {"type": "array", "maxItems": 1.5})


LENIENT: list[tuple[Any, list[str]]] = [
    ({"type": "object", "not": {"required": ["b"]}}, ["'not' at #"]),
    ({"if": {}, "then": {}, "else": {}, "type": "object"}, ["'if' at #", "'then' at #", "'else' at #"]),
    (
        {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
        ["'uniqueItems' at #/pr"],
    ),
    ({"type": "object", "minProperties": 3}, ["'minProperties' at #"]),
    (
        {"type": "object", "properties": {"b": {"type": "string", "format": "topic"}}},
        ["Unknown format: topic"],
    ),
    ({"type": "object", "properties": {"a": {"pattern": "(?=b)"}}}, ["'pattern' at #/properties/a"]),
    ({"type": "object", "properties": {"a": {"$ref": "http://x/y"}}}, ["'$ref' at #/properties/a"]),
    ({"oneOf": [{"type": "object"}, {"type": "object", "title": "x"}]}, ["oneOf"]),
    ({"type": "object", "patternProperties": {"^a": {}, "b$": {}}}, ["'patternProperties' at #"]),
    ({"type": "object", "properties": {"a": {"type": "array"}}}, []),
]


@pytest.mark.parametrize(("schema", "dropped"), LENIENT, ids=lambda one: json.dumps(one)[:40])
async def test_a_lenient_schema_says_what_it_does_not_hold(
    compiler: Compiler, schema: Any, dropped: list[str]
) -> None:
    text = json.dumps(schema)
    inner = {"type": "json_schema", "json_schema": schema, "lenient": True}
    alone = await compiler.compile(GrammarSpec("json_schema", text, "field", lenient=True))
    tagged = await compiled(compiler, "structural_tag", tag(inner))
    for grammar in (alone, tagged):
        assert isinstance(grammar, Grammar)
        assert len(grammar.warnings) == len(dropped)
        for warning, words in zip(grammar.warnings, dropped, strict=True):
            assert words in warning
        assert accepts(grammar, '{"a":[]}')
        assert not accepts(grammar, "[]")
    if dropped:
        await refusal(compiler, "json_schema", schema)
        await refusal(compiler, "structural_tag", tag({**inner, "lenient": False}))
    else:
        assert (await compiled(compiler, "json_schema", schema)).warnings == ()


async def test_what_is_no_schema_is_refused_from_lenient_ones_too(compiler: Compiler) -> None:
    for text in ("[]", "false", '{"type":"strnig"}', '{"x-guidance":{"lenient":true},"type":5}'):
        with pytest.raises(RequestError):
            await compiler.compile(GrammarSpec("json_schema", text, "field", lenient=True))


@pytest.mark.parametrize(
    ("kind", "text", "word"),
    [
        ("regex", "(a", "unclosed"),
        ("regex", r"(a)\1", "backreference"),
        ("regex", "", "empty"),
        ("regex", "a" * 1_000_000, "bytes"),
        ("choice", "[]", "at least one"),
        ("choice", '["a", 1]', "list of at least one string"),
        ("choice", "{", "JSON"),
        ("ebnf", "root ::= (", "Expected"),
        ("ebnf", "start: nowhere", "nowhere"),
        ("ebnf", "root ::= " + "(" * 20_000, "recursion"),
        ("structural_tag", "[]", "format"),
        ("structural_tag", '{"format": {"type": "nope"}}', "nope"),
        ("structural_tag", '{"format": {"type": {}}}', "unknown type"),
        ("structural_tag", '{"format": {"type": "tag"}}', "tag"),
    ],
)
async def test_other_sources_say_what_is_wrong(
    compiler: Compiler, kind: GrammarKind, text: str, word: str
) -> None:
    assert word.lower() in (await refusal(compiler, kind, text)).lower()


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "string", "pattern": "a"}, "pattern"),
        ({"type": "string", "minLength": 2}, "minLength"),
        ({"type": "object", "required": ["a"]}, "required"),
        ({"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 3}}}, "multipleOf"),
        ({"$ref": "#/$defs/a", "type": "object", "$defs": {"a": {}}}, "type"),
        ({"anyOf": [{}], "type": "object"}, "type"),
        ({"allOf": [{}, {}]}, "allOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"enum": [1, "a"], "type": "string"}, "type"),
        ({"type": "string", "format": "date"}, "date"),
        ({"type": "string", "format": []}, "format"),
        ({"type": {}, "enum": ["a"]}, "type"),
        ({"type": "object", "properties": {"a": {}}, "required": [{}]}, "required"),
        ({"type": "array", "items": [{}]}, "items"),
        ({"$ref": "other.json"}, "$ref"),
        ({"properties": {"a": {}}}, "type"),
        ({"type": "integer", "minimum": 2**70}, "minimum"),
        ({"not": {}}, "not"),
    ],
)
def test_schemas_in_tags_are_refused_where_xgrammar_would_loosen_them(schema: Any, word: str) -> None:
    with pytest.raises(Refused, match=re.escape(f"'{word}'")) as caught:
        check_exact(schema)
    if word in ("pattern", "minLength", "multipleOf", "date"):
        assert "leave it out of the schema, or ask for the JSON without tools" in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"description": "anything"},
        {
            "type": "object",
            "properties": {"unit": {"type": "string", "enum": ["c", "f"]}},
            "required": ["unit"],
        },
        {"type": ["string", "null"], "description": "x", "default": None},
        {"oneOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "integer"}}},
        {"type": "object", "additionalProperties": {"type": "number", "minimum": 0}},
    ],
)
def test_what_tools_usually_declare_passes(schema: Any) -> None:
    check_exact(schema)
