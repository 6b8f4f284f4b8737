"""Text to token ids and back, for one model.

The GIL decides the shape of this file: `tokenizers` releases it in its batch calls only (a plain
`encode` of 90,000 tokens was measured to freeze the loop for 409 ms), so single texts travel as
batches of one, and long ones in a pool thread. All threads use one `tokenizers.Tokenizer`, which
nothing changes after it was loaded: only a call that changes it (truncation, padding, new tokens)
would raise "Already borrowed".
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tokenizers

from app.text.vocab import BYTE_ALPHABET, DecoderKind, Vocabulary
from core.env import read_object
from core.errors import ContextExceeded, ModelError, RequestError
from core.grammar import TokenTable
from core.types import Ints

INLINE_CHARS = 512
"""Texts up to this length are encoded on the loop: 60 to 300 µs were measured over Qwen3, Llama 3.1
and DeepSeek-V3 with English and Chinese. Longer ones would pass 0.3 ms, the loop's longest slice."""

THREADS = 2
"""Long prompts encoded at once. More would take cores from the launch threads."""

HUGE_CHARS = 256 * 1024
"""Texts longer than this share one thread of their own: 7 MB take up to 20 s, and two of them would block
every prompt that is not short."""

SPARSE_CHARS = 4
"""Characters per token in usual text. To check a text that may be too long, this many for each token of the
limit are encoded first, then four times as many."""

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|eot|>", "<|return|>", "<|call|>")
"""End-of-turn tokens of ChatML, Llama 3, Gemma, Llama 4 and gpt-oss, used in addition to the EOS of the
files: fine-tunes often keep the base model's."""

T = TypeVar("T")

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

AT_ONCE = 65_536
"""Token ids that are converted to an array in one call. The call holds the GIL: for 0.1 s with four million
ids."""


class EncodedPair(NamedTuple):
    """Ids of two texts, int32 [n], and the position where the second begins. `segments`: whether the template
    marks it as another segment, as BERT's does and RoBERTa's does not."""

    ids: Ints
    second: int
    segments: bool


class Tokenizer:
    """Encodes and decodes for one model.

    Owner: event loop. The methods that are `async` read it in pool threads too.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        settings: Mapping[str, Any],
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        vocab_size: int = 2**31,
    ) -> None:
        """`settings` is tokenizer_config.json, `eos_ids` and `bos_id` are the checkpoint's. End-of-sequence
        ids that are not below `vocab_size`, the model's, are dropped."""
        self._core = core
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenizer")
        self._huge = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-huge")
        # A part's pickled state is its entry of tokenizer.json; writing all of that takes 0.3 s.
        decoder = json.loads(core.decoder.__getstate__()) if core.decoder is not None else None
        added = core.get_added_tokens_decoder().items()
        special = frozenset(token for token, entry in added if entry.special)
        self.vocabulary = Vocabulary(core.get_vocab(with_added_tokens=True), special, decoder)
        self.special_tokens = {name: text for name in _NAMES if (text := _content(settings.get(name)))}
        """`bos_token`, `eos_token` and so on to their text, as chat templates know them."""
        own = self._id_of("bos_token")
        self.bos_id = own if own is not None else bos_id
        eos = self._id_of("eos_token")
        turn_ends = special.intersection(map(core.token_to_id, _TURN_ENDS))
        self.eos_ids = _known({*eos_ids, *turn_ends, eos}, vocab_size)
        """Any of them ends a generation that does not ignore them."""
        # Older files leave BOS to the class that `tokenizer_config.json` names instead of writing
        # it into tokenizer.json (DeepSeek-V3 does).
        probe = core.encode_batch_fast(["a"], add_special_tokens=True)[0].ids
        bos = [self.bos_id] if settings.get("add_bos_token") is True and self.bos_id is not None else []
        self._added_bos = bos if probe[:1] != bos else []
        ends = [eos] if settings.get("add_eos_token") is True and eos is not None else []
        self.added_eos = ends if probe[-1:] != ends else []
        """Token ids that `tokenizer_config.json` puts behind a text and tokenizer.json does not. A prompt
        that is to go on must not end so, a text that is to be embedded must (e5-mistral's vectors are of
        that token)."""

    @classmethod
    def load(
        cls, directory: Path | None, vocab_size: int, eos_ids: Iterable[int] = (), bos_id: int | None = None
    ) -> Tokenizer:
        """Tokenizer of a directory with tokenizer.json; None gives one whose tokens are bytes.

        `vocab_size` is the model's. Takes 0.2 to 0.6 s for 150,000 tokens and holds the GIL: call it before
        serving. Raises `ModelError`.
        """
        if directory is None:
            return cls(_byte_tokenizer(vocab_size), {}, eos_ids, bos_id, vocab_size)
        settings = _settings(directory)
        path = directory / "tokenizer.json"
        try:
            core = tokenizers.Tokenizer.from_file(str(path))
            core.no_truncation()
            core.no_padding()
        except Exception as error:  # what the library raises is of no narrower type
            raise ModelError(
                f"cannot read the tokenizer {path}: {error}. "
                "Download it again or name another with --tokenizer."
            ) from error
        _add_missing(core, settings, path)
        return cls(core, settings, eos_ids, bos_id, vocab_size)

    def close(self) -> None:
        """Stop the pool threads; texts being encoded are finished first, those that wait are dropped.
        Idempotent."""
        for pool in (self._pool, self._huge):
            pool.shutdown(cancel_futures=True)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id; the model's embedding may have more rows."""
        return self.vocabulary.size

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that `skip_special` hides."""
        return self.vocabulary.special_ids

    # -- text to ids -------------------------------------------------------------------------------

    def encode(self, text: str, add_special: bool = True, param: str = "prompt") -> Ints:
        """Token ids, int32 [n]. Raises `RequestError` naming `param` for what is not Unicode text.

        Takes about 1 µs per token where it is called; the GIL is free meanwhile.
        """
        check_text(text, param)
        return self._encode(text, add_special)

    async def encode_async(
        self, text: str, add_special: bool = True, param: str = "prompt", most: int = 0
    ) -> Ints:
        """Like `encode`, in a pool thread when the text is long. Cancelling it drops the result.

        With `most` a text of clearly more tokens than that is refused by its beginning: `ContextExceeded`.
        """
        if len(text) <= INLINE_CHARS:
            return self.encode(text, add_special, param)

        def work() -> Ints:
            check_text(text, param)
            if most:
                _check_beginning(self._core, text, param, most)
            return self._encode(text, add_special)

        return await self._off_loop(len(text), work)

    async def _off_loop(self, length: int, work: Callable[[], T]) -> T:
        """`work` over a text of `length` characters: here, or in a pool thread when it is long."""
        if length <= INLINE_CHARS:
            return work()
        pool = self._pool if length <= HUGE_CHARS else self._huge
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    async def offsets_async(self, text: str, add_special: bool = True) -> list[tuple[int, int]]:
        """Where in `text` each of its tokens is, (first character, one past the last); (0, 0) for
        those that were added. Aligned with `encode`; in a pool thread when long."""

        def work() -> list[tuple[int, int]]:
            (found,) = self._core.encode_batch([text], add_special_tokens=add_special)
            return [(0, 0)] * (len(self._added_bos) if add_special else 0) + list(found.offsets)

        return await self._off_loop(len(text), work)

    async def encode_pair_async(self, texts: tuple[str, str], params: tuple[str, str]) -> EncodedPair:
        """Two texts as the model's own template joins them, special tokens included. `params` name them in
        errors."""
        for text, param in zip(texts, params, strict=True):
            check_text(text, param)
        length, added = len(texts[0]) + len(texts[1]), self._added_bos
        ids, second, segments = await self._off_loop(length, lambda: _pair(self._core, texts))
        return EncodedPair(np.array([*added, *ids], np.int32), second + len(added), segments)

    def _encode(self, text: str, add_special: bool) -> Ints:
        ids = self._core.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        if add_special and self._added_bos:
            ids = self._added_bos + ids
        if len(ids) <= AT_ONCE:
            return np.array(ids, np.int32)
        return np.concatenate([np.array(ids[i : i + AT_ONCE], np.int32) for i in range(0, len(ids), AT_ONCE)])

    # -- ids to text -------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ids, special tokens left out or as they are written. Ids outside the vocabulary
        read as nothing. Takes about 0.1 µs per id; most of it without the GIL, but for byte-fallback
        vocabularies."""
        if self.vocabulary.kind is DecoderKind.BYTE_FALLBACK:
            return self.vocabulary.decode(ids, skip_special)
        text: str = self._core.decode_batch([list(map(int, ids))], skip_special_tokens=skip_special)[0]
        return text

    def token_name(self, token: int) -> str:
        """One token as the vocabulary spells it (`Ġthe`, `▁the`, `<0xC3>`); empty for ids outside it."""
        return str(self._core.id_to_token(token) or "")

    def token_text(self, token: int) -> str:
        """One token as text, U+FFFD where its bytes are no whole character."""
        return self.token_bytes(token).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Exact bytes of one token: concatenated over a text's tokens they are the text's bytes.

        For vocabularies without such bytes, those of the token decoded alone.
        """
        if not 0 <= token < self.vocab_size:
            return b""
        if self.vocabulary.raw:
            return self.vocabulary.raw[token]
        return self.decode([token], skip_special=False).encode()

    def token_table(self, width: int) -> TokenTable:
        """The vocabulary for grammars. `width` is the model's vocabulary size; token ids from it on are left
        out. Takes 0.2 s and holds the GIL."""
        definition = self._core.to_str()
        if self.vocab_size > width:
            content = json.loads(definition)
            content["added_tokens"] = [each for each in content["added_tokens"] if each["id"] < width]
            definition = json.dumps(content)
        return TokenTable(
            raw=self.vocabulary.raw[:width],
            control=frozenset(token for token in self._core.get_added_tokens_decoder() if token < width),
            stops=self.eos_ids,
            width=width,
            definition=definition,
        )

    def token_id(self, text: str) -> int | None:
        """The id of the one token that is written so, special or not."""
        token: int | None = self._core.token_to_id(text)
        return token

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return self.token_id(text) if text else None


def _known(ids: Iterable[int | None], vocab_size: int) -> frozenset[int]:
    """The ids that a model of so many tokens has."""
    return frozenset(token for token in ids if token is not None and 0 <= token < vocab_size)


def _check_beginning(core: tokenizers.Tokenizer, text: str, param: str, most: int) -> None:
    """Raise `ContextExceeded` for a text whose beginning alone has more tokens, without reading the rest.

    A text that is cut anywhere differs in its last word: an eighth more, and 64, is more than that can be.
    """
    size = most * SPARSE_CHARS
    while size < len(text):
        found = len(core.encode_batch_fast([text[:size]], add_special_tokens=False)[0])
        if found > most + most // 8 + 64:
            raise ContextExceeded(most, found, 0, param, counted=False)
        size *= 4


def _pair(core: tokenizers.Tokenizer, texts: tuple[str, str]) -> tuple[list[int], int, bool]:
    found = core.encode_batch_fast([texts], add_special_tokens=True)[0]
    segments = 1 in found.type_ids
    of = found.type_ids if segments else found.sequence_ids
    return found.ids, of.index(1) if 1 in of else len(of), segments


def check_text(text: str, param: str) -> None:
    """Raise `RequestError` for text with lone surrogates, which no encoding has bytes for."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{param} has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; "
            "it is not valid Unicode text.",
            param,
        ) from error


def _content(entry: object) -> str | None:
    """Text of a special token, which files write as a string or as an object."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _settings(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, completed from special_tokens_map.json."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        content = read_object(directory / name) or {}
        settings |= {key: value for key, value in content.items() if value is not None}
    return settings


def _add_missing(core: tokenizers.Tokenizer, settings: Mapping[str, Any], path: Path) -> None:
    """Add the tokens that only tokenizer_config.json names; their ids are fixed by their order."""
    decoder = settings.get("added_tokens_decoder")
    entries = decoder.items() if isinstance(decoder, Mapping) else ()
    for key, entry in sorted(entries, key=lambda item: int(item[0])):
        text = _content(entry)
        if text is None or core.token_to_id(text) is not None:
            continue
        token = tokenizers.AddedToken(
            text,
            **{flag: bool(entry.get(flag)) for flag in ("lstrip", "rstrip", "single_word", "normalized")},
        )
        add = core.add_special_tokens if entry.get("special") else core.add_tokens
        add([token])
        if core.token_to_id(text) != int(key):
            raise ModelError(
                f"tokenizer_config.json gives {text!r} the id {key}, which does not fit {path}. "
                "The two files are of different models; download them again."
            )


def _byte_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """A stand-in for a model without a tokenizer: ids below 256 are bytes, the others read as
    `<id>` and are never produced from text."""
    characters = {byte: chr(char) for char, byte in BYTE_ALPHABET.items()}
    vocab = {characters.get(token) or f"<{token}>": token for token in range(vocab_size)}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], unk_token=characters[0]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    return core
