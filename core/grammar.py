"""Structured output: the constraint that a client asked for, and the interfaces that carry it out.

The libraries that compile grammars bring torch or hold native threads, so they are behind these protocols:
the app compiles, the scheduler passes the compiled grammar on to a slot, the device side steps its matcher.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

BROKEN = "The output cannot continue under its grammar"
"""Start of the reason of a row whose matcher broke in the middle of an answer. Reasons are text; this
one says that the request's own constraint ended it, not a failure of the engine."""

GrammarKind = Literal["json_object", "json_schema", "regex", "ebnf", "choice", "structural_tag"]


class GrammarSpec(msgspec.Struct, frozen=True):
    """A constraint as text. Specs of equal kind and text share one compiled grammar.

    `text` is the schema or structural tag as JSON, the pattern (the syntax of Rust's regex crate, the
    whole answer has to match), the grammar's source (GBNF or Lark), or a JSON list of choices; empty
    for `json_object`. `param` is the request field that errors name. Classes of a pattern are ASCII:
    `\\d` is `[0-9]`, `\\w` is `[0-9A-Za-z_]`; a schema's `pattern` is read so as well. `lenient`: keywords of
    a `json_schema` that cannot be held are left out, and the grammar warns of them.
    """

    kind: GrammarKind
    text: str = ""
    param: str = "response_format"
    lenient: bool = False


class TokenRules(msgspec.Struct, frozen=True):
    """Tokens that may be taken whatever the text: `allowed` alone (None: all), and no `banned` sequence
    may be in the output."""

    allowed: tuple[int, ...] | None = None
    banned: tuple[tuple[int, ...], ...] = ()


class TokenTable(msgspec.Struct, frozen=True):
    """The vocabulary in the form that grammars need.

    `raw[id]` is the exact bytes of a token. `control` are the added tokens: text never matches them. `stops`
    end a generation. `width` is the number of logits, which may exceed the vocabulary. `definition` is the
    content of tokenizer.json.
    """

    raw: list[bytes]
    control: frozenset[int]
    stops: frozenset[int]
    width: int
    definition: str


class CompiledGrammar(Protocol):
    """Ready to constrain any number of rows; immutable, may be shared by threads."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Parts of a lenient schema that the output is not held to."""
        ...

    def matcher(self) -> Any:
        """A fresh matcher for one request: opaque to all but the device side that made it."""
        ...


class GrammarCompiler(Protocol):
    """Turns specs into grammars, off the loop, within its limits. Owner: event loop."""

    async def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Cached by kind and text. Raises `RequestError` naming `spec.param` and the unsupported
        keyword, the syntax error or the limit that was passed; `Overloaded` when too many wait.
        Cancelling it leaves others that wait for the same grammar alone."""
        ...

    async def restrict(
        self, grammar: CompiledGrammar | None, rules: TokenRules, param: str
    ) -> CompiledGrammar:
        """`grammar` (None: any text) restricted by `rules` as well. Raises `RequestError`, which names
        `param`, where no token can be the first one. Takes 0.1 ms, and a mask on another thread."""
        ...

    def close(self) -> None:
        """Stop helper processes and threads."""
        ...
