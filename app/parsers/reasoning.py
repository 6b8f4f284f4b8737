"""Thinking and answer, told apart by the marks around the thinking."""

from __future__ import annotations

from app.parsers.base import Content, Event, Reasoning
from app.parsers.calls import any_of, held


class ReasoningParser:
    """A `StreamParser` for thinking at the start of an answer.

    Marks are recognised once: a later `<think>` is the answer's own. Line breaks next to a mark
    belong to it. From where a call begins all is held until the thinking ends: if it never does, that was
    no thinking. Owner: event loop.
    """

    __slots__ = (
        "_any_of",
        "_begin",
        "_breaks",
        "_called",
        "_end",
        "_ends",
        "_fresh",
        "_held",
        "_inline",
        "_phase",
    )

    def __init__(self, marks: tuple[str, ...], inside: bool = False, inline: bool = False) -> None:
        """`marks`: of the thinking's begin and end, then those that begin calls. `inside`: the prompt has
        opened the thinking already. `inline`: events tell every character, marks and line breaks too."""
        self._begin, self._end, *_ = marks
        self._ends = marks[1:]
        self._any_of = any_of(self._ends)
        self._called: list[str] = []
        """The thinking from a call on."""
        self._inline = inline
        self._phase = self._thinking if inside else self._before
        self._held = ""
        """Could be the start of a mark."""
        self._breaks: list[str] = []
        """Line breaks that belong to what follows, unless that is a mark."""
        self._fresh = True
        """Nothing of this part was told yet."""

    @property
    def inside(self) -> bool:
        """Thinking now."""
        return self._phase in (self._thinking, self._calling)

    @property
    def settled(self) -> bool:
        """There was thinking, or there will be none."""
        return self._phase not in (self._before, self._thinking, self._calling)

    @property
    def plain(self) -> bool:
        """All that comes is content, and nothing is held back."""
        return self._phase == self._plain

    @property
    def called(self) -> str:
        """A thinking that has not ended, from a call on."""
        return "".join((*self._called, self._held)) if self._called else ""

    def feed(self, text: str) -> list[Event]:
        """See `StreamParser.feed`."""
        events: list[Event] = []
        text, self._held = self._held + text, ""
        while text:
            text = self._phase(text, events)
        return events

    def finish(self) -> list[Event]:
        """See `StreamParser.finish`."""
        rest, self._held = "".join((*self._breaks, *self._called, self._held)), ""
        if not rest:
            return []
        return [Reasoning(rest)] if self.inside else [Content(rest)]

    # -- each takes all of `text` or returns the rest for the next ---------------------------------

    def _before(self, text: str, events: list[Event]) -> str:
        body = text.lstrip()
        if body.startswith(self._begin):
            if self._inline:
                lead = text[: len(text) - len(body)]
                events.append(Reasoning("".join(self._breaks) + lead + self._begin))
            self._breaks.clear()
            self._phase = self._thinking
            return body[len(self._begin) :]
        if body and not self._begin.startswith(body):
            self._phase = self._plain
            lead, self._breaks = "".join(self._breaks), []
            return lead + text
        self._breaks.append(text[: len(text) - len(body)])
        self._held = body
        return ""

    def _thinking(self, text: str, events: list[Event]) -> str:
        found = self._any_of.search(text)
        if found is None:
            keep = held(text, 0, self._ends)
            self._reason(text[: len(text) - keep], events)
            self._held = text[len(text) - keep :]
            return ""
        self._reason(text[: found.start()], events)
        if found.group() != self._end:
            self._called.append(found.group())
            self._phase = self._calling
            return text[found.end() :]
        return self._closed(text[found.end() :], events)

    def _calling(self, text: str, events: list[Event]) -> str:
        """A call within the thinking, or the thinking speaks of one: its end will tell."""
        end = text.find(self._end)
        if end < 0:
            keep = held(text, 0, (self._end,))
            self._called.append(text[: len(text) - keep])
            self._held = text[len(text) - keep :]
            return ""
        self._reason("".join((*self._called, text[:end])), events)
        self._called.clear()
        return self._closed(text[end + len(self._end) :], events)

    def _closed(self, text: str, events: list[Event]) -> str:
        if self._inline:
            events.append(Reasoning(self._end))
        self._breaks.clear()
        self._phase = self._plain if self._inline else self._after
        return text

    def _reason(self, text: str, events: list[Event]) -> None:
        if self._inline:
            if text:
                events.append(Reasoning(text))
            return
        if self._fresh:
            text = text.lstrip("\n")
        body = text.rstrip("\n")
        if body:
            self._fresh = False
            events.append(Reasoning("".join(self._breaks) + body))
            self._breaks.clear()
        if len(body) < len(text):
            self._breaks.append(text[len(body) :])

    def _after(self, text: str, events: list[Event]) -> str:
        """Line breaks between the thinking and the answer."""
        text = text.lstrip("\n")
        if text:
            self._phase = self._plain
        return text

    def _plain(self, text: str, events: list[Event]) -> str:
        events.append(Content(text))
        return ""
