"""Text with tool calls in it: what every family of formats does alike."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Generator, Mapping
from typing import Any

from app.parsers.base import CallArguments, CallBroken, CallStart, Content, Event
from app.parsers.cursor import Cursor, Malformed, Steps
from app.parsers.typed import Types, types_of

Format = Callable[["CallParser"], Steps[None]]
"""Reads the calls after a marker. Raises `Malformed` for what is none."""


def call_id() -> str:
    """As OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


class CallParser:
    """A `StreamParser` for calls.

    White space around calls belongs to neither them nor the content; an answer without calls is
    content to its last character. Owner: event loop.
    """

    __slots__ = (
        "_after",
        "_calls",
        "_dropped",
        "_events",
        "_names",
        "_next",
        "_open",
        "_run",
        "_schemas",
        "_space",
        "_told",
        "cursor",
    )

    def __init__(
        self,
        markers: tuple[str, ...],
        calls: Format,
        bare: Format | None,
        names: frozenset[str],
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """`calls` reads what follows one of `markers`, `bare` an answer that begins without one;
        `schemas` are those of the arguments, by function."""
        self.cursor = Cursor()
        self._calls = calls
        self._names = names
        self._schemas = schemas or {}
        self._events: list[Event] = []
        self._next = 0
        self._open = False
        """A call has been told and its arguments are not whole."""
        self._after = False
        """Behind a call: white space is no content until content comes."""
        self._space: list[str] = []
        """White space that is content unless a call follows."""
        self._dropped = ""
        """What the open call made of it: it comes back if the call is broken."""
        self._told = 0
        """Where the cursor stood when the open call was last told of."""
        self._run: Generator[None, None, None] | None = self._answer(markers, bare)

    def feed(self, text: str) -> list[Event]:
        """See `StreamParser.feed`."""
        self.cursor.push(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """See `StreamParser.finish`."""
        self.cursor.ended = True
        events = self._advance()
        if self._space:
            events.append(Content("".join(self._space)))
        return events

    def _advance(self) -> list[Event]:
        if self._run is not None:
            try:
                next(self._run)
            except StopIteration:
                self._run = None
        events, self._events = self._events, []
        return events

    # -- for formats -------------------------------------------------------------------------------

    def declared(self, name: str) -> None:
        """Raise `Malformed` unless `name` is a declared function: without a marker nothing else
        tells a call from an answer that happens to look like one."""
        if name not in self._names:
            raise Malformed

    def types(self, name: str, key: str) -> Types:
        """What an argument of a function may be."""
        schema = self._schemas.get(name, {})
        properties = schema.get("properties")
        return types_of(properties.get(key), schema) if isinstance(properties, Mapping) else None

    def start(self, name: str, id: str = "") -> None:
        """A call begins; its arguments follow. `id` is the model's own, where its family has them."""
        self._dropped = "".join(self._space)
        self._space.clear()
        self._open = True
        self._events.append(CallStart(self._next, id or call_id(), name))
        self._next += 1
        self._told = self.cursor.taken

    def arguments(self, text: str) -> None:
        """More of them."""
        self._told = self.cursor.taken
        self._events.append(CallArguments(self._next - 1, text))

    def whole(self) -> None:
        """The arguments are complete: whatever follows cannot break this call any more."""
        self._open = False
        self._after = True
        self.cursor.recorded()

    # -- the answer --------------------------------------------------------------------------------

    def _answer(self, markers: tuple[str, ...], bare: Format | None) -> Steps[None]:
        if bare is not None:
            yield from self._attempt(bare)
        # One search for all: one each would read to the text's end, again and again, for those not in it.
        any_of = re.compile("|".join(map(re.escape, markers)) or "(?!)")
        while (yield from self._text(markers, any_of)):
            yield from self._attempt(self._calls)

    def _text(self, markers: tuple[str, ...], any_of: re.Pattern[str]) -> Steps[bool]:
        """Content up to a marker; False at the end."""
        cursor = self.cursor
        while True:
            text = cursor.text
            if found := any_of.search(text, cursor.at):
                self._content(cursor.take(found.start()))
                return True
            keep = 0 if cursor.ended else held(text, cursor.at, markers)
            self._content(cursor.take(len(text) - keep))
            if cursor.ended:
                return False
            yield

    def _attempt(self, calls: Format) -> Steps[None]:
        self.cursor.record()
        try:
            yield from calls(self)
        except Malformed:
            raw = self.cursor.recorded()
            if not self._open:
                self._content(raw)
                return
            self._open = False
            body = raw.rstrip()
            rest = body[len(raw) - (self.cursor.taken - self._told) :]
            self._events.append(CallBroken(self._next - 1, self._dropped + body, rest))
            self._space = [raw[len(body) :]]
            self._after = False
        self.cursor.recorded()

    def _content(self, text: str) -> None:
        if self._after:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            self._events.append(Content("".join(self._space) + body))
            self._space.clear()
            self._after = False
        if len(body) < len(text):
            self._space.append(text[len(body) :])


def held(text: str, start: int, markers: tuple[str, ...]) -> int:
    """How many of the last characters of text[start:] could begin a marker."""
    size, most = len(text), 0
    for marker in markers:
        # Nearly every text has none of a marker's first character near its end.
        at = text.find(marker[0], max(start, size - len(marker) + 1))
        while at >= 0 and not marker.startswith(text[at:]):
            at = text.find(marker[0], at + 1)
        if at >= 0:
            most = max(most, size - at)
    return most
