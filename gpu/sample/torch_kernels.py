"""`gpu.sample.kernels.SamplingKernels` for a CPU: a row at a time, and only the rows that want something."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.types import NAN_TOKEN
from gpu.sample.filters import Rule, survivors
from gpu.sample.kernels import MaskRows
from gpu.sample.noise import bits, exponential, row_keys
from gpu.sample.penalties import Counts, Penalty
from gpu.sample.rows import Rows
from gpu.sample.select import argmax
from gpu.sample.token_tables import TokenTables
from gpu.state.entry import MARK, NEW, Layout
from gpu.state.tables import row_of


def start_counts(
    ring: Tensor, cursor: Tensor, at: Layout, counts: Counts, *, new_slots: int, marks: int
) -> None:
    """See `SamplingKernels.start_counts`."""
    entry = ring[int(cursor) % len(ring)]
    news = entry[at.new : at.new + int(entry[4]) * NEW].view(-1, NEW)
    for row in news[:, 1 + row_of("count_row")].tolist():
        if row >= 0:
            counts.clear(row)
    counts.mark(entry[at.marks : at.marks + int(entry[7]) * MARK].view(-1, MARK))


def mask_rows(logits: Tensor, masks: MaskRows, live: Tensor, *, pdl: bool = False) -> None:
    """See `SamplingKernels.mask_rows`."""
    for row, mask in enumerate(masks.which[: int(live)].tolist()):
        if mask >= 0:
            words = masks.bits[mask].numpy().view(np.uint8)
            allowed = np.unpackbits(words, count=logits.shape[1], bitorder="little")
            logits[row] += torch.from_numpy(np.where(allowed, np.float32(0), np.float32(-np.inf)))


def _columns(rows: Rows, *names: str) -> Iterator[tuple[Any, ...]]:
    """Of each true row its slot's entries in the tables `names`."""
    slots = rows.slots[: int(rows.live)]
    return zip(*(getattr(rows.tables, name)[slots].tolist() for name in names), strict=True)


def adjust(logits: Tensor, rows: Rows, tokens: TokenTables, masks: MaskRows, *, pdl: bool = False) -> None:
    """See `SamplingKernels.adjust`."""
    wanted = _columns(rows, "num_bias", "num_stops", "stop_from")
    for row, (biased, held, stop_from) in enumerate(wanted):
        if biased:
            slot = int(rows.slots[row])
            logits[row].index_add_(0, tokens.bias_ids[slot, :biased], tokens.biases[slot, :biased])
        if held and rows.positions[row] < stop_from:
            stops = tokens.stop_ids[int(rows.slots[row]), :held]
            if (mask := int(masks.which[row])) < 0 or _allows_others(masks.bits[mask], stops):
                logits[row].index_add_(0, stops, torch.full((held,), -torch.inf))


def _allows_others(mask: Tensor, stops: Tensor) -> bool:
    words = mask.numpy()
    known = stops.numpy()[stops.numpy() >> 5 < len(words)]
    held = ((words[known >> 5] >> (known & 31)) & 1).sum()
    return bool(np.unpackbits(words.view(np.uint8)).sum() > held)


def penalise(logits: Tensor, rows: Rows, counts: Counts, *, pdl: bool = False) -> None:
    """See `SamplingKernels.penalise`."""
    for row, (counted, *penalty) in enumerate(
        _columns(rows, "count_row", "repetition", "frequency", "presence")
    ):
        if counted >= 0:
            counts.penalise(logits[row], counted, Penalty(*penalty))


def choose(logits: Tensor, rows: Rows, tokens: Tensor, *, filtered: bool, pdl: bool = False) -> None:
    """See `SamplingKernels.choose`.

    A drawn token is the winner of a race of what the filters leave: token i wins with probability weight_i /
    sum of weights if its weight over its exponential noise is the largest. That is Gumbel-max, argmax(logit +
    gumbel) with gumbel = -log(exponential), exponentiated: one logarithm less per token.
    """
    live, tables = int(rows.live), rows.tables
    logits, slots, tokens = logits[:live], rows.slots[:live], tokens[:live]
    ids = argmax(logits)
    best = logits.gather(1, ids.unsqueeze(1)).squeeze(1)  # NaN wins the argmax, so one look is enough
    tokens.copy_(torch.where(best.isfinite(), ids, NAN_TOKEN))
    if tables.temperature[slots].any():
        keys = row_keys(tables.seed[slots].numpy(), rows.positions[:live].numpy().astype(np.int64))
        vocab = torch.arange(logits.shape[1], dtype=torch.int32)
        for row, (rule, top) in enumerate(zip(_rules(rows), best.tolist(), strict=True)):
            if rule.temperature > 0 and tokens[row] != NAN_TOKEN:
                field = survivors(logits[row], vocab, top, rule)
                race = field.weights.div_(exponential(bits(keys[row], field.ids)))
                tokens[row] = field.ids[argmax(race)]
    # The next step embeds the cell, so it must name a row of the table.
    tables.last_token.index_copy_(0, slots.long(), tokens.clamp(min=0).int())


def _rules(rows: Rows) -> list[Rule]:
    return [Rule(*each) for each in _columns(rows, "temperature", "top_k", "top_p", "min_p")]


def count_tokens(tokens: Tensor, rows: Rows, counts: Counts, *, pdl: bool = False) -> None:
    """See `SamplingKernels.count_tokens`."""
    live = int(rows.live)
    at = rows.tables.count_row[rows.slots[:live]].long()
    if (counted := at >= 0).any():
        counts.add(at[counted], tokens[:live][counted])


def emit(tokens: Tensor, cursor: Tensor, count: Tensor, out: Tensor, *, pdl: bool = False) -> None:
    """See `SamplingKernels.emit`."""
    live = int(count)
    out[(int(cursor) - 1) % len(out), :live] = tokens[:live].int()


def draw_weights(logits: Tensor, rows: Rows, tokens: Tensor) -> Tensor:
    """See `SamplingKernels.draw_weights`."""
    vocab = torch.arange(logits.shape[1], dtype=torch.int32)
    found = torch.zeros_like(logits)
    for row, (rule, best) in enumerate(zip(_rules(rows), logits.amax(1).tolist(), strict=True)):
        if rule.temperature > 0 and np.isfinite(best):
            field = survivors(logits[row], vocab, best, rule)
            found[row, field.ids.long()] = field.weights
        else:
            found[row] = (logits[row] - best).exp()
    return found
