"""One step on one GPU: write the order, replay the forward, replay the sampler, mark the end.

    launch(plan)   ring entry ─► forward graph ─► (masks) ─► sampling graphs ─► event
                                  │ begin: tables, view        │ logits, mask, penalties, choice ─► cells
                                  │ attention's work list      │ tokens ─► answer ring
                                  └ layers ─► picked rows      └

The host does nothing per row but write the entry. What a graph cannot hold is launched plainly on the
same buffers: prompt log-probabilities, hidden states, experts and prompts of embeddings; and by the sampling
stage (`gpu.step.sampling`) log-probabilities of the rows that ask and logit processors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from gpu.kernels.step import begin_step
from gpu.kv.pool import KvPool
from gpu.models.base import CausalModel
from gpu.ops.fused import Kernels, TritonOps
from gpu.prompt import score_prompts
from gpu.sample.kernels import SamplingKernels
from gpu.sample.processors import Processor
from gpu.sample.rows import Rows
from gpu.state.entry import Limits
from gpu.state.tables import SlotTables
from gpu.state.view import StepView
from gpu.step.buffers import StepBuffers
from gpu.step.flight import Answer, Flight, mark
from gpu.step.graphs import Launcher, Launches
from gpu.step.rings import Rings
from gpu.step.sampling import Key, SamplingDevice, SamplingStage
from gpu.step.steps import Forward, Steps, sampling_slots
from gpu.thread import assert_device_thread
from gpu.transfer import upload
from gpu.upkeep import Upkeep

Progress = Callable[[float], None]
"""Called with the share that is done, 0 to 1."""

ENTRIES = 4
"""Of each ring: the deepest overlap is 2, and a step more is written while one is read."""

PAGE_WRITES = 8192
"""In one order, 64 KiB: a full step of prompts writes 128, so this is 64 cached prefixes of as many."""


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

    `pages` is the longest row of the page table, `count_rows` the number of rows that may be penalised.
    """

    rows: int
    tokens: int
    chunks: int
    pages: int
    page_size: int
    vocab: int
    count_rows: int


class Machine(NamedTuple):
    """How steps are run: on what, through which attention, as graphs or not, with which kernels over the
    K and V of each layer, and with which for sampling. `pdl` is programmatic dependent launch."""

    device: torch.device
    attention: StepAttention
    launcher: Callable[[], Launcher]
    kernels: Callable[[Sequence[tuple[Tensor, Tensor]]], Kernels]
    sampling: SamplingKernels
    pdl: bool = False


class GraphRunner:
    """`gpu.worker.Runner` over captured steps. Owner: launch thread."""

    def __init__(
        self,
        shape: Shape,
        machine: Machine,
        processors: Mapping[str, Processor],
        hidden: tuple[int, torch.dtype],
        upkeep: Upkeep | None = None,
    ) -> None:
        """`processors` are logit processors by name; `hidden` is width and dtype of the model's hidden
        states. Runs nothing before `use_model` and `use_pool`. Without `upkeep` commands are refused."""
        self.device = machine.device
        self._shape, self._machine, self._upkeep = shape, machine, upkeep
        self._tables = SlotTables(shape.rows, shape.pages, machine.device)
        self._buffers = StepBuffers(self._tables, shape.tokens, shape.rows, shape.chunks, hidden)
        limits = Limits(shape.rows, shape.chunks, shape.tokens, PAGE_WRITES, shape.pages)
        self._rings = Rings(limits, ENTRIES, machine.device)
        self._steps = Steps(shape.rows, shape.tokens)
        buffers = self._buffers
        rows = Rows(buffers.samples.slots, buffers.samples.positions, buffers.num_samples, self._tables)
        works_on = SamplingDevice(rows, self._rings, machine.sampling, machine.pdl)
        self._stage = SamplingStage(works_on, shape.vocab, shape.count_rows, self._head, processors)
        self._matchers = Matchers()
        self._hidden = HiddenRows()
        self._model: CausalModel | None = None
        self._kernels: Kernels | None = None
        self._launches: Launches[Forward | Key] | None = None
        self._unsettled: Flight | None = None

    # -- the step ----------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> Flight:
        """Start a step. Returns while the device works; it waits only where masks or logit processors follow
        from the tokens of the step before, and then for the waiter thread."""
        assert_device_thread(self.device)
        launches = self._launches
        assert launches is not None, "a step came while weights or pages are given back"
        began, answer = mark(self.device), Answer()
        ticket = self._rings.write(plan)
        if ticket.surplus is not None:
            cells, pages = (upload(each, self.device) for each in ticket.surplus[:2])
            self._tables.page_table.view(-1).index_copy_(0, cells, pages)
        self._stage.prepare(plan, ticket)
        forward = self._steps.forward(plan)
        self._hidden.apply(plan.new_slots)
        given, routes = embedded(plan, self.device), self._hidden.routes(plan)
        if self._hidden.wants(plan) or routes is not None or any(c.logprobs >= 0 for c in plan.chunks):
            hidden, rows = self._forward(forward, every=True, given=given, routes=routes), place(plan)
            prompt = score_prompts(self._ready(), hidden, plan, rows)
            answer = Answer(prompt=prompt, given=self._hidden.take(self._ready(), hidden, routes, plan, rows))
        elif given is not None:
            self._forward(forward, given=given)
        else:
            launches[forward]()
        self._settle()
        self._matchers.apply(plan.new_slots)
        if plan.num_samples:
            # Behind the forward: the device computes while masks are filled on the host.
            masks, size = self._matchers.fill(plan), self._steps.samples(plan.num_samples)
            sampled = self._stage.launch(sampling_slots(plan), size, masks, launches)
            answer = answer._replace(sampled=sampled, masks=masks)
        marks = began, mark(self.device)
        flight = Flight(plan.step, self._rings, ticket, marks, answer, self._matchers)
        if flight.settles:
            self._unsettled = flight
        return flight

    def _settle(self) -> None:
        """Wait until matchers and processors know the tokens of the step before, where these matter."""
        if self._unsettled is not None:
            self._unsettled.settle()
            self._unsettled = None

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

    def _head(self, rows: int) -> Tensor:
        """Logits float32 [rows, vocab] of the picked rows."""
        return self._ready().logits(self._buffers.picked[:rows])

    def _ready(self) -> CausalModel:
        assert self._model is not None, "a step came while the weights are given back"
        return self._model

    # -- what may change between steps -------------------------------------------------------------

    def _capture(self, progress: Progress) -> None:
        """Make every launch that serving needs.

        Runs on empty orders: all rows are padding, and what running slots have stays as it is.
        """
        assert_device_thread(self.device)
        keys = list(self._steps.all())
        launches: Launches[Forward | Key] = Launches(self._machine.launcher())
        self._rings.clear()
        for done, key in enumerate(keys, 1):
            if isinstance(key, Forward):
                launches.capture(key, partial(self._forward, key), partial(self._forward, key, brief=True))
            else:
                launches.capture(key, work := self._stage.work(key), work)
            progress(done / len(keys))
        self._stage.warm()
        self._rings.clear()
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
