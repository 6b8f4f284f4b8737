"""Prompt lookup: a row's drafts are what followed the last occurrence of its newest tokens in its own text.

It needs no draft model, and pays where an answer repeats its prompt or itself.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from core.plan import NewSlot, StepPlan
from core.types import Ints
from gpu.draft.drafter import StepOutcome
from gpu.kv.pool import KvPool
from gpu.models.base import CausalModel
from gpu.state.history import (
    EXPECTED,
    LEAST,
    NO_TOKEN,
    RETRY,
    START,
    UNIT,
    WAITED,
    WEIGHT,
    History,
    history_words,
)
from gpu.state.tables import SlotTables
from gpu.step.buffers import Samples
from gpu.transfer import upload


class LookUp(Protocol):
    """Appends the tokens that a step accepted to its rows' texts, and writes their drafts to `tables`.

    `samples` and `chosen` are those of `StepOutcome`, and `rows` is at least the true number of rows. On a
    GPU it is `gpu.kernels.draft.look_up`. `pdl` is programmatic dependent launch.

    Of the suffixes of a text, `history.longest` to `history.shortest` tokens, the longest that occurs
    earlier is taken, and its most recent occurrence. Drafts are the tokens behind that occurrence. Where the
    text ends before there are enough, they start over: such a text repeats itself with that period. How many
    a row gets, `gpu.state.history` says; at most as many as the slot's `limit` and `max_drafts` allow: none
    for a row that accepted nothing, which is at its limit.
    """

    def __call__(
        self,
        history: History,
        tables: SlotTables,
        samples: Samples,
        chosen: Tensor,
        rows: int,
        *,
        pdl: bool = False,
    ) -> None: ...


def look_up(
    history: History,
    tables: SlotTables,
    samples: Samples,
    chosen: Tensor,
    rows: int,
    *,
    pdl: bool = False,
) -> None:
    """See `LookUp`: for a CPU, in numpy over the memory of the tensors."""
    words, drafts, width = history.words.numpy(), tables.drafts.numpy(), history.width
    own, before, made = int(samples.drafts.rows), samples.drafts.before.numpy(), chosen.numpy()
    slots, firsts = (each.numpy()[: min(own, rows)] for each in (samples.slots, samples.positions))
    columns = (tables.length, tables.limit, tables.max_drafts)
    lasts, limits, allowed = (column.numpy()[slots] for column in columns)
    rooms = np.minimum(np.minimum(limits - lasts - 1, allowed), history.most).tolist()
    for row, (slot, first, last) in enumerate(zip(slots, firsts, lasts, strict=True)):
        accepted, given = last - first, before[row + 1] - before[row]
        ring, state = words[slot, :width], words[slot, width:]
        behind = own + before[row]
        taken = np.append(made[row], made[behind : behind + accepted])
        ring[np.arange(first, last + 1) % width] = np.maximum(taken, 0)
        count = min(rooms[row], _wanted(state, accepted, given, history.most))
        drafts[slot, 0] = 0
        if count > 0:
            text = ring[np.arange(max(0, last + 1 - width), last + 1) % width]
            found = _continuation(text, history.longest, history.shortest)
            if len(found):
                drafts[slot, 0] = count
                drafts[slot, 1 : 1 + count] = np.resize(found, count)


def _wanted(state: Ints, accepted: int, given: int, most: int) -> int:
    """Count what became of a step's drafts. Returns how many the row is to have next."""
    if given:
        worth = accepted if accepted < given else min(2 * given, most)
        state[EXPECTED] += worth * (UNIT // WEIGHT) - state[EXPECTED] // WEIGHT
    state[WAITED] = 0 if given else state[WAITED] + 1
    if state[EXPECTED] >= LEAST:
        return -(-int(state[EXPECTED]) // UNIT)
    return int(state[WAITED] >= RETRY)


def _continuation(text: Ints, longest: int, shortest: int) -> Ints:
    """What follows the best earlier match of the end of `text`, nothing where there is none."""
    ends = len(text) - 1
    matched = np.zeros(ends, np.int32)
    alive = np.ones(ends, np.bool_)
    for back in range(min(longest, ends)):
        alive[:back] = False
        alive[back:] &= text[: ends - back] == text[-1 - back]
        matched += alive
    if not ends or matched.max() < shortest:
        return text[:0]
    last = ends - 1 - int(matched[::-1].argmax())
    return text[last + 1 :]


class NgramDrafter:
    """`gpu.draft.drafter.Drafter` by prompt lookup, vLLM's `ngram`. It has to run behind every step that
    samples: of a step that it missed its texts lack the tokens, and its drafts are worse until they are
    out of the ring."""

    aux: tuple[int, ...] | None = None
    keeps_kv = False

    def __init__(
        self,
        tables: SlotTables,
        context: int,
        most: int,
        longest: int = 8,
        shortest: int = 2,
        look_up: LookUp = look_up,
    ) -> None:
        """For texts of up to `context` tokens, at most `most` drafts of a row; the newest `longest` tokens
        are looked up, or down to `shortest` of them (vLLM's `prompt_lookup_max` and `prompt_lookup_min`).
        By replay of texts (`gpu.state.history`) single tokens lose time, and against at most four, eight
        give a tenth more for an edited copy, where the same few tokens occur at many places.

        Raises `ValueError` for numbers that do not fit together.
        """
        if not 1 <= shortest <= longest:
            raise ValueError(f"prompt lookup of {shortest} to {longest} tokens")
        if most > tables.most_drafts:
            raise ValueError(f"{most} drafts of a row where the tables hold {tables.most_drafts}")
        words = history_words(tables.slots, context, tables.drafts.device)
        self.history = History(words, most, longest, shortest)
        self._tables, self._look_up = tables, look_up

    def use_model(self, target: CausalModel | None) -> None:
        """See `Drafter.use_model`: texts are all it needs."""

    def use_pool(self, pool: KvPool | None) -> None:
        """See `Drafter.use_pool`."""

    def follow(self, outcome: StepOutcome) -> None:
        """See `Drafter.follow`: `propose` takes in what rows accepted."""

    def prepare(self, plan: StepPlan) -> None:
        """Upload the texts of new slots: a cached prefix is in no chunk. In order on the stream, so a slot's
        former owner is done."""
        if not plan.new_slots:
            return
        words, width = self.history.words, self.history.width
        cells, values = zip(*(_begun(new, width, words.stride(0)) for new in plan.new_slots), strict=True)
        where, what = (upload(np.concatenate(each), words.device) for each in (cells, values))
        words.view(-1).index_copy_(0, where, what)

    def propose(self, outcome: StepOutcome, rows: int) -> None:
        self._look_up(self.history, self._tables, outcome.samples, outcome.chosen, rows)


def _begun(new: NewSlot, width: int, stride: int) -> tuple[NDArray[np.int64], Ints]:
    """Cells int64 [n] of the flat history and what a new slot begins with there."""
    known = len(new.prompt) + len(new.output)
    text = np.concatenate([np.full(new.embedded, NO_TOKEN, np.int32), new.known, new.output])[-width:]
    if known > width:
        text = np.roll(text, known % width)
    first = new.slot * stride
    cells = np.append(np.arange(first, first + len(text)), first + width + np.array([EXPECTED, WAITED]))
    return cells, np.append(text, np.array([START, 0], np.int32))
