"""tokenizer.json of the sentencepiece vocabulary in a .gguf file.

`transformers` converts these as well, but the result depends on its version. Version 5.17 makes a Unigram
model of Gemma's vocabulary, so that "The chemical symbol for gold is" has 12 tokens instead of 6, and takes a
minute for the 32,000 tokens of Llama 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.checkpoint.bpe import CONTROL, USER_DEFINED, added_token, merges_of, special_tokens

NORMAL, UNKNOWN = 1, 2
"""Types of tokens."""

SPACE = "▁"


def sentencepiece_bpe(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of tokenizer.json and the settings of tokenizer_config.json, made from a .gguf file's
    metadata. Damaged metadata may raise any exception.

    The merge whose result has the highest score comes first, as in llama.cpp's llm_tokenizer_spm. A character
    that is no token becomes one token for each of its bytes.
    """
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    scores: list[float] = fields["tokenizer.ggml.scores"]
    added = [
        added_token(i, token, kind != USER_DEFINED)
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    of_text = [i for i, kind in enumerate(kinds) if kind in (NORMAL, USER_DEFINED)]
    best_first = [tokens[i] for i in sorted(of_text, key=lambda i: -scores[i])]
    settings: dict[str, Any] = {"add_bos_token": True} | special_tokens(fields)
    prefixed = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixed:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    content = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": SPACE,
            "prepend_scheme": "first" if prefixed else "never",
            "split": False,
        },
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": settings.get("unk_token"),
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": list(merges_of(best_first, {tokens[i]: i for i in of_text})),
        },
    }
    return content, settings
