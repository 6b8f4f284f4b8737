"""Request bodies, each a pure function of the workload and an index."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from bench.load import arrivals, traces
from bench.load.words import WORDS
from bench.load.workloads import Workload

Words = npt.NDArray[np.uint64]

# Independent random streams, by what a key identifies.
_PROMPT, _PREFIX, _PAGE, _LINE, _WARM = range(5)
# Conversations send several prompts under one index, at most 2**20 turns.
_TURN_BITS = 20


class PreparedRequest(msgspec.Struct, frozen=True):
    """One request, ready to send."""

    index: int
    turn: int
    body: bytes
    """JSON."""
    out: int | None
    """Expected output tokens; None when the answer may end early."""
    prompt: int | None
    """Expected prompt tokens; None for text, whose count only the server knows."""


def changed(request: PreparedRequest, extra: Mapping[str, Any]) -> PreparedRequest:
    """The request with `extra` fields in its body."""
    if not extra:
        return request
    body = msgspec.json.encode(msgspec.json.decode(request.body) | extra)
    return msgspec.structs.replace(request, body=body)


History = list[dict[str, str]]
"""Messages so far, user and assistant in turn; the last user message is not in it yet."""


class Source:
    """Creates the requests of one workload; equal in every client process."""

    __slots__ = ("_lines", "_seed", "_trace", "_work", "model")

    def __init__(self, work: Workload, model: str) -> None:
        self._work = work
        self.model = model
        # Includes the name, so that scenarios do not hit each other's prefix cache.
        self._seed = np.uint64(zlib.crc32(work.name.encode()) << 32 | (work.seed & 0xFFFFFFFF))
        self._trace = traces.load(work.trace, work.requests) if work.trace else []
        self._lines = _texts(work.dataset) if work.dataset else []

    def __len__(self) -> int:
        return len(self._trace) if self._trace else self._work.requests

    def arrivals(self) -> arrivals.Seconds | None:
        """When each request is due, in seconds from the start [len]; None for a closed loop."""
        work = self._work
        if work.rate > 0:
            return arrivals.gamma(work.rate, work.burstiness, len(self), work.seed)
        if self._trace and work.trace_speed > 0:
            return np.array([entry.at / work.trace_speed for entry in self._trace])
        return None

    def request(self, index: int, turn: int = 0, history: History | None = None) -> PreparedRequest:
        """Request `index`, or the `turn`-th of conversation `index` after `history`."""
        shape = self._shape(index)
        prompt = self._prompt(index, turn, shape)
        return self._pack(index, turn, prompt, shape.out, history or [])

    def warm(self, index: int) -> PreparedRequest:
        """A request with the lengths of `index % len` and a prompt that no measured request shares."""
        shape = self._shape(index % len(self))
        symbols = self._noise(_WARM, np.array([index]), shape.prompt or 64)
        return self._pack(index, 0, self._render(symbols), shape.out, [])

    def user(self, request: PreparedRequest) -> str:
        """The new user text of a conversation's turn."""
        return str(self._prompt(request.index, request.turn, self._shape(request.index)))

    def _shape(self, index: int) -> traces.Entry:
        work = self._work
        if not self._trace:
            return traces.Entry(0.0, work.input_len, work.output_len)
        entry = self._trace[index]
        prompt = min(entry.prompt, work.max_input_len or entry.prompt)
        out = min(entry.out, work.max_output_len or entry.out)
        return traces.Entry(entry.at, max(1, prompt), max(1, out), entry.pages)

    def _prompt(self, index: int, turn: int, shape: traces.Entry) -> list[int] | str:
        if self._lines:
            return self._line(index, turn)
        key = np.array([index << _TURN_BITS | turn])
        if shape.pages:
            own = self._noise(_PAGE, np.array(shape.pages), traces.PAGE)
            if len(own) < shape.prompt:
                own = np.concatenate([own, self._noise(_PROMPT, key, shape.prompt - len(own))])
            return self._render(own[: shape.prompt])
        shared = min(self._work.prefix_len, shape.prompt)  # a trace may have shorter prompts
        own = self._noise(_PROMPT, key, shape.prompt - shared)
        if shared and turn == 0:
            group = np.array([index % self._work.prefix_groups])
            own = np.concatenate([self._noise(_PREFIX, group, shared), own])
        return self._render(own)

    def _line(self, index: int, turn: int) -> str:
        pick = int(self._noise(_LINE, np.array([index]), 1)[0]) + turn
        text = self._lines[pick % len(self._lines)]
        return " ".join(text.split(" ")[: self._work.input_len]) if self._work.input_len else text

    def _noise(self, stream: int, keys: npt.NDArray[Any], count: int) -> Words:
        """Uniform 64-bit words [len(keys) * count], deterministic by key.

        A hash of (seed, stream, key, position), so that the pages of a 40,000-token prompt come from
        one vectorised call: a generator per page would block the loop for 1.5 ms. The finaliser is
        SplitMix64's (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
        """
        rows = _mix(_mix(keys.astype(np.uint64) * np.uint64(8) + np.uint64(stream)) ^ self._seed)
        steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return _mix(rows[:, None] + steps[None, :]).ravel()

    def _render(self, symbols: Words) -> list[int] | str:
        work = self._work
        if work.prompt_kind == "text":
            return " ".join([WORDS[i] for i in (symbols % np.uint64(len(WORDS))).tolist()])
        span = np.uint64(work.vocab_high - work.vocab_low + 1)
        return cast("list[int]", (symbols % span + np.uint64(work.vocab_low)).tolist())

    def _pack(
        self, index: int, turn: int, prompt: list[int] | str, out: int, history: History
    ) -> PreparedRequest:
        work = self._work
        body: dict[str, Any] = {"model": self.model}
        if work.endpoint == "chat":
            body["messages"] = [*history, {"role": "user", "content": prompt}]
        elif isinstance(prompt, str):
            body["prompt"] = "\n".join([*(message["content"] for message in history), prompt])
        else:
            body["prompt"] = prompt
        body |= {
            "max_tokens": out,
            "temperature": work.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if work.ignore_eos:
            body["ignore_eos"] = True
        if work.top_p < 1:
            body["top_p"] = work.top_p
        if work.penalties and index % 2:
            body |= {"presence_penalty": 0.5, "frequency_penalty": 0.5}
        if work.stop:
            body["stop"] = list(work.stop)
        if work.json_schema:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": msgspec.json.decode(work.json_schema)},
            }
        expected_out = out if work.ignore_eos else None
        return PreparedRequest(
            index,
            turn,
            msgspec.json.encode(body),
            expected_out,
            None if isinstance(prompt, str) else len(prompt),
        )


def _mix(x: Words) -> Words:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _texts(path: str) -> list[str]:
    """The texts of a JSON-lines file: the first field with a known name of each line."""
    found: list[str] = []
    with traces.open_text(path) as file:
        for line in file:
            row = msgspec.json.decode(line)
            value = next((row[name] for name in ("text", "prompt", "question", "turns") if name in row), None)
            text = value[0] if isinstance(value, list) and value else value
            if isinstance(text, str) and text.strip():
                found.append(text)
    if not found:
        raise ValueError(f"{path}: no line has a text, prompt, question or turns field")
    return found
