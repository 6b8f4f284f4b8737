"""Tool calls in text: the part of parsing that all formats share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from app.ids import random_hex
from app.parsers.base import CallArguments, CallBroken, CallCut, CallStart, Content, Event
from app.parsers.cursor import Cursor, Malformed, Steps, any_of, behind_spaces, checked_name
from app.parsers.typed import Types, types_of

Format = Callable[["CallParser"], Steps[None]]
"""Reads the calls after a marker. Raises `Malformed` for text that is no call."""

RETRIES = 16
"""Malformed calls of one answer whose text is read again for calls inside it: work stays linear."""


def call_id() -> str:
    """A new call id in OpenAI's format."""
    return f"call_{random_hex(24)}"


class Syntax(msgspec.Struct, frozen=True, kw_only=True):
    """How calls are found in a text, and what reads them."""

    markers: tuple[str, ...]
    """Text that begins calls wherever it stands; it is no content."""
    calls: Format
    """Reads what follows one of `markers`."""
    bare: Format | None = None
    """Reads calls without a marker: an answer of nothing else, or what `begins` find in one."""
    begins: tuple[str, ...] = ()
    """How a call without a marker begins amid text, `%s` its function's name."""
    lead: str = ""
    """The text that the template puts between content and the first call: it is not content."""

    def begun(self, names: Iterable[str]) -> tuple[str, ...]:
        """`begins` with these functions' names."""
        return tuple({begin.replace("%s", name): None for begin in self.begins for name in sorted(names)})


class CallParser:
    """Splits calls from the rest of a text that comes in pieces.

    White space between calls, and around calls where there is no text, belongs to neither; beside text it is
    content as the model wrote it. An answer without calls is content to its last character. A call that the
    text's end cuts off stays one once it has been reported. Owner: event loop.
    """

    def __init__(
        self,
        syntax: Syntax,
        names: frozenset[str],
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        forced: bool = False,
    ) -> None:
        """`schemas` are those of the arguments of `names`, which may be called. `forced`: a
        grammar allows only calls, so a call that is cut off is one, too."""
        self.cursor = Cursor()
        self._syntax = syntax
        self._forced = forced
        self.names = names
        """Functions that may be called."""
        self._schemas = schemas or {}
        self._events: list[Event] = []
        self._next = 0
        self._name = ""
        """Name of the call that is being read, once it is known."""
        self._open = False
        """A call has been reported and its arguments are not complete."""
        self._fresh = True
        """No text yet, or none since the last call: white space is content only if text follows."""
        self._after = False
        """`_fresh` is set because of a call."""
        self._space: list[str] = []
        """White space that is content unless a call follows."""
        self._dropped = ""
        """The white space that the open call dropped: it is content if the call is broken."""
        self._reported = 0
        """Where the cursor was at the last event of the open call."""
        self._retries = RETRIES
        self._run = self._answer()

    def feed(self, text: str) -> list[Event]:
        """See `Answer.feed`."""
        self.cursor.push(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """See `Answer.finish`."""
        self.cursor.ended = True
        events = self._advance()
        if self._space and not self._after:
            events.append(Content("".join(self._space)))
        return events

    def _advance(self) -> list[Event]:
        next(self._run, None)
        events, self._events = self._events, []
        return events

    # -- for formats -------------------------------------------------------------------------------

    def named(self, name: str, declared: bool = False) -> str:
        """The name of the call that is being read. Raises `Malformed` unless it is a `declared` function's,
        where no marker distinguishes a call from an answer that happens to look like one."""
        name = checked_name(name)
        if declared and name not in self.names:
            raise Malformed
        self._name = name
        return name

    def properties(self, name: str) -> Mapping[str, Any]:
        """Schemas of a function's arguments, by name."""
        found = self._schemas.get(name, {}).get("properties")
        return found if isinstance(found, Mapping) else {}

    def types(self, name: str, key: str) -> Types:
        """The types that an argument of a function may have."""
        return types_of(self.properties(name).get(key), self._schemas.get(name, {}))

    def start(self, name: str, id: str = "") -> None:
        """Begin a call; its arguments follow. `id` is the model's own, where its family has them."""
        self._dropped = "".join(self._space)
        self._space.clear()
        self._open = True
        self._events.append(CallStart(self._next, id or call_id(), name))
        self._next += 1
        self._reported = self.cursor.taken

    def arguments(self, text: str) -> None:
        """Report more of the call's arguments."""
        self._reported = self.cursor.taken
        self._events.append(CallArguments(self._next - 1, text))

    def whole(self) -> None:
        """The arguments are complete: whatever follows cannot break this call any more."""
        self._ended()
        self.cursor.recorded()

    def gap(self) -> Steps[str]:
        """Pass over white space behind a call, which is content if text follows; the character after it."""
        cursor = self.cursor
        while (sign := (yield from cursor.peek())).isspace():
            self._space.append(cursor.take(behind_spaces(cursor.text, cursor.at)))
        return sign

    def tail(self, end: str) -> Steps[bool]:
        """Pass over the end mark of a call, if it is there: a call without it is still one."""
        if (yield from self.gap()) != end[0] or not (yield from self.cursor.skip(end)):
            return False
        self._space.clear()
        return True

    def _ended(self) -> None:
        self._open = False
        self._name = ""
        self._after = self._fresh = True

    # -- the answer --------------------------------------------------------------------------------

    def _answer(self) -> Steps[None]:
        syntax = self._syntax
        begins = syntax.begun(self.names)
        # An answer that is a JSON document or a list is not searched for calls inside it.
        if syntax.bare is not None and (yield from self._attempt(syntax.bare)).lstrip()[:1] in ("{", "["):
            begins = ()
        marks = (*syntax.markers, *begins)
        while mark := (yield from self._text(marks)):
            yield from self._attempt(syntax.bare if syntax.bare and mark in begins else syntax.calls)

    def _text(self, marks: tuple[str, ...]) -> Steps[str]:
        """Content up to a mark, which is returned; empty at the end."""
        if mark := (yield from self.cursor.upto(marks, self._content)):
            return mark
        rest = self.cursor.take(len(self.cursor.text))
        if rest and self._forced:
            self._cut(rest)
        elif not (rest and self._after):  # behind a call it is half a mark
            self._content(rest)
        return ""

    def _attempt(self, calls: Format) -> Steps[str]:
        """Read calls; the text of a malformed one, else empty."""
        cursor, raw = self.cursor, ""
        cursor.record()
        try:
            yield from calls(self)
        except Malformed:
            raw = cursor.recorded()
            if cursor.ended:  # valid up to here
                self._cut(raw + cursor.take(len(cursor.text)))
            else:
                raw = self._broken(raw)
        cursor.recorded()
        return raw

    def _cut(self, raw: str) -> None:
        """The text has ended within a call."""
        sole = next(iter(self.names)) if len(self.names) == 1 and not self._next else ""
        if not self._open and not self._forced:
            self._content(raw)
            return
        if not self._open and (name := self._name or sole):
            self.start(name)
        if self._open:
            self._events.append(CallCut(self._next - 1, self._dropped + raw))
        self._space.clear()
        self._ended()

    def _broken(self, raw: str) -> str:
        """Take what was read as content up to the next mark in it: half a string may contain valid calls."""
        again = any_of(self._syntax.markers).search(raw, 1) if self._retries else None
        end = len(raw) if again is None else again.start()
        reported = len(raw) - (self.cursor.taken - self._reported)
        if again is not None:
            self._retries -= 1
            self.cursor.back(raw[end:])
        raw = raw[:end]
        if self._open:
            self._events.append(CallBroken(self._next - 1, self._dropped + raw, raw[reported:]))
            self._open = self._after = self._fresh = False
        else:
            self._content(raw)
        self._name = ""
        return raw

    def _content(self, text: str) -> None:
        if not text:
            return
        if self._fresh and text.isspace():
            self._space.append(text)
            return
        text = "".join(self._space) + text
        self._space.clear()
        self._after = self._fresh = False
        lead = self._syntax.lead
        # The beginning of a longer lead is kept too: the rest may follow.
        if keep := next((end for end in range(len(lead), 0, -1) if text.endswith(lead[:end])), 0):
            self._space.append(lead[:keep])
            text = text[:-keep]
        if text:
            self._events.append(Content(text))
