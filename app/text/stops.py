"""Stop strings and stop patterns in text that arrives in pieces.

The result does not depend on where the pieces are cut: the first stop to be complete wins, of
those completed by the same character the longest. A character is given out as soon as no stop
string can begin with it any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import re2

from core.errors import RequestError

MAX_STOPS = 64
"""OpenAI takes 4 strings; other servers' clients send more."""
MAX_STOP_CHARS = 1_000
MAX_PATTERNS = 8
MAX_PATTERN_CHARS = 1_000

WINDOW = 1_024
"""Characters that a match of a pattern may span: only so many are kept."""
PATTERN_HOLD = 64
"""Characters held back while patterns are in play. A pattern can begin a match anywhere, so this is
a choice: longer matches still stop the text, but what came before the hold has been given out."""

_PATTERN_MEMORY = 1 << 20
"""Bytes that RE2 may use for one pattern (its own default is 8 MB): compiling stays in the
milliseconds, `(x{1000}){1000}` is refused."""

MAX_PROGRAM = 2_000
"""RE2 instructions of all patterns of a request. Every token searches the last `WINDOW` characters
again, at worst in the time of characters times instructions: 8 patterns of 10,000 instructions kept
the loop for 80 ms a token, 2,000 stay at about 5 ms; ordinary ones have 20 to 300 and take 5 µs."""

_CONTEXT_SIGNS = ("^", "$", "\\b", "\\B", "\\A", "\\z")


def check_stops(stops: Sequence[str], patterns: Sequence[str] = ()) -> None:
    """Raise `RequestError` naming `stop` or `stop_regex` for what cannot be looked for."""
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
    if (size := sum(compile_pattern(pattern).programsize for pattern in patterns)) > MAX_PROGRAM:
        raise RequestError(
            f"stop_regex is too large: its patterns compile to {size} instructions, at most "
            f"{MAX_PROGRAM} are taken. Write smaller repetition counts.",
            "stop_regex",
        )


def compile_pattern(pattern: str) -> Any:
    """A google-re2 pattern: linear in the text, whatever the user wrote. Compiled once per text of
    the pattern (re2 keeps them). Raises `RequestError`."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise RequestError(
            f"a stop_regex has at most {MAX_PATTERN_CHARS} characters, got {len(pattern)}.", "stop_regex"
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


class StopScanner:
    """Holds text back while it could still become a stop. Owner: event loop.

    Linear in the text: one step of Knuth, Morris and Pratt (1977) per character and stop that is
    begun; stops that are not begun cost a look at a dict.
    """

    __slots__ = ("_begun", "_firsts", "_held", "_include", "_patterns", "_stops")

    def __init__(
        self, stops: Sequence[str], patterns: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        """Both as `check_stops` lets them pass; `include_stop` leaves the stop in the text."""
        self._stops = [_Prefixes(stop) for stop in stops]
        self._firsts: dict[str, list[_Prefixes]] = {}
        for stop in self._stops:
            self._firsts.setdefault(stop.text[0], []).append(stop)
        self._begun: list[_Prefixes] = []
        self._patterns = _Patterns(patterns) if patterns else None
        self._include = include_stop
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """More text. Returns what may be given out and, when a stop is complete, which one (a
        pattern's source for a pattern): the text then ends before or, if included, after it, and
        nothing may be fed any more."""
        if self._patterns is None and not self._begun and not self._may_begin(text):
            return text, None
        before = len(self._held)
        held = self._held + text
        found = self._find(held, before)
        if self._patterns is not None:
            found = self._first_of(found, before, text)
        if found is not None:
            self._held = ""
            return held[: found.end if self._include else found.start], found.name
        keep = max((stop.matched for stop in self._begun), default=0)
        if self._patterns is not None:
            keep = max(keep, PATTERN_HOLD)
        cut = max(len(held) - keep, 0)
        self._held = held[cut:]
        return held[:cut], None

    def flush(self) -> str:
        """The text ended without a stop: what was held back."""
        held, self._held = self._held, ""
        return held

    def _first_of(self, found: _Found | None, before: int, text: str) -> _Found | None:
        """`found` or the pattern that ends earlier, at equal ends begins earlier."""
        assert self._patterns is not None
        match = self._patterns.feed(text, found.end - before if found else None)
        if match is None:
            return found
        start, end = before + match.start, before + match.end
        if found is None or (end, start) < (found.end, found.start):
            return _Found(max(start, 0), end, match.name)
        return found

    def _may_begin(self, text: str) -> bool:
        return any(first in text for first in self._firsts)

    def _find(self, held: str, start: int) -> _Found | None:
        """The stop string that is complete first when held[start:] follows what was seen."""
        begun = self._begun
        for index in range(start, len(held)):
            character = held[index]
            still: list[_Prefixes] = []
            longest: _Prefixes | None = None
            for stop in begun:
                if stop.step(character):
                    still.append(stop)
                    if stop.matched == len(stop.text) and (longest is None or stop.matched > longest.matched):
                        longest = stop
            for stop in self._firsts.get(character, ()):
                if not stop.matched:
                    stop.matched = 1
                    still.append(stop)
                    if len(stop.text) == 1 and longest is None:
                        longest = stop
            begun = still
            if longest is not None:
                return _Found(index + 1 - longest.matched, index + 1, longest.text)
        self._begun = begun
        return None


class _Found:
    """A match at held[start:end]."""

    __slots__ = ("end", "name", "start")

    def __init__(self, start: int, end: int, name: str) -> None:
        self.start = start
        self.end = end
        self.name = name


class _Prefixes:
    """One stop string and how much of it the text ends with (`matched`).

    `_back[k]` is the longest proper prefix of text[:k] that is also its suffix. It is extended only
    as far as the text has come, so a long stop that never begins costs nothing.
    """

    __slots__ = ("_back", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._back = [0, 0]

    def step(self, character: str) -> bool:
        """Account for one more character; False when no prefix is matched any more."""
        text, back, k = self.text, self._back, self.matched
        while k and text[k] != character:
            k = back[k]
        if text[k] == character:
            k += 1
        if k == len(back):
            self._extend()
        self.matched = k
        return k > 0

    def _extend(self) -> None:
        text, back = self.text, self._back
        k = len(back) - 1
        j = back[k]
        while j and text[j] != text[k]:
            j = back[j]
        back.append(j + 1 if text[j] == text[k] else 0)


class _Patterns:
    """Patterns over the last `WINDOW` characters.

    What matches is decided for the text up to each character, so that it cannot depend on the
    pieces. One search over all the new text says whether there is anything to decide; only with
    anchors and word boundaries, which may hold for a beginning and not for the whole, is every
    character a search (about 5 µs each).
    """

    __slots__ = ("_compiled", "_seen", "_stepwise")

    def __init__(self, patterns: Sequence[str]) -> None:
        self._compiled = [(pattern, compile_pattern(pattern)) for pattern in patterns]
        self._stepwise = any(sign in pattern for pattern in patterns for sign in _CONTEXT_SIGNS)
        self._seen = ""

    def feed(self, text: str, limit: int | None) -> _Found | None:
        """First match that ends in text[:limit], as positions in `text` (the start may be negative:
        in what was seen before)."""
        seen, base = self._seen, len(self._seen)
        whole = seen + text
        end = base + (len(text) if limit is None else min(limit, len(text)))
        self._seen = whole[-WINDOW - 1 :]
        if not self._stepwise and not any(_search(c, whole, 0, end) for _, c in self._compiled):
            return None
        for stop in range(base + 1, end + 1):
            best: _Found | None = None
            for name, compiled in self._compiled:
                span = _search(compiled, whole, max(stop - WINDOW, 0), stop)
                if span and (best is None or span[0] < best.start):
                    best = _Found(*span, name)
            if best is not None:
                return _Found(best.start - base, best.end - base, best.name)
        return None


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
