"""An answer as Ollama's clients read it: whole, or as lines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from app.api.ollama.schema import OllamaBody, OllamaChatBody
from app.engine.job import Piece, Run
from app.http.delivery import Frames
from app.parsers.base import CallArguments, CallBroken, CallCut, CallStart, Content, Event, Reasoning
from app.service import Loaded
from core.types import Finish, FinishReason

_encode = msgspec.json.Encoder().encode


class Lines(Frames[dict[str, object]]):
    """`Frames` of one answer. Owner: event loop."""

    def __init__(self, body: OllamaBody, loaded: Loaded, runs: Sequence[Run]) -> None:
        self._chat = isinstance(body, OllamaChatBody)
        self._model = body.model or loaded.card.name
        self._run = runs[0] if runs else None
        self._calls: list[list[str]] = []
        """Name and arguments so far of calls that were not sent yet: a call is sent once it is complete."""
        self._count = 0
        self._begun = time.perf_counter_ns()
        self._first = 0

    def whole(self, pieces: Sequence[Piece]) -> dict[str, object]:
        """See `Frames.whole`."""
        (piece,) = pieces
        assert piece.finish is not None
        self._count = len(piece.tokens)
        return self.line(piece.parsed(), end=self._end(piece.finish))

    def delta(self, index: int, piece: Piece) -> bytes | None:
        """See `Frames.delta`."""
        self._first = self._first or time.perf_counter_ns()
        self._count += len(piece.tokens)
        line = self.line(piece.parsed(), last=piece.finish is not None)
        said: Any = line["message"] if self._chat else line
        if not (
            said.get("content") or said.get("response") or said.get("thinking") or said.get("tool_calls")
        ):
            return None
        return _encode(line) + b"\n"

    def finish(self, index: int, piece: Piece) -> bytes:
        """See `Frames.finish`."""
        assert piece.finish is not None
        return _encode(self.line([], end=self._end(piece.finish))) + b"\n"

    def line(
        self, events: Iterable[Event], last: bool = False, end: dict[str, object] | None = None
    ) -> dict[str, object]:
        """One line. A call is sent once the next begins or the text ends. `end`: fields of the last line."""
        text, thinking, calls = self._read(events)
        if last or end is not None:
            calls += self._take_calls()
        said: dict[str, object] = {"thinking": thinking} if thinking else {}
        if calls:
            said["tool_calls"] = calls
        if self._chat:
            said = {"message": {"role": "assistant", "content": text, **said}}
        else:
            said["response"] = text
        return {
            "model": self._model,
            "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
            **said,
            "done": end is not None,
            **(end or {}),
        }

    def _read(self, events: Iterable[Event]) -> tuple[str, str, list[dict[str, object]]]:
        """Text, thinking, and the calls that are whole."""
        text, thinking = "", ""
        calls: list[dict[str, object]] = []
        for event in events:
            match event:
                case Content(more):
                    text += more
                case Reasoning(more):
                    thinking += more
                case CallStart(_, _, name):
                    calls += self._take_calls()
                    self._calls.append([name, ""])
                case CallArguments(_, more):
                    self._calls[-1][1] += more
                case CallBroken(_, raw, _) | CallCut(_, raw):
                    self._calls.clear()  # half a call would be run: these clients know whole ones only
                    text += raw
        return text, thinking, calls

    def _take_calls(self) -> list[dict[str, object]]:
        calls: list[dict[str, object]] = [
            {"function": {"name": name, "arguments": msgspec.json.decode(arguments)}}
            for name, arguments in self._calls
        ]
        self._calls.clear()
        return calls

    def _end(self, finish: Finish) -> dict[str, object]:
        """Durations in nanoseconds; a whole answer has no time of the first token."""
        assert self._run is not None
        now = time.perf_counter_ns()
        first = self._first or now
        return {
            "done_reason": "length" if finish.reason is FinishReason.LENGTH else "stop",
            "total_duration": now - self._begun,
            "load_duration": 0,
            "prompt_eval_count": len(self._run.prompt),
            "prompt_eval_duration": first - self._begun,
            "eval_count": self._count,
            "eval_duration": now - first,
        }
