"""What an answer must look like: the constraint a client asked for, and what carries it out.

The libraries that compile grammars bring torch or hold native threads, so they live behind these
protocols: the edge compiles, the scheduler carries the compiled grammar to a slot without looking
into it, the device side steps it.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

GrammarKind = Literal["json_object", "json_schema", "regex", "ebnf", "choice", "structural_tag"]


class GrammarSpec(msgspec.Struct, frozen=True):
    """A constraint as text. Equal specs share one compiled grammar.

    `text` is the schema or structural tag as JSON, the pattern, the grammar's source, or a JSON list of
    choices; empty for `json_object`. `param` is the request field that errors name.
    """

    kind: GrammarKind
    text: str = ""
    param: str = "response_format"


class CompiledGrammar(Protocol):
    """Ready to constrain any number of rows; immutable, may be shared by threads."""

    def matcher(self) -> Any:
        """A fresh matcher for one request: opaque to all but the device side that made it."""
        ...


class GrammarCompiler(Protocol):
    """Turns specs into grammars, off the loop, within its limits."""

    async def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Cached by spec. Raises `RequestError` naming `spec.param` and the unsupported keyword, the
        syntax error or the limit that was passed."""
        ...

    def close(self) -> None:
        """Stop helper processes and threads."""
        ...
