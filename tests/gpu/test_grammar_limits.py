"""Sharing, cancelling, the cache's bound, and sources that mean harm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from app.helper.process import MAX_WAITING, HelperProcess
from core.errors import Overloaded, RequestError
from core.grammar import GrammarKind, GrammarSpec
from gpu.grammar import Compiler
from gpu.grammar.cache import GrammarCache, Key, Refusal
from gpu.grammar.intersections import kept_bytes
from gpu.grammar.limits import needs_trial
from gpu.grammar.llguidance_backend import reason
from gpu.grammar.matchers import Matchers
from gpu.grammar.schema import subschemas
from gpu.grammar.stepper import Grammar
from gpu.sample.rows import RowTokens
from tests.rigs.grammars import decode, new_slot, table
from tests.rigs.wait import PATIENCE

WIDE = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(10_000)}})
"""Compiles for ten seconds."""


@pytest.fixture
async def compiler() -> AsyncIterator[Compiler]:
    made = Compiler(table(), HelperProcess(), cache_bytes=2**20, helper_seconds=0.5)
    yield made
    made.close()


@pytest.fixture(scope="module")
def lasting() -> Iterator[Compiler]:
    """A compiler for many tests: its helper is started again only where it was killed."""
    made = Compiler(table(), HelperProcess(), cache_bytes=2**20, helper_seconds=0.5)
    yield made
    made.close()


@pytest.fixture
async def patient() -> AsyncIterator[Compiler]:
    """A compiler whose helper gives nothing up: what waits for it waits until the test ends, on a slow
    machine too."""
    made = Compiler(table(), HelperProcess(), helper_seconds=600)
    yield made
    made.close()


def choice(i: int) -> GrammarSpec:
    return GrammarSpec("choice", json.dumps([f"option {i}"]))


async def test_equal_constraints_share_one_grammar(compiler: Compiler) -> None:
    first, second = await asyncio.gather(
        compiler.compile(GrammarSpec("regex", "a+", "regex")),
        compiler.compile(GrammarSpec("regex", "a+", "guided_regex")),
    )
    assert first is second
    assert await compiler.compile(GrammarSpec("regex", "a+")) is first


async def test_one_waiter_that_leaves_takes_nothing_from_the_other(compiler: Compiler) -> None:
    spec = GrammarSpec("regex", "[a-z]{3}")
    leaver = asyncio.ensure_future(compiler.compile(spec))
    stayer = asyncio.ensure_future(compiler.compile(spec))
    await asyncio.sleep(0)
    leaver.cancel()
    assert isinstance(await stayer, Grammar)
    assert leaver.cancelled()


async def test_the_last_waiter_takes_the_compile_along(compiler: Compiler) -> None:
    alone = asyncio.ensure_future(compiler.compile(GrammarSpec("json_schema", WIDE)))
    await asyncio.sleep(0)
    alone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await alone
    # Its place in the queue of the helper is free again: what needs the helper next gets it.
    with pytest.raises(RequestError, match=r"0\.5 s"):
        await compiler.compile(GrammarSpec("json_schema", WIDE))


async def test_a_refusal_is_remembered_and_names_the_field_that_asks(compiler: Compiler) -> None:
    for param in ("regex", "guided_regex"):
        with pytest.raises(RequestError) as caught:
            await compiler.compile(GrammarSpec("regex", "(", param))
        assert caught.value.param == param


async def test_a_thousand_schemas_stay_within_the_bytes(compiler: Compiler) -> None:
    first = await compiler.compile(choice(0))
    for i in range(1, 1_000):
        await compiler.compile(choice(i))
        assert compiler.cached_bytes <= 2**20
    assert compiler.cached_bytes > 2**19
    assert await compiler.compile(choice(0)) is not first, "the oldest had to go"
    assert await compiler.compile(choice(999)) is await compiler.compile(choice(999))


def test_the_cache_drops_what_was_used_least_recently() -> None:
    cache = GrammarCache(3_000)
    keys = [Key("regex", str(i)) for i in range(6)]
    for key in keys[:5]:
        cache.put(key, Refusal("x" * 90))
    assert cache.get(keys[0])
    cache.put(keys[5], Refusal("x" * 90))
    assert cache.get(keys[0])
    assert cache.get(keys[1]) is None
    cache.put(Key("regex", "huge"), Refusal("x" * 5_000))
    assert cache.get(Key("regex", "huge")) is None
    assert cache.size <= 3_000


HOSTILE: dict[str, tuple[Any, Any]] = {
    "nested quantifiers": ("regex", "((a{1,100}){1,100}){1,100}"),
    "any of 5,000": ("regex", r"(\w|\W){0,5000}"),
    "exponential": ("regex", "(a|b)*a(a|b){200}"),
    "a million characters": ("regex", "a" * 1_000_000),
    "unicode classes": ("regex", r"(\p{L}|\p{N}){1,3000}"),
    "10,000 deep": ("json_schema", '{"items":' * 10_000 + "{}" + "}" * 10_000),
    "a schema of itself": ("json_schema", '{"$ref":"#"}'),
    "all of itself": ("json_schema", '{"allOf":[{"$ref":"#"}]}'),
    "an array of itself": ("json_schema", '{"type":"array","items":{"$ref":"#"}}'),
    "either itself or not": ("json_schema", '{"anyOf":[{"$ref":"#"},{"type":"integer"}]}'),
    "doubling references": (
        "json_schema",
        json.dumps(
            {
                "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
                | {"d40": {"type": "integer"}},
                "$ref": "#/$defs/d0",
            }
        ),
    ),
    "products of unions": (
        "json_schema",
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"a{i}{j}": {"type": "null"}}} for j in range(8)]}
                    for i in range(8)
                ]
            }
        ),
    ),
    "1,000 optional properties": (
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1_000)}}),
    ),
    "10,000 optional properties": ("json_schema", WIDE),
    "100,000 items": ("json_schema", '{"type":"array","items":{},"minItems":100000}'),
    "an ambiguous grammar": ("ebnf", 'start: e\ne: e e | "a" | e "b" e'),
    "an exponential grammar": (
        "ebnf",
        "start: r0\n" + "".join(f'r{i}: r{i + 1} r{i + 1} | "x"\n' for i in range(300)) + 'r300: "y"',
    ),
    "repeated repetition": ("ebnf", 'start: ("a"{0,1000}){0,1000}'),
    "endless empty": ("ebnf", 'start: a*\na: b*\nb: "x"?'),
    "20,000 choices": ("choice", json.dumps([f"{i}" for i in range(20_000)])),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_sources_are_refused_or_bounded(lasting: Compiler, name: str) -> None:
    """Whatever compiles may fail while decoding, but only itself, and it says why."""
    kind, text = HOSTILE[name]
    try:
        async with asyncio.timeout(PATIENCE):
            grammar = await lasting.compile(GrammarSpec(kind, text))
    except RequestError as error:
        assert error.message
        return
    assert isinstance(grammar, Grammar)
    matchers = Matchers()
    matchers.apply([new_slot(1, grammar), new_slot(2, await _plain(lasting))])
    generator = np.random.default_rng(1)
    for _ in range(60):
        masks = matchers.fill(decode(1, 2))
        if masks is None:
            break
        tokens = [-1, -1]
        for at, row in enumerate(masks.rows):
            may = np.flatnonzero(np.unpackbits(masks.bits[at].view(np.uint8), bitorder="little"))
            if len(may):
                tokens[row] = int(generator.choice(may))
        failed = matchers.accept(masks, RowTokens(np.array(tokens, np.int32)))
        assert 1 not in failed, "the neighbour is not concerned"


async def _plain(compiler: Compiler) -> Grammar:
    grammar = await compiler.compile(GrammarSpec("regex", "[a-z]*"))
    assert isinstance(grammar, Grammar)
    return grammar


async def test_what_waits_for_the_helper_is_bounded_and_nothing_else_waits(patient: Compiler) -> None:
    large = [GrammarSpec("json_schema", WIDE + " " * i) for i in range(MAX_WAITING)]
    waiting = [asyncio.ensure_future(patient.compile(spec)) for spec in large]
    small = await asyncio.gather(*(patient.compile(choice(i)) for i in range(200)))
    assert len(set(small)) == 200
    assert not any(one.done() for one in waiting), "what is small went past all of them"
    with pytest.raises(Overloaded):
        await patient.compile(GrammarSpec("json_schema", WIDE + " " * MAX_WAITING))
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


def _chain(count: int) -> str:
    """References that lead to each other, in two maps: no map is long."""
    half = count // 2
    names = [f"#/$defs/d{i}" for i in range(half)] + [f"#/definitions/d{i}" for i in range(half)]
    links = [{"items": {"$ref": name}} for name in names[1:]] + [{"type": "null"}]
    maps = [{f"d{i}": link for i, link in enumerate(part)} for part in (links[:half], links[half:])]
    return json.dumps({"$ref": names[0], "$defs": maps[0], "definitions": maps[1]})


LARGE = {
    "enum": {"enum": [f"word number {i}" for i in range(9_000)]},
    "description": {"type": "object", "description": "x" * 400_000},
    "required": {
        "type": "object",
        "properties": {f"p{i}": {"type": "string"} for i in range(1_500)},
        "required": [f"p{i}" for i in range(1_500)],
    },
}


@pytest.mark.parametrize("name", LARGE)
async def test_large_schemas_that_are_cheap_never_wait_for_the_helper(name: str) -> None:
    class NoHelper:
        async def run(self, task: object, payload: bytes, seconds: float) -> bytes:
            raise AssertionError("probed")

        def close(self) -> None:
            pass

    compiler = Compiler(table(), NoHelper())
    try:
        text = json.dumps(LARGE[name])
        assert isinstance(await compiler.compile(GrammarSpec("json_schema", text)), Grammar)
        tag = {"format": {"type": "json_schema", "json_schema": LARGE[name]}}
        if len(text) < 250_000:
            assert isinstance(await compiler.compile(GrammarSpec("structural_tag", json.dumps(tag))), Grammar)
    finally:
        compiler.close()


@pytest.mark.parametrize(
    "text",
    [
        WIDE,
        json.dumps({"patternProperties": {f"^p{i}x$": {} for i in range(200)}}),
        json.dumps({"oneOf": [{"const": i} for i in range(3_000)]}),
        _chain(600),
    ],
)
def test_what_may_take_seconds_or_the_stack_is_tried_in_the_helper(text: str) -> None:
    assert needs_trial("json_schema", text)
    assert needs_trial("lark", f"start: r0\nr0: %json {text}")


async def test_a_chain_of_references_ends_the_helper_and_not_the_server(patient: Compiler) -> None:
    """Followed by recursion, it overflows the stack: the process gets SIGSEGV."""
    with pytest.raises(RequestError):
        await patient.compile(GrammarSpec("json_schema", _chain(1_990)))
    assert isinstance(await patient.compile(GrammarSpec("json_schema", _chain(100))), Grammar)


async def test_a_helper_that_was_killed_is_replaced(compiler: Compiler) -> None:
    with pytest.raises(RequestError, match=r"0\.5 s"):
        await compiler.compile(GrammarSpec("json_schema", WIDE))
    long = "|".join(f"word{i}" for i in range(1_200))
    assert isinstance(await compiler.compile(GrammarSpec("regex", long)), Grammar)


async def test_a_vocabulary_is_read_when_a_constraint_needs_it() -> None:
    """Only constraints hear of a vocabulary that cannot be read, each time, prepared or not."""
    broken = msgspec.structs.replace(table(), definition="{}")
    for prepares in (False, True):
        compiler = Compiler(broken, HelperProcess())
        if prepares:
            compiler.prepare()
        for kind, text in (("regex", "a+"), ("regex", "b+"), ("json_schema", "{}")):
            with pytest.raises(RequestError) as caught:
                await compiler.compile(GrammarSpec(kind, text, "field"))
            assert caught.value.param == "field" and caught.value.message
        compiler.close()


def patterns(count: int) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": f"a.{{{at}}}b"} for at in range(count)]


REFERRED = {f"s{at}": {"$ref": f"#/$defs/s{at - 1}", "pattern": f"a.{{{at}}}b"} for at in range(1, 24)}
INTERSECTED: dict[str, dict[str, Any]] = {
    "patterns": {"allOf": patterns(30)},
    "patterns of a property": {"allOf": [{"properties": {"x": each}} for each in patterns(30)]},
    "a chain of references": {"$defs": {"s0": patterns(1)[0], **REFERRED}, "$ref": "#/$defs/s23"},
    "patterns and lengths": {"allOf": [{**each, "minLength": 3} for each in patterns(30)]},
}


@pytest.mark.parametrize("schema", INTERSECTED.values(), ids=INTERSECTED)
@pytest.mark.parametrize("tool", [False, True])
async def test_intersections_are_tried_where_they_can_be_stopped(
    lasting: Compiler, schema: dict[str, Any], tool: bool
) -> None:
    """Thirty patterns take minutes and gigabytes, in a thread that nothing could stop."""
    text = json.dumps(schema)
    if tool:
        text = json.dumps({"format": {"type": "json_schema", "json_schema": schema}})
    with pytest.raises(RequestError):
        await lasting.compile(GrammarSpec("structural_tag" if tool else "json_schema", text, "schema"))
    innocent = await lasting.compile(GrammarSpec("json_schema", '{"type": "boolean"}', "schema"))
    assert innocent is not None


DIVISORS: dict[str, tuple[Any, bool]] = {
    "a prime": ({"type": "integer", "multipleOf": 99_991}, False),
    "a larger power of two": ({"type": "integer", "multipleOf": 2**24}, False),
    "a power of five": ({"type": "integer", "multipleOf": 5**10}, False),
    "as many digits": ({"type": "number", "multipleOf": 0.99991}, False),
    "together": ({"allOf": [{"type": "integer", "multipleOf": each} for each in (7, 11, 13, 17, 19)]}, False),
    "beside a reference": (
        {"$defs": {"a": {"multipleOf": 997}}, "$ref": "#/$defs/a", "type": "integer", "multipleOf": 991},
        False,
    ),
    "in a property": ({"properties": {"x": {"type": "integer", "multipleOf": 99_991}}}, False),
    "apart": ({"anyOf": [{"type": "integer", "multipleOf": each} for each in (4_999, 4_993)]}, True),
    "cents": ({"type": "number", "multipleOf": 0.01}, True),
    "millions": ({"type": "integer", "multipleOf": 1_000_000}, True),
    "a power of two": ({"type": "integer", "multipleOf": 65_536}, True),
    "where a reference leads": (
        {"c": {"x": {"type": "integer", "multipleOf": 99_991}}, "$ref": "#/c/x"},
        False,
    ),
    "where an escaped one leads": ({"c": {"x": {"multipleOf": 99_991}}, "$ref": "#/c/%78"}, False),
    "where one below an id leads": (
        {"properties": {"p": {"$id": "http://x/", "items": {"$ref": "#/c"}, "c": {"multipleOf": 99_991}}}},
        False,
    ),
    "of hundreds of digits": ({"type": "integer", "multipleOf": 10**400 + 1}, False),
    "not a number": ({"type": "integer", "multipleOf": True}, False),
}


@pytest.mark.parametrize(("schema", "taken"), DIVISORS.values(), ids=DIVISORS)
async def test_divisors_of_many_states_are_refused(lasting: Compiler, schema: Any, taken: bool) -> None:
    """A divisor of 99,991 took 3 s, and 119 MB for as long as it was cached."""
    spec = GrammarSpec("json_schema", json.dumps(schema), "schema")
    if taken:
        await lasting.compile(spec)
        return
    with pytest.raises(RequestError, match="multipleOf"):
        await lasting.compile(spec)


async def test_a_large_divisor_is_dropped_where_part_of_a_schema_is_enough(lasting: Compiler) -> None:
    text = json.dumps({"type": "integer", "multipleOf": 99_991})
    grammar = await lasting.compile(GrammarSpec("json_schema", text, "schema", lenient=True))
    assert "'multipleOf' at #" in grammar.warnings


async def test_what_intersections_and_divisors_keep_counts_in_the_cache(lasting: Compiler) -> None:
    met = [{"type": "string", "pattern": f"^a{{1,{at}}}$"} for at in range(1, 13)]
    texts = map(json.dumps, ({"type": "integer"}, {"type": "integer", "multipleOf": 9_973}, {"allOf": met}))
    sizes = [(await lasting.compile(GrammarSpec("json_schema", text, "s"))).size for text in texts]
    assert sizes[1] - sizes[0] > 4e6 and sizes[2] - sizes[0] > 1e6


def levels(count: int, inner: dict[str, Any]) -> dict[str, Any]:
    for _ in range(count):
        inner = {"items": inner}
    return inner


def branches(count: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for each in patterns(count):
        inner = {**each, "anyOf": [inner]}
    return inner


def fields(count: int, value: Any = True) -> dict[str, Any]:
    return {"properties": {f"f{at}": value for at in range(count)}}


def followed(count: int, beside: dict[str, Any]) -> dict[str, Any]:
    """A schema of `count` references to an object of as many fields."""
    return {"$defs": {"b": fields(count)}} | fields(count, {"$ref": "#/$defs/b", **beside})


def union(count: int) -> dict[str, Any]:
    """A schema of one of `count` objects that also says that it is an object, as generators of schemas write
    it."""
    kinds = {f"t{at}": {"type": "object", **fields(10, {"type": "string"})} for at in range(count)}
    return {"$defs": kinds, "type": "object", "anyOf": [{"$ref": f"#/$defs/{name}"} for name in kinds]}


def in_levels(count: int, deep: int) -> dict[str, Any]:
    """Objects whose fields are references to the next, which may be null."""
    made = [fields(count, {"$ref": f"#/$defs/{at + 1}", "nullable": True}) for at in range(deep)]
    return {"$defs": {str(at): each for at, each in enumerate([*made, {}])}, "$ref": "#/$defs/0"}


IDS = {"$defs": {str(at): {"$id": f"http://a/{at}", "c": {}} for at in range(200)}}
CHAIN = {str(at): levels(110, {"$ref": f"#/c/{at + 1}"} if at < 15 else {}) for at in range(16)}
TRIED: dict[str, tuple[GrammarKind, Any]] = {
    "references and levels": ("json_schema", {"c": CHAIN, "$ref": "#/c/0"}),
    "required names": ("json_schema", {"required": [f"n{at}" for at in range(40_000)]}),
    "a constant": ("json_schema", {"const": {f"n{at}": at for at in range(45_000)}}),
    "patterns in branches": ("json_schema", branches(24)),
    "patterns where a reference leads": ("json_schema", {"c": {"allOf": patterns(22)}, "$ref": "#/c"}),
    "an intersection in a grammar": ("ebnf", "start: T\nT: /.*a.*/ & /.*b.*/"),
    "references beside properties": ("json_schema", followed(100, fields(1))),
    "references beside a type": ("json_schema", followed(100, {"type": "object"})),
    "references that may be null": ("json_schema", in_levels(20, 3)),
    "branches beside properties": ("json_schema", {"anyOf": [{}] * 100, **fields(100)}),
    "references below many ids": ("json_schema", {"$ref": "#/$defs/1/c", "type": "null", **IDS}),
    "a long pattern": ("json_schema", {"items": {"pattern": "a" * 9_000}}),
    "optional parts of a pattern": ("json_schema", {"pattern": f"^{'.?' * 2_000}$"}),
    "optional parts of a name": ("json_schema", {"patternProperties": {".?" * 2_000: {}}}),
    "optional parts of a regex": ("regex", ".?" * 2_000),
    "optional parts in a grammar": ("ebnf", f"start: T\nT: /{'.?' * 2_000}/"),
    "regexes of a tag": ("lark", "\n".join(f"r{at}: /{'.?' * 2_000}/" for at in range(5))),
}


@pytest.mark.parametrize(("kind", "source"), TRIED.values(), ids=TRIED)
def test_what_overflows_stacks_or_memory_is_tried(kind: GrammarKind, source: Any) -> None:
    """The first three end the process that compiles them, the others take seconds and gigabytes."""
    assert needs_trial(kind, source if isinstance(source, str) else json.dumps(source))


BOTH = {"allOf": [{"anyOf": [fields(5)] * 18}, {"anyOf": [fields(5)] * 18}]}


@pytest.mark.parametrize("schema", [followed(40, fields(1)), in_levels(10, 3), BOTH])
def test_the_cache_counts_what_copies_keep(schema: dict[str, Any]) -> None:
    """40 references to 40 fields keep 10 MB, and the text has 4 KB."""
    assert 5e6 < kept_bytes("json_schema", json.dumps(schema)) < 30e6


def test_branches_are_not_copied_into_each_other() -> None:
    """60 objects of 10 fields keep 2 MB, and their cache has 256."""
    assert kept_bytes("json_schema", json.dumps(union(60))) < 10e6


def test_an_assertion_of_the_library_is_no_reason() -> None:
    panic = "panic: assertion failed: symbols.len() < u16::MAX\n<backtrace>\n  0: <unknown>"
    assert reason(panic) == "the constraint is too large or too complex"


@pytest.mark.parametrize("reference", ["./#/c/x", "json-schema:///#/c/x", "http://a/b#/c/x"])
async def test_references_that_cannot_be_followed_are_refused(lasting: Compiler, reference: str) -> None:
    schema = {"$id": "http://a/b", "c": {"x": {"type": "integer"}}, "$ref": reference}
    with pytest.raises(RequestError, match=r"\$ref"):
        await lasting.compile(GrammarSpec("json_schema", json.dumps(schema), "schema"))


async def test_a_schema_within_a_grammar_is_refused(lasting: Compiler) -> None:
    text = 'start: %json {"type": "integer", "multipleOf": 99991}'
    with pytest.raises(RequestError, match="%json"):
        await lasting.compile(GrammarSpec("ebnf", text, "grammar"))


def test_long_names_are_not_copied_into_every_place() -> None:
    schema = {"properties": {"n" * 250_000: {"properties": {str(at): {} for at in range(1_000)}}}}
    assert sum(len(place.path) for place in subschemas(schema)) < 2e6


FIELDS = {f"f{at}": {**each, "maxLength": 99} for at, each in enumerate(patterns(15))}
COMMON: list[dict[str, Any]] = [
    {
        "$defs": {"base": {"type": "object", "properties": FIELDS}},
        "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"g": {"type": "string", "minLength": 1}}}],
    },
    {"$defs": {"base": {"type": "object", "properties": FIELDS}}, "$ref": "#/$defs/base", "nullable": True},
    {"type": "object", "anyOf": [{"properties": FIELDS}, {"properties": {"g": {"type": "null"}}}]},
    {"$defs": {"a": patterns(1)[0]}, "allOf": [{"$ref": "#/$defs/a"}], "description": "pydantic's"},
    {"$defs": {f"p{at}": each for at, each in enumerate(patterns(40))}, "$ref": "#/$defs/p3", "title": "x"},
    {"properties": {f"p{at}": {**each, "maxLength": 99} for at, each in enumerate(patterns(40))}},
    {"allOf": [{"properties": {"a": each, "b": each}} for each in patterns(5)]},
    {"anyOf": patterns(40)},
    followed(50, {"description": "a title, a default and the like constrain nothing", "default": None}),
    {"$defs": {"b": fields(50)}} | fields(50, {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}),
    followed(20, {"nullable": True}),
    union(60),
    {"pattern": f"^({'|'.join(f'word{at}' for at in range(700))})$"},
    {"properties": {f"p{at}": {"pattern": "^[^@]+@[^@]+(\\.[a-z]{2,})*$"} for at in range(300)}},
]


@pytest.mark.parametrize("schema", COMMON)
def test_common_schemas_need_no_trial(schema: dict[str, Any]) -> None:
    assert not needs_trial("json_schema", json.dumps(schema))
