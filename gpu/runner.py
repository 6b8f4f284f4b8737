"""One step, on every device: write the entry, run the forward, choose tokens, mark the end.

    launch(plan)   ring entry ─► forward ─► (masks) ─► sampling ─► (drafts) ─► mark ─► LaunchedStep.wait
                                  │ begin: tables, view  │ logits, mask, penalties, choice
                                  │ attention's plan     │ accept ─► lengths, cells, answer ring
                                  └ layers ─► rows that sample

A GPU replays graphs of padded sizes; a CPU, and an encoder on any device, calls the same work in the plan's
own sizes (`Machine`). The host does nothing per row but write the entry. What no graph holds is launched
plainly on the same buffers: what is read of the hidden states of all tokens; forwards that report experts, or
that take embeddings or texts in pairs; and by the sampling stage (`gpu.step.sampling`) log-probabilities of
the rows that ask and logit processors. Nothing here waits for the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from core.command import Command, CommandDone
from core.costs import MeasuredCosts
from core.plan import StepPlan
from gpu.context import ForwardContext
from gpu.draft.drafter import Drafter, StepOutcome
from gpu.draft.stage import DraftStage
from gpu.draft.stage import Key as DraftKey
from gpu.embeds import Embedded, embedded
from gpu.grammar.matchers import Masks, Matchers
from gpu.grammar.ranks import RankMatchers
from gpu.hidden import HiddenRows, segments
from gpu.kv.pool import KvPool
from gpu.kv.states import StatePool
from gpu.maintenance import Maintenance
from gpu.models.base import CausalModel
from gpu.ops.base import Ops
from gpu.prompt import score_prompts
from gpu.sample.processors import Processor
from gpu.state.recurrent import StepStates
from gpu.state.tables import SlotTables
from gpu.state.view import ChunkRow, PackedRows, StepView, place
from gpu.step.buffers import StepBuffers
from gpu.step.costs import is_late, measure_chunks
from gpu.step.graphs import Launches, Work, collect_frozen
from gpu.step.launched import Answer, LaunchedStep, Marks, mark
from gpu.step.machine import Machine
from gpu.step.paths import PathMover
from gpu.step.rings import Entries, Rings, Ticket
from gpu.step.sampling import Key, Sampled, SamplingDevice, SamplingStage
from gpu.step.shape import Shape
from gpu.step.steps import Forward
from gpu.thread import assert_device_thread
from gpu.transfer import upload

StepKey = Forward | Key | DraftKey


class Uncaptured(NamedTuple):
    """What a plan's forward needs that no graph holds, or few: with `every` the hidden states of all rows,
    not only of those that sample. `routes` gets what routers choose, of every row."""

    every: bool
    placed: tuple[ChunkRow, ...]
    embedded: Embedded | None
    segments: Tensor | None
    routes: list[Tensor] | None

    @property
    def every_alone(self) -> bool:
        """Nothing but `every` is needed."""
        return self.every and self.embedded is None and self.segments is None and self.routes is None


class Pages(NamedTuple):
    """What steps work on: the operations of each over the pages of a pool, and the states beside these."""

    ops: Callable[[StepView], Ops]
    states: StatePool | None


class ModelRunner:
    """Runs plans against one model, its pool and its slots. Owner: launch thread."""

    def __init__(
        self,
        shape: Shape,
        machine: Machine,
        entries: Entries,
        processors: Mapping[str, Processor] = MappingProxyType({}),
        maintenance: Maintenance | None = None,
        drafter: Callable[[SlotTables], Drafter] | None = None,
    ) -> None:
        """`entries` are shared by all ranks, `processors` known by name, `drafter` makes what drafts tokens.
        Runs nothing before `use_model`, `use_pool` and `prepare`; refuses commands without `maintenance`."""
        self.device = machine.device
        self.shape, self._machine, self._maintenance = shape, machine, maintenance
        limits = entries.limits
        self.tables = SlotTables(shape.rows, shape.pages, machine.device, limits.drafts, limits.trees)
        self._buffers = buffers = StepBuffers(self.tables, limits, shape.hidden, shape.places)
        self._rings = Rings(entries, machine.device)
        self._paths = PathMover(buffers, machine.sampling, machine.pdl)
        self._drafts: DraftStage | None = None
        if drafter is not None:
            made = drafter(self.tables)
            buffers.keep_aux(made.aux, limits.tokens)
            padded = machine.launcher is not None
            self._drafts = DraftStage(made, self.tables, self._outcome, padded, self._paths)
        accepted = self._paths if self._drafts is None else self._drafts.accepted
        works_on = SamplingDevice(buffers.rows, self._rings, machine.sampling, machine.pdl, accepted)
        self._stage = SamplingStage(works_on, shape.vocab, self._head, processors, shape.adapts_head)
        rank = machine.rank
        self._matchers = Matchers(self.tables) if rank is None else RankMatchers(self.tables, rank)
        self._hidden = HiddenRows()
        self._model: CausalModel | None = None
        self._pages: Pages | None = None
        self._launches: Launches[StepKey] | None = None
        self._unsettled: LaunchedStep | None = None

    @property
    def attention_backend(self) -> str:
        """See `AttentionBackend.name`."""
        return self._machine.attention.name

    # -- the step ----------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step. Returns while a GPU works; waits only where masks or logit processors follow from
        the tokens of the step before, and then for the waiter thread."""
        assert_device_thread(self.device)
        launches = self._launches
        assert launches is not None, "a step came while weights or pages are given back"
        self._rings.check_room(plan.step)
        began, ticket = mark(self.device), self._rings.write(plan)
        self._prepare(plan, ticket)
        key, uncaptured, answer = self._machine.sizes.forward(plan), self._uncaptured(plan), Answer()
        if uncaptured is None:
            launches[key]()
        elif self._leaves_all(plan, key, uncaptured):
            launches[key]()
            hidden = self._finish(key)
        else:
            hidden = self._forward(key, uncaptured)
        masks, sampled = self._choose(plan, launches)
        if uncaptured is not None and uncaptured.every:
            answer = self._read_hidden(plan, hidden, uncaptured)  # of accepted paths
        if self._drafts is not None:
            self._drafts.launch(plan, key, launches)
            self._matchers.fetch(masks)
        answer = answer._replace(masks=masks, sampled=sampled)
        marks = Marks(began, mark(self.device))
        launched = LaunchedStep(plan.step, self._rings, ticket, marks, answer, self._matchers)
        if launched.settles:
            self._unsettled = launched
        return launched

    def _prepare(self, plan: StepPlan, ticket: Ticket) -> None:
        """Launch what an entry may need ahead of its step, and mostly does not: what it had no room for, and
        what new slots have besides their columns."""
        if ticket.surplus is not None:
            cells, pages = (upload(each, self.device) for each in ticket.surplus[:2])
            self.tables.page_table.view(-1).index_copy_(0, cells, pages)
        if self._pages is not None and self._pages.states is not None:
            self._pages.states.prepare(plan)
        self._stage.prepare(plan, ticket)
        self._hidden.apply(plan.new_slots)
        if self._drafts is not None:
            self._drafts.drafter.prepare(plan)

    def _uncaptured(self, plan: StepPlan) -> Uncaptured | None:
        """What no graph holds of a plan's forward, mostly nothing."""
        given, routes = embedded(plan, self.device), self._hidden.routes(plan)
        every = (
            routes is not None
            or self._hidden.wants(plan)
            or any(chunk.logprobs >= 0 for chunk in plan.chunks)
            or not self._ready().spec.causal
        )
        if given is None and not every:
            return None
        placed = place(plan)
        return Uncaptured(every, placed, given, segments(plan, placed, self.device), routes)

    def _leaves_all(self, plan: StepPlan, key: Forward, uncaptured: Uncaptured) -> bool:
        """Whether the graph of `key`, followed by `_finish`, gives the hidden states of all tokens and the
        plan needs nothing more. In a step of decode rows without drafts every token is sampled from, so the
        graph leaves all of them."""
        if self._machine.launcher is None or not uncaptured.every_alone:
            return False
        return self._buffers.tail_of(key) is not None if plan.chunks else not plan.drafts

    def _finish(self, key: Forward) -> Tensor:
        """Return the hidden states of all tokens behind a graph: launches the last layer's output projection
        and MLP for all rows, unless the graph computed them."""
        buffers, tail = self._buffers, self._buffers.tail_of(key)
        if tail is None:
            return buffers.sample_hidden
        if buffers.aux is not None and not buffers.aux.layers:
            return buffers.aux.out[: key.tokens].clone()  # accepted paths are moved there
        assert self._pages is not None
        view = buffers.view(key)
        return self._ready().finish(ForwardContext(view.positions, self._pages.ops(view)), tail)

    def _read_hidden(self, plan: StepPlan, hidden: Tensor, uncaptured: Uncaptured) -> Answer:
        """Launch what is reported of the hidden states of all rows."""
        model, buffers = self._ready(), self._buffers
        packed = PackedRows(plan, uncaptured.placed, buffers.num_decode, *buffers.behind)
        return Answer(
            prompt=score_prompts(self._slot_logits, self._machine.sampling, hidden, packed),
            extras=self._hidden.take(model, hidden, uncaptured.routes, packed),
        )

    def _choose(self, plan: StepPlan, launches: Launches[StepKey]) -> tuple[Masks | None, Sampled]:
        """Launch the choice of a token for each row that samples."""
        self._settle()
        self._matchers.apply(plan.new_slots)
        if not plan.num_samples:
            return None, Sampled()
        # Behind the forward: a GPU computes while masks are filled on the host.
        masks, rows = self._matchers.fill(plan), self._machine.sizes.samples(plan.num_samples)
        return masks, self._stage.launch(plan, rows, masks, launches)

    def _settle(self) -> None:
        """Wait until matchers and processors know the tokens of the step before, where these matter."""
        if self._unsettled is not None:
            self._unsettled.settle()
            self._unsettled = None

    # -- the work of the launches ------------------------------------------------------------------

    def _run(self, key: StepKey) -> None:
        if isinstance(key, Forward):
            self._forward(key)
        elif isinstance(key, DraftKey):
            assert self._drafts is not None
            self._drafts.run(key)
        else:
            self._stage.work(key)()

    def _outcome(self, key: Forward | None) -> StepOutcome:
        """What a step of this size leaves for the drafter; None: of any size."""
        buffers, shape = self._buffers, self.shape
        most = len(buffers.samples.slots)
        key = key or Forward(shape.tokens, most, shape.chunks, most)
        samples = buffers.samples.first(key.samples)
        kept = None if buffers.aux is None else buffers.aux.out
        view = buffers.view(key)._replace(ancestors=None)
        return StepOutcome(view, samples, buffers.rows.live, self._stage.chosen, kept)

    def _forward(self, key: Forward, uncaptured: Uncaptured | None = None, brief: bool = False) -> Tensor:
        """Everything up to the hidden states of the rows that sample, which it leaves in the buffers.

        Returns those of all rows [n, hidden] where every row's are wanted; else the last layer's MLP runs for
        the rows that sample alone. `brief` is for warming up (`ForwardContext`).
        """
        assert self._pages is not None, "a step came while the pages are given back"
        every, placed, given, pairs, routes = uncaptured or Uncaptured(False, (), None, None, None)
        buffers, rings, machine = self._buffers, self._rings, self._machine
        view, samples = buffers.view(key, placed), buffers.samples.first(key.samples)
        entries = rings.empty if brief else rings.entries
        machine.begin(entries, self.tables, view, samples, page_size=self.shape.page_size, pdl=machine.pdl)
        machine.attention.plan(view)
        if given is not None:  # behind the decode rows, however many tokens those have
            given = given._replace(rows=given.rows + view.num_decode)
        wanted = samples.rows if key.chunks and key.samples and not every else None
        tail = None if wanted is None else buffers.tail_of(key)
        ops, pool = self._pages
        states = None if pool is None else StepStates(pool, view, machine.delta)
        ctx = ForwardContext(
            view.positions, ops(view), pairs, wanted, tail, brief, given, routes, buffers.aux, states
        )
        hidden = self._ready().forward(ctx, view.ids)
        out = buffers.sample_hidden[: key.samples]
        if wanted is not None:
            out.copy_(hidden)
        else:
            torch.index_select(hidden, 0, samples.rows, out=out)
        if brief and tail is not None:
            self._finish(key)
        return hidden

    def _head(self, rows: int, adapters: bool) -> Tensor:
        """Logits float32 [rows, vocab] of the first rows that sample."""
        assert self._pages is not None
        view = self._buffers.view(Forward(rows, rows, 0, rows, adapters=adapters))
        return self._ready().logits(self._buffers.sample_hidden[:rows], self._pages.ops(view).for_samples())

    def _slot_logits(self, hidden: Tensor, slot: int) -> Tensor:
        """Logits float32 [n, vocab] of `hidden` [n, hidden] of one slot."""
        assert self._pages is not None
        view = self._buffers.slot_view(slot, len(hidden))
        return self._ready().logits(hidden, self._pages.ops(view).for_samples())

    def _ready(self) -> CausalModel:
        assert self._model is not None, "a step came while the weights are given back"
        return self._model

    # -- what may change between steps -------------------------------------------------------------

    def prepare(self, progress: Callable[[float], None] = lambda share: None) -> MeasuredCosts | None:
        """See `gpu.worker.Runner`. Does nothing while weights or pages are given back, or where it is done.

        Warms up on empty entries: all rows are padding, and what running slots have stays as it is.
        """
        assert_device_thread(self.device)
        if self._launches is not None or self._model is None or self._pages is None:
            return None
        make = self._machine.launcher
        if make is not None and self._buffers.tail is None:
            self._buffers.keep_tail(self._model.tail_widths)
        launches: Launches[StepKey] = Launches(None if make is None else make(), self._run)
        keys: list[StepKey] = list(self._machine.sizes.all())
        if self._drafts is not None:
            keys += self._drafts.keys([key for key in keys if isinstance(key, Forward)])
        rank = self._machine.rank
        # At the first capture only: the row indices that torch reads are 0 then. Later the buffers hold those
        # of earlier steps. Drafted tokens would be arbitrary, and exchanges between ranks would wait.
        ahead, self._machine = self._machine.ahead, self._machine._replace(ahead=None)
        if ahead is not None and rank is None and self._drafts is None:
            with ahead():
                for key in keys:
                    self._warm(key)()
        with nullcontext() if rank is None else rank.apart():
            for done, key in enumerate(keys, 1):
                launches.capture(key, self._warm(key))
                progress(done / len(keys))
            self._stage.warm()
        self._launches = launches
        return self._measure()

    def _warm(self, key: StepKey) -> Work:
        """Work that launches each kernel of a key once."""
        if isinstance(key, Forward):
            return partial(self._forward, key, brief=True)
        return partial(self._run, key)

    def _measure(self) -> MeasuredCosts:
        """What steps cost, once and before requests have slots: empty whenever graphs are captured again."""
        drafts, chunks, machine = None, None, self._machine
        late = is_late if machine.rank is None else machine.rank.late
        if self._drafts is not None:
            drafts = self._drafts.measure(self.launch, self.shape.vocab, late)
        if machine.paced:
            chunks = measure_chunks(self.launch, self.tables, self.shape, late)
            self._machine = machine._replace(paced=False)
        return MeasuredCosts(drafts, chunks)

    def carry_out(self, command: Command) -> CommandDone | Future[CommandDone]:
        """Do what an operator asked, between steps or beside those that follow."""
        assert_device_thread(self.device)
        if self._maintenance is None:
            return CommandDone(command.id, "this runner takes no commands")
        return self._maintenance.carry_out(command, self)

    def close(self) -> None:
        """See `gpu.worker.Runner`."""
        if self._maintenance is not None:
            self._maintenance.close()
        self.use_model(None)
        self.use_pool(None)

    def use_model(self, model: CausalModel | None) -> None:
        """See `gpu.maintenance.Replaceable`. Graphs hold the addresses of weights and pages: both go."""
        self._launches = None
        before = None if self._model is None else weakref.ref(self._model)
        self._model = model
        if self._drafts is not None:
            self._drafts.drafter.use_model(model)
        if before is not None and before() not in (None, model):
            collect_frozen()

    def use_pool(self, pool: KvPool | None) -> None:
        """See `gpu.maintenance.Replaceable`."""
        self._launches = None
        self._machine.attention.bind(pool)
        self._paths.use_pool(pool)
        self._pages = None if pool is None else Pages(self._machine.ops(pool), pool.states)
        if self._drafts is not None:
            self._drafts.drafter.use_pool(pool)
