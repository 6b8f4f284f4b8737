"""tokenizer.json of the byte-level BPE vocabulary in a .gguf file, and of Kimi's tiktoken.model.

`transformers` reads .gguf files of the architectures that it knows alone, and splits most texts in one
way: "1234" and much punctuation would become other tokens than a model was trained on. How texts are
split is said by name (`tokenizer.ggml.pre`); what the names mean is in llama.cpp's llama-vocab.cpp, as a list
of regular expressions after each of which the pieces are split further.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from app.text.vocab import BYTE_ALPHABET
from core.errors import ModelError
from core.models.fields import nearest

Text = TypeVar("Text", str, bytes)

CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that no merge makes: special ones, and others that are found in texts as they are."""

RESERVED = 256
"""Special tokens of a tiktoken.model, behind its ranks."""

_SPECIAL: Mapping[str, str] = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""Tokens by what metadata call them, and tokenizer_config.json."""


class _Split(NamedTuple):
    """The pre-tokenizer of a vocabulary.

    patterns  regular expressions whose matches are words
    nfc       texts are normalised first
    whole     a word that is a token is one, whatever the merges
    bos       texts begin with BOS where the file does not say it
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    whole: bool = False
    bos: bool = False


def _words(letters: str, digits: str, others: str) -> str:
    """GPT-4's split, which most have in some variant."""
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}| ?[^\s{others}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _cased(suffix: str, digits: str, han: str = "") -> str:
    """GPT-4o's split, where words of capitals and then others are apart."""
    upper, lower = (
        rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{han}]",
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{han}]",
    )
    first = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{first}{upper}*{lower}+{suffix}|{first}{upper}+{lower}*{suffix}"
    last = r"[\r\n]*" if han else r"[\r\n/]*"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{last}|\s*[\r\n]+|\s+(?!\S)|\s+"


_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_THREE, _ONE = r"\p{N}{1,3}", r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT4 = _words(r"\p{L}+", _THREE, r"\p{L}\p{N}")
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_LLAMA3 = _Split((_GPT4,), whole=True, bos=True)
_QWEN2 = _Split((_words(r"\p{L}+", _ONE, r"\p{L}\p{N}"),), nfc=True)

_SPLITS: Mapping[str, _Split] = {
    "chatglm-bpe": _Split((_GPT4,)),
    "dbrx": _Split((_GPT4,)),  # of OLMo 2 and 3 and of Phi-4, too
    "deepseek-coder": _Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _ONE)),
    # Letters that have a case, of an older version of Unicode.
    "deepseek-llm": _Split(
        (
            r"[\r\n]",
            r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"(?<!\s)\s+$",  # as \s+$, which takes quadratic time where spaces are before a digit
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-v3": _Split(
        (
            _THREE,
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    "falcon3": _LLAMA3,
    "glm4": _Split((_GPT4,)),
    "gpt-2": _Split((_GPT2,)),
    "gpt-4o": _Split((_cased(_SHORT, _THREE),)),
    # The split of Kimi's tokenizer: llama.cpp's does not part words before capitals.
    "kimi-k2": _Split((r"\p{Han}+|" + _cased(_SHORT, _THREE, r"&&[^\p{Han}]"),)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "llama4": _Split((_cased(_SHORT, _THREE),), bos=True),
    "olmo": _Split((_GPT2,)),
    "qwen2": _QWEN2,
    "qwen35": _Split((_words(r"[\p{L}\p{M}]+", _ONE, r"\p{L}\p{M}\p{N}"),), nfc=True),
    "refact": _Split((_ONE, _GPT2)),  # Granite's
    "smaug-bpe": _Split((_GPT4,)),  # SmolLM3's
    "smollm": _Split((_ONE, _GPT2)),
    "starcoder": _Split((_ONE, _GPT2)),
    "tekken": _Split((_cased("", _ONE),), whole=True, bos=True),
}

_UNNAMED: Mapping[str, str] = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen2moe": "qwen2"}
"""The split of files from before it was named, by architecture."""


def byte_level_bpe(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of tokenizer.json and the settings of tokenizer_config.json, made from a .gguf file's
    metadata. Raises `ModelError` for an unknown split; damaged metadata may raise any other exception."""
    split = _split_of(fields)
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields.get("tokenizer.ggml.token_type") or [0] * len(tokens)
    added = [
        added_token(i, token, kind == CONTROL)
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    merges = [pair.split(" ", 1) for pair in fields["tokenizer.ggml.merges"]]
    content = _content(split, {token: i for i, token in enumerate(tokens)}, merges, added)
    return content, {"add_bos_token": split.bos} | special_tokens(fields)


def special_tokens(fields: Mapping[str, Any]) -> dict[str, str]:
    """Settings of tokenizer_config.json: the special tokens that a .gguf file's metadata name."""
    found = {ours: fields.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in _SPECIAL.items()}
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    return {f"{ours}_token": tokens[token] for ours, token in found.items() if token is not None}


def tiktoken_bpe(data: bytes, settings: Mapping[str, Any], split: str = "kimi-k2") -> dict[str, Any]:
    """tokenizer.json of a tiktoken.model, which Kimi K2 comes with: a line for each token, its bytes in
    base64 and its rank. Neighbours in a word are joined in the order of the rank of what they make, so that
    each token is a merge of all the pairs that make it. `RESERVED` special tokens follow, with the names that
    `added_tokens_decoder` of `settings` (tokenizer_config.json) has for their ids.

    Source: tokenization_kimi.py of moonshotai/Kimi-K2-Instruct, whose split is that of `split`. Raises
    `ModelError` for ranks with a gap, and whatever a damaged file makes it raise.
    """
    ranks = _ranks(data)
    spell = {byte: chr(char) for char, byte in BYTE_ALPHABET.items()}
    spelled = {token: "".join(spell[byte] for byte in token) for token in ranks}
    pairs = merges_of(sorted(ranks, key=ranks.__getitem__), ranks)
    merges = [[spelled[left], spelled[right]] for left, right in pairs]
    named = settings.get("added_tokens_decoder") or {}
    added = []
    for i in range(len(ranks), len(ranks) + RESERVED):
        entry = named.get(str(i)) or {}
        added.append(
            added_token(i, entry.get("content", f"<|reserved_token_{i}|>"), entry.get("special", True))
        )
    return _content(_SPLITS[split], {spelled[token]: rank for token, rank in ranks.items()}, merges, added)


def _ranks(data: bytes) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for line in data.splitlines():
        token, rank = line.split()
        found[base64.b64decode(token, validate=True)] = int(rank)
    if sorted(found.values()) != list(range(len(found))) or not all(bytes([i]) in found for i in range(256)):
        raise ModelError(f"its {len(found)} ranks are not 0 to {len(found) - 1}, or lack a byte")
    return found


def merges_of(tokens: Iterable[Text], ids: Mapping[Text, int]) -> Iterator[tuple[Text, Text]]:
    """All pairs of tokens with `ids` that make one of `tokens`, in the order of these."""
    for token in tokens:
        pairs = ((token[:i], token[i:]) for i in range(1, len(token)))
        made = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        yield from sorted(made, key=lambda pair: (ids[pair[0]], ids[pair[1]]))


def added_token(id: int, token: str, special: bool) -> dict[str, Any]:
    """An entry of tokenizer.json: a token that is found in texts as it is."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id, "content": token, **plain, "special": special}


def _content(
    split: _Split, vocab: Mapping[str, int], merges: Iterable[list[str]], added: list[dict[str, Any]]
) -> dict[str, Any]:
    pieces = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in split.patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    model = {"type": "BPE", "ignore_merges": split.whole, "vocab": vocab, "merges": list(merges)}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if split.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*pieces, byte_level | {"use_regex": False}]},
        "decoder": byte_level | {"use_regex": True},
        "model": model,
    }


def _split_of(fields: Mapping[str, Any]) -> _Split:
    name = str(fields.get("tokenizer.ggml.pre", "default"))
    if name == "default":
        name = _UNNAMED.get(str(fields.get("general.architecture")), name)
    if name not in _SPLITS:
        raise ModelError(
            f"tokenizer.ggml.pre {name!r} of the .gguf file is not known; the nearest that is: "
            f"{nearest(name, _SPLITS)!r}. Name a directory with the model's tokenizer.json with --tokenizer."
        )
    return _SPLITS[name]
