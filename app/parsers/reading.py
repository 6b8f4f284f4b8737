"""How the answers of one request are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from app.parsers.answer import Answer
from app.parsers.registry import ReasoningFamily, ToolFamily


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What to look for in each choice's text, and how to tell it."""

    tools: ToolFamily | None = None
    names: frozenset[str] = frozenset()
    """Functions that the model was told of."""
    schemas: Mapping[str, Mapping[str, Any]] = {}
    """Of their arguments."""
    reasoning: ReasoningFamily | None = None
    inside: bool = False
    """The prompt has opened the thinking."""
    inline: bool = False
    """Leave the thinking in the content."""
    silent: bool = False
    """Leave the thinking out."""
    one: bool = False
    """At most one call."""
    forced: bool = False
    """A grammar lets through calls alone, behind the thinking."""

    @property
    def plain(self) -> bool:
        """The text is the content."""
        return self.tools is None and self.reasoning is None

    @property
    def apart(self) -> bool:
        """The thinking is told in fields of its own."""
        return self.reasoning is not None and not self.inline and not self.silent

    def answer(self) -> Answer:
        """The parser of one choice."""
        markers = () if self.tools is None else self.tools.markers
        reasoning = (
            None if self.reasoning is None else self.reasoning.parser(self.inside, self.inline, markers)
        )
        calls = None if self.tools is None else self.tools.parser(self.names, self.schemas, self.forced)
        return Answer(reasoning, calls, inline=self.inline, silent=self.silent, one=self.one)
