"""JSON schemas, regexes, grammars, choices and most structural tags through llguidance.

Its schemas are exact or refused (0 invalid of 33,000 MaskBench instances accepted), it compiles in a
millisecond, and added tokens never match as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from core.grammar import TokenTable
from gpu.grammar.formats import rewrite_formats
from gpu.grammar.intersections import drop_large_divisors, kept_bytes
from gpu.grammar.normal import allow_control_characters, normalise
from gpu.grammar.regex import ascii_classes, literal
from gpu.grammar.schema import Json, Refused, check_schema, decode, drop_unsupported
from gpu.grammar.stepper import Bits, Grammar, reached
from gpu.grammar.structural_tag_lark import NotInLark, SchemaPart, control_token_ids, lark_of

_LIMITS: Any = {
    "initial_lexer_fuel": 1_000_000,  # 20 ms of regex analysis when compiling
    "step_lexer_fuel": 200_000,  # half of it ended 17 more of 9,499 real schemas while decoding
    "step_max_items": 20_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,  # at 1 to 2 KB, what one request may hold
    "max_grammar_size": 500_000,
    "verbose_errors": False,  # they quote the schema and the text
}
"""Limits on what one step may cost its neighbours. The library's 50,000 items let a hostile grammar hold a
step for 115 ms, these for 60 to 90; MaskBench decodes the same under both."""

MAX_BLANKS = 24
_BLANKS = r"[\x20\x0A\x0D\x09]{1,%d}"
_SCHEMA_OPTIONS: Any = {
    "lenient": False,
    "coerce_one_of": False,
    "item_separator": ",",
    "key_separator": ":",
    # No \u, unless the schema asks for what cannot be written otherwise: an escaped letter in a key would
    # spell a declared property past its schema ("\u0061" is "a"). No \/ either, for the same reason. The
    # rest stand for characters that cannot stand plain.
    "json_allowed_escapes": 'nrbtf\\"',
    "whitespace_flexible": True,
    "whitespace_pattern": _BLANKS % MAX_BLANKS,
}
"""Overrides: without them a schema could loosen itself through `x-guidance`. White space between two
tokens of JSON is bounded, with room for a line and its indentation: small models that may write it for
ever do, until max_tokens. (Tighter patterns, such as one line break and then blanks, cost ten times the
parser items: one such ended real schemas of 100 properties.)"""

_SLICE = "[^<]+"
"""Tokens that free text takes whole, even where it must not contain a mark: marks begin with "<"."""

_SCHEMA_IN_GRAMMAR = re.compile(r"%json\s*\{")
"""A schema inside a grammar, which is refused: it would be neither checked nor counted, and what it cannot
express would be ignored."""

_PROBED = 24
"""Forced tokens followed after compiling: some dead ends lie behind the opening brace."""


def check_table(table: TokenTable) -> None:
    """Raise `Refused` for a vocabulary without an end-of-sequence token or without exact bytes."""
    if not table.stops or not any(table.raw):
        raise Refused("constraints need an end-of-sequence token, and tokens with exact bytes")


class LlguidanceBackend:
    """Compiles on any thread; is its own stepper on the launch thread."""

    def __init__(self, table: TokenTable, threads: int) -> None:
        """Takes 0.7 to 1.6 s for 150,000 tokens and holds the GIL. Raises `Refused` for a tokenizer
        whose tokens have no exact bytes."""
        check_table(table)
        try:
            self._tokenizer = LLTokenizer(
                table.definition,
                n_vocab=table.width,
                eos_token=sorted(table.stops),
                slices=[*LLTokenizer.general_slices(), _SLICE],
            )
        except ValueError as error:
            raise Refused(str(error).splitlines()[0]) from error
        self._limits = LLParserLimits(**_LIMITS)
        self._executor = LLExecutor(threads)
        self._stops = table.stops
        self._marks = control_token_ids(table)
        self.words = -(-table.width // 32)

    # -- compiling ---------------------------------------------------------------------------------

    def tag_source(self, text: str) -> Source:
        """A structural tag as a Lark grammar. Raises `NotInLark` for one that xgrammar has to compile, and
        `Refused` for a schema in it that cannot be honoured."""
        tag = decode(text, "The structural tag")
        if not isinstance(tag, dict) or tag.get("type", "structural_tag") != "structural_tag":
            raise NotInLark
        dropped: list[str] = []
        lenient = False

        def schema_text(part: SchemaPart) -> str:
            nonlocal lenient
            lenient = lenient or part.lenient
            return _inner_schema(part, dropped)

        text = lark_of(tag, self._marks, schema_text)
        return Source(text, tuple(dropped), lenient)

    def compile(self, kind: str, text: str, lenient: bool = False) -> Grammar:
        """Raises `Refused` with the reason. Bounded by the library's fuel, not by time."""
        source = _source(kind, text, lenient)
        notation = source.text
        if any(name in notation.replace("\\", "") for name in self._marks):
            notation = _unforced(notation)
        prototype = LLMatcher(self._tokenizer, notation, log_level=0, limits=self._limits)
        _check(prototype)
        warnings = prototype.get_grammar_warnings()
        if warnings and not lenient:
            raise Refused(f"Part of the constraint would be ignored: {warnings[0]}")
        self._probe(prototype)
        # Above what was measured over MaskBench: 35 KB of state and automaton, 5 bytes per byte of text.
        size = 35_000 + 20 * len(text) + kept_bytes(kind, text)
        return Grammar(self, prototype.deep_copy, size, (*source.dropped, *dict.fromkeys(warnings)))

    def _probe(self, prototype: LLMatcher) -> None:
        """Fail now what would fail at the first tokens. The first mask also warms the prototype."""
        bits = np.zeros((1, self.words), np.int32)
        self.fill([prototype], [0], bits)
        _check(prototype)
        if not bits.any():
            raise Refused("Nothing can satisfy the constraint.")
        state = prototype.deep_copy()
        if forced := state.compute_ff_tokens()[:_PROBED]:
            state.try_consume_tokens(forced)
            self.fill([state], [0], bits)
            _check(state)

    # -- stepping ----------------------------------------------------------------------------------

    def fill(self, states: Sequence[Any], rows: Sequence[int], bits: Bits) -> None:
        """See `Stepper.fill`. A matcher that fails allows the stop ids only, and `accept` refuses them."""
        pairs = list(zip(states, rows, strict=True))
        self._executor.unsafe_compute_mask_ptr(pairs, bits.ctypes.data, bits.shape[1] * 4, len(bits))

    def fill_ahead(
        self, states: Sequence[Any], rows: Sequence[int], bits: Bits, ahead: Sequence[Sequence[int]]
    ) -> list[int]:
        """See `Stepper.fill_ahead`. The library moves a matcher through the tokens and back."""
        # No matcher is moved past a stop id: nothing follows one.
        known = [list(takewhile(lambda token: token not in self._stops, tokens)) for tokens in ahead]
        moving = [each for each in zip(states, rows, known, strict=True) if each[2]]
        if moving:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(
                moving, bits.ctypes.data, bits.shape[1] * 4, len(bits)
            )
        staying = [i for i, tokens in enumerate(known) if not tokens]
        if staying:
            self.fill([states[i] for i in staying], [rows[i] for i in staying], bits)
        return [reached(bits, row, tokens) for row, tokens in zip(rows, known, strict=True)]

    def lost(self, state: Any) -> bool:
        """See `Stepper.lost`."""
        return bool(state.is_error())

    def accept(self, states: Sequence[Any], tokens: Sequence[int]) -> list[str | None]:
        """See `Stepper.accept`."""
        moved = self._executor.consume_token_par(list(zip(states, tokens, strict=True)))
        stops = self._stops
        return [
            # The library takes a stop id from a matcher that failed in `fill`: half an answer would end well.
            None if ok and not (token in stops and state.is_error()) else reason(state.get_error())
            for ok, state, token in zip(moved, states, tokens, strict=True)
        ]

    def ended(self, state: Any, token: int) -> bool:
        """See `Stepper.ended`. The library's own "stopped" comes a token too early: when nothing but
        an end can follow."""
        return token in self._stops


def _check(state: LLMatcher) -> None:
    if state.is_error():
        raise Refused(f"{reason(state.get_error())}.")


def reason(error: str) -> str:
    """The library's message without its state, on one line."""
    lines = [line.strip() for line in error.replace("<non-verbose/>", "").splitlines()]
    text = "; ".join(line for line in lines if line).rstrip(".;")
    if text.startswith("panic"):  # an assertion in the library, and its stack
        return "the constraint is too large or too complex"
    return "nothing can follow" if text in ("", "NoExtensionBias") else text[:400]


def _unforced(grammar: str) -> str:
    """Return the grammar with forced tokens switched off. If forced text contains the name of a control
    token, llguidance forces that token, and then refuses it."""
    if not grammar.startswith("{"):
        return f'%llguidance {{"no_forcing": true}}\n{grammar}'
    parts = json.loads(grammar)
    for part in parts["grammars"]:
        schema = part.pop("json_schema", None)
        lark = f"start: %json {json.dumps(schema)}" if schema is not None else part["lark_grammar"]
        part["lark_grammar"] = f'%llguidance {{"no_forcing": true}}\n{lark}'
    return json.dumps(parts)


class Source(NamedTuple):
    """A grammar in the library's notation, and the keywords that a lenient schema lost."""

    text: str
    dropped: tuple[str, ...] = ()
    lenient: bool = False


def _source(kind: str, text: str, lenient: bool) -> Source:
    """A constraint in llguidance's notation. Raises `Refused` for what that cannot express."""
    match kind:
        case "json_object":
            return _schema('{"type":"object"}', lenient=False)
        case "json_schema":
            return _schema(text, lenient)
        case "lark":
            return Source(text)
        case "regex":
            return Source(LLMatcher.grammar_from_regex(ascii_classes(text)))
        case "choice":
            # An alternation, not grammar rules: those are tried one by one at every token.
            return Source(LLMatcher.grammar_from_regex("|".join(map(literal, choices(text)))))
    if _SCHEMA_IN_GRAMMAR.search(text):
        raise Refused("A schema within a grammar ('%json') is not supported: use a structural tag.")
    try:
        return Source(grammar_from("ebnf", text))
    except (ValueError, RecursionError) as error:
        raise Refused(str(error)) from error


def _schema(text: str, lenient: bool) -> Source:
    schema = decode(text)
    dropped: list[str] = []
    options: Any = _schema_options(schema, lenient, dropped)
    try:
        return Source(LLMatcher.grammar_from_json_schema(_to_json(schema), overrides=options), tuple(dropped))
    except ValueError as error:
        raise Refused(f"The schema cannot be read: {reason(str(error))}.") from error


def _inner_schema(part: SchemaPart, dropped: list[str]) -> str:
    """A schema within a Lark grammar. Keywords left out of it are added to `dropped`."""
    schema, blanks, lenient = part
    options = _schema_options(schema, lenient, dropped)
    if blanks is not None:
        options["whitespace_pattern"] = _BLANKS % min(blanks, MAX_BLANKS)
    return _to_json({**({} if schema is True else schema), "x-guidance": options})


def _schema_options(schema: Json, lenient: bool, dropped: list[str]) -> dict[str, Any]:
    """Options for `schema`, which is checked and rewritten in place. Keywords that a `lenient` one loses
    are added to `dropped`."""
    normalise(schema)
    if lenient:
        dropped += drop_unsupported(schema)
    else:
        check_schema(schema)
    dropped += drop_large_divisors(schema, lenient)
    if schema is False:
        raise Refused("The schema false allows nothing.")
    rewrite_formats(schema)
    escapes = _SCHEMA_OPTIONS["json_allowed_escapes"]
    if allow_control_characters(schema, _to_json(schema)):
        escapes += "u"
    return {
        **_SCHEMA_OPTIONS,
        "json_allowed_escapes": escapes,
        "lenient": lenient,
        "coerce_one_of": lenient,
    }


def _to_json(schema: Json) -> str:
    """The schema as JSON of an object: options cannot be added to a boolean."""
    return json.dumps({} if schema is True else schema, ensure_ascii=False)


def choices(text: str) -> list[str]:
    """The choices of a JSON list. Raises `Refused` unless it holds strings, at least one."""
    listed = decode(text, "The list of choices")
    if not isinstance(listed, list) or not listed or not all(isinstance(one, str) for one in listed):
        raise Refused("The choices must be a list of at least one string.")
    return listed
