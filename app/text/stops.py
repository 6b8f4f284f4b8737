"""Stop strings and stop patterns in text that arrives in pieces.

The result does not depend on where the pieces are cut: the first stop to be complete wins, of
those completed by the same character the longest. A character is given out as soon as no stop
string can begin with it any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import re2

from core.errors import RequestError

MAX_STOPS = 64
"""OpenAI takes 4 strings; other servers' clients send more."""
MAX_STOP_CHARS = 1_000
MAX_PATTERNS = 8
MAX_PATTERN_CHARS = 1_000

WINDOW = 1_024
"""Longest match of a pattern, in characters: no more of the text is kept."""
PATTERN_HOLD = 64
"""Characters held back while a request has patterns. A pattern can begin a match anywhere, so this is
a choice: longer matches still stop the text, but what came before the hold has been given out."""

_PATTERN_MEMORY = 1 << 20
"""Bytes that RE2 may use for one pattern (its own default is 8 MB): compiling stays in the
milliseconds, `(x{1000}){1000}` is refused."""

MAX_CLASSES = 16
"""Classes of Unicode in one pattern: 320 of them took 60 ms to read."""

MAX_PROGRAM = 2_000
"""RE2 instructions of all patterns of a request. Every token searches the last `WINDOW` characters
again, at worst in the time of characters times instructions: 8 patterns of 10,000 instructions kept
the loop for 80 ms a token, 2,000 stay at about 5 ms; ordinary ones have 20 to 300 and take 5 µs."""

MAX_PROGRAMS = 20_000
"""RE2 instructions of all patterns of a request, times its choices, which are searched one after the other.
A pattern of about 500 instructions in 128 choices blocked the event loop for 0.2 s."""

_CONTEXT_SIGNS = ("^", "$", "\\b", "\\B", "\\A", "\\z")


def check_stops(stops: Sequence[str], patterns: Sequence[str] = (), choices: int = 1) -> None:
    """Raise `RequestError` naming `stop` or `stop_regex` for one that is not supported in so many choices."""
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop takes at most {MAX_STOPS} strings, got {len(stops)}.", "stop")
    for stop in stops:
        if not stop:
            raise RequestError("stop must not contain an empty string.", "stop")
        if len(stop) > MAX_STOP_CHARS:
            raise RequestError(
                f"a stop string has at most {MAX_STOP_CHARS} characters, got {len(stop)}.", "stop"
            )
    if len(patterns) > MAX_PATTERNS:
        raise RequestError(
            f"stop_regex takes at most {MAX_PATTERNS} patterns, got {len(patterns)}.", "stop_regex"
        )
    size = 0
    for pattern in patterns:  # one after the other: those behind a large one need not be compiled
        size += compile_pattern(pattern).programsize
        if size > MAX_PROGRAM:
            raise RequestError(
                f"stop_regex is too large: its patterns compile to {size} instructions, at most "
                f"{MAX_PROGRAM} are taken. Write smaller repetition counts.",
                "stop_regex",
            )
    if size * choices > MAX_PROGRAMS:
        raise RequestError(
            f"stop_regex is too large for {choices} choices: its patterns compile to {size} instructions, at "
            f"most {MAX_PROGRAMS // choices} are taken. Write smaller repetition counts, or ask for fewer.",
            "stop_regex",
        )


def compile_pattern(pattern: str) -> Any:
    """A google-re2 pattern: linear in the text, whatever the user wrote. Compiled once per text of
    the pattern (re2 keeps them). Raises `RequestError`."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise RequestError(
            f"a stop_regex has at most {MAX_PATTERN_CHARS} characters, got {len(pattern)}.", "stop_regex"
        )
    if pattern.count("\\p") + pattern.count("\\P") > MAX_CLASSES:
        raise RequestError(
            f"a stop_regex has at most {MAX_CLASSES} classes of Unicode (\\p and \\P); repeat one instead.",
            "stop_regex",
        )
    options = re2.Options()
    options.max_mem = _PATTERN_MEMORY
    options.log_errors = False
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0] if error.args else "it cannot be compiled"
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise RequestError(f"stop_regex {pattern!r}: {text}.", "stop_regex") from error
    except UnicodeEncodeError as error:
        raise RequestError("stop_regex has a lone surrogate.", "stop_regex") from error
    if compiled.search("") is not None:
        raise RequestError(f"stop_regex {pattern!r} matches the empty text.", "stop_regex")
    return compiled


class _Found(NamedTuple):
    """A match at held[start:end]; the text before `held` has been given out. The least wins: the first to be
    complete, among equal ends the longest."""

    end: int
    start: int
    name: str


class StopScanner:
    """Holds text back while it could still become a stop. Owner: event loop.

    A stop that is not begun costs one look for its first character.
    """

    def __init__(
        self,
        stops: Sequence[str],
        patterns: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Stops and patterns as `check_stops` lets them pass; `include_stop` leaves the stop in the text. The
        text of the first `min_tokens` tokens must not be fed."""
        self.min_tokens = min_tokens
        self._stops = [_Stop(stop) for stop in stops]
        self._patterns = _Patterns(patterns) if patterns else None
        self._include = include_stop
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Scan more text. Returns what may be given out and, when a stop is complete, which one (a
        pattern's source for a pattern): the text then ends before or, if included, after it, and
        nothing may be fed any more."""
        begun = [stop for stop in self._stops if stop.begin >= 0 or stop.first in text]
        if not begun and self._patterns is None:
            return text, None
        before = len(self._held)
        held = self._held + text
        found = [at for stop in begun if (at := stop.seek(held, before)) is not None]
        keep = max((len(held) - stop.begin for stop in begun if stop.begin >= 0), default=0)
        if self._patterns is not None:
            found += self._patterns.feed(held, before, min(found)[0] if found else len(held))
            keep = max(keep, PATTERN_HOLD)
        if found:
            first = min(found)
            self._held = ""
            return held[: first.end if self._include else max(first.start, 0)], first.name
        cut = max(len(held) - keep, 0)
        for stop in begun:
            stop.begin -= cut
        self._held = held[cut:]
        return held[:cut], None

    def flush(self) -> str:
        """The text ended without a stop: return what was held back."""
        held, self._held = self._held, ""
        return held


class _Stop:
    """A stop string. `begin` is the first place in the held text where it may have begun; negative: none."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.first = text[0]
        self.begin = -1

    def seek(self, held: str, before: int) -> _Found | None:
        """The stop's first match in `held`, where held[before:] is new. A place that is ruled out is not
        looked at again."""
        text, begin = self.text, self.begin
        if begin < 0:
            begin = held.find(self.first, before)
        elif not text.startswith(held[before : begin + len(text)], before - begin):
            begin = held.find(self.first, begin + 1)
        while begin >= 0 and not text.startswith(held[begin : begin + len(text)]):
            begin = held.find(self.first, begin + 1)
        self.begin = begin
        return _Found(begin + len(text), begin, text) if 0 <= begin <= len(held) - len(text) else None


class _Patterns:
    """Patterns over the last `WINDOW` characters.

    Matches are decided for the text up to each character, so that they cannot depend on the
    pieces. One search over all the new text says whether there is anything to decide; only with
    anchors and word boundaries, which may hold for a beginning and not for the whole, is every
    character a search (about 5 µs each).
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._compiled = [(pattern, compile_pattern(pattern)) for pattern in patterns]
        self._stepwise = any(sign in pattern for pattern in patterns for sign in _CONTEXT_SIGNS)
        self._seen = ""

    def feed(self, held: str, before: int, limit: int) -> list[_Found]:
        """The first match that ends in held[before:limit], if there is one; held[before:] is new. It may
        begin before `held`, in what was seen."""
        base = len(self._seen)
        whole = self._seen + held[before:]
        end, shift = base + limit - before, before - base
        self._seen = whole[-WINDOW - 1 :]
        if not self._stepwise and not any(_search(c, whole, 0, end) for _, c in self._compiled):
            return []
        for stop in range(base + 1, end + 1):
            spans = [(_search(c, whole, max(stop - WINDOW, 0), stop), name) for name, c in self._compiled]
            if found := [_Found(span[1] + shift, span[0] + shift, name) for span, name in spans if span]:
                return [min(found, key=lambda at: at.start)]
        return []


def _search(compiled: Any, text: str, start: int, end: int) -> tuple[int, int] | None:
    """First match that is not empty. `^` holds at the start of the whole text only, so a character
    before `start` is kept and skipped over."""
    if start:
        match = compiled.search(text[start - 1 : end], 1)
        offset = start - 1
    else:
        match = compiled.search(text[:end])
        offset = 0
    if match is None or match.start() == match.end():
        return None
    return match.start() + offset, match.end() + offset
