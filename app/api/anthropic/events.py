"""An answer as Anthropic's clients read it: blocks, whole or as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from app.api.anthropic.cache import prompt_usage
from app.engine.job import Job, Piece, Run
from app.http.delivery import Frames
from app.http.errors import AnthropicError
from app.http.sse import Dialect
from app.parsers.base import CallArguments, CallBroken, CallStart, Content, Event, Reasoning, assemble
from app.parsers.typed import members
from app.service import ModelCard
from core.types import Finish, FinishReason

_encode = msgspec.json.Encoder().encode

Block = dict[str, Any]


def _event(type_: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (type_.encode(), _encode({"type": type_, **fields}))


DIALECT = Dialect(
    error=lambda fault, id: b"event: error\ndata: %b\n\n" % fault.body(AnthropicError, id),
    keep_alive=_event("ping"),
)


def whole_usage(run: Run, tokens: int) -> dict[str, object]:
    """Tokens of the prompt and of the whole answer."""
    thinking = {"thinking_tokens": run.reasoning_tokens}
    return {**prompt_usage(run), "output_tokens": tokens, "output_tokens_details": thinking}


def stop_fields(finish: Finish, calls: int, full: bool) -> dict[str, object]:
    """How an answer with this many whole calls ended; `full`: no other token fits the context."""
    reason, matched = "end_turn", None
    if finish.reason is FinishReason.LENGTH:
        reason = "model_context_window_exceeded" if full else "max_tokens"
    elif calls:
        reason = "tool_use"
    elif isinstance(finish.matched, str):
        reason, matched = "stop_sequence", finish.matched
    return {"stop_reason": reason, "stop_sequence": matched}


def _shell(id: str, model: str) -> dict[str, object]:
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


class MessageFrames(Frames[dict[str, object]]):
    """`Frames` of one answer. Owner: event loop."""

    def __init__(self, job: Job, card: ModelCard, runs: Sequence[Run]) -> None:
        self._id = job.id
        self._card = card
        self._empty = job.max_tokens == 0
        """No token was requested: the answer has no block."""
        self._run = runs[0]
        self._count = 0
        self._index = -1
        self._kind = ""
        """Kind of the open block; empty between two."""
        self._head = b""
        """Beginning of the open block's deltas, up to their text."""
        self._started = False

    def delta(self, index: int, piece: Piece) -> bytes | None:
        """See `Frames.delta`. All events of a piece go out in one write, the message's start with the
        first token: only then it is known what the cache had."""
        self._count += len(piece.tokens)
        frames = self._start()
        for event in piece.parsed():
            self._tell(event, frames)
        return b"".join(frames) or None

    def finish(self, index: int, piece: Piece) -> bytes:
        """See `Frames.finish`."""
        frames = self._start()
        if self._index < 0 and not self._empty:  # an answer has at least one block
            self._open("text", {"text": ""}, b"", frames)
        self._close(frames)
        used = whole_usage(self._run, self._count)
        frames += [_event("message_delta", delta=self._stop(piece), usage=used), _event("message_stop")]
        return b"".join(frames)

    def whole(self, pieces: Sequence[Piece]) -> dict[str, object]:
        """See `Frames.whole`."""
        (piece,) = pieces
        self._count = len(piece.tokens)
        read = assemble(piece.parsed())
        blocks: list[Block] = []
        if read.reasoning:
            blocks.append({"type": "thinking", "thinking": read.reasoning, "signature": self._id})
        if read.content or not (read.calls or read.reasoning or self._empty):
            blocks.append({"type": "text", "text": read.content})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": members(call.arguments)}
            for call in read.calls
        ]
        used = whole_usage(self._run, self._count)
        return {**_shell(self._id, self._card.name), "content": blocks, **self._stop(piece), "usage": used}

    def _stop(self, piece: Piece) -> dict[str, object]:
        assert piece.finish is not None
        full = len(self._run.prompt) + self._count >= self._card.context_length
        return stop_fields(piece.finish, piece.calls, full)

    def _start(self) -> list[bytes]:
        """The message's start, unless it was sent."""
        if self._started:
            return []
        self._started = True
        used = {**prompt_usage(self._run), "output_tokens": self._count}
        return [_event("message_start", message={**_shell(self._id, self._card.name), "usage": used})]

    def _tell(self, event: Event, frames: list[bytes]) -> None:
        match event:
            case Content(text):
                self._text(text, frames)
            case Reasoning(text):
                if self._kind != "thinking":
                    block = {"thinking": "", "signature": ""}
                    self._open("thinking", block, b'"thinking_delta","thinking"', frames)
                self._add(text, frames)
            case CallStart(_, id, name):
                call: Block = {"id": id, "name": name, "input": {}}
                self._open("tool_use", call, b'"input_json_delta","partial_json"', frames)
            case CallArguments(_, text):
                self._add(text, frames)
            case CallBroken(_, _, rest):
                self._close(frames)
                self._text(rest, frames)

    def _text(self, text: str, frames: list[bytes]) -> None:
        if not text:
            return
        if self._kind != "text":
            self._open("text", {"text": ""}, b'"text_delta","text"', frames)
        self._add(text, frames)

    def _open(self, kind: str, block: Block, delta: bytes, frames: list[bytes]) -> None:
        self._close(frames)
        self._kind = kind
        self._index += 1
        block = {"type": kind, **block}
        frames.append(_event("content_block_start", index=self._index, content_block=block))
        self._head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%b:'
            % (self._index, delta)
        )

    def _add(self, text: str, frames: list[bytes]) -> None:
        """The hot path: only the text is encoded."""
        frames.append(b"%b%b}}\n\n" % (self._head, _encode(text)))

    def _close(self, frames: list[bytes]) -> None:
        if not self._kind:
            return
        if self._kind == "thinking":
            signature = {"type": "signature_delta", "signature": self._id}
            frames.append(_event("content_block_delta", index=self._index, delta=signature))
        self._kind = ""
        frames.append(_event("content_block_stop", index=self._index))
