"""Drafts one after the other on the device: EAGLE, EAGLE-3, a small model of the same vocabulary.

    follow    the step's tokens ─► one forward of the draft: its KV, and the states of each row's last token
    propose   states ─► draft 1 ─► forward ─► draft 2 ─► forward ─► ...   a forward less than drafts

A draft model's KV lies in pages of the target's numbers. EAGLE's entry at position p is made of the target's
hidden state at p and of the token at p + 1, which the step that computes p has chosen; a page that two texts
share may hold another text's token at its last position, which costs the draft a little and no text anything.
What the target rejects is overwritten by the tokens that take its place.

A draft is drawn with the noise of the position it is for, as the target's token will be (`gpu.sample.noise`):
both then take the same token as often as their distributions allow, which for a greedy row is the argmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from core.plan import StepPlan
from gpu.attention.backend import AttentionBackend
from gpu.context import ForwardContext
from gpu.draft.drafter import StepOutcome
from gpu.kv.pool import KvPool
from gpu.models.base import CausalModel
from gpu.ops.base import Ops
from gpu.sample.kernels import SamplingKernels
from gpu.sample.rows import Rows
from gpu.state.tables import SlotTables
from gpu.state.view import StepView


@runtime_checkable
class Chain(Protocol):
    """A draft model that makes one token after the other: `gpu.models.draft.ChainModel`, or a small model.

    width, dtype  of the hidden states that it reads and makes
    token_ids     int64 [draft vocabulary]: the target's id of each of the draft's; None: the same
    shifted       whether a position's entry is made of the token behind it
    """

    @property
    def width(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def token_ids(self) -> Tensor | None: ...

    @property
    def shifted(self) -> bool: ...

    def fuse(self, aux: Tensor, ops: Ops | None = None) -> Tensor:
        """What it reads of the target's states."""
        ...

    def forward(self, ctx: ForwardContext, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states for `logits` and for the next call, of tokens `ids` [n] and `hidden` [n, width]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, draft vocabulary]."""
        ...


class DraftMachine(NamedTuple):
    """How a draft model is run: `attention` and `ops` of its layers over its own pages, `sampling` kernels of
    the target. `make_pool` allocates pages of the draft's heads for as many as the target's pool has. `pdl`
    is programmatic dependent launch."""

    attention: AttentionBackend
    ops: Callable[[KvPool], Callable[[StepView], Ops]]
    make_pool: Callable[[KvPool], KvPool]
    sampling: SamplingKernels
    pdl: bool = False


class _Row(NamedTuple):
    """Rows that get drafts, [rows] each: their slots (0 for padding), the position of their last token, and
    the first one without a page."""

    slots: Tensor
    lengths: Tensor
    ends: Tensor


class ChainDrafter:
    """`gpu.draft.drafter.Drafter` over a `Chain`."""

    keeps_kv = True

    def __init__(
        self,
        load: Callable[[CausalModel], Chain],
        machine: DraftMachine,
        tables: SlotTables,
        aux: tuple[int, ...] | None,
        samples: int,
    ) -> None:
        """`load` gives the draft model of a target; steps have up to `samples` samples."""
        self.aux = aux
        self._load, self._machine, self._tables, self._samples = load, machine, tables, samples
        self._model: Chain | None = None
        self._ops: Callable[[StepView], Ops] | None = None
        self._page_size = 1
        self._states: tuple[Tensor, Tensor] | None = None
        self._logits: Tensor | None = None

    def use_model(self, target: CausalModel | None) -> None:
        """See `Drafter.use_model`."""
        self._model = self._states = self._logits = None
        if target is None:
            return
        model = self._model = self._load(target)
        device, width = self._tables.words.device, (self._samples, model.width)
        made, ahead = (torch.zeros(width, dtype=model.dtype, device=device) for _ in range(2))
        self._states = made, ahead
        if model.token_ids is not None:
            # Tokens that the draft does not have are never drawn.
            vocab = target.spec.vocab_size
            self._logits = torch.full((self._tables.slots, vocab), float("-inf"), device=device)

    def use_pool(self, pool: KvPool | None) -> None:
        """See `Drafter.use_pool`."""
        own = None if pool is None else self._machine.make_pool(pool)
        self._machine.attention.bind(own)
        self._ops = None if own is None else self._machine.ops(own)
        self._page_size = 1 if own is None else own.page_size

    def prepare(self, plan: StepPlan) -> None:
        """See `Drafter.prepare`: a new slot's cached tokens have the draft's KV in the same pages."""

    def follow(self, outcome: StepOutcome) -> None:
        """See `Drafter.follow`."""
        view, samples, model = outcome.view, outcome.samples, self._ready()
        count = len(samples.rows)
        ids = view.ids
        if model.shifted:
            # Each token's successor; behind a row's last token the one that was chosen there.
            ids = torch.cat([ids[1:], ids.new_zeros(2)])
            at = torch.arange(count, device=ids.device)
            rows = torch.where(at < outcome.live, samples.rows, view.tokens)
            ids.index_copy_(0, rows.long(), outcome.chosen[:count].clamp(min=0).to(ids.dtype))
            ids = ids[: view.tokens]
        ctx = self._context(view)
        hidden = model.fuse(outcome.aux[: view.tokens], ctx.ops) if outcome.aux is not None else ids
        states = model.forward(ctx, ids, hidden)
        accepted = self._tables.length[samples.slots.long()] + 1 - samples.positions
        last = (samples.rows + accepted - 1).clamp(0, view.tokens - 1).long()
        assert self._states is not None
        for out, found in zip(self._states, states, strict=True):
            torch.index_select(found, 0, last, out=out[:count])

    def propose(self, outcome: StepOutcome, rows: int) -> None:
        """See `Drafter.propose`."""
        tables, model = self._tables, self._ready()
        assert self._states is not None
        most, own = tables.most_drafts, outcome.samples.drafts.rows
        row = self._rows(outcome, rows)
        position, hidden = row.lengths, self._states[1][:rows]
        made = list[Tensor]()
        if model.shifted:
            made.append(self._draw(self._states[0][:rows], row, position + 1, own))
            ids, position = made[0], position
        else:
            ids = tables.last_token[row.slots]
        while len(made) < most:
            view = self._view(row, ids, position, own)
            states, hidden = model.forward(self._context(view), view.ids, hidden)
            position = position + 1
            made.append(ids := self._draw(states, row, position + model.shifted, own))
        count = (row.ends - row.lengths + model.shifted).clamp(0, most)
        count = torch.where(row.slots > 0, count, 0)
        tables.drafts[row.slots] = torch.stack([count, *made], 1).to(torch.int32)

    def _rows(self, outcome: StepOutcome, rows: int) -> _Row:
        """Of a step's rows that sample. A decode row has pages for its whole query, any other for its
        tokens."""
        tables, size = self._tables, self._page_size
        slots, positions = outcome.samples.slots[:rows], outcome.samples.positions[:rows]
        own, before = outcome.samples.drafts.rows, outcome.samples.drafts.before
        at = torch.arange(rows, device=slots.device)
        slots = torch.where(at < own, slots, 0).long()
        decode = outcome.view.num_decode - before[own.long()]
        held = positions + torch.where(at < decode, tables.most_drafts, 0)
        ends = torch.minimum(tables.limit[slots], (held + size - 1) // size * size)
        return _Row(slots, tables.length[slots], ends)

    def _view(self, row: _Row, ids: Tensor, position: Tensor, own: Tensor) -> StepView:
        """One token of each row, at `position`; a row without a page there stores it in the dump."""
        size, count = self._page_size, len(ids)
        ends = row.ends.clamp(min=1)
        inside = (position < row.ends) & (row.slots > 0)
        held = torch.minimum(position, ends - 1)
        cells = self._tables.page_table[row.slots, held // size] * size + held % size
        counts = torch.cat([own, own, torch.zeros_like(own), own]).clamp(max=count)
        empty = row.slots.new_zeros(0, dtype=torch.int32)
        return StepView(
            count, count, 0, counts, ids.to(torch.int32), held.to(torch.int32),
            torch.where(inside, cells, 0).to(torch.int32), self._tables.page_table,
            row.slots.to(torch.int32), (held + 1).to(torch.int32), empty, empty, empty.new_zeros(1),
            empty.new_zeros(1),
        )  # fmt: skip

    def _draw(self, hidden: Tensor, row: _Row, positions: Tensor, own: Tensor) -> Tensor:
        """A token for each row, int64 [rows], for `positions`."""
        model, machine = self._ready(), self._machine
        logits, count = model.logits(hidden), len(hidden)
        if model.token_ids is not None:
            assert self._logits is not None
            whole = self._logits[:count]
            whole[:, model.token_ids] = logits
            logits = whole
        slots, positions = row.slots.to(torch.int32), positions.to(torch.int32)
        rows = Rows(slots, positions, own.clamp(max=count), self._tables)
        chosen = torch.zeros(count, dtype=torch.int64, device=logits.device)
        machine.sampling.choose(logits, rows, chosen, filtered=True, pdl=machine.pdl)
        return chosen.clamp_(min=0)

    def _context(self, view: StepView) -> ForwardContext:
        assert self._ops is not None, "a step came while the pages are given back"
        self._machine.attention.plan(view)
        return ForwardContext(view.positions, self._ops(view))

    def _ready(self) -> Chain:
        assert self._model is not None, "a step came while the weights are given back"
        return self._model
