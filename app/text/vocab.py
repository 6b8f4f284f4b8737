"""Bytes and text of single token ids.

Two kinds of vocabularies are exact tables, because their decoders work token by token:

    byte-level    (GPT-2, Llama 3, Qwen, DeepSeek)  each character of a token stands for one byte
    byte-fallback (sentencepiece: Llama 2, Gemma)   "▁" is a space, "<0xE2>" is one byte

Everything else (WordPiece, Metaspace without byte fallback, no decoder) is `DecoderKind.OTHER`: a
token's text depends on its neighbours, so the tokenizer itself has to decode it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto
from typing import Any

Json = Mapping[str, Any]


class DecoderKind(Enum):
    """Which rule turns tokens into bytes."""

    BYTE_LEVEL = auto()
    BYTE_FALLBACK = auto()
    OTHER = auto()


class Vocabulary:
    """Tables over token ids, dense from 0 to the highest id.

    `raw[id]` is the exact bytes of a token; `texts[id]` the same as text, or None where the bytes
    are not whole characters on their own. Ids that the vocabulary skips read as nothing. Both are
    empty for `DecoderKind.OTHER`. Immutable after construction.
    """

    def __init__(self, vocab: Mapping[str, int], special: frozenset[int], decoder: Json | None) -> None:
        """`vocab` maps every token, added ones too, to its id; `decoder` is that entry of
        tokenizer.json."""
        self.size = max(vocab.values(), default=-1) + 1
        self.special_ids = special
        self.kind, self.strips_space = _kind(decoder)
        self.raw: list[bytes] = []
        self.texts: list[str | None] = []
        if self.kind is not DecoderKind.OTHER:
            self.raw = [b""] * self.size
            for text, token in vocab.items():
                self.raw[token] = _bytes(text, self.kind)
            self.texts = [_whole(raw) for raw in self.raw]
        # The same tables with special tokens skipped.
        self.shown_raw, self.shown_texts = list(self.raw), list(self.texts)
        if self.raw:
            for token in self.special_ids:
                self.shown_raw[token], self.shown_texts[token] = b"", ""

    @property
    def errors(self) -> str:
        """Handler for `bytes.decode` that shows invalid bytes as this kind of decoder does."""
        return PER_BYTE if self.kind is DecoderKind.BYTE_FALLBACK else "replace"

    def decode(self, ids: Iterable[int], skip_special: bool) -> str:
        """Text of ids by the tables. `tokenizers` agrees but for byte-fallback runs with both whole
        characters and invalid bytes, all of which it replaces; sentencepiece keeps the characters,
        and a stream cannot know what a run will be."""
        raw, size = self.shown_raw if skip_special else self.raw, self.size
        data = b"".join([raw[token] for token in ids if 0 <= token < size])
        return (data.removeprefix(b" ") if self.strips_space else data).decode(errors=self.errors)


def _kind(decoder: Json | None) -> tuple[DecoderKind, bool]:
    """The kind, and whether one leading space of the whole text is dropped."""
    steps = list(_steps(decoder)) if decoder else []
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return DecoderKind.BYTE_LEVEL, False
    strips = kinds[3:] == ["Strip"] and steps[3] == _STRIP
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0] == _SPACES and (strips or not kinds[3:]):
        return DecoderKind.BYTE_FALLBACK, strips
    return DecoderKind.OTHER, False


_SPACES: Json = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_STRIP: Json = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _steps(decoder: Json) -> Iterator[Json]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder


def _byte_alphabet() -> dict[int, int]:
    """Character to byte of GPT-2's byte-level BPE (Radford et al., 2019, encoder.py): printable
    Latin-1 stands for itself, the other 68 bytes are shifted to 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}


BYTE_ALPHABET: Mapping[int, int] = _byte_alphabet()


class _AlphabetOnly(dict[int, int]):
    """Sends every other character beyond Latin-1, so that one pass over a token finds them."""

    def __missing__(self, character: int) -> int:
        return 0xFFFF


_ALPHABET_ONLY = _AlphabetOnly(BYTE_ALPHABET)

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _bytes(text: str, kind: DecoderKind) -> bytes:
    if kind is DecoderKind.BYTE_LEVEL:
        # A token with a character outside the alphabet is taken literally, as tokenizers does.
        try:
            return text.translate(_ALPHABET_ONLY).encode("latin-1")
        except UnicodeEncodeError:
            return text.encode()
    if match := _FALLBACK.fullmatch(text):
        return bytes((int(match[1], 16),))
    return text.replace("▁", " ").encode()


def _whole(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    """One U+FFFD per undecodable byte, which is sentencepiece's rule; Python's own handler (and
    byte-level decoders) write one per maximal invalid run."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


PER_BYTE = "loom-per-byte"
"""Name of that error handler for `bytes.decode`."""

codecs.register_error(PER_BYTE, _each_byte)
