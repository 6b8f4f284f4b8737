"""Tokenizers made of the metadata of .gguf files."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import tokenizers

from app.checkpoint.bpe import byte_level_bpe
from app.text.vocab import DecoderKind, Vocabulary
from core.errors import ModelError
from tests.rigs import vocabularies
from tests.rigs.assets import asset


def metadata(content: dict[str, Any], pre: str | None, architecture: str = "glm4moe") -> dict[str, Any]:
    """What llama.cpp's converter writes of a tokenizer.json."""
    vocab = dict(content["model"]["vocab"]) | {
        each["content"]: each["id"] for each in content["added_tokens"]
    }
    kinds = {each["content"]: 3 if each["special"] else 4 for each in content["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = [each if isinstance(each, str) else " ".join(each) for each in content["model"]["merges"]]
    named = {} if pre is None else {"tokenizer.ggml.pre": pre}
    return named | {
        "general.architecture": architecture,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }


def small(pre: str | None, architecture: str = "glm4moe") -> dict[str, Any]:
    return metadata(json.loads(vocabularies.byte_level().to_str()), pre, architecture)


@pytest.mark.parametrize(
    ("name", "pre"), [("deepseek_v3", "deepseek-v3"), ("llama3_1", "llama-bpe"), ("qwen3", "qwen2")]
)
def test_splits_are_those_of_the_real_vocabularies(name: str, pre: str) -> None:
    text = (asset(f"tokenizers/{name}") / "tokenizer.json").read_text()
    original = json.loads(
        re.sub(r"(?<!\\)\\([rn])", r"\\\\\1", text)
    )  # some have these characters themselves
    made, _ = byte_level_bpe(small(pre))
    (*ours, bytes_), (*theirs, _) = (each["pre_tokenizer"]["pretokenizers"] for each in (made, original))
    assert ours == theirs and bytes_["use_regex"] is False
    assert made["model"]["ignore_merges"] == bool(original["model"].get("ignore_merges"))
    assert (made["normalizer"] or {}).get("type", "Sequence") == (original["normalizer"] or {}).get(
        "type", "Sequence"
    )


TEXT = "I'LL say 12345 HELLOWorld\u4f60\u597dabc e\u0301t\u00e9.\r\n  x /\n"
CL100K = ["I", "'LL", " say", " ", "123", "45", " HELLOWorld\u4f60\u597dabc", " e"]


@pytest.mark.parametrize(
    ("pre", "begins"),
    [
        *((pre, CL100K) for pre in ("chatglm-bpe", "dbrx", "glm4", "smaug-bpe")),
        ("deepseek-coder", ["I", "'", "LL", " say", " ", "1", "2", "3", "4", "5", " HELLOWorld"]),
        ("deepseek-llm", ["I", "'", "LL", " say", " ", "12345", " HELLOWorld", "\u4f60\u597d", "abc"]),
        ("gpt-2", ["I", "'", "LL", " say", " 12345", " HELLOWorld\u4f60\u597dabc"]),
        ("gpt-4o", ["I'LL", " say", " ", "123", "45", " HELLOWorld\u4f60\u597dabc", " e\u0301t\u00e9"]),
        (
            "kimi-k2",
            ["I'LL", " say", " ", "123", "45", " HELLOWorld", "\u4f60\u597d", "abc", " e\u0301t\u00e9"],
        ),
        (
            "qwen35",
            [
                "I",
                "'LL",
                " say",
                " ",
                "1",
                "2",
                "3",
                "4",
                "5",
                " HELLOWorld\u4f60\u597dabc",
                " \u00e9t\u00e9",
            ],
        ),
        ("refact", ["I", "'", "LL", " say", " ", "1", "2", "3", "4", "5", " HELLOWorld\u4f60\u597dabc"]),
        ("tekken", ["I", "'LL", " say", " ", "1", "2", "3", "4", "5", " HELLOWorld\u4f60\u597dabc"]),
    ],
)
def test_words_of_each_split(pre: str, begins: list[str]) -> None:
    core = tokenizers.Tokenizer.from_str(json.dumps(byte_level_bpe(small(pre))[0]))
    text = core.normalizer.normalize_str(TEXT) if core.normalizer is not None else TEXT
    words = [text[start:end] for _, (start, end) in core.pre_tokenizer.pre_tokenize_str(text)]
    assert words[: len(begins)] == begins and "".join(words) == text
    assert core.decode(core.encode(TEXT).ids, skip_special_tokens=False) == text


def test_tokens_keep_their_ids_and_kinds() -> None:
    original = vocabularies.byte_level()
    content, settings = byte_level_bpe(small("smollm"))
    core = tokenizers.Tokenizer.from_str(json.dumps(content))
    assert core.get_vocab(with_added_tokens=True) == original.get_vocab(with_added_tokens=True)
    text = "<|im_start|>hello two words<think> hell<|im_end|>"
    assert core.encode(text).ids == original.encode(text).ids
    special = {token: each.special for token, each in original.get_added_tokens_decoder().items()}
    assert {token: each.special for token, each in core.get_added_tokens_decoder().items()} == special
    assert settings == {"add_bos_token": False, "eos_token": "two words"}
    # Texts of tokens are looked up, which this decoder allows.
    assert Vocabulary({}, frozenset(), content["decoder"]).kind is DecoderKind.BYTE_LEVEL


def test_a_split_that_is_not_named_is_that_of_the_architecture_then() -> None:
    for pre in (None, "default"):
        assert byte_level_bpe(small(pre, "qwen2")) == byte_level_bpe(small("qwen2", "qwen2"))
        with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre 'default' .* not known.*--tokenizer"):
            byte_level_bpe(small(pre, "olmo2"))
    with pytest.raises(
        ModelError, match=r"'gpt-5' of the \.gguf file is not known; the nearest that is: 'gpt-"
    ):
        byte_level_bpe(small("gpt-5"))
