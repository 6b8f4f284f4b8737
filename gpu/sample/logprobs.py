"""Log-probabilities of sampled and of prompt tokens, without a wait for the device.

A step launches their computation and a copy to the host (`launch_block`, `prompt_logprobs`); the waiter
thread reads it when the step has ended (`read_block`, `PromptScores.read`). What is copied are keys, an int64
for each token that is reported: the bits of the log-probability's absolute value in float32 (it is at most
0), then the token's id. In ascending order they are as reported: most likely first, lowest id first among
equals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.plan import PromptLogprobs, RowLogprobs, Support
from core.types import NAN_TOKEN, Floats, Ints, frozen
from gpu.sample.kernels import SamplingKernels
from gpu.sample.rows import RowTokens
from gpu.sample.slots import AFTER_ALL, AFTER_MASK, ENTROPY, SUPPORT, LogprobOptions
from gpu.transfer import download, upload

BLOCK = 64
"""Rows normalised at once: bounds each copy to 39 MB at a vocabulary of 151,936."""


class Ranked(NamedTuple):
    """Tokens int32 [n, k] and their log-probabilities float32 [n, k]."""

    ids: Ints
    values: Floats


def keys_of(logprobs: Tensor, ids: Tensor) -> Tensor:
    """int64 of `logprobs` float32 of tokens `ids` int64, same shape: ascending from the most likely."""
    return torch.add(ids, logprobs.abs().view(torch.int32).long(), alpha=2**32)


def read_keys(keys: NDArray[np.int64]) -> Ranked:
    """What `keys` [n, k] were made of."""
    sizes = (keys >> 32).astype(np.int32).view(np.float32)
    return Ranked((keys & 0xFFFFFFFF).astype(np.int32), np.float32(0) - sizes)


class LogprobColumns(NamedTuple):
    """On the device: samples, slots and how many drafts precede the token int64 [m]; whether
    log-probabilities are of what a grammar allows, and of what was drawn from, bool [m, 1] each; tokens that
    requests name int64 [m, any], padded with 0."""

    samples: Tensor
    slots: Tensor
    drafts: Tensor
    after_mask: Tensor
    after_all: Tensor
    named: Tensor


class LogprobRows(NamedTuple):
    """The tokens of a step that log-probabilities are wanted of, what of each, and the same on the device: of
    a row the token that follows so many of its drafts, if that is accepted."""

    rows: Sequence[int]
    drafts: Sequence[int]
    wanted: Sequence[LogprobOptions]
    columns: LogprobColumns

    @staticmethod
    def of(
        rows: Sequence[int],
        drafts: Sequence[int],
        slots: Sequence[int],
        wanted: Sequence[LogprobOptions],
        masked: Sequence[bool],
        device: torch.device,
    ) -> LogprobRows:
        """`masked`: whether a grammar constrains the row. One copy to the device. Samples are those of rows
        without drafts."""
        words = np.zeros((len(rows), 5 + max(len(each.ids) for each in wanted)), np.int64)
        words[:, 0], words[:, 1], words[:, 2] = rows, slots, drafts
        words[:, 3] = [
            within and bool(each.needs & AFTER_MASK) for each, within in zip(wanted, masked, strict=True)
        ]
        words[:, 4] = [bool(each.needs & AFTER_ALL) for each in wanted]
        for row, each in enumerate(wanted):
            words[row, 5 : 5 + len(each.ids)] = each.ids
        held = upload(words, device)
        numbers = held[:, 0], held[:, 1], held[:, 2]
        columns = LogprobColumns(*numbers, held[:, 3:4] > 0, held[:, 4:5] > 0, held[:, 5:])
        return LogprobRows(rows, drafts, wanted, columns)

    def blocks(self) -> Iterator[tuple[slice, LogprobRows]]:
        """Yield the rows in blocks of at most `BLOCK`, each with its place among all rows."""
        for first in range(0, len(self.rows), BLOCK):
            at = slice(first, first + BLOCK)
            columns = LogprobColumns(*(each[at] for each in self.columns))
            yield at, LogprobRows(self.rows[at], self.drafts[at], self.wanted[at], columns)

    def any(self, flags: int) -> bool:
        """Whether a row wants one of `flags`."""
        return any(wanted.needs & flags for wanted in self.wanted)


class LogprobBlock(NamedTuple):
    """A block's results on their way to the host."""

    asked: LogprobRows
    keys: Tensor
    entropy: Tensor | None
    support: tuple[Tensor, Tensor] | None
    """Which tokens could be chosen, bool [m, vocab], and the log-probability of the chosen one among them."""


def launch_block(
    kernels: SamplingKernels,
    asked: LogprobRows,
    raw: Tensor,
    tokens: Tensor,
    after: Tensor | None,
    weights: Tensor | None,
) -> LogprobBlock:
    """Start a block: `raw` float32 [m, vocab] are the log-probabilities of the model, `tokens` int64 [m]
    those sampled, `after` the logits that they were chosen by and `weights` what they were drawn by, for
    blocks that want these."""
    entropy = support = None
    if asked.any(ENTROPY):
        entropy = download(torch.special.entr(raw.exp()).sum(-1))
    if after is not None and asked.any(AFTER_MASK):
        among = raw.masked_fill(after.isneginf(), -torch.inf).log_softmax(-1)
        raw = torch.where(asked.columns.after_mask, among, raw)
    at = tokens.unsqueeze(1)
    if weights is not None:
        total = weights.sum(1, keepdim=True, dtype=torch.float64).log().float()
        if asked.any(AFTER_ALL):
            raw = torch.where(asked.columns.after_all, weights.log() - total, raw)
        if asked.any(SUPPORT):
            support = download(weights > 0), download((weights.gather(1, at).log() - total).squeeze(1))
    most = max(max(wanted.best for wanted in asked.wanted), 0)
    best = kernels.best_tokens(raw, min(most, raw.shape[1]))
    ids = torch.cat([at, asked.columns.named, best], 1)
    return LogprobBlock(asked, download(keys_of(raw.gather(1, ids), ids)), entropy, support)


def read_block(block: LogprobBlock, made: RowTokens) -> dict[int, RowLogprobs]:
    """The answers of a block whose step has ended, by index in its tokens. A row without a token has none: a
    distribution that is not finite has no log-probabilities."""
    ids, values = read_keys(block.keys.numpy())
    width = block.asked.columns.named.shape[1]
    answers: dict[int, RowLogprobs] = {}
    rows, drafts, every, _ = block.asked
    for i, (row, draft, wanted) in enumerate(zip(rows, drafts, every, strict=True)):
        index = made.index(row, draft)
        if index < 0 or (token := int(made.tokens[index])) == NAN_TOKEN:
            continue
        best = slice(1 + width, 1 + width + max(wanted.best, 0))
        at = [*range(ids.shape[1])[best], *range(1, 1 + len(wanted.ids))] if wanted.ids else best
        answers[index] = RowLogprobs(
            float(values[i, 0]),
            frozen(ids[i, at]),
            frozen(values[i, at]),
            float(block.entropy[i]) if block.entropy is not None and wanted.needs & ENTROPY else None,
            _support(block, i, token) if wanted.needs & SUPPORT else None,
        )
    return answers


def _support(block: LogprobBlock, i: int, token: int) -> Support:
    if block.support is None or block.asked.wanted[i].greedy:
        return Support(frozen(np.array([token], np.int32)), 0.0)
    allowed, chosen = block.support
    ids = np.flatnonzero(allowed[i].numpy()).astype(np.int32)
    return Support(frozen(ids), min(float(chosen[i]), 0.0))


class PromptScores(NamedTuple):
    """Log-probabilities of a chunk's prompt tokens, on their way to the host."""

    start: int
    keys: Tensor
    ranks: Tensor
    named: int

    def read(self) -> PromptLogprobs:
        """Once the step has ended."""
        ids, values = read_keys(self.keys.numpy())
        first = 1 + self.named
        order = [*range(first, ids.shape[1]), *range(1, first)]
        return PromptLogprobs(
            self.start,
            frozen(values[:, 0].copy()),
            frozen(self.ranks.numpy()),
            frozen(ids[:, order]),
            frozen(values[:, order]),
        )


def prompt_logprobs(
    kernels: SamplingKernels,
    start: int,
    logits: Iterable[Tensor],
    targets: Tensor,
    k: int,
    named: Sequence[int] = (),
) -> PromptScores:
    """Log-probabilities of the prompt tokens `targets` int64 [n], each predicted by its row of `logits`,
    which come in slices [any, vocab], in order: all of a long chunk at once would be gigabytes.

    `start` is the position of the first target. `k` = 0 gives the targets' values only. The tokens
    `named` come after the `k` best of every row. Rows that are not finite give NaN.
    """
    keys: list[Tensor] = []
    ranks: list[Tensor] = []
    more = upload(np.array([named], np.int64), targets.device)
    first = 0
    for piece in logits:
        wanted = targets[first : first + len(piece)]
        first += len(piece)
        scores, best = kernels.score(piece, wanted), kernels.best_tokens(piece, min(k, piece.shape[1]))
        ids = torch.cat([wanted.unsqueeze(1), more.expand(len(piece), -1), best], 1)
        keys.append(keys_of(scores.normalised(piece.gather(1, ids)), ids))
        ranks.append(scores.ranks)
    return PromptScores(start, download(torch.cat(keys)), download(torch.cat(ranks).int()), len(named))
