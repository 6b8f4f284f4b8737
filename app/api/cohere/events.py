"""An answer as Cohere's clients read it: a message of blocks and calls, whole or as events."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from app.api.request.logprobs import Namer, output_entries
from app.engine.job import Piece, Run
from app.http.delivery import Frames
from app.http.errors import Fault
from app.http.sse import DONE, Dialect
from app.parsers.base import CallArguments, CallBroken, CallStart, Content, Event, Reasoning, assemble
from core.plan import RowLogprobs
from core.types import Finish, FinishReason

_encode = msgspec.json.Encoder().encode


def _event(type_: str, **fields: object) -> bytes:
    return b"data: %b\n\n" % _encode({"type": type_, **fields})


def _error(fault: Fault, request_id: str) -> bytes:
    """Their streams know no event of failure: the message ends with it, as in vLLM."""
    return _event("message-end", delta={"error": fault.message, "finish_reason": "ERROR"})


DIALECT = Dialect(error=_error, done=DONE)


def finish_reason(finish: Finish, calls: int) -> str:
    """How an answer with this many whole calls ended."""
    match finish.reason:
        case FinishReason.LENGTH:
            return "MAX_TOKENS"
        case FinishReason.STOP if calls:
            return "TOOL_CALL"
        case FinishReason.STOP:
            return "STOP_SEQUENCE" if isinstance(finish.matched, str) else "COMPLETE"
    return "ERROR"


def usage(run: Run, tokens: int) -> dict[str, object]:
    """Tokens of the prompt and of the whole answer. Nothing is billed, but clients count by it."""
    counts = {"input_tokens": len(run.prompt), "output_tokens": tokens}
    return {"billed_units": counts, "tokens": counts, "cached_tokens": run.cached}


def _call(id: str, name: str, arguments: str) -> dict[str, object]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


class ReplyFrames(Frames[dict[str, object]]):
    """`Frames` of one answer. Owner: event loop."""

    def __init__(self, id: str, namer: Namer | None, runs: Sequence[Run]) -> None:
        """`namer`: log-probabilities are requested."""
        self._id = id
        self._namer = namer
        self._run = runs[0]
        self._count = 0
        self._calls = 0
        """Number of calls so far, without malformed ones."""
        self._blocks = 0
        """Blocks of text or thinking so far. Calls are numbered apart."""
        self._kind = ""
        """Kind of the open block or call: `text`, `thinking`, `call`; empty between two."""
        self._index = 0
        """Index of the open block or call."""
        self._head = b""
        """Beginning of its deltas, up to their text."""
        self._started = False
        self._tokens: list[int] = []
        self._rows: list[RowLogprobs] = []
        """Log-probabilities that the next delta of a block sends, and their tokens."""

    def delta(self, index: int, piece: Piece) -> bytes | None:
        """See `Frames.delta`. All events of a piece go out in one write."""
        self._count += len(piece.tokens)
        if self._namer is not None:
            self._tokens += piece.tokens
            self._rows += piece.logprobs or ()
        frames = self._start()
        for event in piece.parsed():
            self._tell(event, frames)
        return b"".join(frames) or None

    def finish(self, index: int, piece: Piece) -> bytes:
        """See `Frames.finish`."""
        assert piece.finish is not None
        frames = self._start()
        if not (self._blocks or self._calls):  # as in a whole answer
            self._open_block("text", frames)
        self._close(frames)
        reason = finish_reason(piece.finish, piece.calls)
        ended = {"finish_reason": reason, "usage": usage(self._run, self._count)}
        frames.append(_event("message-end", id=self._id, delta=ended))
        return b"".join(frames)

    def whole(self, pieces: Sequence[Piece]) -> dict[str, object]:
        """See `Frames.whole`."""
        namer, (piece,) = self._namer, pieces
        assert piece.finish is not None
        read = assemble(piece.parsed())
        blocks = []
        if read.reasoning:
            blocks.append({"type": "thinking", "thinking": read.reasoning})
        if read.content or not (read.calls or read.reasoning):  # clients look into the first block
            blocks.append({"type": "text", "text": read.content})
        said: dict[str, object] = {"role": "assistant"}
        if blocks:
            said["content"] = blocks
        if read.calls:
            said["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in read.calls]
        answer: dict[str, object] = {
            "id": self._id,
            "finish_reason": finish_reason(piece.finish, piece.calls),
            "message": said,
            "usage": usage(self._run, len(piece.tokens)),
        }
        if namer is not None:
            answer["logprobs"] = [
                {"text": namer.text(entry.token), "token_ids": [entry.token], "logprobs": [entry.value]}
                for entry in output_entries(piece.tokens, piece.logprobs or ())
            ]
        return answer

    def _start(self) -> list[bytes]:
        """The message's start, unless it was sent."""
        if self._started:
            return []
        self._started = True
        return [_event("message-start", id=self._id, delta={"message": {"role": "assistant"}})]

    def _tell(self, event: Event, frames: list[bytes]) -> None:
        match event:
            case Content(text):
                self._add("text", text, frames)
            case Reasoning(text):
                self._add("thinking", text, frames)
            case CallStart(index, id, name):
                self._calls += 1
                self._open_call(index, id, name, frames)
            case CallArguments(_, text):
                frames.append(b"%b%b}}}}}\n\n" % (self._head, _encode(text)))
            case CallBroken(_, _, rest):
                self._calls -= 1
                self._close(frames)
                self._add("text", rest, frames)

    def _add(self, kind: str, text: str, frames: list[bytes]) -> None:
        """The hot path: only the text is encoded."""
        if not text:
            return
        if self._kind != kind:
            self._open_block(kind, frames)
        logprobs = self._logprobs() if self._tokens else b""
        frames.append(b"%b%b}}}%b}\n\n" % (self._head, _encode(text), logprobs))

    def _logprobs(self) -> bytes:
        namer = self._namer
        assert namer is not None
        values = [entry.value for entry in output_entries(self._tokens, self._rows)]
        item = {
            "text": namer.tokenizer.decode(self._tokens, False),
            "token_ids": self._tokens,
            "logprobs": values,
        }
        self._tokens, self._rows = [], []
        return b',"logprobs":%b' % _encode(item)

    def _open_block(self, kind: str, frames: list[bytes]) -> None:
        self._close(frames)
        self._kind, self._index = kind, self._blocks
        self._blocks += 1
        content = {"message": {"content": {"type": kind, kind: ""}}}
        frames.append(_event("content-start", index=self._index, delta=content))
        self._head = b'data: {"type":"content-delta","index":%d,"delta":{"message":{"content":{"%b":' % (
            self._index,
            kind.encode(),
        )

    def _open_call(self, index: int, id: str, name: str, frames: list[bytes]) -> None:
        self._close(frames)
        self._kind, self._index = "call", index
        call = {"message": {"tool_calls": _call(id, name, "")}}
        frames.append(_event("tool-call-start", index=index, delta=call))
        self._head = (
            b'data: {"type":"tool-call-delta","index":%d,"delta":{"message":{"tool_calls":{"function":'
            b'{"arguments":' % index
        )

    def _close(self, frames: list[bytes]) -> None:
        if self._kind:
            frames.append(
                _event("tool-call-end" if self._kind == "call" else "content-end", index=self._index)
            )
        self._kind = ""
