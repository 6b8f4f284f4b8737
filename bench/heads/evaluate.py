"""Accepted lengths of greedy drafts, by teacher forcing.

A greedy draft is accepted while it equals the target's greedy answer, so a known answer holds everything that
verification would say. The drafts of every position are computed at once, with the answer's own tokens before
each draft: that is exact up to the first wrong draft, and what comes behind it is not counted.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.heads.data import Answered, batches, pad
from bench.heads.layers import Head
from bench.heads.target import Target


class Count(NamedTuple):
    """Tokens of answers, and the verification steps that they took."""

    tokens: int
    steps: int

    @property
    def length(self) -> float:
        """Tokens per step, the target's own token included: 1 where no draft is ever right."""
        return self.tokens / max(self.steps, 1)


def right_drafts(ids: Tensor, drafts: Tensor) -> Tensor:
    """int64 [B, T]: how many of the drafts [B, T, K] behind each position are right, by ids [B, T]."""
    count = drafts.shape[2]
    padded = F.pad(ids, (0, count), value=-1)
    following = padded.unfold(1, count + 1, 1)[:, :, 1:]
    return (drafts == following).long().cumprod(-1).sum(-1)


def walk(right: Sequence[int], start: int, length: int, most: int) -> Count:
    """Count the steps of an answer (positions `start` to `length - 1`) with at most `most` drafts.

    `right` holds the right drafts behind each position. The first token comes with the prompt; a step ends
    at the answer's end at the latest.
    """
    at, steps = start, 0
    while at < length - 1:
        at = min(at + min(right[at], most) + 1, length - 1)
        steps += 1
    return Count(length - 1 - start, steps)


def total(counts: Iterable[Count]) -> Count:
    """The sum of counts."""
    pairs = list(counts)
    return Count(sum(each.tokens for each in pairs), sum(each.steps for each in pairs))


@torch.no_grad()
def evaluate(
    head: Head, target: Target, rows: Sequence[Answered], drafts: Sequence[int], tokens: int
) -> dict[str, dict[int, Count]]:
    """Counts by category, and of all, for each number of drafts. `tokens`: padded tokens of a batch."""
    found: dict[str, dict[int, list[Count]]] = {}
    most = max(drafts)
    for group in batches(rows, tokens, random.Random(0)):
        batch = pad(group, target.device)
        drafted = head.drafts(batch, target.see(batch.ids, head.size.aux), most)
        behind = torch.arange(batch.ids.shape[1], device=target.device) >= batch.length[:, None]
        right = right_drafts(batch.ids.masked_fill(behind, -1), drafted).tolist()
        for row, lengths in zip(group, right, strict=True):
            for count in drafts:
                walked = walk(lengths, row.start, len(row.ids), count)
                for name in (row.category, "all"):
                    found.setdefault(name, {}).setdefault(count, []).append(walked)
    return {name: {k: total(counts) for k, counts in by.items()} for name, by in sorted(found.items())}
