"""Log-probabilities in the three shapes that clients read."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from app.engine.job import Piece, Run
from app.text.tokenizer import Tokenizer
from core.plan import RowLogprobs
from core.request import SamplingParams
from core.types import Floats

FLOOR = -9999.0
"""Log-probability of masked tokens, as in vLLM: JSON has no infinity."""


class Namer:
    """Tokens as text, or as `token_id:17` for clients that must distinguish tokens of equal text."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self.tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token: int) -> str:
        """A token as text. Never raises for an id inside the vocabulary."""
        return f"token_id:{token}" if self._as_ids else self.tokenizer.token_text(token)


class Entry(NamedTuple):
    """One position: its token, that token's log-probability, the best (token, value) pairs. `rank` is where
    the token stands in the vocabulary, 1 for the most likely; set for prompts, else 0."""

    token: int
    value: float | None
    top: list[tuple[int, float]]
    rank: int = 0


def finite(value: float) -> float:
    """`value`, with what JSON cannot spell replaced by `FLOOR`."""
    return value if math.isfinite(value) else FLOOR


def _finite(values: Floats) -> Floats:
    return np.where(np.isfinite(values), values, np.float32(FLOOR))


def output_entries(tokens: Sequence[int], rows: Sequence[RowLogprobs]) -> Iterator[Entry]:
    """Entries of sampled tokens."""
    for token, row in zip(tokens, rows, strict=False):
        top = list(zip(row.top_ids.tolist(), _finite(row.top_values).tolist(), strict=True))
        yield Entry(token, finite(row.chosen), top)


def prompt_entries(run: Run, start: int = 0) -> list[Entry]:
    """Entries of the prompt from position `start`; the value of position 0 is None: nothing comes
    before it. Converted a chunk at a time: one by one, numpy's scalars took three times as long."""
    tokens: list[int] = run.prompt.tolist()
    entries = [Entry(token, None, []) for token in tokens[start:]]
    for chunk in run.prompt_logprobs():
        columns = (_finite(chunk.values), chunk.ranks, chunk.top_ids, _finite(chunk.top_values))
        for at, (value, rank, ids, values) in enumerate(
            zip(*(each.tolist() for each in columns), strict=True), chunk.start
        ):
            if start <= at < len(tokens):
                entries[at - start] = Entry(tokens[at], value, list(zip(ids, values, strict=True)), rank)
    return entries


def token_details(params: SamplingParams, rows: Sequence[RowLogprobs]) -> dict[str, list[object]]:
    """Values per token besides log-probabilities, by their names in SGLang's `meta_info`: the entropy of
    the distribution that the model made, in nats, as `return_entropy` asks (SGLang has the field, and fills
    it in builds made for it, from the same logits that its log-probabilities come from); the tokens that the
    filters left to choose from, and how likely the chosen one was among those, as `return_sampling_mask`
    does."""
    found: dict[str, list[object]] = {}
    if params.entropy:
        found["output_token_entropy"] = [row.entropy for row in rows]
    if params.support:
        supports = [row.support for row in rows if row.support is not None]
        found["output_token_sampling_mask"] = [each.ids.tolist() for each in supports]
        found["output_token_sampling_logprobs"] = [finite(each.chosen) for each in supports]
    return found


def chat_logprobs(piece: Piece, namer: Namer) -> dict[str, object]:
    """`choices[].logprobs` of chat."""
    return {"content": token_logprobs(piece, namer), "refusal": None}


def token_logprobs(piece: Piece, namer: Namer) -> list[dict[str, object]]:
    """One object per token: its own log-probability and the best others'."""
    return [chat_entry(entry, namer) for entry in output_entries(piece.tokens, piece.logprobs or ())]


def chat_entry(entry: Entry, namer: Namer) -> dict[str, object]:
    """A token's log-probability and the best others', as chat spells them."""
    top = [_chat_token(token, value, namer) for token, value in entry.top]
    return {**_chat_token(entry.token, entry.value, namer), "top_logprobs": top}


def _chat_token(token: int, value: float | None, namer: Namer) -> dict[str, object]:
    return {"token": namer.text(token), "logprob": value, "bytes": list(namer.tokenizer.token_bytes(token))}


class Offsets:
    """Where in a choice's text its tokens begin, in characters: those that the text leaves out take no room,
    and a token that has a part of a character begins where that does. Owner: event loop."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0
        self._sent = 0
        """Characters of the text that have been sent."""

    def echoed(self, tokens: Iterable[int], text: str) -> list[int]:
        """Offsets of the prompt's tokens in the `text` that is echoed for it: the client's own text, without
        the special tokens that were added, or the decoded tokens, less a first blank."""
        found = []
        for token in tokens:
            found.append(min(self._at, len(text)))
            decoded = self._decoder.decode(self._tokenizer.token_bytes(token))
            if text.startswith(decoded, self._at):
                self._at += len(decoded)
            elif token not in self._tokenizer.special_ids:
                self._at += len(decoded) - (
                    self._at == 0 and decoded.startswith(" ") and not text.startswith(" ")
                )
        self._at = self._sent = len(text)
        return found

    def made(self, piece: Piece) -> list[int]:
        """Offsets of the piece's tokens. The last piece ends the text: a stop cut off begins at its end."""
        found = []
        for token in piece.tokens:
            found.append(self._at)
            if not (self._skips and token in self._tokenizer.special_ids):
                self._at += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        self._sent += len(piece.text)
        return found if piece.finish is None else [min(at, self._sent) for at in found]


class CompletionLogprobs:
    """`choices[].logprobs` of completions; offsets continue from chunk to chunk. Owner: event loop."""

    def __init__(self, namer: Namer, skip_special: bool) -> None:
        self._namer = namer
        self._offsets = Offsets(namer.tokenizer, skip_special)

    def of(self, piece: Piece, prompt: Sequence[Entry] = (), echo: str = "") -> dict[str, object]:
        """The parallel lists of OpenAI's old format, read by lm-eval: of the piece's tokens, after those of
        the `prompt` where it is echoed, with its text `echo`."""
        offsets = self._offsets.echoed((entry.token for entry in prompt), echo) if prompt else []
        entries = [*prompt, *output_entries(piece.tokens, piece.logprobs or ())]
        tokens = [self._namer.text(entry.token) for entry in entries]
        return {
            "text_offset": (offsets + self._offsets.made(piece))[: len(entries)],
            "token_logprobs": [entry.value for entry in entries],
            "tokens": tokens,
            "top_logprobs": [self._top(name, entry) for name, entry in zip(tokens, entries, strict=True)],
        }

    def _top(self, name: str, entry: Entry) -> dict[str, float] | None:
        if entry.value is None:
            return None
        top: dict[str, float] = {}
        for token, value in entry.top:
            top.setdefault(self._namer.text(token), value)  # of equal texts the likelier one counts
        top.setdefault(name, entry.value)
        return top


def vllm_prompt_logprobs(run: Run, namer: Namer) -> list[dict[str, dict[str, object]] | None]:
    """`prompt_logprobs` as vLLM spells it: a map from token id for each position, None for the first."""
    listed: list[dict[str, dict[str, object]] | None] = []
    for entry in prompt_entries(run):
        if entry.value is None:
            listed.append(None)
            continue
        ranked: dict[str, dict[str, object]] = {}
        for rank, (token, value) in enumerate(entry.top, 1):
            ranked[str(token)] = {"logprob": value, "rank": rank, "decoded_token": namer.text(token)}
        ranked.setdefault(
            str(entry.token),
            {"logprob": entry.value, "rank": entry.rank, "decoded_token": namer.text(entry.token)},
        )
        listed.append(ranked)
    return listed
