"""The spellings of a constraint, and how each reaches the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core.grammar import GrammarSpec
from tests.rigs.requests import CHAT, COMPLETIONS, GENERATE, body
from tests.rigs.server import Server

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
TEXT = '{"type":"object","properties":{"b":{"type":"string"},"a":{"type":"integer"}}}'
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
TAG_TEXT = '{"type":"structural_tag","format":{"type":"const_string","value":"x"}}'


CASES: list[tuple[dict[str, Any], GrammarSpec | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "regex": None, "structured_outputs": None, "guided_choice": None}, None),
    ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object", "", "response_format")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        GrammarSpec("json_schema", TEXT, "response_format"),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"strict": True, "schema": True}}},
        GrammarSpec("json_schema", "true", "response_format"),
    ),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        GrammarSpec("json_schema", TEXT, "response_format.schema"),
    ),
    (
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        GrammarSpec("json_schema", TEXT, "response_format.schema"),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"strict": False, "schema": SCHEMA}}},
        GrammarSpec("json_schema", TEXT, "response_format", lenient=True),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"strict": None, "schema": SCHEMA}}},
        GrammarSpec("json_schema", TEXT, "response_format"),
    ),
    ({"response_format": TAG}, GrammarSpec("structural_tag", TAG_TEXT, "response_format")),
    ({"regex": "a+"}, GrammarSpec("regex", "a+", "regex")),
    ({"ebnf": "root ::= 'a'"}, GrammarSpec("ebnf", "root ::= 'a'", "ebnf")),
    ({"grammar": 'root ::= "a"'}, GrammarSpec("ebnf", 'root ::= "a"', "grammar")),  # llama.cpp's
    ({"json_schema": TEXT}, GrammarSpec("json_schema", TEXT, "json_schema")),
    ({"json_schema": SCHEMA}, GrammarSpec("json_schema", TEXT, "json_schema")),
    ({"structural_tag": TAG}, GrammarSpec("structural_tag", TAG_TEXT, "structural_tag")),
    ({"structured_outputs": {"json": SCHEMA}}, GrammarSpec("json_schema", TEXT, "structured_outputs.json")),
    ({"structured_outputs": {"regex": "a"}}, GrammarSpec("regex", "a", "structured_outputs.regex")),
    (
        {"structured_outputs": {"choice": ["b", "é"]}},
        GrammarSpec("choice", '["b","é"]', "structured_outputs.choice"),
    ),
    ({"structured_outputs": {"grammar": "g"}}, GrammarSpec("ebnf", "g", "structured_outputs.grammar")),
    (
        {"structured_outputs": {"json_object": True, "regex": None}},
        GrammarSpec("json_object", "", "structured_outputs.json_object"),
    ),
    ({"guided_json": SCHEMA}, GrammarSpec("json_schema", TEXT, "guided_json")),
    ({"guided_regex": "a"}, GrammarSpec("regex", "a", "guided_regex")),
    ({"guided_choice": ["a"]}, GrammarSpec("choice", '["a"]', "guided_choice")),
    ({"guided_grammar": "g"}, GrammarSpec("ebnf", "g", "guided_grammar")),
]


async def test_every_spelling_reaches_the_engine_on_every_route(server: Server) -> None:
    for path in (CHAT, COMPLETIONS, GENERATE):
        for fields, expected in CASES:
            await server.ask(path, body(path, fields))
            made = server.engine.runs[-1].job.grammar
            if expected is None:
                assert made is None
                continue
            assert made is not None
            assert (made.kind, made.text, made.lenient) == (expected.kind, expected.text, expected.lenient)
            prefix = "sampling_params." if path == GENERATE else ""
            assert made.param == prefix + expected.param


async def test_the_first_structural_tags_become_triggered_ones(server: Server) -> None:
    structures = [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]
    wanted = {"type": "structural_tag", "structures": structures, "triggers": ["<f"]}
    await server.ask(CHAT, body(CHAT, {"response_format": wanted}))
    made = server.engine.runs[-1].job.grammar
    assert made is not None
    content = {"type": "json_schema", "json_schema": SCHEMA}
    tag = {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}
    assert json.loads(made.text)["format"] == {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag]}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"regex": "a", "ebnf": "b"}, "ebnf", "'regex'"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format", "'regex'"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.choice",
            "'structured_outputs.regex'",
        ),
        ({"guided_regex": "a", "regex": "a"}, "guided_regex", "'regex'"),
        ({"regex": 5}, "regex", "string"),
        ({"ebnf": {"a": 1}}, "ebnf", "string"),
        ({"json_schema": 5}, "json_schema", "object"),
        ({"guided_choice": "a"}, "guided_choice", "list"),
        ({"guided_choice": ["a", 1]}, "guided_choice", "list"),
        ({"structured_outputs": "json"}, "structured_outputs", "object"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "not supported",
        ),
        ({"regex": ""}, "regex", "empty"),
        ({"ebnf": ""}, "ebnf", "empty"),
        ({"json_schema": ""}, "json_schema", "empty"),
        ({"guided_choice": []}, "guided_choice", "empty"),
        ({"guided_grammar": ""}, "guided_grammar", "empty"),
        ({"regex": False}, "regex", "string"),
        ({"structured_outputs": {}}, "structured_outputs", "empty"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "empty"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "empty"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "empty"),
        ({"structured_outputs": {"jsn": SCHEMA}}, "structured_outputs.jsn", "takes"),
        ({"structured_outputs": {"regex": "a", "lark": "b"}}, "structured_outputs.lark", "takes"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema", "takes"),
        ({"response_format": {"type": "json_object", "shema": 1}}, "response_format.shema", "schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": True, "Strict": True}}},
            "response_format.json_schema.Strict",
            "strict",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": True, "strict": "yes"}}},
            "response_format.json_schema.strict",
            "true or false",
        ),
        ({"response_format": {}}, "response_format.type", "type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
        ({"response_format": {"type": 5}}, "response_format.type", "type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        (
            {"response_format": {"type": "structural_tag", "structures": [1], "triggers": []}},
            "response_format.structures[0]",
            "begin",
        ),
    ],
)
async def test_what_is_wrong_is_named(server: Server, fields: dict[str, Any], param: str, words: str) -> None:
    error = await server.refused(CHAT, body(CHAT, fields))
    assert error["param"] == param
    assert words in error["message"]
    assert not server.engine.runs


async def test_a_constraint_inside_and_one_outside_are_two(server: Server) -> None:
    sent = {"text": "a", "regex": "x", "sampling_params": {"ebnf": "y"}}
    error = await server.refused(GENERATE, sent)
    assert "'regex' and 'sampling_params.ebnf'" in error["message"]
