"""Fill-in-the-middle: text between a prompt and a suffix, from models that were trained for it.

Such models have tokens that mark the parts of a prompt. They are looked up by name in the vocabulary, which
does not say whether a checkpoint was trained with them; a vocabulary without them cannot be asked to fill
in. The names and the order of the parts are those of the checkpoints' own cards; llama.cpp looks for the
same names.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from app.text.tokenizer import Tokenizer
from core.types import Ints


class FimFormat(NamedTuple):
    """Names of the marks before the prompt, before the suffix, and behind both (empty: there is none).
    `ends` are tokens that end such a text besides the marks."""

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()
    suffix_first: bool = False
    glued: bool = False
    """The tokenizer puts a space before every text, which a suffix must not have."""


_FILES = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>")
_BIGCODE = ("<fim_pad>", "<file_sep>", "<|endoftext|>")

FIM_FORMATS = (
    FimFormat(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", _FILES
    ),  # Qwen2.5-Coder, Qwen3, CodeGemma
    FimFormat("<fim_prefix>", "<fim_suffix>", "<fim_middle>", _BIGCODE),  # StarCoder, StarCoder2, Granite
    FimFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>",)),  # SantaCoder
    FimFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<|EOT|>",)),  # DeepSeek-Coder, V2, V3
    FimFormat("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",), glued=True),  # CodeLlama
    FimFormat("[PREFIX]", "[SUFFIX]", "", suffix_first=True, glued=True),  # Codestral
    FimFormat("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ("<|endoftext|>",)),  # GLM, CodeGeeX4
    FimFormat("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
)
"""The first whose tokens are all in the vocabulary is used."""

_GLUE = "☺"
"""Meta's own way to encode a text without the space before it: behind a character of its own tokens."""


class FimTokens(NamedTuple):
    """Ids of a format's tokens in one vocabulary. `middle` is None where there is none; `ends` say that the
    text is complete."""

    format: FimFormat
    prefix: int
    suffix: int
    middle: int | None
    ends: frozenset[int]


def find_marks(tokenizer: Tokenizer) -> FimTokens | None:
    """The marks that a vocabulary has."""
    for format in FIM_FORMATS:
        prefix, suffix = tokenizer.token_id(format.prefix), tokenizer.token_id(format.suffix)
        middle = tokenizer.token_id(format.middle) if format.middle else None
        if prefix is None or suffix is None or (format.middle and middle is None):
            continue
        ends = {tokenizer.token_id(name) for name in format.ends} | {prefix, suffix, middle}
        return FimTokens(format, prefix, suffix, middle, frozenset(id for id in ends if id is not None))
    return None


async def encode_suffix(text: str, format: FimFormat, tokenizer: Tokenizer, most: int) -> Ints:
    """The ids of a suffix; `most` tokens are not too long (0: none is)."""
    if format.glued:
        glue = await tokenizer.encode_async(_GLUE, False)
        ids = await tokenizer.encode_async(_GLUE + text, False, "suffix", most)
        if np.array_equal(ids[: len(glue)], glue):
            return ids[len(glue) :]
    return await tokenizer.encode_async(text, False, "suffix", most)
