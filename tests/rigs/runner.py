"""A runner driven by plans that a test writes, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec
import numpy as np
import torch

from core.adapters import AdapterLimits
from core.command import Action, Command
from core.models import ModelSpec
from core.plan import Chunk, NewSlot, PageWrites, Save, StepPlan, StepResult
from core.request import SamplingParams
from gpu.adapting import plan_adapters
from gpu.attention import EncoderAttention, torch_attention
from gpu.build import spec_of
from gpu.kv.pool import KvPool
from gpu.kv.states import StatePool
from gpu.layers.linear import Places
from gpu.maintenance import Maintenance
from gpu.models.base import CausalModel
from gpu.ops.base import Ops
from gpu.ops.plain import TorchOps
from gpu.runner import ModelRunner
from gpu.sample import torch_kernels
from gpu.step.begin import begin_step
from gpu.step.buffers import HiddenShape
from gpu.step.machine import Machine
from gpu.step.shape import Shape
from gpu.step.steps import ExactSizes
from gpu.thread import device_thread
from gpu.weights import load_model
from tests.rigs.arrays import ints

CPU = torch.device("cpu")
torch.set_num_threads(1)
"""Matrices of 64 columns are not faster with threads; on a busy machine the barriers of two threads took six
times as long as the work."""

GREEDY = SamplingParams(temperature=0.0)


class WatchedModel:
    """The real model; records its last logits [n, vocab]."""

    seen: torch.Tensor

    def __init__(self, model: CausalModel) -> None:
        self.spec, self._model = model.spec, model
        self.forward = model.forward

    def logits(self, hidden: torch.Tensor, ops: Ops | None = None) -> torch.Tensor:
        logits = self._model.logits(hidden, ops)
        self.seen = logits.clone()
        return logits

    def seal(self) -> None: ...

    def places(self) -> Places:
        return self._model.places()


class Rig:
    """A runner with a page allocator. Pages are allocated in shuffled order unless `consecutive`."""

    def __init__(
        self,
        path: Path,
        page_size: int = 16,
        rows: int = 4,
        tokens: int = 1024,
        consecutive: bool = False,
        adapters: AdapterLimits | None = None,
        spec: ModelSpec | None = None,
        checkpoints: int = 8,
        drafts: int = 0,
    ) -> None:
        """`spec` says how matrices are held; None: in float32. States have room for `drafts` of a row."""
        self.spec = spec_of(path) if spec is None else spec
        self.page_size = page_size
        pages = tokens // page_size + 1
        self.model = load_model(self.spec, path, torch.float32, CPU)
        self.watched = WatchedModel(self.model)
        self.places = self.model.places()  # only those that sealing keeps are valid: embedding and norms
        with device_thread(CPU):
            self.model.seal()
            self.pool = KvPool(
                self.spec.kv_layers,
                pages,
                page_size,
                self.spec.kv_shape,
                torch.float32,
                CPU,
            )
            if self.spec.linear is not None:
                states = StatePool(self.spec.linear, rows + 1, checkpoints, torch.float32, CPU, drafts)
                self.pool.states = states
            attention = torch_attention(self.spec) if self.spec.causal else EncoderAttention()
            width = HiddenShape(self.spec.hidden, torch.float32)
            vocab = self.spec.vocab_size
            shape = Shape(rows, tokens, rows, pages, page_size, vocab, width, adapters=adapters)
            adapting = plan_adapters(self.spec, adapters, torch.float32)
            tiers = None if adapting is None else adapting.allocate(self.model, CPU)
            maintenance = Maintenance(str(path), lambda path: self.model, lambda: self.pool, adapters=tiers)
            self.runner = ModelRunner(
                shape,
                Machine(
                    CPU,
                    ExactSizes(),
                    None,
                    attention,
                    lambda pool: lambda view: TorchOps(view, attention),
                    begin_step,
                    torch_kernels,
                ),
                shape.entries(CPU),
                maintenance=maintenance,
            )
            self.slots = self.runner.tables
            self.runner.use_model(self.watched)
            self.runner.use_pool(self.pool)
            self.runner.prepare()
        order = np.arange(1, pages)
        if not consecutive:
            np.random.default_rng(3).shuffle(order)
        self.free = order[::-1].tolist()
        self.pages: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.adapted: dict[int, bool] = {}
        self.steps = 0

    def new(
        self,
        slot: int,
        prompt: Sequence[int],
        *,
        shared: Sequence[int] = (),
        params: SamplingParams = GREEDY,
        place: int = -1,
        checkpoint: int = 0,
    ) -> NewSlot:
        """A slot that starts after `shared` full pages of another slot, with the adapter at `place` and the
        states of `checkpoint`."""
        cached = len(shared) * self.page_size
        self.pages[slot] = list(shared)
        self.lengths[slot] = cached
        self.adapted[slot] = place >= 0
        return NewSlot(slot, params, ints(prompt), ints([]), cached, place=place, checkpoint=checkpoint)

    def plan(
        self, decode: Sequence[int] = (), chunks: Sequence[Chunk] = (), new: Sequence[NewSlot] = ()
    ) -> StepPlan:
        """A plan with the page writes of its rows."""
        cells: list[tuple[int, int, int]] = []
        for fresh in new:
            cells += [(fresh.slot, at, page) for at, page in enumerate(self.pages[fresh.slot])]
        for slot, count in [(s, 1) for s in decode] + [(c.slot, len(c.tokens)) for c in chunks]:
            self.lengths[slot] += count
            while len(self.pages[slot]) * self.page_size < self.lengths[slot]:
                cells.append((slot, len(self.pages[slot]), page := self.free.pop()))
                self.pages[slot].append(page)
        columns = np.array(cells, np.int32).reshape(-1, 3).T
        columns.setflags(write=False)  # as the scheduler's
        self.steps += 1
        adapted = any(self.adapted[slot] for slot in [*decode, *(chunk.slot for chunk in chunks)])
        writes = PageWrites(*columns)
        return StepPlan(self.steps, ints(decode), tuple(chunks), tuple(new), writes, adapters=adapted)

    def command(self, action: Action, adapter: str, path: Path = Path(), place: int = -1) -> str | None:
        """Carry out a command and wait: why it is refused, if so."""
        self.steps += 1
        with device_thread(CPU):
            done = self.runner.carry_out(
                Command(id=self.steps, action=action, adapter=adapter, path=str(path), place=place)
            )
        answer = done.result() if isinstance(done, Future) else done
        assert answer.id == self.steps
        return answer.error

    def place(self, adapter: str, path: Path, place: int) -> None:
        """Read an adapter and copy it to a place."""
        assert self.command("adapter_read", adapter, path) is None
        assert self.command("adapter_place", adapter, place=place) is None

    def step(
        self,
        decode: Sequence[int] = (),
        chunks: Sequence[Chunk] = (),
        new: Sequence[NewSlot] = (),
        saves: Sequence[Save] = (),
    ) -> StepResult:
        """Plan, launch, wait. Models without linear attention have no states to save."""
        saves = () if self.spec.linear is None else tuple(saves)
        plan = msgspec.structs.replace(self.plan(decode, chunks, new), saves=saves)
        with device_thread(CPU):
            return self.runner.launch(plan).wait()

    def generate(self, slot: int, prompt: Sequence[int], tokens: int, place: int = -1) -> list[int]:
        """Greedy output of one row: the whole prompt in one step, then decode."""
        new = self.new(slot, prompt, place=place)
        result = self.step(chunks=[Chunk(slot, 0, ints(prompt), True)], new=[new])
        out = [int(result.tokens[0])]
        while len(out) < tokens:
            out.append(int(self.step(decode=[slot]).tokens[0]))
        return out
