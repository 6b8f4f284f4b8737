"""The first kernel of a step: its protocol, and that of a CPU in numpy over the memory of its tensors.

A step has a few hundred numbers, and a call of torch takes longer than their arithmetic. On a GPU it is
`gpu.kernels.step.begin_step`.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from torch import Tensor

from core.types import Ints
from gpu.adapters.kernels import lay_out
from gpu.state.entry import CHUNK, NEW, SAMPLE, TOKEN, WRITE, EntryRing
from gpu.state.tables import LEVEL_BITS, LEVELS, ONE, WIDE, SlotTables
from gpu.state.view import StepView
from gpu.step.buffers import Samples


class BeginStep(Protocol):
    """Takes the next entry: writes the tables, gathers the view, turns the ring; where the view has adapters,
    finds whose they are. `samples` are of the tokens
    to choose, at most as many as the view has tokens: one of each row, then those of drafts. `pdl` is
    programmatic dependent launch."""

    def __call__(
        self,
        ring: EntryRing,
        tables: SlotTables,
        view: StepView,
        samples: Samples,
        *,
        page_size: int,
        pdl: bool = False,
    ) -> None: ...


def begin_step(
    ring: EntryRing,
    tables: SlotTables,
    view: StepView,
    samples: Samples,
    *,
    page_size: int,
    pdl: bool = False,
) -> None:
    """See `BeginStep`."""
    words, cursor, at = ring
    entry: Ints = words[int(cursor) % len(words)].numpy()
    cursor += 1

    def section(first: int, count: int, width: int) -> Ints:
        return entry[first : first + count * width].reshape(count, width)

    known, rows, chunks, count, news, writes, common, _, longest, drafts, proposes = entry[:11].tolist()
    view.common.fill_(common)
    if news:
        _take_new(section(at.new, news, NEW), tables.words.numpy())
    pages = tables.page_table.numpy()
    if writes:
        cells = section(at.writes, writes, WRITE)
        pages.reshape(-1)[cells[:, 0]] = cells[:, 1]
    slots, chosen = entry[at.decode : at.decode + rows], section(at.samples, count, SAMPLE)
    positions, ids = tables.length.numpy()[slots], tables.last_token.numpy()[slots]
    at_limit = order = None
    beside: Any = 0  # drafts before each token that are not on its path
    if tables.most_drafts:
        query = _query_lengths(tables, slots, longest, drafts)
        firsts = np.cumsum(query) - query
        slots, within = np.repeat(slots, query), np.arange(query.sum()) - np.repeat(firsts, query)
        positions = np.repeat(positions, query) + within
        ids = np.where(within > 0, tables.drafts.numpy()[slots, within], np.repeat(ids, query))
        at_limit = positions >= tables.limit.numpy()[slots]
        before = samples.drafts.before.numpy()
        before[:rows] = firsts - np.arange(rows)
        before[rows : rows + count + 1] = len(ids) - rows
        samples.drafts.rows.fill_(rows + count)
        samples.drafts.proposes.fill_(proposes)
        if tables.ancestors is not None and view.ancestors is not None:
            masks = tables.ancestors.numpy()[slots, within - 1]
            seen = np.where(within > 0, masks, -1).astype(np.int32)
            beside = np.bitwise_count(~seen).astype(np.int32)
            _fill(view.ancestors, seen, padding=-1)
        order = np.argsort(np.append(within, np.zeros(count)) > 0, kind="stable")
    queries, tokens = len(ids), len(ids) + known
    view.counts.numpy()[:] = tokens, queries, chunks, queries + count
    for column, decoding, ending in (
        (samples.rows, np.arange(queries), queries + chosen[:, 0]),
        (samples.slots, slots, chosen[:, 1]),
        (samples.positions, positions + 1 - beside, chosen[:, 2]),
    ):
        each = np.append(decoding, ending)
        _fill(column, each if order is None else each[order])
    if at_limit is not None:  # such a row's token is computed for nobody, and stored in the dump
        positions = positions - at_limit
    _fill(view.decode_slots, slots)
    _fill(view.decode_lengths, positions + 1, padding=1)
    if view.max_chunks:
        records, prompts = section(at.chunks, chunks, CHUNK), section(at.tokens, known, TOKEN)
        owners = records[prompts[:, 1]]
        within = np.arange(known) - owners[:, 2]
        ids, slots = np.concatenate([ids, prompts[:, 0]]), np.concatenate([slots, owners[:, 0]])
        positions = np.concatenate([positions, owners[:, 1] + within])
        _fill(view.chunk_slots, records[:, 0])
        _fill(view.chunk_starts, records[:, 1])
        _fill(view.chunk_firsts, queries + records[:, 2], padding=tokens)
    mapping = pages[slots, positions // page_size] * page_size + positions % page_size
    if at_limit is not None:
        mapping[:queries][at_limit] = 0
        positions[:queries] -= beside
    _fill(view.ids, ids)
    _fill(view.positions, positions)
    _fill(view.kv_slot_mapping, mapping)
    if view.adapters is not None:
        lay_out(view, samples.slots, tables.place, *view.adapters)


def _query_lengths(tables: SlotTables, slots: Ints, longest: int, drafts: int) -> Ints:
    """Tokens of each decode row: its last one, and drafts as far as its limits and those of all rows allow.

    Where rows have more than `drafts` in all, those that most likely survive are taken, by level. Among equal
    ones a row's earlier drafts come first, then earlier rows: where no drafter tells probabilities, every row
    gets its first draft before one gets its second.
    """
    columns = (tables.length, tables.limit, tables.max_drafts, tables.drafts[:, 0])
    length, limit, most, ready = (column.numpy()[slots] for column in columns)
    wanted: Ints = np.clip(np.minimum(np.minimum(ready, most), limit - length - 1), 0, longest - 1)
    if wanted.sum() > drafts:
        each = np.arange(tables.most_drafts)
        levels = ONE - np.maximum(tables.survival.numpy().view(np.int32)[slots], 0) >> LEVEL_BITS
        levels = np.maximum.accumulate(np.clip(levels, 0, LEVELS - 1), axis=1)
        places = np.where(each < wanted[:, None], levels * len(each) + each, LEVELS * len(each))
        best = np.argsort(places, axis=None, kind="stable")[:drafts]
        wanted = np.bincount(best // len(each), minlength=len(slots)).astype(np.int32)
    query: Ints = 1 + wanted
    return query


def _take_new(records: Ints, words: Ints) -> None:
    """Each record's words to their columns (`gpu.state.tables`)."""
    slots, values = records[:, 0], records[:, 1:].T
    for row in range(0, WIDE, 2):
        words[row : row + 2].reshape(-1, 2)[slots] = values[row : row + 2].T
    words[WIDE:, slots] = values[WIDE:]


def _fill(out: Tensor, values: Ints, padding: int = 0) -> None:
    into = out.numpy()
    into[: len(values)] = values
    into[len(values) :] = padding
