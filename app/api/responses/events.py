"""A response while it is generated: its output items and events."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from app.api.request.logprobs import token_logprobs
from app.api.responses.disk import Doc
from app.api.responses.input import item_id, sealed
from app.api.responses.turn import Turn
from app.engine.job import Piece, Run
from app.http.errors import Fault
from app.parsers.base import CallArguments, CallBroken, CallCut, CallStart, Content, Event, Reasoning
from core.types import Finish, FinishReason

_encode = msgspec.json.Encoder().encode


class _Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One type of output item, whose text is streamed."""

    type: str
    event: str
    """Name of the events of its text, before `.delta` and `.done`."""
    text: str = "text"
    """The text's field in the event that is done."""
    part: str = ""
    """Type of the one content part that has the text; a call has none."""


_MESSAGE = _Kind(type="message", event="response.output_text", part="output_text")
_THINKING = _Kind(type="reasoning", event="response.reasoning_text", part="reasoning_text")
_CALL = _Kind(type="function_call", event="response.function_call_arguments", text="arguments")


class _Open:
    """The item that text is added to. Owner: event loop."""

    def __init__(self, kind: _Kind, item: Doc, index: int) -> None:
        self.kind = kind
        self.item = item
        self.texts: list[str] = []
        self.logprobs: list[Any] = []
        self.where: Doc = {"item_id": item["id"], "output_index": index}
        if kind.part:
            self.where["content_index"] = 0
        event = kind.event + ".delta"
        self.head = b"event: %b\ndata: %b" % (event.encode(), _encode({"type": event, **self.where})[:-1])


class ResponseEvents:
    """Builds a response from pieces: event frames on the way, the object at the end.

    Every frame is one event; its sequence number is its place among all of them. Owner: event loop.
    """

    def __init__(self, turn: Turn, run: Run) -> None:
        self._turn = turn
        self._run = run
        self._open: _Open | None = None
        self._count = 0
        self._tokens = 0
        self._pending: list[Any] = []
        """Log-probabilities of tokens whose text is still held back."""
        self.output: list[Doc] = []
        self.doc: Doc = self._document("in_progress")
        """The response as it is now."""

    def begin(self) -> list[bytes]:
        """The two events before anything else."""
        return [self._event(f"response.{word}", response=self.doc) for word in ("created", "in_progress")]

    def take(self, piece: Piece) -> list[bytes]:
        """More of the text. A `finish` in it is reported by `end`."""
        self._tokens += len(piece.tokens)
        if self._turn.namer is not None and piece.logprobs is not None:
            self._pending += token_logprobs(piece, self._turn.namer)
        frames: list[bytes] = []
        for event in piece.parsed():
            logprobs, self._pending = self._pending, []  # only those of the answer's text are sent
            self._tell(event, frames, logprobs)
        return frames

    def end(self, finish: Finish) -> list[bytes]:
        """The last events."""
        match finish.reason:
            case FinishReason.LENGTH:
                return self._end("incomplete", incomplete_details={"reason": "max_output_tokens"})
            case FinishReason.ABORT:
                return self._end("cancelled")
        return self._end("completed")

    def fail(self, fault: Fault) -> list[bytes]:
        """The last events when it went wrong."""
        code = fault.code or ("rate_limit_exceeded" if fault.status == 429 else "server_error")
        return self._end("failed", error={"code": code, "message": fault.message})

    # -- items -------------------------------------------------------------------------------------

    def _tell(self, event: Event, frames: list[bytes], logprobs: list[Any]) -> None:
        match event:
            case Content(text):
                self._text(_MESSAGE, text, frames, logprobs)
            case Reasoning(text):
                self._text(_THINKING, text, frames, [])
            case CallStart(_, id, name):
                self._close(frames)
                self._begin(_CALL, {"call_id": id, "name": name, "arguments": ""}, frames)
            case CallArguments(_, text):
                self._add(text, frames, [])
            case CallCut():
                self._close(frames, "incomplete")
            case CallBroken(_, raw, rest):
                self._close(frames, "incomplete")
                if not self._turn.streamed:  # no client has seen it: it counts as text
                    self.output.pop()
                    rest = raw
                self._text(_MESSAGE, rest, frames, [])

    def _text(self, kind: _Kind, text: str, frames: list[bytes], logprobs: list[Any]) -> None:
        if not text:
            return
        if self._open is None or self._open.kind is not kind:
            self._close(frames)
            fields: Doc = {"content": [], "summary": []} if kind is _THINKING else {"content": []}
            if kind is _MESSAGE:
                fields["role"] = "assistant"
            self._begin(kind, fields, frames)
        self._add(text, frames, logprobs)

    def _begin(self, kind: _Kind, fields: Doc, frames: list[bytes]) -> None:
        index = len(self.output)
        id = item_id(kind.type, self._turn.head["id"], "o", index)
        item: Doc = {"id": id, "type": kind.type, "status": "in_progress", **fields}
        self.output.append(item)
        self._open = _Open(kind, item, index)
        frames.append(self._event("response.output_item.added", output_index=index, item=item))
        if kind.part:
            part = _part(kind, "", [])
            frames.append(self._event("response.content_part.added", **self._open.where, part=part))

    def _add(self, text: str, frames: list[bytes], logprobs: list[Any]) -> None:
        """The hot path: only the text is encoded."""
        opened = self._open
        if opened is None:
            return
        opened.texts.append(text)
        suffix = b""
        if opened.kind is _MESSAGE:
            opened.logprobs += logprobs
            suffix = b',"logprobs":' + (_encode(logprobs) if logprobs else b"[]")
        frames.append(
            b'%b%b,"delta":%b,"sequence_number":%d}\n\n' % (opened.head, suffix, _encode(text), self._count)
        )
        self._count += 1

    def _close(self, frames: list[bytes], status: str = "completed") -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        kind, item, text = opened.kind, opened.item, "".join(opened.texts)
        item["status"] = status
        done: Doc = {**opened.where, kind.text: text}
        if kind is _MESSAGE:
            done["logprobs"] = opened.logprobs
        elif kind is _CALL:
            done["name"] = item["name"]
            item["arguments"] = text
        frames.append(self._event(kind.event + ".done", **done))
        if kind.part:
            part = _part(kind, text, opened.logprobs)
            item["content"] = [part]
            frames.append(self._event("response.content_part.done", **opened.where, part=part))
        if kind is _THINKING and self._turn.keeps_thinking:
            item["encrypted_content"] = sealed(text)
        index = opened.where["output_index"]
        frames.append(self._event("response.output_item.done", output_index=index, item=item))

    # -- the whole ---------------------------------------------------------------------------------

    def _end(self, status: str, **fields: object) -> list[bytes]:
        frames: list[bytes] = []
        self._close(frames, "completed" if status == "completed" else "incomplete")
        self.doc = self._document(status, **fields)
        # There is no event of a response that was cancelled; its status says it.
        event = "incomplete" if status == "cancelled" else status
        frames.append(self._event(f"response.{event}", response=self.doc))
        return frames

    def _document(self, status: str, **fields: object) -> Doc:
        done = status != "in_progress"
        return {
            **self._turn.head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "output": self.output if done else [],
            "usage": self._usage() if done else None,
            **fields,
        }

    def _usage(self) -> Doc:
        run = self._run
        return {
            "input_tokens": len(run.prompt),
            "input_tokens_details": {"cached_tokens": run.cached},
            "output_tokens": self._tokens,
            "output_tokens_details": {"reasoning_tokens": run.reasoning_tokens},
            "total_tokens": len(run.prompt) + self._tokens,
        }

    def _event(self, type_: str, **fields: object) -> bytes:
        frame = _frame(type_, **fields, sequence_number=self._count)
        self._count += 1
        return frame


def _part(kind: _Kind, text: str, logprobs: list[Any]) -> Doc:
    if kind is _MESSAGE:
        return {"type": kind.part, "text": text, "annotations": [], "logprobs": logprobs}
    return {"type": kind.part, "text": text}


def ending(doc: Doc, number: int) -> bytes:
    """The last event of a stored response whose own events were lost."""
    status = doc["status"]
    event = f"response.{status if status in ('completed', 'failed') else 'incomplete'}"
    return _frame(event, response=doc, sequence_number=number)


def error_event(fault: Fault, request_id: str) -> bytes:
    """The event that ends a stream that broke outside of every response."""
    code = fault.code or fault.type
    return _frame("error", code=code, message=fault.message, param=fault.param, sequence_number=0)


def _frame(type_: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (type_.encode(), _encode({"type": type_, **fields}))
