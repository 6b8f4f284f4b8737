"""gpt-oss' format, harmony: an answer is a row of messages, each with a channel and sometimes a recipient.

    <|start|>assistant<|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary<|message|>text before calls<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>text<|return|>

The prompt ends in `<|start|>assistant`, and the tokens that end an answer, `<|return|>` and `<|call|>`, have
no text. The recipient may stand before the channel. See https://github.com/openai/harmony, docs/format.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from app.parsers.base import Content, Reasoning
from app.parsers.calls import CallParser, Syntax
from app.parsers.cursor import Cursor, Malformed, Steps
from app.parsers.formats import arguments

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
ASSISTANT = f"{START}assistant"
ANALYSIS, COMMENTARY, FINAL = (f"{CHANNEL}{name}{MESSAGE}" for name in ("analysis", "commentary", "final"))
BEGINS = (START, CHANNEL)
ENDS = (END, "<|call|>", "<|return|>")

_TO, _FUNCTIONS = "to=", "functions."
_RECIPIENT = re.compile(rf"\b{_TO}([^\s<]+)")
_BUILT_IN = frozenset(("browser", "python", "container"))
"""Tools that the models were trained with. No function is called: what is sent to them is part of the
reasoning, as in vLLM's Responses."""

_SPACES = re.compile(r"\s+")
# Patterns for headers with single spaces. Possessive, channel by channel: each would match in as many ways as
# its words have letters, and those of a header that is none would all be tried.
_ROLE = rf"(?:{re.escape(START)}[^ <]*)?"
_TYPE = r" ?(?:<\|constrain\|>)? ?[\w+-]* ?"
_CHANNEL = rf"{re.escape(CHANNEL)} ?(?:(?!{_TO})\w)*+ ?(?:{_TO}[^ <]+)?{_TYPE}"
_HEADER = re.compile(rf" ?{_ROLE} ?(?:{_TO}[^ <]+)? ?(?>{_CHANNEL})*+")
_HALF_NAMES = (name[:end] for name in ("analysis", "commentary", "final") for end in range(len(name), -1, -1))
_HALF_TO = rf" ?(?:{_TO}[^ <]*|to?)?"
_HALF_CHANNEL = rf"{re.escape(CHANNEL)} ?(?:{'|'.join(_HALF_NAMES)}){_HALF_TO}{_TYPE}"
_HALF_HEADER = re.compile(rf" ?{_ROLE}{_HALF_TO}(?:{_HALF_CHANNEL})?(?:<[|a-z]*)?")


class _Header(NamedTuple):
    """The header of a message: everything before `<|message|>`."""

    channel: str
    recipient: str

    def function(self, names: frozenset[str]) -> str:
        """The function that the message calls; empty for other messages. Models omit the namespace; then it
        must be one of `names`."""
        if self.recipient.startswith(_FUNCTIONS):
            return self.recipient.removeprefix(_FUNCTIONS)
        return self.recipient if self.recipient in names else ""

    @property
    def reasoning(self) -> bool:
        """Whether the message is not for the user."""
        return self.channel == "analysis" or self.recipient.partition(".")[0] in _BUILT_IN


def _header(cursor: Cursor) -> Steps[_Header]:
    """A message up to its text. Raises `Malformed`."""
    begin = ""
    for mark in BEGINS:
        if not begin and (yield from cursor.skip(mark)):
            begin = mark
    text = begin + (yield from cursor.until(MESSAGE))
    if not _HEADER.fullmatch(_SPACES.sub(" ", text)):
        raise Malformed
    found = _RECIPIENT.search(text)
    channel = text.rpartition(CHANNEL)[2].split() if CHANNEL in text else ()
    return _Header(channel[0] if channel else "", found[1] if found else "")


def _opened(cursor: Cursor) -> Steps[None]:
    """Look whether an answer begins with a recipient, which goes on what the prompt has begun. Raises
    `Malformed`."""
    yield from cursor.spaces()
    if (yield from cursor.ahead(len(_TO))) != _TO:
        raise Malformed


def _called(calls: CallParser, name: str) -> Steps[None]:
    calls.named(name)
    yield from arguments(calls, name)
    for end in ENDS:
        if (yield from calls.tail(end)):
            return


def call(calls: CallParser) -> Steps[None]:
    """A message that calls a function. Raises `Malformed` for others."""
    if name := (yield from _header(calls.cursor)).function(calls.names):
        yield from _called(calls, name)
    else:
        raise Malformed


def first_call(calls: CallParser) -> Steps[None]:
    """`call` for a message that the prompt has begun."""
    yield from _opened(calls.cursor)
    yield from call(calls)


class Channels(CallParser):
    """Reads reasoning, text and calls of an answer: here any may come between two others, so one parser reads
    all three. It stands in for `ReasoningParser`, and makes calls as well.

    Texts of a kind that come in several messages begin a line each, as in vLLM. Marks are no text; half a
    header at the text's end is none, either. Owner: event loop.
    """

    plain = False
    """See `ReasoningParser.plain`."""
    called = ""
    """See `ReasoningParser.called`. Here a call always ends the reasoning."""

    def __init__(
        self,
        names: frozenset[str],
        schemas: Mapping[str, Mapping[str, Any]],
        *,
        calls: bool = True,
        inside: bool = False,
        inline: bool = False,
        forced: bool = False,
    ) -> None:
        """`calls`: messages to functions are calls; otherwise text. `inside`: the prompt has opened the
        reasoning. `inline`: all but calls is told to the last character, marks too. Others: see
        `CallParser`."""
        super().__init__(Syntax(markers=BEGINS[:1], calls=call), names, schemas, forced)
        self._makes_calls = calls
        self._inline = inline
        self._told: dict[type[Content | Reasoning], bool] = {}
        """Kinds of text that were told, and whether the next one begins a line."""
        self.inside = inside
        """Whether the text is inside reasoning now."""
        self.settled = False
        """The first reasoning has ended, or another message has come before it."""

    def _answer(self) -> Steps[None]:
        cursor = self.cursor
        if self.inside:
            yield from self._body(Reasoning)
        else:
            yield from self._attempt(self._first)
        while mark := (yield from cursor.upto(BEGINS + ENDS, self._content)):
            if mark in BEGINS:
                yield from self._attempt(self._message)
            elif self._inline:
                self._content(cursor.take(cursor.at + len(mark)))
            else:
                cursor.take(cursor.at + len(mark))
        rest = cursor.take(len(cursor.text))
        if self._inline or not (self._after or self._forced):  # behind a message it is half a mark
            self._content(rest)

    def _first(self, calls: CallParser) -> Steps[None]:
        yield from _opened(self.cursor)
        yield from self._message(self)

    def _message(self, calls: CallParser) -> Steps[None]:
        header = yield from _header(self.cursor)
        self._space.clear()
        name = header.function(self.names) if self._makes_calls else ""
        kind = Reasoning if header.reasoning and not name else Content
        if kind is Content:
            self.settled = True
        if name:
            yield from _called(self, name)
            return
        self.inside = kind is Reasoning
        yield from self._body(kind, self.cursor.recorded())

    def _body(self, kind: type[Content | Reasoning], header: str = "") -> Steps[None]:
        """A message's text."""
        cursor = self.cursor
        self._told = dict.fromkeys(self._told, True)
        if self._inline:
            self._tell(kind, header)
        mark = yield from cursor.upto(BEGINS + ENDS, lambda text: self._tell(kind, text))
        if not mark:
            self._tell(kind, cursor.take(len(cursor.text)))
            return
        if mark in ENDS:
            end = cursor.take(cursor.at + len(mark))
            if self._inline:
                self._tell(kind, end)
        self.inside, self.settled = False, True
        self._ended()

    def _tell(self, kind: type[Content | Reasoning], text: str) -> None:
        if not text:
            return
        line = self._told.get(kind, False) and not self._inline
        self._told[kind] = False
        self._events.append(kind("\n" + text if line else text))

    def _content(self, text: str) -> None:
        """Text that is part of no message, or of one that the prompt has begun."""
        self.settled = self.settled or bool(text.strip())
        if not self._inline:
            super()._content(text)
            return
        self._tell(Content, "".join(self._space) + text)
        self._space.clear()

    def _cut(self, raw: str) -> None:
        if self._name and not self._open:
            self.start(self._name)
        elif not self._open and not self._inline and self._is_half_header(raw):
            return
        super()._cut(raw)

    def _is_half_header(self, raw: str) -> bool:
        """Whether that is no text, nor the beginning of a call that a grammar makes sure of."""
        if not raw.startswith(BEGINS) and not raw.lstrip().startswith(_TO + _FUNCTIONS):
            return False
        calls = self._forced and (_TO in raw or f"{CHANNEL}c" in raw)
        return not calls and _HALF_HEADER.fullmatch(_SPACES.sub(" ", raw)) is not None
