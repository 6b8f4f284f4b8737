"""`gpu.sample.kernels.SamplingKernels` for a CPU: a row at a time, and only the rows that want something."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.types import NAN_TOKEN, Ints
from gpu.sample.filters import Rule, survivors
from gpu.sample.kernels import MaskRows, Scores
from gpu.sample.noise import bits, exponential, row_keys
from gpu.sample.penalties import Counts, Penalty
from gpu.sample.rows import COUNT_BITS, Paths, Rows
from gpu.sample.select import argmax, largest
from gpu.sample.token_tables import TokenTables
from gpu.state.entry import MARK, NEW, EntryRing
from gpu.state.tables import row_of


def start_counts(ring: EntryRing, counts: Counts, *, new_slots: int, marks: int) -> None:
    """See `SamplingKernels.start_counts`."""
    words, cursor, at = ring
    entry = words[int(cursor) % len(words)]
    news = entry[at.new : at.new + int(entry[4]) * NEW].view(-1, NEW)
    for row in news[:, 1 + row_of("count_row")].tolist():
        if row >= 0:
            counts.clear(row)
    counts.mark(entry[at.marks : at.marks + int(entry[7]) * MARK].view(-1, MARK))


def mask_rows(logits: Tensor, masks: MaskRows, live: Tensor, *, pdl: bool = False) -> None:
    """See `SamplingKernels.mask_rows`."""
    which = masks.which.numpy()[: int(live)]
    for row in np.flatnonzero(which >= 0).tolist():
        words = masks.bits[which[row]].numpy().view(np.uint8)
        allowed = np.unpackbits(words, count=logits.shape[1], bitorder="little")
        logits[row] += torch.from_numpy(np.where(allowed, np.float32(0), np.float32(-np.inf)))


def _column(rows: Rows, name: str) -> NDArray[Any]:
    """Each true row's value in the column `name` of the slot tables. In numpy, which is faster than torch for
    so few."""
    column: NDArray[Any] = getattr(rows.tables, name).numpy()
    found: NDArray[Any] = column[rows.slots.numpy()[: int(rows.live)]]
    return found


def adjust(logits: Tensor, rows: Rows, tokens: TokenTables, masks: MaskRows, *, pdl: bool = False) -> None:
    """See `SamplingKernels.adjust`."""
    biased, held = _column(rows, "num_bias"), _column(rows, "num_stops")
    early = rows.positions.numpy()[: len(held)] < _column(rows, "stop_from")
    for row in np.flatnonzero((biased > 0) | ((held > 0) & early)).tolist():
        slot, bias, stops = int(rows.slots[row]), int(biased[row]), int(held[row]) * int(early[row])
        logits[row].index_add_(0, tokens.bias_ids[slot, :bias], tokens.biases[slot, :bias])
        ids, mask = tokens.stop_ids[slot, :stops], int(masks.which[row])
        if stops and (mask < 0 or _allows_others(masks.bits[mask], ids)):
            logits[row].index_add_(0, ids, torch.full((stops,), -torch.inf))


def _allows_others(mask: Tensor, stops: Tensor) -> bool:
    words = mask.numpy()
    known = stops.numpy()[stops.numpy() >> 5 < len(words)]
    held = ((words[known >> 5] >> (known & 31)) & 1).sum()
    return bool(np.unpackbits(words.view(np.uint8)).sum() > held)


def penalise(logits: Tensor, rows: Rows, counts: Counts, *, pdl: bool = False) -> None:
    """See `SamplingKernels.penalise`."""
    counted = _column(rows, "count_row")
    first_draft = len(counted) if rows.drafts is None else int(rows.drafts.rows)
    for row in np.flatnonzero(counted >= 0).tolist():
        slot, tables = rows.slots[row], rows.tables
        penalty = (float(each[slot]) for each in (tables.repetition, tables.frequency, tables.presence))
        drafts = None
        if tables.most_drafts and row >= first_draft:
            drafts = _path(rows, row)
        counts.penalise(logits[row], int(counted[row]), Penalty(*penalty), drafts)


def _path(rows: Rows, row: int) -> Tensor:
    """The drafts int32 [n] before the token of a draft's sample."""
    tables, slot = rows.tables, rows.slots[row]
    node, seen = int(rows.positions[row] - 1 - tables.length[slot]), -1
    if rows.paths is not None:
        seen = int(rows.paths.ancestors[rows.paths.rows[row]])
        node += (~seen).bit_count()
    return tables.drafts[slot, [each for each in range(1, node + 1) if seen >> (node - each) & 1]]


def score(logits: Tensor, tokens: Tensor) -> Scores:
    """See `SamplingKernels.score`."""
    values, at = logits.numpy(), tokens.unsqueeze(1)
    own = values[np.arange(len(values)), tokens.numpy()][:, None]
    ahead = (values > own) | ((values == own) & (np.arange(values.shape[1]) < at.numpy()))
    high = logits.amax(1)
    log_sum = logits.sub(high.unsqueeze(1)).exp_().sum(1).log_()
    return Scores(high, log_sum, torch.from_numpy(ahead.sum(1) + 1))


def best_tokens(logits: Tensor, k: int) -> Tensor:
    """See `SamplingKernels.best_tokens`.

    topk alone breaks ties as it likes: one more is fetched, and only the rows where the last one in equals
    the first one out are looked through. The result is in the order of logits, then of ids.
    """
    if k == 0:
        return torch.empty(len(logits), 0, dtype=torch.int64)
    top = logits.topk(min(k + 1, logits.shape[1]))
    ids, values = top.indices[:, :k], top.values.numpy()
    if k < logits.shape[1]:
        for row in np.flatnonzero(values[:, k - 1] == values[:, k]).tolist():
            ids[row] = largest(logits[row], float(values[row, k - 1]), k)
    ids = ids.sort(1).values
    return ids.gather(1, logits.gather(1, ids).sort(stable=True, dim=1, descending=True).indices)


def choose(logits: Tensor, rows: Rows, tokens: Tensor, *, filtered: bool, pdl: bool = False) -> None:
    """See `SamplingKernels.choose`.

    A drawn token is the winner of a race of what the filters leave: token i wins with probability weight_i /
    sum of weights if its weight over its exponential noise is the largest. That is Gumbel-max, argmax(logit +
    gumbel) with gumbel = -log(exponential), exponentiated: one logarithm less per token.
    """
    live = int(rows.live)
    values = logits.numpy()[:live]
    ids = values.argmax(-1)
    best = values[np.arange(live), ids]  # NaN wins the argmax, so one look is enough
    found = np.where(np.isfinite(best), ids, NAN_TOKEN)
    drawn = np.flatnonzero((_column(rows, "temperature") > 0) & (found != NAN_TOKEN)).tolist()
    if drawn:
        keys = row_keys(_column(rows, "seed"), rows.positions.numpy()[:live].astype(np.int64))
        rules, vocab = _rules(rows), _vocabulary(logits.shape[1])
        for row in drawn:
            field = survivors(logits[row], vocab, float(best[row]), rules[row])
            race = field.weights.div_(exponential(bits(keys[row], field.ids)))
            found[row] = field.ids[argmax(race)]
    tokens.numpy()[:live] = found


def perturb(logits: Tensor, rows: Rows, names: Tensor | None = None, *, pdl: bool = False) -> None:
    """See `SamplingKernels.perturb`."""
    ids = _vocabulary(logits.shape[1]) if names is None else names.int()
    temperatures, positions = _column(rows, "temperature"), rows.positions.numpy().astype(np.int64)
    keys = row_keys(_column(rows, "seed"), positions[: len(temperatures)])
    for row in np.flatnonzero(temperatures > 0).tolist():
        noise = exponential(bits(keys[row], ids)).log_()
        logits[row].div_(max(float(temperatures[row]), 1e-6)).sub_(noise)


@cache
def _vocabulary(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.int32)


def _rules(rows: Rows) -> list[Rule]:
    columns = (_column(rows, name).tolist() for name in ("temperature", "top_k", "top_p", "min_p"))
    return [Rule(*each) for each in zip(*columns, strict=True)]


def accept(
    tokens: Tensor,
    rows: Rows,
    cursor: Tensor,
    out: Tensor,
    counts: Counts | None = None,
    *,
    pdl: bool = False,
) -> None:
    """See `SamplingKernels.accept`."""
    tables, live, drafts = rows.tables, int(rows.live), rows.drafts
    answer = out.numpy()[(int(cursor) - 1) % len(out)]
    if tables.most_drafts and drafts is not None:
        live = int(drafts.rows)
    slots, positions, last = (each.numpy()[:live] for each in (rows.slots, rows.positions, tokens))
    taken, owners = last, slots
    if tables.most_drafts and drafts is not None:
        before, each = drafts.before.numpy()[: live + 1], np.arange(1 + tables.most_drafts)
        at = np.where(each > 0, live + before[:-1, None] + each - 1, np.arange(live)[:, None])
        accepted = taken_paths = None
        if rows.paths is not None:
            accepted, taken_paths = _straighten(tokens, rows, rows.paths)
        made = tokens.numpy()[np.minimum(at, len(tokens) - 1)]
        if accepted is None:
            # A sample is taken while every one before it in its row is what its next draft says.
            right = (made[:, :-1] == tables.drafts.numpy()[slots, 1:]) & (
                each[1:] <= np.diff(before)[:, None]
            )
            accepted = right.cumprod(1).sum(1)
        lengths = (1 + accepted) * (positions <= tables.limit.numpy()[slots])
        words = tables.slots - 1
        counted = answer[len(answer) - words * (1 if rows.paths is None else 2) :]
        counted[:live] = lengths | np.diff(before) << COUNT_BITS
        if taken_paths is not None:
            counted[words:][:live] = taken_paths
        taken, owners = made[each < lengths[:, None]], np.repeat(slots, lengths)
        kept = lengths > 0
        last = made[kept, lengths[kept] - 1]
        slots, positions = slots[kept], (positions + lengths - 1)[kept]
    answer[: len(taken)] = taken
    tables.length.numpy()[slots] = positions
    # The next step embeds the cell, so it must name a row of the table.
    tables.last_token.numpy()[slots] = np.maximum(last, 0)
    if counts is not None:
        counted = tables.count_row.numpy()[owners]
        known = counted >= 0
        if known.any():
            counts.add(torch.from_numpy(counted[known]).long(), torch.from_numpy(taken[known]))


def _straighten(tokens: Tensor, rows: Rows, paths: Paths) -> tuple[Ints, Ints]:
    """Find each row's accepted path, move its `tokens` to where a chain's would be, and write
    `Paths.moved`. Returns how many drafts each path has, and which: bit j - 1 is draft j."""
    tables, drafts = rows.tables, rows.drafts
    assert tables.ancestors is not None and drafts is not None
    live, made, moved = int(drafts.rows), tokens.numpy(), paths.moved.numpy()
    before, slots = drafts.before.numpy()[: live + 1], rows.slots.numpy()[:live]
    last, given, first = made[:live].copy(), np.diff(before), live + before[:-1]
    accepted, node, seen = np.zeros(live, np.int32), np.zeros(live, np.int32), np.full(live, -1, np.int32)
    which = np.zeros(live, np.int32)
    moved[:] = 0
    for j in range(1, 1 + tables.most_drafts):
        own, draft = tables.ancestors.numpy()[slots, j - 1], tables.drafts.numpy()[slots, j]
        # A child of the last one taken sees what that one sees, and itself.
        at = np.flatnonzero((j <= given) & (draft == last) & (own == (seen << j - node | 1)))
        last[at] = made[first[at] + j - 1]
        made[first[at] + accepted[at]] = last[at]
        accepted[at] += 1
        moved[at + before[at] + accepted[at]] = j - accepted[at]
        node[at], seen[at] = j, own[at]
        which[at] |= 1 << j - 1
    return accepted, which


def move_paths(entries: Tensor, rows: Rows, cells: Tensor | None = None, *, pdl: bool = False) -> None:
    """See `SamplingKernels.move_paths`."""
    assert rows.paths is not None
    moved = rows.paths.moved
    to = moved.nonzero().squeeze(1)
    if len(to):
        found = to + moved[to]
        if cells is not None:
            to, found = cells[to].long(), cells[found].long()
        entries[:, to] = entries[:, found]


def draw_weights(logits: Tensor, rows: Rows, tokens: Tensor) -> Tensor:
    """See `SamplingKernels.draw_weights`."""
    every = rows._replace(live=torch.tensor(len(logits)))
    vocab, found = _vocabulary(logits.shape[1]), torch.zeros_like(logits)
    for row, (rule, best) in enumerate(zip(_rules(every), logits.amax(1).tolist(), strict=True)):
        if rule.temperature > 0 and np.isfinite(best):
            field = survivors(logits[row], vocab, best, rule)
            found[row, field.ids.long()] = field.weights
        else:
            found[row] = (logits[row] - best).exp()
    return found
