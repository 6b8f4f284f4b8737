"""One choice's text to events: reasoning first, then calls in what is left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from app.parsers.base import CallBroken, CallCut, CallStart, Content, Event, Reasoning, assemble
from app.parsers.calls import CallParser
from app.parsers.harmony import Channels
from app.parsers.reasoning import ReasoningParser
from app.parsers.registry import ReasoningFamily, ToolFamily


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The formats to parse in each choice's text, and how to report what is found."""

    tools: ToolFamily | None = None
    names: frozenset[str] = frozenset()
    """Functions in the prompt."""
    schemas: Mapping[str, Mapping[str, Any]] = {}
    """Schemas of the functions' arguments."""
    reasoning: ReasoningFamily | None = None
    inside: bool = False
    """The prompt has opened the reasoning."""
    inline: bool = False
    """Leave the reasoning in the content."""
    silent: bool = False
    """Leave the reasoning out."""
    one: bool = False
    """At most one call."""
    forced: bool = False
    """A grammar allows calls only, after the reasoning."""

    @property
    def plain(self) -> bool:
        """Whether all text is content."""
        return self.tools is None and self.reasoning is None

    @property
    def apart(self) -> bool:
        """Whether reasoning is reported in its own fields."""
        return self.reasoning is not None and not self.inline and not self.silent

    @property
    def calls_in_channels(self) -> bool:
        """Whether calls are messages beside those of the answer's text."""
        return self.tools is not None and self.tools.channels

    def answer(self) -> Answer:
        """The parser of one choice."""
        return Answer(self)


class Answer:
    """Splits the text of a whole choice, which comes in pieces. Either parser may be absent.

    The events do not depend on how the text was cut, but for where fragments end. Work is linear in the text,
    and what is held back is the start of a possible marker or of a call that may still be malformed. The same
    holds for both parsers. Owner: event loop.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        family, tools = reading.reasoning, reading.tools
        self._reasoning: ReasoningParser | Channels | None = None
        if family is not None and family.channels:
            in_channels = reading.calls_in_channels
            self._reasoning = Channels(
                reading.names,
                reading.schemas,
                calls=in_channels,
                inside=reading.inside,
                inline=reading.inline,
                forced=reading.forced and in_channels,
            )
            tools = None if in_channels else tools
        elif family is not None:
            begins = tools.markers if tools is not None else ()
            self._reasoning = ReasoningParser(
                family.begins, family.ends, begins, reading.inside, reading.inline
            )
        self._calls: CallParser | None = None
        if tools is not None:
            self._calls = CallParser(tools, reading.names, reading.schemas, reading.forced)
        self.done = False
        """No event follows: the one call allowed has been followed by another."""
        self.made = 0
        """Calls that were reported and not broken."""
        self.whole = 0
        """The calls of `made` that the text's end did not cut off."""

    @property
    def thinking(self) -> bool:
        """Whether the text is inside the reasoning now."""
        return self._reasoning is not None and self._reasoning.inside

    @property
    def settled(self) -> bool:
        """Whether no reasoning can begin any more."""
        return self._reasoning is None or self._reasoning.settled

    @property
    def plain(self) -> bool:
        """Whether all text from here on is content, character for character: it need not be fed."""
        return self._calls is None and (self._reasoning is None or self._reasoning.plain)

    def feed(self, text: str) -> list[Event]:
        """Parse more text. Never raises for what a model may write."""
        if self._reasoning is None:
            return self._counted(self._called(text))
        return self._counted(self._split(self._reasoning.feed(text)))

    def finish(self) -> list[Event]:
        """The text is over: return the events of what was held back. Nothing may be fed afterwards."""
        events: list[Event] = []
        if self._reasoning is not None:
            if (found := self._unclosed(self._reasoning)) is not None:
                return self._counted(found)
            events = self._split(self._reasoning.finish())
        if self._calls is not None:
            events += self._calls.finish()
        return self._counted(events)

    def _unclosed(self, reasoning: ReasoningParser | Channels) -> list[Event] | None:
        """The events of calls in reasoning without an end mark, which ends with them. None without any."""
        if self._calls is None or not (text := reasoning.called):
            return None
        found = self._calls.feed(text) + self._calls.finish()
        return found if assemble(found).calls else self._split(reasoning.finish())

    def _split(self, parts: list[Event]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            if isinstance(part, Content):
                events += self._called(part.text)
            elif isinstance(part, Reasoning) and self._reading.inline:
                events.append(Content(part.text))
            elif not (isinstance(part, Reasoning) and self._reading.silent):
                events.append(part)
        return events

    def _called(self, text: str) -> list[Event]:
        if self._calls is None:
            return [Content(text)] if text else []
        return self._calls.feed(text)

    def _counted(self, events: list[Event]) -> list[Event]:
        if self.done:
            return []
        for at, event in enumerate(events):
            if isinstance(event, CallStart):
                if self._reading.one and self.made:
                    self.done = True
                    return events[:at]
                self.made += 1
                self.whole += 1
            elif isinstance(event, CallBroken):
                self.made -= 1
                self.whole -= 1
            elif isinstance(event, CallCut):
                self.whole -= 1
        return events
