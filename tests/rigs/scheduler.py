"""A scheduler, a fake device and a step loop that a test controls."""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec
import numpy as np

from core.adapters import AdapterLimits
from core.cache.manager import CacheManager
from core.command import Command
from core.config import CacheConfig, ScheduleConfig
from core.costs import ChunkCosts, StepCosts
from core.executor import Capabilities
from core.plan import StepResult
from core.request import Request, SamplingParams
from core.schedule.scheduler import Confirmed, Scheduler
from core.types import Finish, RootKey
from tests.rigs.executor import FakeExecutor, oracle

VOCAB = 97


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Harness:
    """The step loop (apply, plan, submit, deliver) with an executor that completes steps on request."""

    def __init__(
        self,
        *,
        pages: int = 64,
        page_size: int = 4,
        rows: int = 8,
        depth: int = 1,
        chunks: int = 0,
        sizes: tuple[int, ...] = (),
        causal: bool = True,
        drafts: int = 0,
        samples: int = 0,
        seed: int = 0,
        costs: StepCosts | None = None,
        chunk_costs: ChunkCosts | None = None,
        places: int = 0,
        device: str = "cpu",
        checkpoints: int | None = None,
        cache: CacheConfig = CacheConfig(),  # noqa: B008 - frozen
        **schedule: object,
    ) -> None:
        self.clock = Clock()
        self.depth = depth
        config = msgspec.convert(schedule, ScheduleConfig)
        capabilities = Capabilities(
            num_pages=pages + 1,
            page_size=page_size,
            max_rows=rows,
            context_length=pages * page_size,
            vocab_size=VOCAB,
            max_step_tokens=config.step_tokens or 2048,
            max_chunks=chunks,
            step_sizes=sizes,
            causal=causal,
            max_drafts=drafts,
            max_samples=samples,
            costs=costs,
            chunk_costs=chunk_costs,
            device=device,
            checkpoints=checkpoints,
            adapters=AdapterLimits(places=places, max_rank=8, host=4) if places else None,
        )
        self.executor = FakeExecutor(capabilities, seed=seed)
        manager = CacheManager(
            pages + 1,
            page_size,
            radix=cache.radix_cache and causal,
            eviction=cache.eviction,
        ).with_checkpoints(checkpoints)
        self.scheduler = Scheduler(capabilities, manager, config, self.clock)
        self.delivered: dict[str, list[int]] = {}
        self.finishes: dict[str, Finish] = {}
        self._ids = 0
        self.loading: list[tuple[str, int]] = []
        """(adapter, place): copies to the device under way."""
        self.loads_at_once = True
        """Copies to the device are complete with the turn that they began in."""
        self.loads = 0
        """Copies that were made."""

    def load(self, count: int = 1) -> None:
        """Complete the oldest `count` copies."""
        for _ in range(count):
            adapter, place = self.loading.pop(0)
            self.loads += 1
            self.executor.host = {adapter: ""}
            self.executor.command(Command(id=0, action="adapter_place", adapter=adapter, place=place))
            self.executor.results()
            self.scheduler.places.placed(adapter)

    def request(
        self,
        prompt: Iterable[int],
        max_tokens: int = 8,
        *,
        priority: int = 0,
        caller: str = "",
        root: RootKey = RootKey(),  # noqa: B008 - frozen
        continues: bool = False,
        **sampling: object,
    ) -> Request:
        """Queue a request; other keyword arguments go to its `SamplingParams`."""
        self._ids += 1
        request = Request(
            f"r{self._ids}",
            np.asarray(list(prompt), np.int32),
            SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
            arrival=self.clock.now,
            priority=priority,
            caller=caller,
            root=root,
            continues=continues,
        )
        self.scheduler.add([request])
        self.delivered[request.id] = []
        return request

    def submit(self) -> int:
        """Plan and submit as deep as allowed; returns the number of steps submitted."""
        count = 0
        while self.scheduler.may_plan(self.depth):
            plan = self.scheduler.plan()
            if plan is None:
                break
            self.executor.submit(plan)
            count += 1
        self.loading += self.scheduler.places.take_due()
        self._ended(self.scheduler.take_finished())
        return count

    def turn(self) -> bool:
        """Plan ahead, complete one step of the device, apply it. False when there was nothing to do."""
        submitted = self.submit()
        if self.executor.pending:
            self.executor.complete()
        self.apply()
        loads = len(self.loading)
        self.load(loads if self.loads_at_once else 0)
        return bool(submitted or self.executor.pending or self.scheduler.in_flight or loads)

    def apply(self) -> None:
        """Apply the finished steps of the device."""
        for result in self.executor.results():
            assert isinstance(result, StepResult)
            self._deliver(self.scheduler.apply(result))
        self._ended(self.scheduler.take_finished())

    def run(self, turns: int = 10_000) -> None:
        """Run until all requests have finished; integrity is checked after each iteration."""
        for _ in range(turns):
            more = self.turn()
            self.scheduler.check_integrity()
            if not more and self.scheduler.idle:
                return
        raise AssertionError(f"still busy after {turns} turns: {self.scheduler.statistics()}")

    def check(self, request: Request) -> None:
        """The delivered output of the request must be the expected one."""
        params = request.params
        prompt, adapter = request.prompt.tolist(), request.root.adapter
        expected = oracle(prompt, params.max_tokens, VOCAB, params.stop_ids, adapter)
        assert self.delivered[request.id] == expected, request.id

    def _deliver(self, confirmed: Confirmed) -> None:
        for row, (request, token) in enumerate(zip(confirmed.requests, confirmed.tokens, strict=True)):
            assert request.id not in self.finishes, "a token after the finish"
            if token >= 0:
                self.delivered[request.id].append(token)
            if row in confirmed.ends:
                self.finishes[request.id] = confirmed.ends[row]
        self._ended(confirmed.finished)

    def _ended(self, requests: list[Request]) -> None:
        for request in requests:
            assert request.id not in self.finishes
            assert request.finish is not None
            self.finishes[request.id] = request.finish


def prompts(rng: random.Random, count: int, longest: int = 40) -> list[list[int]]:
    """Prompts that often share prefixes."""
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, longest))] for _ in range(4)]
    result = []
    for _ in range(count):
        stem = rng.choice(stems)
        cut = rng.randrange(len(stem) + 1)
        result.append(stem[:cut] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))])
    return result
