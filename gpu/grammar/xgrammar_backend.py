"""Structural tags through xgrammar: free text, tags and schemas in one automaton.

Slower than llguidance (a schema's median is 0.3 s, one in twenty passes 5 s) and takes fewer schemas, but
knows every format of a tag, and reads letters and JSON that begin alike: it
compiles what `gpu/grammar/structural_tag_lark.py` does not translate.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import msgspec
import numpy as np

from core.grammar import TokenTable
from gpu.grammar.normal import normalise
from gpu.grammar.schema import Json, Refused, decode, values
from gpu.grammar.stepper import Bits, Grammar
from gpu.grammar.structural_tag_lark import control_token_ids
from gpu.grammar.xgrammar_schema import check_exact, close_objects

MAX_BYTES = 64 * 2**20
"""Maximum bytes of one compiled grammar. The largest of 1,500 MaskBench schemas took 34 MB."""
BLANKS = 2
"""Maximum white space characters in a row inside JSON, whatever a tag says. With 24 an automaton is nine
times as large and takes twice as long."""
MAX_VOCABULARIES = 16
"""Kept sets of control tokens that tags name. A model's templates need two or three; each costs 0.1 s,
half of it with the GIL held, and 10 MB."""
_FORMATS = frozenset(
    (
        *("const_string", "json_schema", "qwen_xml_parameter", "any_text", "token", "exclude_token"),
        *("any_tokens", "grammar", "regex", "sequence", "or", "tag", "triggered_tags"),
        *("token_triggered_tags", "tags_with_separator", "optional", "plus", "star", "repeat"),
        *("dispatch", "token_dispatch"),
    )
)


class _Batches(threading.local):
    """A pool of threads that fills masks, for each launch thread: replicas share grammars."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.batch = make()


class XgrammarBackend:
    """Compiles on any thread; is its own stepper on launch threads."""

    def __init__(self, table: TokenTable, threads: int) -> None:
        """Imports the library (1 s) and reads the vocabulary (0.1 s): call it before serving."""
        import xgrammar

        self._library: Any = xgrammar
        self._table = table
        self._names = control_token_ids(table)
        self._batches = _Batches(partial(xgrammar.BatchGrammarMatcher, max_threads=threads))
        self.words = -(-table.width // 32)
        self._info = lru_cache(MAX_VOCABULARIES)(self._make_info)
        self._info(frozenset())

    # -- compiling ---------------------------------------------------------------------------------

    def compile(self, kind: str, text: str, lenient: bool = False) -> Grammar:
        """Raises `Refused` with the reason. May run for minutes and take gigabytes: sources that can
        are tried in a helper process first."""
        tag = check_tag(text)
        info = self._info(self._named(tag))
        # No cache of the library's: with it, eight of 1,500 schemas failed on an assertion, and what
        # it holds is not bounded.
        compiler = self._library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        try:
            compiled = compiler.compile_structural_tag(msgspec.json.encode(tag).decode())
        except RuntimeError as error:
            raise Refused(_reason(str(error))) from error
        if compiled.memory_size_bytes > MAX_BYTES:
            raise Refused(f"The structural tag compiles to more than {MAX_BYTES >> 20} MB.")
        fork = partial(self._library.GrammarMatcher, compiled)
        self._probe(fork())
        return Grammar(self, fork, compiled.memory_size_bytes + len(text))

    def _named(self, tag: Json) -> frozenset[int]:
        """Control tokens that the tag spells or gives by id: only these may match."""
        words = list(values(tag, skipped="json_schema"))
        spelled = "\n".join(word for word in words if isinstance(word, str))
        by_id = self._table.control.intersection(word for word in words if isinstance(word, int))
        return by_id | {token for name, token in self._names.items() if name in spelled}

    def _make_info(self, named: frozenset[int]) -> Any:
        raw = list(self._table.raw)
        for token in self._table.control - named:
            raw[token] = b""
        return self._library.TokenizerInfo(
            raw,
            self._library.VocabType.RAW,
            vocab_size=self._table.width,
            stop_token_ids=sorted(self._table.stops),
        )

    def _probe(self, state: Any) -> None:
        bits = np.zeros((1, self.words), np.int32)
        self.fill([state], [0], bits)
        if not bits.any():
            raise Refused("Nothing can satisfy the structural tag.")

    # -- stepping ----------------------------------------------------------------------------------

    def fill(self, states: Sequence[Any], rows: Sequence[int], bits: Bits) -> None:
        """See `Stepper.fill`."""
        try:
            self._batches.batch.batch_fill_next_token_bitmask(list(states), bits, list(rows))
        except RuntimeError:  # of one matcher: find it, and leave its row empty
            for state, row in zip(states, rows, strict=True):
                bits[row] = 0
                try:
                    state.fill_next_token_bitmask(bits, row)
                except RuntimeError:
                    bits[row] = 0

    def fill_ahead(
        self, states: Sequence[Any], rows: Sequence[int], bits: Bits, ahead: Sequence[Sequence[int]]
    ) -> list[int]:
        """See `Stepper.fill_ahead`."""
        counts, moved = [1] * len(states), [0] * len(states)
        self.fill(states, rows, bits)
        walking = list(range(len(states)))
        while walking:
            walking = [i for i in walking if len(ahead[i]) > moved[i]]
            reasons = self.accept([states[i] for i in walking], [ahead[i][moved[i]] for i in walking])
            walking = [i for i, reason in zip(walking, reasons, strict=True) if reason is None]
            for i in walking:
                moved[i] += 1
            walking = [i for i in walking if not states[i].is_terminated()]
            for i in walking:
                counts[i] += 1
            if walking:
                self.fill([states[i] for i in walking], [rows[i] + moved[i] for i in walking], bits)
        for state, tokens in zip(states, moved, strict=True):
            if tokens:
                state.rollback(tokens)
        return counts

    def lost(self, state: Any) -> bool:
        """See `Stepper.lost`."""
        return False

    def accept(self, states: Sequence[Any], tokens: Sequence[int]) -> list[str | None]:
        """See `Stepper.accept`."""
        moved = self._library.BatchGrammarMatcher.batch_accept_token(list(states), list(tokens))
        return [
            None if ok else f"token {token} is not what the grammar allows here"
            for ok, token in zip(moved, tokens, strict=True)
        ]

    def ended(self, state: Any, token: int) -> bool:
        """See `Stepper.ended`."""
        return bool(state.is_terminated())


# -- what a tag may ask for ------------------------------------------------------------------------


def check_tag(text: str) -> Json:
    """The tag as JSON, without additional properties in its schemas. Raises `Refused` for what is no tag,
    and for schemas that xgrammar would not enforce exactly."""
    tag = decode(text, "The structural tag")
    if not isinstance(tag, Mapping) or not isinstance(tag.get("format"), Mapping):
        raise Refused("A structural tag must be an object with a 'format'.")
    for node in _formats(tag["format"]):
        kind = node.get("type")
        if not isinstance(kind, str) or kind not in _FORMATS:
            raise Refused(f"The structural tag has a format of unknown type {kind!r:.60}.")
        if kind in ("json_schema", "qwen_xml_parameter"):
            node.pop("lenient", None)  # it is not: llguidance alone leaves out what it cannot hold
            normalise(node.get("json_schema"))
            check_exact(node.get("json_schema"))
            close_objects(node.get("json_schema"))
            blanks = node.get("max_whitespace_cnt")
            if blanks is None or (isinstance(blanks, int) and blanks > BLANKS):
                node["max_whitespace_cnt"] = BLANKS
            if node.get("any_order"):
                raise Refused("'any_order' drops constraints of a schema and is not supported.")
    return tag


def is_light(tag: Json) -> bool:
    """Whether a tag is small and has nothing that was seen to compile for seconds: repetition,
    patterns, numeric ranges, or objects with many optional properties."""
    nodes = 0
    for node in values(tag):
        nodes += 1
        if isinstance(node, Mapping):
            kind = node.get("type")  # in a schema it may be a list
            if not _HEAVY.isdisjoint(node) or (isinstance(kind, str) and kind in _HEAVY):
                return False
            if len(node) > MAX_OPTIONAL:
                return False
    return nodes <= MAX_LIGHT


MAX_LIGHT = 400
"""Values in a tag, nested ones counted."""
MAX_OPTIONAL = 16
"""Keys of one object, which may be optional properties: any of them may be skipped, so that the automaton
grows with the square of their number."""
_HEAVY = frozenset().union(
    ("regex", "grammar", "repeat", "pattern", "minItems", "maxItems", "minimum", "maximum", "$ref"),
    ("exclusiveMinimum", "exclusiveMaximum", "max_chars", "max_tokens"),
)


def _formats(root: Json) -> Iterator[dict[str, Json]]:
    """Every format object of a tag; schemas are not looked into."""
    ahead = [root]
    while ahead:
        node = ahead.pop()
        if not isinstance(node, dict):
            raise Refused("Every format of a structural tag must be an object.")
        yield node
        for key in ("content", "elements", "tags", "rules"):
            inner = node.get(key)
            if isinstance(inner, Mapping):
                ahead.append(inner)
            elif isinstance(inner, list):
                ahead += [one[-1] if isinstance(one, list) and one else one for one in inner]


def _reason(error: str) -> str:
    """The library's message without time, file and line."""
    first = next((line for line in error.splitlines() if line.strip()), "")
    text = first.rsplit("is false: ", 1)[-1].strip()
    return f"The structural tag cannot be compiled: {text[:400] or 'no reason given'}"
