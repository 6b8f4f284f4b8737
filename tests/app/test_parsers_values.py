"""Values of arguments: written bare, as Python's, or as JSON, by the function's schema."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from app.parsers import fields
from app.parsers.base import assemble
from app.parsers.calls import CallParser
from app.parsers.registry import TOOLS
from app.parsers.typed import members, types_of
from tests.rigs.calls import NAMES, parser, read
from tests.rigs.parsers import cuts, lines, parse, splits


def test_strings_of_gemma_may_be_as_in_json_or_bare() -> None:
    text = '<|tool_call>call:f{ text: New York, a: [1, "b\\n", {"c": <|"|>d}<|"|>, e:x}] }<tool_call|>'
    for pieces in cuts(text):
        content, [(name, arguments)] = read("gemma4", pieces)
        assert (content, name) == ("", "f")
        assert json.loads(arguments) == {"text": "New York", "a": [1, "b\n", {"c": "d}", "e": "x"}]}


def test_members_of_half_an_object() -> None:
    text = '{"a": 1, "b": {"c": [true, "x"]}, "d": "\\u00e9\\"", "e": 12'
    whole = {"a": 1, "b": {"c": [True, "x"]}, "d": 'é"'}
    for end in range(len(text) + 1):
        found = members(text[:end])
        assert all(whole[key] == value for key, value in found.items()), text[:end]
    assert found == whole and members(text + "}") == whole | {"e": 12}
    assert members("") == members("{") == members("[1]") == {}


def test_olmos_values_are_pythons_or_json() -> None:
    text = (
        "<function_calls>f(a=null, b=[true, None], c={}, d='it\\'s', e={\"k\": 'v'}, f=-1.5)</function_calls>"
    )
    for pieces in cuts(text):
        _, [(_, arguments)] = read("olmo3", pieces)
        values = {"a": None, "b": [True, None], "c": {}, "d": "it's", "e": {"k": "v"}, "f": -1.5}
        assert json.loads(arguments) == values


@pytest.mark.parametrize(
    ("said", "written", "value"),
    [("true", "5", "5"), ("true", " <a>\n", " <a>\n"), ("false", "5", 5), ("false", "[1, {}]", [1, {}])],
)
def test_deepseeks_tags_say_whether_a_value_is_a_string(said: str, written: str, value: Any) -> None:
    """Whatever the schema: `text` is a string, of `a` nothing is known."""
    for key in ("a", "text"):
        argument = f'<｜DSML｜parameter name="{key}" string="{said}">{written}</｜DSML｜parameter>'
        for pieces in cuts(f'<｜DSML｜invoke name="f">{argument}</｜DSML｜invoke>'):
            assert [json.loads(made) for _, made in read("deepseek_v32", pieces)[1]] == [{key: value}]


def test_deepseeks_arguments_may_be_one_object() -> None:
    one = '<｜DSML｜invoke name="f">\n{"a": [1]}\n</｜DSML｜invoke>\n'
    for text in (f"<｜DSML｜function_calls>\n{one * 2}</｜DSML｜function_calls>", one * 2):
        for pieces in (*cuts(text), *splits(text)):
            assert read("deepseek_v32", pieces) == ("", [("f", '{"a": [1]}')] * 2)


TYPED: list[tuple[Any, str, Any]] = [
    ({"type": "string"}, "5", "5"),
    ({"type": "string"}, "null", "null"),
    ({"type": "string"}, ' "q" \n\n', ' "q" \n\n'),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"type": "integer"}, " 5\n", 5),
    ({"type": "integer"}, "five", "five"),
    ({"type": "number"}, "-1.5e3", -1500.0),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "false", False),
    ({"type": ["string", "null"]}, "None", None),
    ({"type": ["string", "null"]}, '"x"', '"x"'),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
    ({"type": "object"}, '{"a": [1,\n 2]}', {"a": [1, 2]}),
    ({"type": "object"}, "{'a': 1}", {"a": 1}),
    ({"type": "object"}, "{'a': [True, None, 'x\"y'], \"b\": -1.5}\n", {"a": [True, None, 'x"y'], "b": -1.5}),
    ({"type": "object"}, "{'a': f()}", "{'a': f()}"),
    ({"type": "object"}, "['a']", "['a']"),
    ({"type": "array"}, "['a', 1]", ["a", 1]),
    ({"type": ["string", "object"]}, "{'a': 1}", {"a": 1}),
    ({"type": "string"}, "{'a': 1}", "{'a': 1}"),
    ({}, "{'a': 1}", "{'a': 1}"),
    ({"type": "float"}, "5", 5),
    ({"type": "double"}, "-0.5", -0.5),
    ({"type": "int"}, "5", 5),
    ({"type": "bool"}, "True", True),
    ({"type": "str"}, "5", "5"),
    ({"type": "dict"}, "{'a': {}}", {"a": {}}),
    ({"type": "list[str]"}, "['5']", ["5"]),
    ({"type": "FLOAT"}, "1e3", 1000.0),
    ({"type": "of tomorrow"}, "5", 5),
    ({"type": "array"}, "[1", "[1"),
    ({"const": 1, "enum": None}, "1", 1),
    ({"enum": [None, "x"]}, "null", None),
    ({"$ref": "#/$defs/S"}, "7", "7"),
    ({"$ref": "#/$defs/none"}, "7", 7),
    ({"$ref": "#"}, "[]", []),
    ({}, '"x"', "x"),
    ({}, "x y", "x y"),
    (True, "01", "01"),
]


@pytest.mark.parametrize(("schema", "written", "value"), TYPED)
def test_a_bare_value_is_what_its_schema_says(schema: Any, written: str, value: Any) -> None:
    root = {"properties": {"k": schema}, "$defs": {"S": {"type": "string"}}}
    for family, text in (
        ("qwen3_coder", f"<tool_call>\n<function=f>\n<parameter=k>\n{written}\n</parameter>\n</function>"),
        ("glm", f"<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"),
        ("minimax_m2", f'<invoke name="f">\n<parameter name="k">{written}</parameter>\n</invoke>'),
    ):
        for pieces in cuts(text):
            message = assemble(parse(CallParser(TOOLS[family], NAMES, {"f": root}), pieces))
            assert [json.loads(call.arguments) for call in message.calls] == [{"k": value}]


@pytest.mark.parametrize("family", ["qwen3_coder", "glm", "minimax_m2"])
def test_a_const_beside_an_unset_enum_holds(family: str) -> None:
    written = TOOLS[family].writing.fields
    assert written is not None
    of_const, of_enum = (
        fields.arguments({"properties": {"k": {"type": "string", **listed}}}, written, True, False)
        for listed in ({"const": "x", "enum": None}, {"enum": ["x"]})
    )
    assert of_const == of_enum and "any_text" not in str(of_const)


def test_bare_strings_are_told_as_they_come() -> None:
    family = parser("qwen3_coder")
    family.feed("<tool_call>\n<function=f>\n<parameter=text>\n")
    assert [event.text for event in family.feed('a "b" </para')] == ['a \\"b\\" ']
    assert [event.text for event in family.feed("x\n")] == ["</parax"]
    assert [event.text for event in family.feed("\n</parameter>")] == ["\\n", '"']


def test_schemas_that_branch_into_each_other_are_followed_no_further_than_a_bound() -> None:
    for key in ("anyOf", "allOf"):
        schema = {key: [{"$ref": "#/$defs/x"}] * 60}
        root = {"properties": {"k": schema}, "$defs": {"x": schema}}
        assert lines(partial(types_of, schema, root)) < 10_000
        assert types_of(schema, root) is None


def test_many_arguments_of_a_function_do_not_make_each_slow() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=k1>\n1\n<parameter=k2>\n2\n</parameter>\n</function>"
    for count, arguments in ((10, {"k1": "1", "k2": "2"}), (5_000, {"k1": "1", "k2": "2"})):
        schema = {"properties": {f"k{i}": {"type": "string"} for i in range(count)}}
        for pieces in cuts(text):
            message = assemble(parse(CallParser(TOOLS["qwen3_coder"], NAMES, {"f": schema}), pieces))
            assert [json.loads(call.arguments) for call in message.calls] == [arguments]
