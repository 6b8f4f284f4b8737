"""Small tokenizers of each family."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from app.text.vocab import BYTE_ALPHABET


def byte_level() -> tokenizers.Tokenizer:
    """256 bytes, a few merges, ChatML's special tokens and one that is not special."""
    characters = {byte: chr(char) for char, byte in BYTE_ALPHABET.items()}
    vocab = {characters[byte]: byte for byte in range(256)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), (characters[0xF0], characters[0x9F])]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>", "<｜日本｜>"])
    core.add_tokens(["<think>", "two words"])
    return core


def byte_fallback() -> tokenizers.Tokenizer:
    """A vocabulary like sentencepiece's: "▁" for spaces, bytes for unknown characters, BOS in front."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for word in ("▁", "a", "b", "c", "é", "▁a", "▁b", "日"):
        vocab.setdefault(word, len(vocab))
    core = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[("▁", "a"), ("▁", "b")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    return core


def word_pieces() -> tokenizers.Tokenizer:
    """A decoder that depends on context: "##" joins, all other tokens get a space before them."""
    vocab = {"[UNK]": 0, "un": 1, "##happy": 2, "happy": 3, ".": 4, "[SEP]": 5, "and": 6}
    core = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    core.add_special_tokens(["[SEP]"])
    return core


def save(core: tokenizers.Tokenizer, directory: Path, **settings: object) -> Path:
    """Write tokenizer.json and tokenizer_config.json to `directory`. Returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    core.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
