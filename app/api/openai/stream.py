"""Chunks of the two OpenAI streams, from byte templates made once per stream.

Per token only the text is encoded; everything around it is ready. Measured: 0.17 µs per chunk,
against 0.75 µs for building and encoding the object with msgspec and 6.2 µs with `json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import msgspec

from app.engine.job import Piece, Run
from app.engine.reasoning_budget import WatchedRun
from app.http.reply import encode_long
from core.types import Finish

_encode = msgspec.json.Encoder().encode

DATA = b"data: "
END = b"\n\n"


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What all chunks and the whole answer of one request share."""

    id: str
    object: str
    created: int
    model: str

    def open(self) -> bytes:
        """`{"id":...,"model":"..."`, the object left open."""
        return _encode(self)[:-1]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asked to be told."""

    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    cached: bool = False
    """Where cached tokens came from, in SGLang's own object."""
    routed: bool = False
    """Which experts tokens were routed to, in the same object: a chunk that `routed_chunk` makes."""


class Shape(Protocol):
    """What tells chat and completions apart. `open_first` and `open_next` come before the text's
    JSON string, `close` after it."""

    open_first: bytes
    open_next: bytes
    close: bytes
    empty: bytes
    """The delta of a chunk without text."""

    def first_text(self, index: int) -> str:
        """Text before the first piece of a choice (an echoed prompt)."""
        ...

    def first_chunk(self) -> dict[str, object]:
        """Fields beside the choices, of the first chunk only."""
        ...

    def first_extra(self, index: int) -> dict[str, object]:
        """Fields of a choice's first chunk only."""
        ...

    def logprobs(self, index: int, piece: Piece) -> object: ...


@lru_cache
def _tail(close: bytes, usage: bytes) -> bytes:
    """What comes after the text of a plain chunk; one object for all streams, so that it stays near."""
    return b'%b,"logprobs":null,"finish_reason":null}]%b}%b' % (close, usage, END)


def usage(runs: Sequence[Run], completion_tokens: int, reasoning_tokens: int = 0) -> dict[str, object]:
    """The `usage` object. A prompt counts once, however many choices it has."""
    prompt_tokens = sum(len(run.prompt) for run in runs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(run.requests[0].cached for run in runs)},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def thought(runs: Sequence[Run]) -> int:
    """Tokens of thinking, where a bound had them counted."""
    return sum(run.reasoning_tokens for run in runs if isinstance(run, WatchedRun))


def cached_details(runs: Sequence[Run]) -> dict[str, object]:
    """SGLang's `sglext`: cached tokens by the tier that had them. There is one."""
    cached = sum(run.requests[0].cached for run in runs)
    return {"cached_tokens_details": {"device": cached, "host": 0}}


def last_chunks(head: bytes, options: Options, runs: Sequence[Run], usage: bytes) -> bytes | None:
    """What comes after the last choice's end, only for those who asked: others index `choices[0]` of every
    chunk. `head` ends inside the list of choices, `usage` is that field."""
    told = b""
    if options.cached and not options.routed:
        told = b'%b],"sglext":%b}%b' % (head, _encode(cached_details(runs)), END)
    if options.include_usage:
        told += b"%b]%b}%b" % (head, usage, END)
    return told or None


def appended(fields: Mapping[str, object]) -> bytes:
    """`fields` encoded, to follow others inside an object."""
    return b"," + encode_long(fields)[1:-1] if fields else b""


def finish_fields(finish: Finish) -> dict[str, object]:
    """How a choice ended, the detail under both names in use (SGLang's and vLLM's)."""
    return {
        "finish_reason": finish.reason.value,
        "matched_stop": finish.matched,
        "stop_reason": finish.matched,
    }


class Chunks:
    """`Frames` of an OpenAI stream. Owner: event loop."""

    __slots__ = (
        "_count",
        "_envelope",
        "_heads",
        "_options",
        "_rich",
        "_runs",
        "_shape",
        "_tail",
    )

    def __init__(
        self, envelope: Envelope, shape: Shape, options: Options, runs: Sequence[Run], choices: int
    ) -> None:
        self._shape = shape
        self._options = options
        self._runs = runs
        self._count = 0
        self._envelope = DATA + envelope.open() + b',"choices":['
        self._heads: list[bytes | None] = [None] * choices
        """What is before the text, once a choice has begun: the first chunk of a chat carries the role."""
        usage_null = b',"usage":null' if options.include_usage else b""
        self._tail = _tail(shape.close, usage_null)
        self._rich = options.logprobs or options.token_ids or options.continuous_usage

    def delta(self, index: int, piece: Piece) -> bytes | None:
        """See `Frames.delta`. Tokens whose text is still uncertain make no chunk, except the first:
        it is what clients measure the time to first token by."""
        self._count += len(piece.tokens)
        head = self._heads[index]
        if self._rich or head is None:
            return self._slow_delta(index, piece)
        return b"".join((head, _encode(piece.text), self._tail)) if piece.text else None

    def _slow_delta(self, index: int, piece: Piece) -> bytes | None:
        options, shape = self._options, self._shape
        head, text, extra, told = self._heads[index], piece.text, {}, b""
        if head is not None and not text and not piece.tokens:
            return None
        if head is None:
            text = shape.first_text(index) + text
            extra = shape.first_extra(index)
            if not (text or piece.tokens):
                return None  # nothing generated, as with max_tokens 0: the end says it all
            if not any(self._heads):
                told = appended(shape.first_chunk())
            before = b'%b{"index":%d,' % (self._envelope, index)
            head, self._heads[index] = before + shape.open_first, before + shape.open_next
        if options.token_ids:
            extra["token_ids"] = piece.tokens
        logprobs = encode_long(shape.logprobs(index, piece)) if options.logprobs else b"null"
        return b'%b%b%b,"logprobs":%b,"finish_reason":null%b}]%b%b}%b' % (
            head,
            _encode(text),
            shape.close,
            logprobs,
            appended(extra),
            told,
            self._usage(options.continuous_usage),
            END,
        )

    def finish(self, index: int, finish: Finish) -> bytes:
        """See `Frames.finish`."""
        fields = _encode(finish_fields(finish))[1:-1]
        return b'%b{"index":%d,%b,"logprobs":null,%b}]%b}%b' % (
            self._envelope,
            index,
            self._shape.empty,
            fields,
            self._usage(self._options.continuous_usage),
            END,
        )

    def tail(self) -> bytes | None:
        """See `Frames.tail`."""
        return last_chunks(self._envelope, self._options, self._runs, self._usage(True))

    def _usage(self, told: bool) -> bytes:
        if told:
            return b',"usage":' + _encode(usage(self._runs, self._count, thought(self._runs)))
        return b',"usage":null' if self._options.include_usage else b""
