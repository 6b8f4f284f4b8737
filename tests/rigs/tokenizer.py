"""A byte tokenizer and a trivial chat template, without files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from app.text.tokenizer import EncodedPair
from core.errors import RequestError
from core.types import Ints

VOCAB = 260
BOS, EOS = 256, 257


class ByteTokenizer:
    """Ids below 256 are bytes; 256 is BOS, 257 EOS."""

    vocab_size = VOCAB
    special_ids = frozenset({BOS, EOS})
    added_eos: tuple[int, ...] = ()
    eos_ids = frozenset({EOS})
    special_tokens: Mapping[str, str] = {"bos_token": "<s>", "eos_token": "</s>"}

    def __init__(self, marks: Mapping[str, int] = MappingProxyType({})) -> None:
        """`marks`: special tokens of fill-in-the-middle, by text."""
        self.marks = marks

    def encode(self, text: str, add_special: bool = True) -> Ints:
        ids = list(text.encode())
        return np.array([BOS, *ids] if add_special else ids, np.int32)

    async def encode_async(
        self, text: str, add_special: bool = True, param: str = "prompt", most: int = 0
    ) -> Ints:
        return self.encode(text, add_special)

    async def offsets_async(self, text: str, add_special: bool = True) -> list[tuple[int, int]]:
        at = [(i, i + 1) for i, char in enumerate(text) for _ in char.encode()]
        return [(0, 0), *at] if add_special else at

    async def encode_pair_async(self, texts: tuple[str, str], params: tuple[str, str]) -> EncodedPair:
        one, two = (text.encode() for text in texts)
        return EncodedPair(np.array([BOS, *one, EOS, *two, EOS], np.int32), len(one) + 2, True)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        special = {BOS: "<s>", EOS: "</s>"}
        parts = [
            bytes([id]) if id < 256 else b"" if skip_special else special.get(id, "").encode() for id in ids
        ]
        return b"".join(parts).decode(errors="replace")

    def token_id(self, text: str) -> int | None:
        return self.marks.get(text)

    def token_name(self, id: int) -> str:
        return self.token_text(id) if id < 128 or id > 255 else f"<0x{id:02X}>"

    def token_text(self, id: int) -> str:
        return self.token_bytes(id).decode(errors="replace")

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < 256 else {BOS: b"<s>", EOS: b"</s>"}.get(id, b"")


class JoinTemplate:
    """`role: content` lines. A content of `RAISE` makes the template raise."""

    shows_tools = True
    drops_calls = False
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"

    special_tokens: Mapping[str, str] = {}

    async def render_async(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        if any(message["content"] == "RAISE" for message in messages):
            raise RequestError("The chat template refused: no RAISE.", "messages")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        if tools:
            lines.insert(0, f"tools: {len(tools)}\n")
        lines += [f"{key}={value}\n" for key, value in sorted(kwargs.items())]
        if add_generation_prompt:
            lines.append("assistant: ")
        text = "".join(lines)
        return text.removesuffix("\n") if continue_final_message else text
