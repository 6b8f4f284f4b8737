"""Prompt lookup: a row's drafts are what followed the last occurrence of its newest tokens in its own text,
or in other answers where more of them occur (`gpu.state.served`).

It needs no draft model, and pays where an answer repeats its prompt, itself or another answer.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from core.config import SpeculativeConfig
from core.plan import NewSlot, StepPlan
from core.types import NO_TOKENS, Ints
from gpu.draft.drafter import StepOutcome
from gpu.draft.served import NOWHERE, find, serve
from gpu.kv.pool import KvPool
from gpu.models.base import CausalModel
from gpu.state.history import (
    CELLS,
    EXPECTED,
    LEAST,
    NO_TOKEN,
    RETRY,
    SERVED,
    SOURCE,
    START,
    UNIT,
    WAITED,
    WEIGHT,
    History,
    history_words,
)
from gpu.state.served import make_served
from gpu.state.tables import SlotTables
from gpu.step.buffers import Samples
from gpu.transfer import upload


class LookUp(Protocol):
    """Appends the tokens that a step accepted to its rows' texts and to served ones, and writes the rows'
    drafts to `tables`.

    `samples` and `chosen` are those of `StepOutcome`, and `rows` is at least the true number of rows. On a
    GPU it is `gpu.kernels.ngram.look_up`. `pdl` is programmatic dependent launch.

    The longest suffix of a text, of `history.longest` to `history.shortest` tokens, that occurs earlier is
    looked up, and its most recent occurrence taken. Drafts are the tokens behind that occurrence. Where the
    text ends before there are enough, they start over: such a text repeats itself with that period. Where
    more tokens than those occur in the answers of the row's namespace, drafts follow the newest of these
    occurrences, up to the end of that answer. `gpu.state.history` says how many a row gets; at most as many
    as the slot's `limit` and `max_drafts` allow: none for a row that accepted nothing, which is at its limit,
    and none behind a step that does not propose, whose texts are not searched.
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
    history: History, tables: SlotTables, samples: Samples, chosen: Tensor, rows: int, *, pdl: bool = False
) -> None:
    """See `LookUp`: for a CPU, in numpy over the memory of the tensors."""
    words, drafts, width = history.words.numpy(), tables.drafts.numpy(), history.width
    own, before, made = int(samples.drafts.rows), samples.drafts.before.numpy(), chosen.numpy()
    slots, firsts = (each.numpy()[: min(own, rows)] for each in (samples.slots, samples.positions))
    columns = (tables.length, tables.limit, tables.max_drafts)
    lasts, limits, allowed = (column.numpy()[slots] for column in columns)
    most = history.most if int(samples.drafts.proposes) else 0
    rooms = np.minimum(np.minimum(limits - lasts - 1, allowed), most).tolist()
    taken = []
    for row, accepted in enumerate((lasts - firsts).tolist()):
        behind = own + before[row]
        taken.append(np.maximum(np.append(made[row], made[behind : behind + accepted])[: accepted + 1], 0))
    served, others = history.served, [NOWHERE] * len(slots)
    if served is not None:
        serve(history, served, slots, firsts, taken)
    for slot, first, last, tokens in zip(slots, firsts, lasts, taken, strict=True):
        words[slot, np.arange(first, last + 1) % width] = tokens
    if served is not None:
        others = find(history, served, slots, lasts)
    for row, (slot, last, other) in enumerate(zip(slots, lasts, others, strict=True)):
        state, accepted, given = words[slot, width:], last - firsts[row], before[row + 1] - before[row]
        source = int(state[SOURCE])
        count = min(rooms[row], _wanted(state, accepted, given * (source == 0), history.most))
        size, found, theirs = 0, NO_TOKENS, 0
        if served is not None:
            given_theirs = given * (source == SERVED)
            theirs = min(rooms[row], _wanted(state[SERVED:], accepted, given_theirs, history.most))
        if max(count, theirs) > 0:
            text = words[slot, np.arange(max(0, last + 1 - width), last + 1) % width]
            size, found = _continuation(text, history.longest, history.shortest)
        state[SOURCE] = 0
        if theirs > 0 and other.size > size:
            state[SOURCE], found, count = SERVED, other.tokens, min(theirs, len(other.tokens))
        drafts[slot, 0] = 0
        if len(found) and count > 0:
            drafts[slot, 0] = count
            drafts[slot, 1 : 1 + count] = np.resize(found, count)


def _wanted(state: Ints, accepted: int, given: int, most: int) -> int:
    """Count what became of a step's drafts from one source. Returns how many the row is to have next."""
    if given:
        worth = accepted if accepted < given else min(2 * given, most)
        state[EXPECTED] += worth * (UNIT // WEIGHT) - state[EXPECTED] // WEIGHT
    state[WAITED] = 0 if given else state[WAITED] + 1
    if state[EXPECTED] >= LEAST:
        return -(-int(state[EXPECTED]) // UNIT)
    return int(state[WAITED] >= RETRY)


def _continuation(text: Ints, longest: int, shortest: int) -> tuple[int, Ints]:
    """Tokens of the best earlier match of the end of `text`, and what follows it; 0 and nothing where there
    is none."""
    ends = len(text) - 1
    matched = np.zeros(ends, np.int32)
    alive = np.ones(ends, np.bool_)
    for back in range(min(longest, ends)):
        alive[:back] = False
        alive[back:] &= text[: ends - back] == text[-1 - back]
        matched += alive
    if not ends or matched.max() < shortest:
        return 0, NO_TOKENS
    last = ends - 1 - int(matched[::-1].argmax())
    return int(matched[last]), text[last + 1 :]


class NgramDrafter:
    """`gpu.draft.drafter.Drafter` by prompt lookup, vLLM's `ngram`. It runs behind every step that samples:
    of a step that it missed its texts would lack the tokens."""

    aux: tuple[int, ...] | None = None
    keeps_kv = False

    def __init__(
        self,
        tables: SlotTables,
        context: int,
        most: int,
        settings: SpeculativeConfig,
        look_up: LookUp = look_up,
    ) -> None:
        """A drafter for texts of up to `context` tokens and at most `most` drafts of a row. In replays of
        texts (`gpu.state.history`) looking up single tokens lost time. Looking up at most eight tokens gave a
        tenth more than at most four for an edited copy, where the same few tokens occur at many places.

        Raises `ValueError` for numbers that do not fit together.
        """
        longest, shortest = settings.prompt_lookup_max, settings.prompt_lookup_min
        if not 1 <= shortest <= longest:
            raise ValueError(f"prompt lookup of {shortest} to {longest} tokens")
        if most > tables.most_drafts:
            raise ValueError(f"{most} drafts of a row where the tables hold {tables.most_drafts}")
        words = history_words(tables.slots, context, tables.drafts.device)
        served = make_served(tables.slots, settings.ngram_capacity, tables.drafts.device)
        self.history = History(words, most, longest, shortest, served)
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
    state = [START, 0, START, 0, 0, 1, *np.array([new.namespace]).view(np.int32)]  # up to `CELLS`
    cells = np.append(np.arange(first, first + len(text)), first + width + np.arange(CELLS))
    return cells, np.append(text, np.array(state, np.int32))
