"""Token ids to text as they come, one detokenizer per choice.

What is emitted is never taken back, so a token's text waits until its last character is whole. The
concatenated pieces are what `Tokenizer.decode` gives for all the ids, after the same prompt tail.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import cast

from app.text.tokenizer import Tokenizer
from app.text.vocab import DecoderKind

_HELD = 16
"""Tokens that a text ending in U+FFFD may wait for the rest of a character. The longest real case
is 4; without a bound, a model that produces U+FFFD itself would make every step decode them all."""


_DECODER = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one choice. Owner: event loop.

    `prompt_tail` is the last few ids of the prompt: they decide whether a leading space belongs to
    the text, and complete a character that the prompt cut in half. About 0.2 µs per token for
    vocabularies that are tables (`DecoderKind.BYTE_LEVEL`, `BYTE_FALLBACK`), 5 to 10 µs for others.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int], skip_special: bool = True) -> None:
        vocabulary = tokenizer.vocabulary
        self._texts = cast(list[str], vocabulary.shown_texts if skip_special else vocabulary.texts)
        """None for a part of a character, which `join` refuses."""
        self._raw = vocabulary.shown_raw if skip_special else vocabulary.raw
        self._nothing_pending = False
        """No bytes are pending: the next token's text can be looked up."""
        self._starting = False
        self._windows: _Windows | None = None
        if vocabulary.kind is DecoderKind.OTHER:
            self._windows = _Windows(tokenizer, prompt_tail, skip_special)
            return
        self._decode = _DECODER(vocabulary.errors)
        tail = b"".join([self._raw[token] for token in prompt_tail if 0 <= token < vocabulary.size])
        self._decode.decode(tail)
        self._starting = vocabulary.strips_space and not tail
        self._nothing_pending = not (self._starting or self._decode.getstate()[0])

    def feed(self, ids: Sequence[int]) -> str:
        """Decode more ids (each >= 0). Returns the text that became certain. Ids outside the vocabulary
        read as nothing."""
        if self._nothing_pending:  # nearly always
            texts = self._texts
            try:
                return "".join([texts[token] for token in ids])
            except (IndexError, TypeError):
                pass
        return self._feed_slowly(ids)

    def _feed_slowly(self, ids: Sequence[int]) -> str:
        if self._windows is not None:
            return self._windows.feed(ids)
        raw, size = self._raw, len(self._raw)
        data = b"".join([raw[token] for token in ids if token < size])
        if self._starting and data:
            self._starting = False
            data = data.removeprefix(b" ")
        text = self._decode.decode(data)
        self._nothing_pending = not (self._starting or self._decode.getstate()[0])
        return text

    def finish(self) -> str:
        """The text still held back; half a character becomes U+FFFD. Nothing may be fed afterwards."""
        if self._windows is not None:
            return self._windows.finish()
        return self._decode.decode(b"", True)


class _Windows:
    """Text from the tokenizer itself, for vocabularies where a token reads differently in context.

        ids:  ... prefix ...... read ......... end
                  | seen       | not yet emitted |

    The new text is decode(ids[prefix:]) after decode(ids[prefix:read]): both begin in the same
    place, so what the decoder does to the start of a text is in both and cancels. Each window is a
    few tokens long, whatever the length of the output.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._ids = list(prompt_tail)
        self._read = len(self._ids)
        self._seen = tokenizer.decode(self._ids, skip_special)

    def feed(self, ids: Sequence[int]) -> str:
        self._ids += ids
        text = self._tokenizer.decode(self._ids, self._skip)
        held = len(self._ids) - self._read
        if text.endswith("\ufffd") and held < _HELD:
            return ""
        if len(text) <= len(self._seen):
            # Hidden tokens: without forgetting them, an output of nothing else would be quadratic.
            if held >= _HELD:
                del self._ids[self._read :]
            return ""
        new = text[len(self._seen) :]
        # The tokens emitted now are the next call's context.
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._seen = self._tokenizer.decode(self._ids, self._skip)
        return new

    def finish(self) -> str:
        text = self._tokenizer.decode(self._ids, self._skip)
        return text[len(self._seen) :]
