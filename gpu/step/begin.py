"""The first kernel of a step: its protocol, and that of a CPU in numpy over the memory of its tensors.

A step has a few hundred numbers, and a call of torch takes longer than their arithmetic. On a GPU it is
`gpu.kernels.step.begin_step`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from core.types import Ints
from gpu.state.entry import CHUNK, NEW, SAMPLE, TOKEN, WRITE, EntryRing
from gpu.state.tables import WIDE, SlotTables
from gpu.state.view import StepView
from gpu.step.buffers import Samples


class BeginStep(Protocol):
    """Takes the next entry: writes the tables, gathers the view, turns the ring. `samples` are of the tokens
    to choose, at most as many as the view has tokens. `pdl` is programmatic dependent launch."""

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

    tokens, rows, chunks, count, news, writes, common = entry[:7].tolist()
    view.counts.numpy()[:] = entry[:4]
    view.common.fill_(common)
    if news:
        _take_new(section(at.new, news, NEW), tables.words.numpy())
    pages, last_token, length = (
        each.numpy() for each in (tables.page_table, tables.last_token, tables.length)
    )
    if writes:
        cells = section(at.writes, writes, WRITE)
        pages.reshape(-1)[cells[:, 0]] = cells[:, 1]
    decode = entry[at.decode : at.decode + rows]
    positions = length[decode]
    length[decode] = positions + 1
    ids, slots = last_token[decode], decode
    _fill(view.decode_slots, decode)
    _fill(view.decode_lengths, positions + 1, padding=1)
    if view.max_chunks:
        records, known = section(at.chunks, chunks, CHUNK), section(at.tokens, tokens - rows, TOKEN)
        owners = records[known[:, 1]]
        ids, slots = np.concatenate([ids, known[:, 0]]), np.concatenate([slots, owners[:, 0]])
        within = np.arange(rows, tokens) - owners[:, 2]
        positions = np.concatenate([positions, owners[:, 1] + within])
        ends = np.append(records[1:, 2], tokens)
        length[records[:, 0]] = records[:, 1] + ends - records[:, 2]
        _fill(view.chunk_slots, records[:, 0])
        _fill(view.chunk_starts, records[:, 1])
        _fill(view.chunk_firsts, records[:, 2], padding=tokens)
    _fill(view.ids, ids)
    _fill(view.positions, positions)
    _fill(view.kv_slot_mapping, pages[slots, positions // page_size] * page_size + positions % page_size)
    chosen = section(at.samples, count, SAMPLE)
    _fill(samples.rows, chosen[:, 0])
    _fill(samples.slots, chosen[:, 1])
    _fill(samples.positions, length[chosen[:, 1]])


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
