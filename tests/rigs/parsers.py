"""Texts of tool calls, ways to split them, and the work of parsing them."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

import pytest

from app.parsers.base import Event
from app.parsers.calls import CallParser
from app.parsers.reading import Answer
from app.parsers.reasoning import ReasoningParser
from core.grammar import GrammarSpec

Made = list[tuple[str, dict[str, Any]]]


def hermes(calls: Made) -> str:
    each = ((name, json.dumps(args, ensure_ascii=False)) for name, args in calls)
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in each)


def parse(parser: Answer | CallParser | ReasoningParser, pieces: Iterable[str]) -> list[Event]:
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    return events + parser.finish()


def cuts(text: str, seed: int = 0) -> Iterable[list[str]]:
    """The text whole, in single characters, and in random pieces."""
    yield [text]
    yield list(text)
    chance = random.Random(seed)
    for _ in range(8):
        at = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randrange(1, 12))))
        yield [text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True)]


def splits(text: str) -> Iterable[list[str]]:
    """The text in two pieces, split at every position."""
    for at in range(len(text) + 1):
        yield [text[:at], text[at:]]


def lines(work: Callable[[], object]) -> int:
    """Number of executed lines of the parsers: a deterministic measure of work, unlike time."""
    count = 0
    of_parsers: dict[CodeType, bool] = {}

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if (found := of_parsers.get(code)) is None:
            found = of_parsers[code] = "parsers" in code.co_filename
        return line if found else None

    def line(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if event == "line":
            count += 1
        return line

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


def accepts(spec: GrammarSpec, text: str) -> bool:
    """Whether a whole text satisfies a structural tag."""
    xgrammar = pytest.importorskip("xgrammar")
    testing = pytest.importorskip("xgrammar.testing")
    return bool(testing._is_grammar_accept_string(xgrammar.Grammar.from_structural_tag(spec.text), text))
