"""A position in a text that arrives in pieces, for parsers written as generators.

A parser reads as a straight line, `name = yield from cursor.until("[ARGS]")`, and its generator
keeps its place when the text runs out: a bare `yield` means that more is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

from app.parsers.json_scan import JsonScanner

_SPACES = re.compile(r"\s*")
"""Matches all white space at once, by the rule of `str.isspace`."""

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Yields whenever the text has run out; ends with a T."""

NAME_CHARS = 256
"""Characters that a name (or anything else that must be whole to be used) may have."""


class Malformed(Exception):
    """The text does not match the format. Caught where the call began."""


class Cursor:
    """Owner: event loop."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        """Whether no more text comes."""
        self.taken = 0
        """Characters behind the cursor, of the whole text."""
        self._raw: list[str] | None = None

    def push(self, text: str) -> None:
        """Add more text. The text that was not taken yet stays in front of it."""
        self.text = self.text[self.at :] + text
        self.at = 0

    def back(self, text: str) -> None:
        """Put `text`, which was taken last, in front again."""
        self.text, self.at = text + self.text[self.at :], 0
        self.taken -= len(text)

    def take(self, end: int) -> str:
        """The text up to `end`, now behind the cursor."""
        span = self.text[self.at : end]
        self.at = end
        self.taken += len(span)
        if self._raw is not None:
            self._raw.append(span)
        return span

    # -- the text of a call, in case it is malformed ------------------------------------------------

    def record(self) -> None:
        """Keep what is taken from now on."""
        self._raw = []

    def recorded(self) -> str:
        """The text taken since `record`; ends the recording."""
        raw, self._raw = self._raw, None
        return "".join(raw or ())

    # -- steps -------------------------------------------------------------------------------------

    def peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        while self.at == len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def ahead(self, count: int) -> Steps[str]:
        """The next `count` characters, fewer at the end; none of them taken."""
        while len(self.text) - self.at < count and not self.ended:
            yield
        return self.text[self.at : self.at + count]

    def spaces(self) -> Steps[str]:
        """Pass over white space; the character after it, empty at the end."""
        while (sign := (yield from self.peek())).isspace():
            self.take(behind_spaces(self.text, self.at))
        return sign

    def expect(self, wanted: str) -> Steps[None]:
        """Take exactly `wanted`. Raises `Malformed`."""
        while wanted:
            found = self.text[self.at : self.at + len(wanted)]
            if not wanted.startswith(found) or (self.ended and found != wanted):
                while not wanted.startswith(found):
                    found = found[:-1]
                self.take(self.at + len(found))
                raise Malformed
            self.take(self.at + len(found))
            wanted = wanted[len(found) :]
            if wanted:
                yield

    def skip(self, wanted: str) -> Steps[bool]:
        """Take `wanted` if it comes next; otherwise nothing, except the start of it at the text's end."""
        while (found := self.text[self.at : self.at + len(wanted)]) != wanted:
            if not wanted.startswith(found):
                return False
            if self.ended:
                self.take(len(self.text))
                return False
            yield
        self.take(self.at + len(wanted))
        return True

    def run(self, belongs: Callable[[str], object], limit: int = NAME_CHARS) -> Steps[str]:
        """Take characters for as long as they belong. Raises `Malformed` for more than `limit`."""
        taken = ""
        while (sign := (yield from self.peek())) and belongs(sign):
            end, most = self.at + 1, min(len(self.text), self.at + limit - len(taken) + 1)
            while end < most and belongs(self.text[end]):
                end += 1
            taken += self.take(end)
            if len(taken) > limit:
                raise Malformed
        return taken

    def until(self, mark: str) -> Steps[str]:
        """The text before `mark`, both taken. Raises `Malformed` when it is longer than `NAME_CHARS`."""
        # Not beyond the limit: where every call is malformed, each would read to the text's end.
        limit = NAME_CHARS + len(mark)
        while (end := self.text.find(mark, self.at, self.at + limit)) < 0:
            if self.ended or len(self.text) - self.at >= limit:
                raise Malformed
            yield
        before = self.take(end)
        self.take(end + len(mark))
        return before

    def upto(self, marks: tuple[str, ...], out: Callable[[str], None]) -> Steps[str]:
        """Take the text before the first of `marks`, which goes to `out` as it comes; the mark, which is not
        taken. Empty at the end, where what could have begun a mark is left."""
        # One search for all: one each would read to the text's end, again and again, for those not in it.
        search = any_of(marks).search
        while (found := search(text := self.text, at := self.at)) is None:
            if span := self.take(len(text) - held(text, at, marks)):
                out(span)
            if self.ended:
                return ""
            yield
        out(self.take(found.start()))
        return found.group()

    def value(self, out: Callable[[str], None]) -> Steps[None]:
        """Take one JSON value; its text goes to `out` as it comes. Raises `Malformed`."""
        scanner = JsonScanner()
        while True:
            end = scanner.scan(self.text, self.at)
            span = self.take(end)
            if scanner.failed:
                raise Malformed
            if span:
                out(span)
            if scanner.done:
                return
            if self.ended:
                raise Malformed
            yield


def checked_name(text: str) -> str:
    """A name without the space around it. Raises `Malformed` for what cannot be one: marks in it are those of
    the next call."""
    name = text.strip()
    if not name or len(name) > NAME_CHARS or "<" in name or "\n" in name:
        raise Malformed
    return name


@lru_cache
def any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern that finds the first of `marks`."""
    return re.compile("|".join(map(re.escape, marks)) or "(?!)")


def held(text: str, start: int, markers: tuple[str, ...]) -> int:
    """How many of the last characters of text[start:] could begin a marker."""
    begun, longest = beginnings(markers)
    found = begun.search(text, max(start, len(text) - longest))
    return len(text) - found.start() if found else 0


@lru_cache
def beginnings(marks: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    """A pattern that matches the longest prefix of a mark at the end of a text, and the length of the longest
    such prefix."""
    found = {re.escape(mark[:end]) for mark in marks for end in range(1, len(mark))}
    longest = max(map(len, marks), default=1) - 1
    return re.compile(f"(?:{'|'.join(sorted(found))})\\Z" if found else "(?!)"), longest


def behind_spaces(text: str, at: int) -> int:
    """The position where the white space that begins at `at` ends."""
    found = _SPACES.match(text, at)
    assert found is not None
    return found.end()
