"""Constraints, tools and templates that try to exhaust time or memory, or to run code."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

from bench.chaos.bench import Bench
from bench.chaos.clients import CHAT, TEXT, post
from bench.chaos.row import Outcome

HI = [{"role": "user", "content": "hi"}]


async def grammars(bench: Bench) -> Outcome:
    """Every grammar is compiled or rejected, without a 5xx and without an effect on the neighbour."""
    outcome = Outcome()
    hostile = [*_constraints().items(), *_distinct(bench.count(1_000, 5))]
    if not bench.timed:
        hostile = [each for each in hostile if not each[0].startswith("long")]
    await bench.run_beside_neighbour(outcome, _send(bench, outcome, hostile))
    return outcome


async def _send(bench: Bench, outcome: Outcome, bodies: list[tuple[str, tuple[str, dict[str, Any]]]]) -> None:
    statuses: Counter[int] = Counter()
    gate = asyncio.Semaphore(8)

    async def one(name: str, path: str, body: dict[str, Any]) -> None:
        async with gate:
            answer = await post(bench.port, path, {"max_tokens": 8, "temperature": 0, **body})
        statuses[answer.status] += 1
        outcome.expect(
            answer.status in (200, 400, 413, 429), f"{name}: {answer.status} {answer.body[-200:]!r}"
        )

    await asyncio.gather(*(one(name, path, body) for name, (path, body) in bodies))
    outcome.figures["statuses"] = dict(sorted(statuses.items()))


def _distinct(count: int) -> list[tuple[str, tuple[str, dict[str, Any]]]]:
    schemas = [{"type": "object", "properties": {f"field_{i}": {"type": "integer"}}} for i in range(count)]
    return [
        (f"schema {i}", (TEXT, {"prompt": "a", "json_schema": json.dumps(schema)}))
        for i, schema in enumerate(schemas)
    ]


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _tool(**parameters: object) -> dict[str, Any]:
    function = {"name": "f", "parameters": {"type": "object", **parameters}}
    return {"messages": HI, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def _constraints() -> dict[str, tuple[str, dict[str, Any]]]:
    def regex(pattern: str) -> tuple[str, dict[str, Any]]:
        return TEXT, {"prompt": "a", "regex": pattern}

    def schema(value: object) -> tuple[str, dict[str, Any]]:
        return TEXT, {"prompt": "a", "json_schema": json.dumps(value)}

    loop = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    tree = {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(10_000)}}
    deep = (TEXT, {"prompt": "a", "json_schema": '{"items":' * 10_000 + "{}" + "}" * 10_000})
    return {
        "nested quantifiers": regex("(a+)+$"),
        "nested counts": regex("((a{0,100}){0,100}){0,100}"),
        "a regex of a megabyte": regex("ab" * 500_000),
        "an unclosed regex": regex("(" * 500),
        "a back reference": regex(r"(a)\1"),
        "an exponential choice": regex("(.{0,30}[a-z]){0,9}q"),
        "a schema of depth 60": schema(_nested(60)),
        "a schema of depth 10,000": deep,
        "circular references": schema(loop),
        "a recursive schema": schema(tree),
        "a reference to the network": schema({"$ref": "http://127.0.0.1:1/x"}),
        "a reference to a file": schema({"$ref": "file:///etc/passwd"}),
        "a schema of unknown type": schema({"type": 7}),
        "an exponential pattern": schema({"type": "string", "pattern": "(a|aa)+$"}),
        "huge bounds": schema({"type": "array", "items": {}, "minItems": 10**9, "maxItems": 10**9}),
        "long wide objects": schema(wide),
        "a circular grammar": (TEXT, {"prompt": "a", "ebnf": "root ::= root"}),
        "a grammar without a root": (TEXT, {"prompt": "a", "ebnf": "x ::= 'a'"}),
        "an ambiguous empty grammar": (TEXT, {"prompt": "a", "ebnf": 'root ::= ("" | "" | root root)*'}),
        "tool with a pattern": (CHAT, _tool(properties={"a": {"type": "string", "pattern": "(a+)+$"}})),
        "a recursive tool": (CHAT, _tool(properties={"a": {"$ref": "#"}})),
        "tool without a name": (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {}}]}),
        "5,000 tools": (CHAT, {"messages": HI, "tools": [_tool()["tools"][0]] * 5_000}),
        "exponential stops": (TEXT, {"prompt": "a", "stop_regex": ["(a+)+$", "(.{0,30}[a-z]){0,9}q"]}),
        "3,000 bad words": (TEXT, {"prompt": "a", "bad_words": [f"w{i}" for i in range(3_000)]}),
    }


ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{% set x = messages.append(1) %}{{ 'str'.format.__globals__ }}",
    "{{ '{0.__class__}'.format(1) }}{{ ''|attr('__class__') }}{{ ''['__cl' ~ 'ass__'].x.y }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
)
BOMBS = (
    "{{ 'x' * 10 ** 10 }}",
    "{% for a in range(10 ** 9) %}x{% endfor %}",
    "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "{{ (('a ' * 15000000) | title) | length }}",
    "{{ 'a' | center(10 ** 9) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 10 ** (10 ** 8) }}",
)


async def templates(bench: Bench) -> Outcome:
    """Every template is rejected within its time limit, without an effect on the neighbour."""
    outcome = Outcome()
    bombs = BOMBS if bench.timed else BOMBS[:2]

    async def attack() -> None:
        for source in (*ESCAPES, *bombs):
            answer = await post(bench.port, CHAT, {"messages": HI, "max_tokens": 1, "chat_template": source})
            outcome.expect(answer.status == 400, f"{source}: {answer.status} {answer.body[-200:]!r}")

    await bench.run_beside_neighbour(outcome, attack())
    outcome.figures["templates"] = len(ESCAPES) + len(bombs)
    return outcome
