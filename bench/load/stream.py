"""Reads the server-sent events of one answer, with little CPU time.

A client that decoded the JSON of every event would be the bottleneck of the benchmark. Nearly all
events are one token in the middle of a stream; those are recognised by two byte searches. All other
events (the first token, the last, a role, usage, an error, another server's spacing of JSON) are
decoded in full, so the fast path never misses an event.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bench.load.records import Record

# Inside a JSON string a quote is escaped, so these bytes can only be a key and the start of its value.
_TEXT = {"completions": b'"text":"', "chat": b'"content":"'}
_OPEN = b'"finish_reason":null'
_BROKEN = frozenset({"abort", "error", "content_filter"})


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def shown(self) -> str:
        """The text of this choice; tool calls count as one character."""
        if self.text or self.delta is None:
            return self.text or ""
        delta = self.delta
        seen = delta.content or delta.reasoning_content or delta.reasoning
        return seen or ("+" if delta.tool_calls else "")


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Stream:
    """Reads one answer into a `Record`. Owner: event loop of a client process.

    An event carries a token when it has text, or when it has a choice without text that is
    neither a role nor the end (a token whose text is held back: half a character, a possible stop
    string). A role alone is not a token.
    """

    __slots__ = ("_after", "_done", "_expected", "_keep", "_key", "_rest", "_times", "pieces", "record")

    def __init__(
        self, record: Record, endpoint: str, expected: tuple[int | None, int | None], keep: bool
    ) -> None:
        """`expected`: output and prompt tokens that usage must report; `keep`: collect the text too."""
        self.record = record
        self.pieces: list[str] = []
        self._times = record.times
        self._key = _TEXT[endpoint]
        self._after = len(self._key)
        self._expected = expected
        self._keep = keep
        self._rest = b""
        self._done = False

    def feed(self, data: bytes, now: float) -> None:
        """Process `data` of the body, which arrived at `now`; events may be split at any byte."""
        if self._rest:
            data = self._rest + data
        if b"\r\n" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            at = event.find(self._key) + self._after
            if (
                at >= self._after
                and event[at : at + 1] != b'"'
                and _OPEN in event
                and self._times
                and not self._keep
            ):
                self._times.append(now)
            else:
                self._read(event, now)

    def reject(self, status: int, body: bytes, now: float) -> None:
        """The server answered with an HTTP status other than 200."""
        self.fail(f"http {status}", _message(body), now)

    def fail(self, kind: str, detail: str, now: float) -> None:
        """Record the first failure; later ones are its consequences."""
        if self.record.bad is None:
            self.record.bad = kind
            self.record.detail = detail[:300]
        self.record.end = self.record.end or now

    def close(self, now: float, whole: bool) -> None:
        """End the body, which is complete if `whole`, else cut off. Decides whether the request succeeded."""
        if whole and self._rest.strip():
            self._read(self._rest, now)
        record = self.record
        if not record.usage:
            record.out = len(self._times)
            record.prompt = self._expected[1] or 0
        if verdict := self._verdict(whole):
            self.fail(*verdict, now)
        record.end = record.end or now

    def _verdict(self, whole: bool) -> tuple[str, str] | None:
        record = self.record
        out, prompt = self._expected
        if not self._done:
            return ("no [DONE]" if whole else "truncated"), self._rest[:200].decode("latin-1")
        if not self._times:
            return "no tokens", ""
        if record.finish in _BROKEN:
            return f"finish {record.finish}", ""
        if record.usage and out is not None and record.out != out:
            return "token count", f"{record.out} output tokens, expected {out}"
        if record.usage and prompt is not None and record.prompt != prompt:
            return "token count", f"{record.prompt} prompt tokens, expected {prompt}"
        return None

    def _read(self, event: bytes, now: float) -> None:
        lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
        data = b"\n".join(lines)
        if not data or self._done:
            return  # a keep-alive comment, or an event after [DONE]
        if data == b"[DONE]":
            self._done = True
            self.record.end = now
            return
        try:
            message = _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.fail("malformed event", f"{error}: {data[:100]!r}", now)
            return
        if message.error is not None:
            self.fail("stream error", _text(message.error), now)
        if message.usage is not None:
            self._use(message.usage)
        for choice in message.choices:
            self._choose(choice, now)

    def _use(self, usage: _Usage) -> None:
        record = self.record
        record.usage = True
        record.out = usage.completion_tokens
        record.prompt = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            record.cached = usage.prompt_tokens_details.cached_tokens

    def _choose(self, choice: _Choice, now: float) -> None:
        text = choice.shown()
        role = choice.delta is not None and choice.delta.role is not None
        if choice.finish_reason is not None:
            self.record.finish = choice.finish_reason
            held = not self._times and not role  # the only token may be one without text
        else:
            held = not role
        if text or held:
            self._times.append(now)
        if self._keep:
            self.pieces.append(text)


def _text(error: object) -> str:
    """The message of an error object, in any of the formats that servers use."""
    if isinstance(error, dict):
        for name in ("message", "error", "detail"):
            if name in error:
                return _text(error[name])
    return str(error)


def _message(body: bytes) -> str:
    try:
        return _text(msgspec.json.decode(body))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return body[:300].decode("utf-8", "replace")
