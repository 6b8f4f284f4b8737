"""One step on one GPU: write the order, replay the forward, replay the sampler, mark the end.

    launch(plan)   ring entry ─► forward graph ─► (masks) ─► sampling graph ─► event
                                  │ begin: tables, view        │ logits, mask, penalties, sample ─► cells
                                  │ attention's work list      │ tokens ─► answer ring
                                  └ layers ─► picked rows      └

The host does nothing per row but write the entry. What a graph cannot hold is launched plainly on the
same buffers: prompt log-probabilities, hidden states, experts, prompts of embeddings, and sampling with
bias, log-probabilities, entropies, masks told or a logit processor, which waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from core.command import Command, CommandDone
from core.plan import StepPlan
from gpu.context import ForwardContext
from gpu.embeds import Embedded, embedded
from gpu.grammar.matchers import Matchers
from gpu.hidden import HiddenRows
from gpu.inputs import place
from gpu.kernels.sampling.penalty import count_tokens, penalise, start_counts
from gpu.kernels.sampling.sample import Filters, sample
from gpu.kernels.step import begin_step, emit, mask_rows
from gpu.kv.pool import KvPool
from gpu.models.base import CausalModel
from gpu.ops.fused import Kernels, TritonOps
from gpu.prompt import score_prompts
from gpu.sample.params import BIASED, LOGPROBS, PROCESSED
from gpu.sample.sampler import Sampler
from gpu.state.entry import Limits
from gpu.state.tables import SlotTables
from gpu.state.view import StepView
from gpu.step.buffers import StepBuffers
from gpu.step.flight import Answer, Flight, mark
from gpu.step.graphs import Launcher, Launches
from gpu.step.rings import Rings, Ticket
from gpu.step.steps import Forward, MaskStage, Sampling, Steps, sampling_slots
from gpu.thread import assert_device_thread
from gpu.upkeep import Upkeep

Progress = Callable[[float], None]
"""Called with the share that is done, 0 to 1."""

ENTRIES = 4
"""Of each ring: the deepest overlap is 2, and a step more is written while one is read."""

PAGE_WRITES = 8192
"""In one order, 64 KiB: a full step of prompts writes 128, so this is 64 cached prefixes of as many."""

PLAINLY = BIASED | LOGPROBS | PROCESSED
"""What the captured sampler does not do."""


class StepAttention(Protocol):
    """What is asked here of an attention backend besides `gpu.ops.fused.Attend`."""

    def bind(self, caches: Sequence[tuple[Tensor, Tensor]] | None) -> None:
        """Work on these K and V per layer, [tokens, kv_heads, head_dim] each; None lets go."""
        ...

    def plan(self, view: StepView) -> None:
        """Launch what divides the step's work, inside the graph, before the layers."""
        ...

    def attend(self, layer: int, q: Tensor, view: StepView) -> Tensor:
        """See `gpu.ops.fused.Attend`."""
        ...


class Shape(NamedTuple):
    """What the steps of a runner can hold.

    `pages` is the longest row of the page table, `mask_words` the width of a grammar's mask: vocabulary
    / 32, rounded up.
    """

    rows: int
    tokens: int
    chunks: int
    pages: int
    page_size: int
    mask_words: int


class Machine(NamedTuple):
    """How steps are run: on what, through which attention, as graphs or not, with which kernels over the
    K and V of each layer. `pdl` is programmatic dependent launch."""

    device: torch.device
    attention: StepAttention
    launcher: Callable[[], Launcher]
    kernels: Callable[[Sequence[tuple[Tensor, Tensor]]], Kernels]
    pdl: bool = False


class GraphRunner:
    """`gpu.worker.Runner` over captured steps. Owner: launch thread."""

    def __init__(
        self,
        shape: Shape,
        machine: Machine,
        sampler: Sampler,
        hidden: tuple[int, torch.dtype],
        upkeep: Upkeep | None = None,
    ) -> None:
        """`hidden` is width and dtype of the model's hidden states. Runs nothing before `use_model` and
        `use_pool`. Without `upkeep` commands are refused."""
        self.device = machine.device
        self._shape, self._machine, self._sampler, self._upkeep = shape, machine, sampler, upkeep
        self._tables = SlotTables(shape.rows, shape.pages, machine.device)
        self._buffers = StepBuffers(self._tables, shape.tokens, shape.rows, shape.chunks, hidden)
        limits = Limits(shape.rows, shape.chunks, shape.tokens, PAGE_WRITES, shape.pages)
        self._rings = Rings(limits, ENTRIES, machine.device)
        self._steps = Steps(shape.rows, shape.tokens)
        self._masks = MaskStage(shape.rows, shape.mask_words, machine.device)
        self._matchers = Matchers()
        self._hidden = HiddenRows()
        self._model: CausalModel | None = None
        self._kernels: Kernels | None = None
        self._launches: Launches[Forward | Sampling] | None = None
        self._unsettled: Flight | None = None

    # -- the step ----------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> Flight:
        """Start a step. Returns while the device works, unless a row needs what no graph holds."""
        assert_device_thread(self.device)
        launches = self._launches
        assert launches is not None, "a step came while weights or pages are given back"
        began, answer, rich = mark(self.device), Answer(), False
        self._sampler.apply(plan.new_slots, start_counts=False)
        ticket = self._rings.write(plan)
        self._prepare(plan, ticket)
        forward = self._steps.forward(plan)
        self._hidden.apply(plan.new_slots)
        given, routes = embedded(plan, self.device), self._hidden.routes(plan)
        if self._hidden.wants(plan) or routes is not None or any(c.logprobs >= 0 for c in plan.chunks):
            hidden, rows = self._forward(forward, every=True, given=given, routes=routes), place(plan)
            answer.prompt = score_prompts(self._ready(), hidden, plan, rows)
            answer.given = self._hidden.take(self._ready(), hidden, routes, plan, rows)
        elif given is not None:
            self._forward(forward, given=given)
        else:
            launches[forward]()
        self._settle()
        self._matchers.apply(plan.new_slots)
        self._masks.early.apply(plan.new_slots)
        if plan.num_samples:
            # Behind the forward: the device computes while masks are filled on the host.
            answer.masks = self._matchers.fill(plan)
            slots = sampling_slots(plan)
            needs, early = self._sampler.needs(slots), self._masks.early.count(slots)
            if needs & PLAINLY:
                self._sample_plainly(plan, answer)
            else:
                sampling = self._steps.sampling(plan, needs, answer.masks is not None or bool(early))
                if rich := sampling.rich:
                    self._masks.write(answer.masks, early)
                launches[sampling]()
        marks = began, mark(self.device)
        if rich:
            self._masks.reader = marks[1]
        flight = Flight(plan.step, self._rings, ticket, marks, answer, self._matchers)
        if answer.masks is not None:
            self._unsettled = flight
        return flight

    def _prepare(self, plan: StepPlan, ticket: Ticket) -> None:
        """Launch what an order may need ahead of its step, and mostly does not: token counts of new
        slots, and what its entry had no room for."""
        rings, counts = self._rings, self._sampler.counts
        if any(new.count_row >= 0 for new in plan.new_slots):
            start_counts(
                rings.orders,
                rings.cursor,
                rings.at,
                counts,
                new_slots=len(plan.new_slots),
                marks=ticket.marks,
            )
        if ticket.surplus is not None:
            # Copies: what comes from the scheduler is read-only, and torch shares no such memory.
            cells, pages, marks = (torch.tensor(each, device=self.device) for each in ticket.surplus)
            self._tables.page_table.view(-1).index_copy_(0, cells, pages)
            counts.mark(marks)

    def _settle(self) -> None:
        """Let the matchers catch up with the step before, whose tokens the next masks follow."""
        if self._unsettled is not None:
            self._unsettled.settle()
            self._unsettled = None

    def _sample_plainly(self, plan: StepPlan, answer: Answer) -> None:
        count, samples, tables = plan.num_samples, self._buffers.samples, self._tables
        logits = self._ready().logits(self._buffers.picked[:count])
        slots, positions = samples.slots[:count].long(), samples.positions[:count].long()
        sampled = self._sampler.sample(logits, slots, positions, answer.masks)
        tables.last_token.index_copy_(0, slots, sampled.tokens.clamp(min=0).int())
        answer.logprobs, answer.failed = sampled.logprobs, sampled.failed
        rings, live = self._rings, self._buffers.num_samples
        emit(sampled.tokens, rings.cursor, live, rings.answers, pdl=self._machine.pdl)

    # -- the work of the graphs --------------------------------------------------------------------

    def _forward(
        self,
        key: Forward,
        every: bool = False,
        brief: bool = False,
        given: Embedded | None = None,
        routes: list[Tensor] | None = None,
    ) -> Tensor:
        """Everything up to the hidden states of the rows that sample, which it leaves in the buffers.

        Returns those of all rows [n, hidden] where `every` asks for them; else the last layer's MLP runs
        for the rows that sample alone. `brief` is for warming up (`ForwardContext`). `given` are rows that
        come as embeddings. `routes` gets what routers choose, of `every` row.
        """
        assert self._kernels is not None, "a step came while the pages are given back"
        buffers, rings = self._buffers, self._rings
        view = buffers.view(key.tokens, key.mixed, key.shared, key.deep)
        samples = buffers.samples.first(min(key.tokens, self._shape.rows))
        begin_step(
            rings.orders, rings.cursor, rings.at, self._tables, view, samples,
            page_size=self._shape.page_size, pdl=self._machine.pdl,
        )  # fmt: skip
        self._machine.attention.plan(view)
        picks = key.mixed and not every
        ops = TritonOps(view, self._kernels)
        wanted = samples.rows if picks else None
        ctx = ForwardContext(view.positions, ops, wanted=wanted, brief=brief, embedded=given, routes=routes)
        hidden = self._ready().forward(ctx, view.ids)
        picked = buffers.picked[: len(samples.rows)]
        if picks:
            picked.copy_(hidden)
        else:
            torch.index_select(hidden, 0, samples.rows, out=picked)
        return hidden

    def _sample(self, key: Sampling) -> None:
        """Logits of the picked rows, their tokens, into cells and ring."""
        tables, buffers, rings, pdl = self._tables, self._buffers, self._rings, self._machine.pdl
        samples, live = buffers.samples.first(key.rows), buffers.num_samples
        logits = self._ready().logits(buffers.picked[: key.rows])
        if key.rich:
            mask_rows(logits, self._masks.which[: key.rows], self._masks.bits, live, pdl=pdl)
            penalise(logits, samples.slots, tables, self._sampler.counts, live, pdl=pdl)
        filters = Filters(tables.top_k, tables.top_p, tables.min_p) if key.filtered else None
        tokens = sample(
            logits, samples.slots, samples.positions, tables.temperature, tables.seed,
            filters=filters, cells=tables.last_token, num_rows=live, pdl=pdl,
        )  # fmt: skip
        if key.rich:
            count_tokens(tokens, samples.slots, tables, self._sampler.counts, live, pdl=pdl)
        emit(tokens, rings.cursor, live, rings.answers, pdl=pdl)

    def _ready(self) -> CausalModel:
        assert self._model is not None, "a step came while the weights are given back"
        return self._model

    # -- what may change between steps -------------------------------------------------------------

    def _capture(self, progress: Progress) -> None:
        """Make every launch that serving needs.

        Runs on empty orders: all rows are padding, and what running slots have stays as it is.
        """
        assert_device_thread(self.device)
        work = list(self._steps.all())
        launches: Launches[Forward | Sampling] = Launches(self._machine.launcher())
        self._rings.clear()
        for done, key in enumerate(work, 1):
            if isinstance(key, Forward):
                launches.capture(key, partial(self._forward, key), partial(self._forward, key, brief=True))
            else:
                launches.capture(key, act := partial(self._sample, key), act)
            progress(done / len(work))
        # Not in any graph, and compiled before the first penalised request needs it.
        rings = self._rings
        start_counts(rings.orders, rings.cursor, rings.at, self._sampler.counts, new_slots=1, marks=1)
        rings.clear()
        self._launches = launches

    def carry_out(self, command: Command) -> CommandDone:
        """Do what an operator asked between steps."""
        assert_device_thread(self.device)
        if self._upkeep is None:
            return CommandDone(command.id, "this runner takes no commands")
        return self._upkeep.carry_out(command, self)

    def close(self) -> None:
        """See `gpu.worker.Runner`."""
        self.use_model(None)
        self.use_pool(None)

    def use_model(self, model: CausalModel | None) -> None:
        """See `gpu.upkeep.Replaceable`."""
        self._model = model
        self._recapture()

    def use_pool(self, pool: KvPool | None, progress: Progress = lambda share: None) -> None:
        """See `gpu.upkeep.Replaceable`."""
        caches = None if pool is None else pool.caches()
        self._machine.attention.bind(caches)
        self._kernels = None if caches is None else self._machine.kernels(caches)
        self._recapture(progress)

    def _recapture(self, progress: Progress = lambda share: None) -> None:
        """Graphs hold the addresses of weights and pages: they go with them, and come again when both
        are there."""
        self._launches = None
        if self._model is not None and self._kernels is not None:
            self._capture(progress)
