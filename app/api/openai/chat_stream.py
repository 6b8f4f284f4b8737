"""Chat's part of an answer: messages and deltas, from the events that the parsers found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from app.api.openai.stream import Chunks, GenerationRequest
from app.api.request.logprobs import chat_logprobs, vllm_prompt_logprobs
from app.api.request.schema import ChatBody
from app.engine.job import Piece, Run
from app.parsers.base import CallArguments, CallBroken, CallStart, Content, Event, Reasoning, assemble
from app.parsers.reading import Reading

Delta = dict[str, Any]


def message_fields(events: Iterable[Event], reading: Reading) -> dict[str, object]:
    """A whole choice as a message."""
    message = assemble(events)
    fields: dict[str, object] = {
        "role": "assistant",
        "content": message.content or (None if message.calls else ""),
        "refusal": None,
    }
    if reading.apart:
        fields["reasoning_content"] = fields["reasoning"] = message.reasoning or None
    if message.calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
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


class ChatFrames(Chunks):
    """`Frames` of `/v1/chat/completions`: a delta in each chunk, the role in the first one."""

    __slots__ = ("_body", "_echo", "_reading")

    opening = b'"delta":{"content":'
    closing = b"}"
    empty: ClassVar[Mapping[str, object]] = {"delta": {}}

    def __init__(self, request: GenerationRequest, reading: Reading, runs: Sequence[Run]) -> None:
        super().__init__(request, runs)
        assert isinstance(request.body, ChatBody)
        self._body = request.body
        self._reading = reading
        last = (request.body.messages or [{}])[-1]
        content = last.get("content")
        echoed = request.body.echo and last.get("role") == "assistant" and isinstance(content, str)
        self._echo = content if echoed else ""
        """The answer's beginning, which the client has written itself."""

    def parts(self, index: int, piece: Piece, begins: bool) -> list[dict[str, object]]:
        """See `Chunks.parts`."""
        made = deltas(piece.parsed())
        if begins and (made or piece.tokens or self._echo):
            first = {"role": "assistant", "content": "", **(made[0] if made else {})}
            first["content"] = self._echo + first["content"]
            made[:1] = [first]
        elif not made and piece.tokens and self._rich:
            made = [{"content": ""} if piece.events is None else {}]
        return [{"delta": delta} for delta in made]

    def content(self, index: int, piece: Piece) -> dict[str, object]:
        """See `Chunks.content`."""
        message = message_fields(piece.parsed(), self._reading)
        if self._echo:
            message["content"] = f"{self._echo}{message['content'] or ''}"
        return {"message": message}

    def logprobs(self, index: int, piece: Piece) -> object:
        """See `Chunks.logprobs`."""
        return chat_logprobs(piece, self._namer)

    def prompt_fields(self) -> dict[str, object]:
        """See `Chunks.prompt_fields`."""
        body, run, prompt = self._body, self._runs[0], self._request.jobs[0].prompt
        fields: dict[str, object] = {}
        if body.return_token_ids or body.return_prompt_token_ids:
            fields["prompt_token_ids"] = run.prompt.tolist()
        if body.return_prompt_text:
            decode = self._request.loaded.tokenizer.decode
            fields["prompt_text"] = prompt if isinstance(prompt, str) else decode(run.prompt.tolist(), False)
        if body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = vllm_prompt_logprobs(run, self._namer)
        return fields
