"""Reasoning and answer, split at the marks around the reasoning."""

from __future__ import annotations

from app.parsers.base import Content, Event, Reasoning
from app.parsers.cursor import Cursor, Steps


class ReasoningParser:
    """Splits reasoning from the answer after it, in a text that comes in pieces.

    Marks are recognised once: a later `<think>` is the answer's own. Line breaks next to a mark
    belong to it. From where a call begins, everything is held until the reasoning ends: if it never does, the
    held text was no reasoning. Owner: event loop.
    """

    def __init__(
        self,
        begins: tuple[str, ...],
        ends: tuple[str, ...],
        calls: tuple[str, ...] = (),
        inside: bool = False,
        inline: bool = False,
    ) -> None:
        """`begins` and `ends` are marks of the reasoning, `calls` begin calls. `inside`: the prompt has
        opened the reasoning already. `inline`: events have every character, marks and line breaks too."""
        self._begins = begins
        self._ends = ends
        self._calls = calls
        self._inline = inline
        self._cursor = Cursor()
        self._events: list[Event] = []
        self._called: list[str] = []
        """The reasoning from a call on."""
        self._breaks: list[str] = []
        """Line breaks that belong to what follows, unless that is a mark."""
        self._fresh = True
        """Nothing of the reasoning was reported yet."""
        self._run = self._answer()
        self.inside = inside
        """Whether the text is inside the reasoning now."""
        self.settled = False
        """There was reasoning, or there will be none."""
        self.plain = False
        """Whether all further text is content, and nothing is held back."""

    @property
    def called(self) -> str:
        """Reasoning that has not ended, from a call on."""
        return "".join(self._called) + self._rest() if self._called else ""

    def feed(self, text: str) -> list[Event]:
        """See `Answer.feed`."""
        if self.plain:
            return [Content(text)] if text else []
        self._cursor.push(text)
        next(self._run, None)
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """See `Answer.finish`."""
        rest = "".join((*self._breaks, *self._called, self._cursor.recorded(), self._rest()))
        if not rest:
            return []
        return [Reasoning(rest)] if self.inside else [Content(rest)]

    def _rest(self) -> str:
        return self._cursor.text[self._cursor.at :]

    def _answer(self) -> Steps[None]:
        cursor = self._cursor
        if not self.inside:
            cursor.record()
            yield from cursor.spaces()
            for begin in self._begins:
                self.inside = self.inside or (yield from cursor.skip(begin))
            lead = cursor.recorded()
            if self.inside and self._inline:
                self._events.append(Reasoning(lead))
            elif not self.inside:
                self._content(lead)
                return
        end = yield from cursor.upto((*self._ends, *self._calls), self._reason)
        if end not in self._ends:
            # A call within the reasoning, or the reasoning mentions one: its end decides.
            end = yield from cursor.upto(self._ends, self._called.append)
            self._reason("".join(self._called))
            self._called.clear()
        cursor.take(cursor.at + len(end))
        self.inside, self.settled = False, True
        self._breaks.clear()
        if self._inline:
            self._events.append(Reasoning(end))
        else:
            while (yield from cursor.peek()) == "\n":
                cursor.take(cursor.at + 1)
        self._content("")

    def _content(self, lead: str) -> None:
        """The rest is content."""
        self.settled = self.plain = True
        if text := lead + self._cursor.take(len(self._cursor.text)):
            self._events.append(Content(text))

    def _reason(self, text: str) -> None:
        if self._inline:
            if text:
                self._events.append(Reasoning(text))
            return
        if self._fresh:
            text = text.lstrip("\n")
        body = text.rstrip("\n")
        if body:
            self._fresh = False
            self._events.append(Reasoning("".join(self._breaks) + body))
            self._breaks.clear()
        if len(body) < len(text):
            self._breaks.append(text[len(body) :])
