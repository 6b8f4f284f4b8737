"""Events of the parsers, and how a message is assembled from them.

Knows text only: not tokens, not HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import msgspec


class Content(msgspec.Struct, frozen=True, gc=False):
    """More of the answer's text."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """More of the reasoning."""

    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """A call begins; `index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments. The fragments of a whole call are one JSON object, without `CallCut`."""

    index: int
    text: str


class CallBroken(msgspec.Struct, frozen=True, gc=False):
    """A call that had begun turned out malformed.

    A stream cannot take the call back: its arguments stay incomplete, `rest` of what was read is
    content, and so is what follows. A whole answer has no such call and `raw`, all of it as
    the model wrote it, in the content instead.
    """

    index: int
    raw: str
    rest: str


class CallCut(msgspec.Struct, frozen=True, gc=False):
    """The text ended within a call: it stays one, its arguments the beginning of a JSON object. `raw` is all
    of it as the model wrote it, for protocols that know whole calls only."""

    index: int
    raw: str


Event = Content | Reasoning | CallStart | CallArguments | CallBroken | CallCut


def merged(events: Iterable[Event]) -> list[Event]:
    """The events, with adjacent fragments of one text joined."""
    found: list[Event] = []
    for _, group in groupby(events, type):
        first, *more = group
        if more and isinstance(first, Content | Reasoning | CallArguments):
            # Adjacent arguments are of one call: the start of another is between the arguments of two.
            text = "".join([each.text for each in (first, *more) if isinstance(each, type(first))])
            found.append(msgspec.structs.replace(first, text=text))
        else:
            found += (first, *more)
    return found


class Call(msgspec.Struct):
    """A call. Its arguments are the beginning of an object where the text ended within them."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct):
    """A whole answer."""

    content: str
    reasoning: str
    calls: list[Call]


def assemble(events: Iterable[Event]) -> Message:
    """All events of one answer as a message."""
    content: list[str] = []
    reasoning: list[str] = []
    names: dict[int, CallStart] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallStart(index):
                names[index], arguments[index] = event, []
            case CallArguments(index, text):
                arguments[index].append(text)
            case CallBroken(index, raw):
                del names[index]
                content.append(raw)
    calls = [Call(start.id, start.name, "".join(arguments[index])) for index, start in names.items()]
    return Message("".join(content), "".join(reasoning), calls)
