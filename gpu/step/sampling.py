"""From a step's logits to its tokens, for every row and on every device.

    logits ─► processors ─► mask, bias, stop ids, penalties ─► choice ─► accept ─► lengths, cells, answers
       └ set aside for rows that want log-probabilities ───────────────► their values, to the host

A step whose rows want none of this is one launch from logits to answer ring (`Sampling`). Any other is two
(`Logits`, `Choice`) with what single rows want launched between and behind them, on their rows alone.
Nothing here waits for the device: what is reported of tokens is read when the step has ended (`Sampled`).

A row's token depends on its logits, its slot's parameters and counts, its seed and position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from core.plan import MASKED_DRAFTS, NewSlot, RowLogprobs, StepPlan
from core.request.params import SamplingParams
from core.types import NO_TOKENS, Ints
from gpu.device import zeros
from gpu.grammar.matchers import Masks
from gpu.sample.kernels import MaskRows, SamplingKernels
from gpu.sample.logprobs import LogprobBlock, LogprobRows, launch_block, read_block
from gpu.sample.penalties import Counts
from gpu.sample.processors import NONE_PROCESSED, Processed, Processor, Processors
from gpu.sample.rows import Rows, RowTokens
from gpu.sample.slots import (
    ADJUSTED,
    AFTER_ALL,
    AFTER_MASK,
    ENTROPY,
    FILTERED,
    LOGPROBS,
    PROCESSED,
    SUPPORT,
    LogprobOptions,
    SlotOptions,
)
from gpu.sample.token_tables import token_tables
from gpu.state.entry import EntryRing
from gpu.step.graphs import Launchable, Work
from gpu.step.rings import Rings, Ticket
from gpu.transfer import upload

# Structs, not tuples: as keys of one table, equal fields must not make two kinds equal.


class Sampling(msgspec.Struct, frozen=True):
    """Logits and choice of `rows` padded rows of which none is adjusted, reported of or processed."""

    rows: int
    filtered: bool
    adapters: bool = False


class Logits(msgspec.Struct, frozen=True):
    """The logits of `rows` padded rows, left in the stage's buffer."""

    rows: int
    adapters: bool = False


class Choice(msgspec.Struct, frozen=True):
    """The choice from that buffer with all that a row may want; one that wants less leaves kernels at
    once."""

    rows: int


Key = Sampling | Logits | Choice


def sampling_keys(rows: int, adapters: bool = False) -> tuple[Key, ...]:
    """All launches of one size, with `adapters` also those whose head they change."""
    keys: list[Key] = [Choice(rows)]
    for kind in (False, True) if adapters else (False,):
        keys += Logits(rows, kind), Sampling(rows, True, kind), Sampling(rows, False, kind)
    return tuple(keys)


class SamplingDevice(NamedTuple):
    """What the stage works on: the samples of a step, the rings, the kernels. `pdl` is programmatic dependent
    launch. `accepted` is called with the number of samples after they are accepted, in the same graph."""

    rows: Rows
    rings: Rings
    kernels: SamplingKernels
    pdl: bool = False
    accepted: Callable[[int], None] | None = None


class Sampled(NamedTuple):
    """What a launched sampling returns beside its answer ring."""

    processed: Processed = NONE_PROCESSED
    logprobs: Sequence[LogprobBlock] = ()

    def read(self, made: RowTokens) -> dict[int, RowLogprobs]:
        """Log-probabilities by index in the tokens of the step, which has ended, of rows that asked."""
        return {index: answer for block in self.logprobs for index, answer in read_block(block, made).items()}


class SamplingStage:
    """Owner: launch thread."""

    def __init__(
        self,
        device: SamplingDevice,
        vocab: int,
        head: Callable[[int, bool], Tensor],
        processors: Mapping[str, Processor],
        adapters: bool = False,
    ) -> None:
        """`head(rows, adapters)` gives the logits float32 [rows, vocab] of a step's first rows that sample;
        `adapters`: these may change them."""
        self._device, self._head, self._adapters = device, head, adapters
        slots, rows = device.rows.tables.slots, len(device.rows.slots)
        where = device.rows.slots.device
        self.counts = Counts(slots - 1, vocab, where)
        self._processors = Processors(processors)
        self._options = SlotOptions(slots)
        self._tokens = token_tables(slots, where)
        self._logits = zeros((rows, vocab), torch.float32, where)
        self.chosen = torch.zeros(rows, dtype=torch.int64, device=where)
        tables = device.rows.tables
        masks = slots - 1 + min((slots - 1) * tables.most_drafts, MASKED_DRAFTS)
        # Behind the rows of `which` there is one for masks of drafts that are not verified.
        self._masks = MaskRows(
            torch.full((rows + 1,), -1, dtype=torch.int32, device=where),
            zeros((masks, -(-vocab // 32)), torch.int32, where),
        )
        self._masked = False
        """Whether a row has a mask there."""

    # -- ahead of the step -------------------------------------------------------------------------

    def prepare(self, plan: StepPlan, ticket: Ticket) -> None:
        """Launch what new slots need ahead of their step's first kernel, mostly nothing: ids that they name,
        token counts, and what the entry had no room for."""
        if not plan.new_slots:
            return
        self._options.write(plan.new_slots)
        self._processors.apply(plan.new_slots)
        self._tokens.write(plan.new_slots)
        if any(new.count_row >= 0 for new in plan.new_slots):
            self._start_counts(self._device.rings.entries, len(plan.new_slots), ticket.marks)
        if ticket.surplus is not None and len(ticket.surplus.marks):
            self.counts.mark(upload(ticket.surplus.marks, self._logits.device))

    def _start_counts(self, entries: EntryRing, new_slots: int, marks: int) -> None:
        self._device.kernels.start_counts(entries, self.counts, new_slots=new_slots, marks=marks)

    # -- the step ----------------------------------------------------------------------------------

    def launch(self, plan: StepPlan, rows: int, masks: Masks | None, launches: Launchable[Key]) -> Sampled:
        """Choose the tokens of the plan's rows in launches of `rows` padded samples. `masks` say what
        constrained rows may take."""
        slots = plan.sampling_slots
        needs, adapters = self._options.needs(slots), plan.adapters and self._adapters
        if masks is None and not needs & (ADJUSTED | LOGPROBS | PROCESSED):
            launches[Sampling(rows, bool(needs & FILTERED), adapters)]()
            return Sampled()
        launches[Logits(rows, adapters)]()
        asked = self._asked(plan, slots, masks) if needs & LOGPROBS else None
        changed = masks is not None or bool(needs & (ADJUSTED | PROCESSED))
        aside = self._logits.index_select(0, asked.columns.samples) if asked is not None and changed else None
        processed = self._processors.run(self._logits, slots) if needs & PROCESSED else NONE_PROCESSED
        self._write_masks(masks)
        launches[Choice(rows)]()
        return Sampled(processed, () if asked is None else self._logprobs(asked, aside))

    def _asked(self, plan: StepPlan, slots: Ints, masks: Masks | None) -> LogprobRows:
        """The tokens that log-probabilities are wanted of: of a decode row as many as it may have."""
        wanted, masked = self._options.wanted(slots), frozenset(masks.rows if masks is not None else ())
        decoding = len(plan.decode_slots)
        lengths = {row: plan.query_length if row < decoding else 1 for row in wanted}
        rows = [row for row, length in lengths.items() for _ in range(length)]
        drafts = [draft for length in lengths.values() for draft in range(length)]
        asked = LogprobRows.of(
            rows,
            drafts,
            slots[rows].tolist(),
            [wanted[row] for row in rows],
            [row in masked for row in rows],
            self._logits.device,
        )
        if plan.drafts and self._device.rows.drafts is not None:
            columns = asked.columns
            samples = self._device.rows.drafts.find(columns.samples, columns.drafts, 0)
            asked = asked._replace(columns=columns._replace(samples=samples))
        return asked

    def _write_masks(self, masks: Masks | None) -> None:
        """Make these the masks of the next choice."""
        if masks is None:
            if self._masked:
                self._masks.which.fill_(-1)
            self._masked = False
            return
        count, width = masks.bits.shape
        if masks.drafts is None or self._device.rows.drafts is None:
            which = np.full(len(self.chosen) + 1, -1, np.int32)
            which[masks.rows] = np.arange(count)
            self._masks.which.copy_(upload(which, self._logits.device))
        else:
            words = np.stack([masks.rows, masks.drafts, np.arange(count)])
            rows, drafts, which = upload(words, self._logits.device)
            samples = self._device.rows.drafts.find(rows, drafts, len(self.chosen))
            self._masks.which.fill_(-1).index_copy_(0, samples, which.int())
        self._masks.bits[:count, :width].copy_(upload(masks.bits, self._logits.device))
        self._masks.bits[:count, width:].zero_()
        self._masked = True

    def _logprobs(self, asked: LogprobRows, aside: Tensor | None) -> list[LogprobBlock]:
        """Launch what is reported of the tokens just chosen. `aside` [asked rows, vocab] are the model's
        logits of rows that have others by now."""
        launched, columns, device = [], asked.columns, self._device.rows
        # Accepted tokens stand where a chain's would; their logits stay where they were.
        found, kept = columns.samples, torch.arange(len(columns.samples), device=columns.samples.device)
        if device.paths is not None and device.drafts is not None:
            moved = device.paths.moved
            further = moved[device.paths.rows[found].clamp(max=len(moved) - 1)]
            further = torch.where(columns.drafts > 0, further, 0)
            found = (found + further).clamp_(max=len(self._logits) - 1)
            kept = (kept + further).clamp_(max=len(kept) - 1)
        for at, block in asked.blocks():
            rows = found[at]
            raw = self._logits.index_select(0, rows) if aside is None else aside.index_select(0, kept[at])
            tokens = self.chosen.index_select(0, block.columns.samples).clamp_(min=0)
            after = weights = None
            if block.any(AFTER_MASK | AFTER_ALL | SUPPORT):
                after = self._logits.index_select(0, rows)
            if after is not None and block.any(AFTER_ALL | SUPPORT):
                own = self._device.rows._replace(slots=block.columns.slots)
                weights = self._device.kernels.draw_weights(after, own, tokens)
            raw, kernels = raw.log_softmax(-1), self._device.kernels
            launched.append(launch_block(kernels, block, raw, tokens, after, weights))
        return launched

    # -- the work of the launches ------------------------------------------------------------------

    def work(self, key: Key) -> Work:
        """What is to be captured under `key`."""
        match key:
            case Sampling():
                return partial(self._sample, key)
            case Logits():
                return partial(self._fill, key)
            case Choice():
                return partial(self._choose, key.rows)

    def warm(self) -> None:
        """Launch once what no capture holds, so that its kernels are compiled and loaded before a request
        needs them. On an empty entry; what slot 0 gets, no row reads."""
        params = SamplingParams(logit_bias=((0, 0.0),), min_tokens=1, stop_ids=frozenset({0}))
        self._tokens.write((NewSlot(0, params, NO_TOKENS, NO_TOKENS, 0),))
        self._start_counts(self._device.rings.empty, 1, 1)
        everything = LogprobOptions(LOGPROBS | ENTROPY | SUPPORT | AFTER_MASK | AFTER_ALL, 1, (0,), False)
        asked = LogprobRows.of([0], [0], [0], [everything], [True], self._logits.device)
        self._logprobs(asked, self._logits.index_select(0, asked.columns.samples))
        self._device.kernels.score(self._logits[:1], asked.columns.slots)  # of prompts
        for drafts in (None, np.zeros(1, np.int32)):
            self._write_masks(Masks([0], [0], np.zeros((1, 1), np.int32), drafts))
        self._write_masks(None)

    def _sample(self, key: Sampling) -> None:
        self._draw(self._head(key.rows, key.adapters), key.filtered)
        self._accept(key.rows)

    def _fill(self, key: Logits) -> None:
        self._logits[: key.rows].copy_(self._head(key.rows, key.adapters))

    def _choose(self, count: int) -> None:
        (rows, _, kernels, pdl, _), logits = self._device, self._logits[:count]
        rows, masks = rows.first(count), self._masks._replace(which=self._masks.which[:count])
        kernels.mask_rows(logits, masks, rows.live, pdl=pdl)
        kernels.adjust(logits, rows, self._tokens, masks, pdl=pdl)
        kernels.penalise(logits, rows, self.counts, pdl=pdl)
        self._draw(logits, filtered=True)
        self._accept(count, self.counts)

    def _draw(self, logits: Tensor, filtered: bool) -> None:
        rows, _, kernels, pdl, _ = self._device
        count = len(logits)
        kernels.choose(logits, rows.first(count), self.chosen[:count], filtered=filtered, pdl=pdl)

    def _accept(self, count: int, counts: Counts | None = None) -> None:
        rows, rings, kernels, pdl, accepted = self._device
        chosen = self.chosen[:count]
        kernels.accept(chosen, rows.first(count), rings.cursor, rings.answers, counts, pdl=pdl)
        if accepted is not None:
            accepted(count)
