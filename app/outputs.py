"""Answers and pieces of answers for Python callers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from app.engine.job import Piece


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One continuation. `message` (chat only) is the parsed answer: `content`, `reasoning_content`,
    `tool_calls`."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: Any = None
    message: dict[str, Any] | None = None
    hidden_states: list[float] | None = None
    """With `return_hidden_states`: the hidden state of the last token, [width]."""


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one prompt: `n` choices, with properties for the first."""

    id: str
    choices: list[Choice]
    usage: dict[str, Any]

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one choice while it is generated: raw text, reasoning and tool calls included. The last
    piece of a choice has its `finish_reason`."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    hidden_states: list[float] | None = None
    """Set in the last piece, as in `Choice`."""


def output_of(answer: Mapping[str, Any]) -> Output:
    """The output in a JSON answer of chat or completions, requested with `return_token_ids`."""
    choices = []
    for choice in answer["choices"]:
        message = choice.get("message")
        text = choice["text"] if message is None else message.get("content") or ""
        fields = {name: choice.get(name) for name in Choice.__struct_fields__}
        choices.append(Choice(**{**fields, "text": text}))
    return Output(id=answer["id"], choices=choices, usage=answer["usage"])


def delta_of(index: int, piece: Piece, states: list[float] | None = None) -> Delta:
    """The delta for a piece from the engine."""
    finish = piece.finish
    return Delta(
        index=index,
        text=piece.text,
        token_ids=piece.tokens,
        finish_reason=None if finish is None else finish.reason.value,
        hidden_states=states,
    )
