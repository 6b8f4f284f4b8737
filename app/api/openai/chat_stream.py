"""Answers with thinking and tool calls in them, whole and as chunks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from app.api.openai.stream import DATA, END, Envelope, Options, appended, finish_fields, last_chunks, usage
from app.engine.job import Piece
from app.engine.reasoning_budget import WatchedRun
from app.parsers.base import CallArguments, CallBroken, CallStart, Content, Event, Reasoning, assemble
from app.parsers.reading import Reading
from core.types import Finish, FinishReason

_encode = msgspec.json.Encoder().encode

Delta = dict[str, Any]


class Told(Protocol):
    """What else is told with a choice's tokens, when a client asks."""

    def first_text(self, index: int) -> str:
        """Text before a choice's own."""
        ...

    def first_chunk(self) -> dict[str, object]:
        """Fields beside the choices, of the first chunk only."""
        ...

    def logprobs(self, index: int, piece: Piece) -> object:
        """Of the piece's tokens."""
        ...


def read_message(reading: Reading, piece: Piece) -> tuple[dict[str, object], dict[str, object]]:
    """A whole choice: its message, and how it ended."""
    assert piece.finish is not None
    answer = reading.answer()
    message = assemble(answer.feed(piece.text) + answer.finish())
    fields: dict[str, object] = {
        "role": "assistant",
        "content": message.content or (None if message.calls else ""),
        "refusal": None,
    }
    if reading.apart:
        fields["reasoning_content"] = fields["reasoning"] = message.reasoning or None
    if message.calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    return fields, finished(piece.finish, answer.whole)


def finished(finish: Finish, calls: int) -> dict[str, object]:
    """How a choice with this many whole calls ended.

    `tool_calls` for every answer that made one, whatever `tool_choice` was. OpenAI's own API says
    `stop` after a call of the named function; but agents decide by this field whether to run what
    was called, and those that compare it with `tool_calls` would let a forced call pass.
    """
    fields = finish_fields(finish)
    if calls and finish.reason is FinishReason.STOP:
        fields["finish_reason"] = "tool_calls"
    return fields


def deltas(events: Iterable[Event]) -> list[Delta]:
    """Events as deltas, as few as clients allow: a call's first has empty arguments."""
    made: list[Delta] = []
    for event in events:
        match event:
            case Content(text):
                _append(made, "content", text)
            case CallBroken(_, _, rest):
                _append(made, "content", rest)
            case Reasoning(text):
                _append(made, "reasoning_content", text)
                _append(made, "reasoning", text)
            case CallStart(index, id, name):
                function = {"name": name, "arguments": ""}
                made.append(
                    {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
                )
            case CallArguments(index, text):
                last = made[-1].get("tool_calls") if made else None
                if last and "id" not in last[0]:
                    last[0]["function"]["arguments"] += text
                else:
                    made.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
    return made


def _append(made: list[Delta], field: str, text: str) -> None:
    if not text:
        return
    if not made or (field not in made[-1] and "reasoning_content" not in made[-1]):
        made.append({})
    made[-1][field] = made[-1].get(field, "") + text


class AnswerChunks:
    """`Frames` of a chat stream whose text is parsed. Owner: event loop."""

    __slots__ = (
        "_answers",
        "_count",
        "_head",
        "_heads",
        "_options",
        "_quick",
        "_run",
        "_started",
        "_tail",
        "_told",
    )

    def __init__(
        self, envelope: Envelope, options: Options, told: Told, run: WatchedRun, reading: Reading
    ) -> None:
        self._head = DATA + envelope.open() + b',"choices":['
        self._options = options
        self._told = told
        self._run = run
        self._answers = [reading.answer() for _ in run.requests]
        self._started = [False] * len(self._answers)
        self._count = 0
        # A model that thinks says most of its tokens afterwards: those take no parsing. Measured: 0.4
        # in place of 2.4 µs a chunk.
        self._quick = not (options.logprobs or options.token_ids or options.continuous_usage)
        usage_null = b',"usage":null' if options.include_usage else b""
        self._heads = [
            b'%b{"index":%d,"delta":{"content":' % (self._head, index) for index in range(len(self._answers))
        ]
        self._tail = b'},"logprobs":null,"finish_reason":null}]%b}%b' % (usage_null, END)

    def delta(self, index: int, piece: Piece) -> bytes | None:
        """See `Frames.delta`. A piece may make several events (a call begins, its arguments follow):
        they go out in one write."""
        self._count += len(piece.tokens)
        if self._quick and self._started[index] and self._answers[index].plain:
            return b"".join((self._heads[index], _encode(piece.text), self._tail)) if piece.text else None
        begins = not any(self._started)
        made, fields = self._read(index, piece)
        if not made:
            return None
        first = self._event(index, made[0], fields, appended(self._told.first_chunk()) if begins else b"")
        plain: dict[str, object] = {"logprobs": None, "finish_reason": None}
        return first + b"".join([self._event(index, delta, plain) for delta in made[1:]])

    def _read(self, index: int, piece: Piece) -> tuple[list[Delta], dict[str, object]]:
        """The deltas that a piece makes, and what else the first of them tells."""
        answer, options = self._answers[index], self._options
        events = answer.feed(piece.text)
        if piece.finish is not None:
            events += answer.finish()
        made = deltas(events)
        fields: dict[str, object] = {"logprobs": None, "finish_reason": None}
        if not self._started[index] and (made or piece.tokens):
            self._started[index] = True
            begun = {"role": "assistant", "content": "", **(made[0] if made else {})}
            begun["content"] = self._told.first_text(index) + begun["content"]
            made[:1] = [begun]
        elif not made and piece.tokens and not self._quick:
            made = [{}]
        if options.token_ids:
            fields["token_ids"] = piece.tokens
        if options.logprobs:
            fields["logprobs"] = self._told.logprobs(index, piece)
        return made, fields

    def finish(self, index: int, finish: Finish) -> bytes:
        """See `Frames.finish`."""
        return self._event(index, {}, {"logprobs": None, **finished(finish, self._answers[index].whole)})

    def tail(self) -> bytes | None:
        """See `Frames.tail`."""
        return last_chunks(self._head, self._options, [self._run], b',"usage":' + self._usage())

    def _event(self, index: int, delta: Delta, fields: dict[str, object], told: bytes = b"") -> bytes:
        """`told` are encoded fields to stand beside the choices."""
        if self._options.continuous_usage:
            told += b',"usage":' + self._usage()
        elif self._options.include_usage:
            told += b',"usage":null'
        choice = _encode({"index": index, "delta": delta, **fields})
        return b"%b%b]%b}%b" % (self._head, choice, told, END)

    def _usage(self) -> bytes:
        return _encode(usage([self._run], self._count, self._run.reasoning_tokens))
