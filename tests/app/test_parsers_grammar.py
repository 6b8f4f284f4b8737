"""One grammar for thinking, calls and an answer's own constraint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.parsers.base import assemble
from app.parsers.grammar import Tool, Wanted, answer_element, constraint, without_notes
from app.parsers.reading import Reading
from app.parsers.registry import REASONING, TOOLS, ToolFamily, tool_family
from core.errors import RequestError
from core.grammar import GrammarSpec
from tests.rigs.parsers import accepts

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
STRICT = Tool("weather", SCHEMA, True)
LOOSE = Tool("now", {"type": "object", "properties": {}})
ANSWER = GrammarSpec("json_schema", json.dumps(SCHEMA | {"properties": {"city": {"type": "integer"}}}))
THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
BAD = CALL.replace("city", "town")
JSON = '{"city": 3}'


def grammar(family: ToolFamily | None = TOOLS["hermes"], **wanted: Any) -> GrammarSpec:
    fields = {"tools": (STRICT, LOOSE), "calls": "required", **wanted}
    spec = constraint(Wanted(**fields), family, REASONING["think"])
    assert spec is not None and spec.kind == "structural_tag"
    return spec


def judged(spec: GrammarSpec, texts: dict[str, str]) -> set[str]:
    return {name for name, text in texts.items() if accepts(spec, text)}


TEXTS = {
    "call": CALL,
    "two": f"{CALL}\n{OTHER}",
    "json": JSON,
    "think call": THOUGHT + CALL,
    "think two": f"{THOUGHT}{CALL}\n{OTHER}",
    "think json": THOUGHT + JSON,
    "thought json": THOUGHT.removeprefix("<think>") + JSON,
    "thought call": THOUGHT.removeprefix("<think>") + CALL,
    # never right
    "bad": BAD,
    "think bad": THOUGHT + BAD,
    "think": THOUGHT,
    "think twice": THOUGHT + THOUGHT + JSON,
    "unended think": THOUGHT[:-10] + JSON,
    "call in think": f"<think>{CALL}</think>\n\n{JSON}",
    "call then json": f"{CALL}\n{JSON}",
    "unended call": CALL[:-12],
    "unknown": CALL.replace("weather", "whether"),
    "text": "The weather is fine.",
    "text call": f"Well.\n{CALL}",
    "wrong type": '{"city": "x"}',
}


@pytest.mark.parametrize(
    ("calls", "thinking", "right"),
    [
        ("auto", "none", {"call", "two", "json"}),
        ("required", "none", {"call", "two"}),
        ("auto", "possible", {"call", "two", "json", "think call", "think two", "think json"}),
        ("required", "possible", {"call", "two", "think call", "think two"}),
        ("auto", "open", {"thought json", "thought call"}),
        ("required", "open", {"thought call"}),
    ],
)
def test_thinking_then_an_answer_or_calls(calls: str, thinking: str, right: set[str]) -> None:
    assert judged(grammar(answer=ANSWER, calls=calls, thinking=thinking), TEXTS) == right


def test_an_answers_constraint_begins_behind_the_thinking() -> None:
    spec = grammar(tools=(), calls="none", answer=ANSWER, thinking="possible")
    assert judged(spec, TEXTS) == {"json", "think json"} and spec.param == "response_format"
    assert constraint(Wanted(answer=ANSWER), None, REASONING["think"]) is ANSWER
    assert constraint(Wanted(thinking="open"), TOOLS["hermes"], REASONING["think"]) is None


def test_strict_functions_within_free_text() -> None:
    spec = grammar(calls="auto")
    assert judged(spec, TEXTS) >= {"call", "two", "text", "text call", "think call"}
    assert not judged(spec, TEXTS) & {"bad", "think bad", "unknown", "unended call"}
    assert accepts(spec, OTHER.replace("{}", '{"any": [1]}'))  # not strict: only JSON
    one = grammar(calls="auto", many=False)
    assert judged(one, TEXTS) >= {"call", "text call"} and not judged(one, TEXTS) & {"two"}
    loose = Wanted(tools=(LOOSE,), calls="auto")
    assert constraint(loose, TOOLS["hermes"], None) is None and constraint(loose, None, None) is None


def test_notes_are_left_out_of_grammars() -> None:
    noted = {
        "description": "<|im_start|>",
        "type": "object",
        "properties": {
            "title": {"type": "string", "title": "T", "enum": ["description"]},
            "list": {"type": "array", "items": {"$comment": "c", "type": "string", "default": "x"}},
            "either": {"anyOf": [{"type": "null", "description": "d"}, {"type": "string"}]},
        },
        "required": ["title"],
    }
    assert without_notes(noted) == {
        "type": "object",
        "properties": {
            "title": {"type": "string", "enum": ["description"]},
            "list": {"type": "array", "items": {"type": "string"}},
            "either": {"anyOf": [{"type": "null"}, {"type": "string"}]},
        },
        "required": ["title"],
    }
    assert "<|im_start|>" not in grammar(tools=(Tool("f", noted),)).text


def test_one_call_only() -> None:
    assert judged(grammar(many=False), TEXTS) == {"call"}


WRITTEN = {
    "hermes": f"{CALL}\n{OTHER}",
    "llama3": '{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}, '
    '{"name": "now", "arguments": {}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Oslo"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n'
    "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "pythonic": '[weather(city="Oslo"), now()]',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>\n"
    "<tool_call>now\n</tool_call>",
    "glm </arg_key><arg_value>": "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
    "</tool_call><tool_call>now</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    '<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|><|tool_call_begin|>functions.now:1'
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "functiongemma": "<start_function_call>call:weather{city:<escape>Oslo<escape>}<end_function_call>"
    "<start_function_call>call:now{}<end_function_call>",
    "gemma4": '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|><|tool_call>call:now{}<tool_call|>',
    "granite": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}, '
    '{"name": "now", "arguments": {}}]',
    "granite <tool_call> followed by a JSON list": '<tool_call>[{"name": "weather", "arguments": '
    '{"city": "Oslo"}}, {"name": "now", "arguments": {}}]',
    "granite-20b-fc": '<function_call> {"name": "weather", "arguments": {"city": "Oslo"}} '
    '<function_call> {"name": "now", "arguments": {}}',
    "phi4_mini_json": 'functools[{"name": "weather", "arguments": {"city": "Oslo"}}, '
    '{"name": "now", "arguments": {}}]',
    "phi4_mini_json <|/tool_call|>": '<|tool_call|>{"name": "weather", "arguments": {"city": "Oslo"}}'
    '<|/tool_call|><|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|>',
    "olmo3": '<function_calls>weather(city="Oslo")\nnow()</function_calls>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
    '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "deepseek_v32 tool_calls>": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "seed_oss": "<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n</function>\n"
    "</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "mistral [ARGS]": '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]now[ARGS]{}',
    "deepseek_v3 <｜tool▁sep｜>": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
}


@pytest.mark.parametrize("family", WRITTEN)
def test_every_family_reads_what_its_grammar_lets_through(family: str) -> None:
    name, _, template = family.partition(" ")
    found = tool_family(name, template)
    assert found is not None
    for calls in ("required", "auto"):
        spec = grammar(found, calls=calls)
        assert accepts(spec, WRITTEN[family]) and not accepts(spec, WRITTEN[family].replace("city", "town"))
        assert accepts(spec, "Let me {see}.\nYes.") == (calls == "auto")
        bad = "Well: " + WRITTEN[family].replace("city", "town")
        assert not accepts(spec, bad), "it would be read as a call"
    answer = Reading(tools=found, names=frozenset({"weather", "now"}), schemas={"weather": SCHEMA}).answer()
    message = assemble(answer.feed(WRITTEN[family]) + answer.finish())
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == [
        ("weather", {"city": "Oslo"}),
        ("now", {}),
    ]
    assert message.content == ""


def test_calls_in_an_unknown_format_cannot_be_made_to_happen() -> None:
    for wanted in (
        Wanted(tools=(LOOSE,), calls="required"),
        Wanted(tools=(STRICT,), calls="auto"),
        Wanted(tools=(LOOSE,), calls="auto", answer=ANSWER),
    ):
        with pytest.raises(RequestError) as refused:
            constraint(wanted, None, None)
        assert refused.value.param == ("tool_choice" if wanted.calls == "required" else "tools")


TAGGED = ("qwen3_coder", "glm", "pythonic", "functiongemma", "olmo3", "minimax_m2", "deepseek_v32")
"""Families that write arguments one by one."""
TRIP = {
    "type": "object",
    "properties": {
        "note": {"type": "string"},
        "days": {"type": "integer", "minimum": 2},
        "unit": {"enum": ["C", "F"]},
        "deep": {"$ref": "#/$defs/deep"},
        "on": {"type": ["boolean", "null"]},
    },
    "required": ["days"],
    "additionalProperties": False,
    "$defs": {"deep": {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"]}},
}


def said(value: str) -> str:
    """A value behind what DeepSeek's tag says of it; strings of this module's calls begin with a quote."""
    return f'true">{value[1:-1]}' if value.startswith("'") else f'false">{value}'


def tagged(family: str, **values: str) -> str:
    """A call of `trip`, its arguments as they stand in the text."""
    if family == "pythonic":
        return f"[trip({', '.join(f'{key}={value}' for key, value in values.items())})]"
    if family == "olmo3":
        return f"<function_calls>{tagged('pythonic', **values)[1:-1]}</function_calls>"
    if family == "functiongemma":
        each = (f"{key}:{value}" for key, value in values.items())
        return f"<start_function_call>call:trip{{{','.join(each)}}}<end_function_call>"
    if family == "minimax_m2":
        each = (f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())
        call = f'<invoke name="trip">\n{"".join(each)}</invoke>\n'
        return f"<minimax:tool_call>\n{call}</minimax:tool_call>"
    if family == "deepseek_v32":
        each = (
            f'<｜DSML｜parameter name="{key}" string="{said(value)}</｜DSML｜parameter>\n'
            for key, value in values.items()
        )
        call = f'<｜DSML｜invoke name="trip">\n{"".join(each)}</｜DSML｜invoke>\n'
        return f"<｜DSML｜function_calls>\n{call}</｜DSML｜function_calls>"
    if family == "glm":
        each = (f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items())
        return f"<tool_call>trip\n{''.join(each)}</tool_call>"
    each = (f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=trip>\n{''.join(each)}</function>\n</tool_call>"


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize("calls", ["required", "auto"])
def test_arguments_one_by_one_are_held_to_their_schemas(family: str, calls: str) -> None:
    spec = grammar(TOOLS[family], tools=(Tool("trip", TRIP, True),), calls=calls)
    quote = {"pythonic": '"', "olmo3": '"', "functiongemma": "<escape>", "deepseek_v32": "'"}.get(family, "")
    true = "True" if family in ("pythonic", "olmo3") else "true"
    right = (
        {"days": "3"},
        {"days": "3", "note": f"{quote}a <b> c{quote}"},
        {"days": "12", "unit": f"{quote}F{quote}", "deep": '{"x": null}', "on": true},
    )
    wrong = (
        {},
        {"days": "1"},
        {"days": "x"},
        {"note": f"{quote}a{quote}"},
        {"days": "3", "unit": f"{quote}K{quote}"},
        {"days": "3", "deep": "{}"},
        {"days": "3", "on": "5"},
        {"days": "3", "more": "5"},
    )
    for values in right:
        assert accepts(spec, tagged(family, **values)), values
    for values in wrong:
        assert not accepts(spec, tagged(family, **values)), values


def test_arguments_of_which_none_is_required_may_be_any_of_them() -> None:
    free = {"properties": {key: {"type": "integer"} for key in "abc"}, "type": "object"}
    for family in TAGGED:
        spec = grammar(TOOLS[family], tools=(Tool("trip", free),))
        for names in ("", "a", "b", "c", "ab", "bc", "ac", "abc"):
            assert accepts(spec, tagged(family, **dict.fromkeys(names, "1"))), (family, names)
        assert not accepts(spec, tagged(family, a="1", d="1"))
        assert not accepts(spec, "[trip(, a=1)]") and not accepts(spec, "[trip(a=1, )]")


def test_functions_that_are_not_strict_are_held_to_names_within_free_text() -> None:
    tools = (Tool("trip", TRIP), STRICT)
    for family in ("qwen3_coder", "glm", "functiongemma"):
        spec = grammar(TOOLS[family], tools=tools, calls="auto")
        soon = "<escape>soon<escape>" if family == "functiongemma" else "soon"
        assert accepts(spec, tagged(family, days=soon)) and not accepts(spec, tagged(family, when=soon))
        assert accepts(spec, "Soon. " + tagged(family, days="1"))
    coder = grammar(TOOLS["qwen3_coder"], tools=tools, calls="auto")
    assert not accepts(coder, "<function=trip>\n</function>")  # it would be read as a call


def test_names_that_any_string_is_ask_for_nothing() -> None:
    for family in TAGGED:
        record = {**TRIP, "propertyNames": {"type": "string"}}
        assert grammar(TOOLS[family], tools=(Tool("trip", record),)).kind == "structural_tag"
        with pytest.raises(RequestError, match="propertyNames"):
            grammar(TOOLS[family], tools=(Tool("trip", {**TRIP, "propertyNames": {"pattern": "a"}}),))


def test_only_what_was_said_not_to_be_strict_is_lenient() -> None:
    for lenient in (False, True):
        tools = (Tool("f", SCHEMA, lenient=lenient), STRICT)
        spec = constraint(Wanted(tools=tools, calls="required"), TOOLS["hermes"], None)
        assert spec is not None
        begun, held = json.loads(spec.text)["format"]["tags"]
        assert begun["content"].get("lenient", False) is lenient
        assert "lenient" not in held["content"]
    answer = GrammarSpec("json_schema", '{"type":"object"}', lenient=True)
    assert answer_element(answer)["lenient"] is True and "lenient" not in answer_element(ANSWER)


UNHELD: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"a": {"type": "string", "pattern": "^x$"}}}, "pattern"),
    ({"properties": {"a": {"type": "string", "maxLength": 5}}}, "maxLength"),
    ({"properties": {"a": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}}}, "format"),
    ({"properties": {"a": {"not": {}}}}, "not"),
    ({"properties": {"a>": {"type": "integer"}}}, "a>"),
    ({"properties": {"a": {}}, "required": ["b"]}, "b"),
    ({"properties": {"a": {}}, "required": 5}, "required"),
    ({"properties": {"a": {}}, "required": [{}]}, "required"),
    ({"properties": {"a": {}}, "minProperties": 1}, "minProperties"),
]


def test_definitions_are_copied_for_arguments_that_refer_to_them_and_not_too_often() -> None:
    definitions = {"$defs": {"x": {"enum": [f"only {'y' * 10_000}"]}, "n": {"type": "integer"}}}
    plain, referring = {"type": "integer"}, {"$ref": "#/$defs/n"}
    for count, schema, copies in ((200, plain, 0), (5, referring, 5)):
        schemas = {f"a{i}": schema for i in range(count)}
        tool = Tool("f", {"properties": schemas, "required": list(schemas)} | definitions)
        assert grammar(TOOLS["qwen3_coder"], tools=(tool,)).text.count("only y") == copies
    schemas = {f"a{i}": referring for i in range(200)}
    with pytest.raises(RequestError, match="definitions are too large"):
        grammar(TOOLS["qwen3_coder"], tools=(Tool("f", {"properties": schemas} | definitions),))


def test_a_required_of_null_is_none() -> None:
    """Go's clients send null for a list that was never made."""
    tools = (Tool("trip", {"properties": {"a": {}}, "required": None}, True),)
    assert constraint(Wanted(tools=tools, calls="required"), TOOLS["qwen3_coder"], None) is not None


@pytest.mark.parametrize(("schema", "word"), UNHELD)
def test_what_bare_arguments_cannot_be_held_to_is_refused(schema: dict[str, Any], word: str) -> None:
    tools = (Tool("trip", {"type": "object", **schema}, True),)
    with pytest.raises(RequestError) as refused:
        constraint(Wanted(tools=tools, calls="required"), TOOLS["qwen3_coder"], None)
    assert f"'{word}'" in refused.value.message and "'trip'" in refused.value.message
    if word in ("pattern", "maxLength", "format"):
        assert f"Leave '{word}' out" in refused.value.message and '"strict": true' in refused.value.message
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("spec", "right", "wrong"),
    [
        (GrammarSpec("json_object"), '{"a": [1, {"b": null}]}', "[1]"),
        (GrammarSpec("regex", "a+b"), "aab", "b"),
        (GrammarSpec("ebnf", 'root ::= "x" [0-9]'), "x7", "7"),
        (GrammarSpec("choice", '["yes", "no"]'), "no", "maybe"),
        (
            GrammarSpec(
                "structural_tag",
                '{"type": "structural_tag", "format": {"type": "const_string", "value": "ok"}}',
            ),
            "ok",
            "ko",
        ),
    ],
)
def test_every_kind_of_constraint_can_be_part_of_it(spec: GrammarSpec, right: str, wrong: str) -> None:
    whole = grammar(answer=spec, calls="auto", thinking="possible")
    assert accepts(whole, THOUGHT + right) and accepts(whole, right) and accepts(whole, CALL)
    assert not accepts(whole, THOUGHT + wrong)


def test_a_constraint_that_is_no_json_is_named() -> None:
    for spec in (GrammarSpec("json_schema", "{"), GrammarSpec("structural_tag", "{}", "structural_tag")):
        with pytest.raises(RequestError) as refused:
            answer_element(spec)
        assert refused.value.param == spec.param
