"""Tokenizers made of the metadata of .gguf files."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import sentencepiece
import tokenizers

from app.checkpoint.bpe import RESERVED, byte_level_bpe, tiktoken_bpe
from app.checkpoint.convert import from_slow
from app.text.tokenizer import Tokenizer
from app.text.vocab import BYTE_ALPHABET, DecoderKind, Vocabulary
from core.errors import ModelError
from tests.rigs import vocabularies
from tests.rigs.assets import asset


def metadata(content: dict[str, Any], pre: str | None, architecture: str = "glm4moe") -> dict[str, Any]:
    """Metadata that llama.cpp's converter writes for a tokenizer.json."""
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


def test_spaces_before_digits_take_linear_time() -> None:
    """50,000 took 7 s by the original's last expression but two, which finds the same."""
    made, _ = byte_level_bpe(small("deepseek-llm"))
    pieces = made["pre_tokenizer"]["pretokenizers"]
    (ours,) = (each for each in pieces if each.get("pattern") == {"Regex": r"(?<!\s)\s+$"})
    split = tokenizers.Tokenizer.from_str(json.dumps(made)).pre_tokenizer.pre_tokenize_str
    assert len(split(" " * 50_000 + "5")) == 2
    theirs = tokenizers.Tokenizer.from_str(json.dumps(made).replace(r"(?<!\\s)\\s+$", r"\\s+$"))
    assert ours["behavior"] == "Isolated"
    random = Random(0)
    for _ in range(200):
        text = "".join(random.choices(" \t\n\r5a!\u4f60\u3000", k=12))
        assert split(text) == theirs.pre_tokenizer.pre_tokenize_str(text)


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


def tiktoken_file(content: dict[str, Any]) -> bytes:
    """The tiktoken.model of a byte-level vocabulary, whose tokens have the ids of their ranks."""
    special = {each["content"] for each in content["added_tokens"]}
    tokens = {token: rank for token, rank in content["model"]["vocab"].items() if token not in special}
    return b"".join(
        base64.b64encode(bytes(BYTE_ALPHABET[ord(char)] for char in token)) + b" %d\n" % rank
        for token, rank in tokens.items()
    )


KIMI = {
    "tokenizer_class": "TikTokenTokenizer",
    "eos_token": "[EOS]",
    "added_tokens_decoder": {
        "300": {"content": "[EOS]", "special": True},
        "302": {"content": "<think>", "special": False},
    },
}
MERGED = [b"th", b"he", b"the", b" the", *(b"%d" % i for i in range(10, 50))]


def small_tiktoken() -> bytes:
    """A tiktoken file of 300 ranks. Here " the" is made by " " and "the" or by none: " th" is no token."""
    tokens = [bytes([i]) for i in range(256)] + MERGED
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def test_ranks_of_a_real_vocabulary_give_its_ids() -> None:
    """Llama 3's, which was made with tiktoken, and so was Kimi's."""
    original = json.loads((asset("tokenizers/llama3_1") / "tokenizer.json").read_text())
    made = tiktoken_bpe(tiktoken_file(original), {}, split="llama-bpe")
    ours, theirs = (tokenizers.Tokenizer.from_str(json.dumps(each)) for each in (made, original))
    text = (
        TEXT
        + "The quick brown fox, 1234567 km/h: na\u00efve \U0001f600 antidisestablishmentarianism\n\n\tx=1"
    )
    for each in (text, text[::-1], text.upper(), text.replace(" ", "")):
        assert ours.encode(each).ids == theirs.encode(each, add_special_tokens=False).ids


@pytest.mark.parametrize(("kind", "prefixed"), [("LlamaTokenizer", True), ("GemmaTokenizer", False)])
def test_a_directory_with_a_sentencepiece_model(kind: str, prefixed: bool, tmp_path: Path) -> None:
    """The tokens are the same as sentencepiece's own."""
    (tmp_path / "text").write_text((TEXT + "\n") * 3, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefixed,
        user_defined_symbols=["<|im_start|>"],
        minloglevel=2,
    )
    settings = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    own = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer = Tokenizer.load(from_slow(tmp_path, print), own.vocab_size())
    # Unlike sentencepiece, `LlamaTokenizer` puts no space before a text that begins with a space or a special
    # token: such texts differ by one token.
    lines = [line for line in TEXT.splitlines() if line[:1].strip()]
    for text in (*lines, "a  b\u6f22\U0001f600\t12", "so<|im_start|>user"):
        ids = tokenizer.encode(text, add_special=False).tolist()
        assert ids == own.encode(text)
        assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {2})


def test_a_directory_with_a_tiktoken_model(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes(small_tiktoken())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(KIMI))
    tokenizer = Tokenizer.load(from_slow(tmp_path, print), 300 + RESERVED)
    ids = tokenizer.encode("the the49\u6c49[EOS]<think>").tolist()
    the, spaced = 256 + MERGED.index(b"the"), 256 + MERGED.index(b" the")
    assert ids == [the, spaced, 256 + MERGED.index(b"49"), *"\u6c49".encode(), 300, 302]
    assert tokenizer.vocab_size == 300 + RESERVED and 300 in tokenizer.eos_ids
    assert tokenizer.decode([the, 300, 302, 301], skip_special=True) == "the<think>"


@pytest.mark.parametrize(
    ("data", "settings", "reason"),
    [
        (
            small_tiktoken(),
            {"tokenizer_class": "QWenTokenizer"},
            "(?s)'TikTokenTokenizer' .*alone.*QWenTok",
        ),
        (small_tiktoken()[:-5], KIMI, "cannot read the tokenizer"),
        (small_tiktoken().replace(b" 299", b" 300"), KIMI, "its 300 ranks are not 0 to 299"),
        (b"dGhl 0\n", KIMI, "lack a byte"),
        (b"\xff\xff 0\n", KIMI, "cannot read the tokenizer"),
    ],
)
def test_a_tiktoken_model_that_is_not_read(
    data: bytes, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "tiktoken.model").write_bytes(data)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=reason):
        from_slow(tmp_path, print)
