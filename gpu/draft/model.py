"""What the drafters that run a draft model share: its pages, the rows that get drafts, and the draw.

A draft model's KV lies in pages of the target's numbers. What the target rejects is overwritten by the tokens
that take its place.

A draft is drawn with the noise of the position it is for, as the target's token will be (`gpu.sample.noise`):
both then take the same token as often as their distributions allow, which for a greedy row is the argmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from core.plan import StepPlan
from gpu.attention.backend import AttentionBackend
from gpu.context import ForwardContext
from gpu.draft.chain_kernels import ChainKernels
from gpu.draft.drafter import StepOutcome
from gpu.kv.pool import KvPool
from gpu.models.base import CausalModel
from gpu.ops.base import Ops
from gpu.sample.kernels import SamplingKernels
from gpu.sample.rows import Rows
from gpu.state.chain import ChainRows
from gpu.state.tables import SlotTables
from gpu.state.view import StepView


class AnyDraftModel(Protocol):
    """A draft model, of any kind.

    token_ids  int64 [draft vocabulary]: the target's id of each of the draft's; None: the same
    """

    @property
    def token_ids(self) -> Tensor | None: ...

    def retarget(self, target: CausalModel) -> None:
        """Draft for other weights of its target from now on."""
        ...

    def fuse(self, aux: Tensor, ops: Ops | None = None) -> Tensor:
        """What it reads of the target's states."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, draft vocabulary]."""
        ...


Model = TypeVar("Model", bound=AnyDraftModel)


class DraftMachine(NamedTuple):
    """How a draft model is run: `attention` and `ops` of its layers over its own pages, `sampling` kernels of
    the target, and the `chain` kernels between the forwards of a chain. `make_pool` allocates pages of the
    draft's heads for as many as the target's pool has. `pdl` is programmatic dependent launch."""

    attention: AttentionBackend
    ops: Callable[[KvPool], Callable[[StepView], Ops]]
    make_pool: Callable[[KvPool], KvPool]
    sampling: SamplingKernels
    chain: ChainKernels
    pdl: bool = False


class DraftRows(NamedTuple):
    """Rows that get drafts, [rows] each: their slots (0 for padding), the position of their last token, and
    the first one without a page. `live` int32 [1] is how many are true."""

    slots: Tensor
    lengths: Tensor
    ends: Tensor
    live: Tensor

    def part(self, first: int, end: int) -> DraftRows:
        """Rows `first` to `end`."""
        slots, lengths, ends = (each[first:end] for each in self[:3])
        return DraftRows(slots, lengths, ends, (self.live - first).clamp(min=0))

    def repeat(self, times: int) -> DraftRows:
        """Each row so many times: its tokens."""
        slots, lengths, ends = (each.repeat_interleave(times) for each in self[:3])
        return DraftRows(slots, lengths, ends, self.live * times)


class ModelDrafter(Generic[Model]):
    """The part of a `gpu.draft.drafter.Drafter` over a draft model that does not depend on its kind.

    Owner: launch thread.
    """

    keeps_kv = True

    def __init__(
        self,
        load: Callable[[CausalModel], Model],
        machine: DraftMachine,
        tables: SlotTables,
        aux: tuple[int, ...] | None,
        draws: int,
    ) -> None:
        """`load` gives the draft model of a target; up to `draws` tokens are drawn at once."""
        self.aux = aux
        self._load, self._machine, self._tables, self._draws = load, machine, tables, draws
        self._model: Model | None = None
        self._ops: Callable[[StepView], Ops] | None = None
        self._chain = ChainRows.of(tables)
        self._logits: Tensor | None = None

    def use_model(self, target: CausalModel | None) -> None:
        """See `Drafter.use_model`. The draft model stays where the target's weights are exchanged: reading it
        again could fail, and then no target would be left to go back to."""
        if target is not None and self._model is not None:
            self._model.retarget(target)
            return
        self._model = self._logits = None
        if target is None:
            return
        model = self._model = self._load(target)
        if model.token_ids is not None:
            # Tokens that the draft does not have are never drawn.
            device, vocab = self._tables.words.device, target.spec.vocab_size
            self._logits = torch.full((self._draws, vocab), float("-inf"), device=device)

    def use_pool(self, pool: KvPool | None) -> None:
        """See `Drafter.use_pool`."""
        own = None if pool is None else self._machine.make_pool(pool)
        self._machine.attention.bind(own)
        self._ops = None if own is None else self._machine.ops(own)
        if own is not None:
            self._chain = self._chain._replace(page_size=own.page_size)

    def prepare(self, plan: StepPlan) -> None:
        """See `Drafter.prepare`: a new slot's cached tokens have the draft's KV in the same pages."""

    def _rows(self, outcome: StepOutcome, rows: int) -> DraftRows:
        """Of a step's rows that sample. A decode row has pages for its whole query, any other for its
        tokens."""
        tables, size = self._tables, self._chain.page_size
        slots, positions = outcome.samples.slots[:rows], outcome.samples.positions[:rows]
        own, before = outcome.samples.drafts.rows, outcome.samples.drafts.before
        at = torch.arange(rows, device=slots.device)
        slots = torch.where(at < own, slots, 0).long()
        decode = outcome.view.num_decode - before[own.long()]
        query = tables.max_drafts[slots].clamp(max=tables.most_drafts)
        held = positions + torch.where(at < decode, query, 0)
        ends = torch.minimum(tables.limit[slots], (held + size - 1) // size * size)
        return DraftRows(slots, tables.length[slots], ends, own)

    def _view(self, rows: DraftRows, ids: Tensor, position: Tensor) -> StepView:
        """One token of each row, at `position` of its text; a row without a page there stores it in the
        dump."""
        size, count = self._chain.page_size, len(ids)
        position = position - self._chain.gaps.skipped[rows.slots]
        ends = rows.ends.clamp(min=1)
        inside = (position < rows.ends) & (rows.slots > 0)
        held = torch.minimum(position, ends - 1)
        cells = self._tables.page_table[rows.slots, held // size] * size + held % size
        live = rows.live
        counts = torch.cat([live, live, torch.zeros_like(live), live]).clamp(max=count)
        empty = rows.slots.new_zeros(0, dtype=torch.int32)
        return StepView(
            count, count, 0, counts, ids.to(torch.int32), held.to(torch.int32),
            torch.where(inside, cells, 0).to(torch.int32), self._tables.page_table,
            rows.slots.to(torch.int32), (held + 1).to(torch.int32), empty, empty, empty.new_zeros(1),
            empty.new_zeros(1),
        )  # fmt: skip

    def _draw(self, hidden: Tensor, rows: DraftRows, positions: Tensor) -> Tensor:
        """A token for each row, int64 [rows], for `positions`."""
        model, machine = self._ready(), self._machine
        logits, count = model.logits(hidden), len(hidden)
        if model.token_ids is not None:
            assert self._logits is not None
            whole = self._logits[:count]
            whole[:, model.token_ids] = logits
            logits = whole
        slots, positions = rows.slots.to(torch.int32), positions.to(torch.int32)
        drawn = Rows(slots, positions, rows.live.clamp(max=count), self._tables)
        chosen = torch.zeros(count, dtype=torch.int64, device=logits.device)
        machine.sampling.choose(logits, drawn, chosen, filtered=True, pdl=machine.pdl)
        return chosen.clamp_(min=0)

    def _context(self, view: StepView) -> ForwardContext:
        assert self._ops is not None, "a step came while the pages are given back"
        self._machine.attention.plan(view)
        return ForwardContext(view.positions, self._ops(view))

    def _ready(self) -> Model:
        assert self._model is not None, "a step came while the weights are given back"
        return self._model
