"""A runner driven by plans that a test writes, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from core.plan import Chunk, NewSlot, PageWrites, StepPlan, StepResult
from core.request import SamplingParams
from gpu.attention import EncoderAttention, TorchAttention
from gpu.build import spec_of
from gpu.kv.pool import KvPool
from gpu.layers.linear import Places
from gpu.models.base import CausalModel
from gpu.ops.base import Ops
from gpu.ops.plain import TorchOps
from gpu.runner import Machine, ModelRunner
from gpu.sample import torch_kernels
from gpu.step.begin import begin_step
from gpu.step.buffers import HiddenShape
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
    ) -> None:
        self.spec = spec_of(path)
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
                (self.spec.kv_heads, self.spec.head_dim),
                torch.float32,
                CPU,
            )
            windows = [self.spec.window(layer) for layer in range(self.spec.layers)]
            attention = TorchAttention(windows) if self.spec.causal else EncoderAttention()
            width = HiddenShape(self.spec.hidden, torch.float32)
            shape = Shape(rows, tokens, rows, pages, page_size, self.spec.vocab_size, width)
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
        self.steps = 0

    def new(
        self,
        slot: int,
        prompt: Sequence[int],
        *,
        shared: Sequence[int] = (),
        params: SamplingParams = GREEDY,
    ) -> NewSlot:
        """A slot that starts after `shared` full pages of another slot."""
        cached = len(shared) * self.page_size
        self.pages[slot] = list(shared)
        self.lengths[slot] = cached
        return NewSlot(slot, params, ints(prompt), ints([]), cached)

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
        return StepPlan(self.steps, ints(decode), tuple(chunks), tuple(new), PageWrites(*columns))

    def step(
        self, decode: Sequence[int] = (), chunks: Sequence[Chunk] = (), new: Sequence[NewSlot] = ()
    ) -> StepResult:
        """Plan, launch, wait."""
        plan = self.plan(decode, chunks, new)
        with device_thread(CPU):
            return self.runner.launch(plan).wait()

    def generate(self, slot: int, prompt: Sequence[int], tokens: int) -> list[int]:
        """Greedy output of one row: the whole prompt in one step, then decode."""
        result = self.step(chunks=[Chunk(slot, 0, ints(prompt), True)], new=[self.new(slot, prompt)])
        out = [int(result.tokens[0])]
        while len(out) < tokens:
            out.append(int(self.step(decode=[slot]).tokens[0]))
        return out
