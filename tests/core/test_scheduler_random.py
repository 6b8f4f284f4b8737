"""Random traffic over every setting at once; whatever happens, each text is the oracle's."""

from __future__ import annotations

import os
import random

import pytest

from core.cache import manager
from core.config import CacheConfig, Eviction, SchedulePolicy
from core.costs import ChunkCosts, CostTable, StepCosts
from core.request import Request
from core.schedule import chunk_budget, prefill
from core.schedule.adapters import PATIENCE
from core.types import FinishReason, RootKey
from tests.rigs.scheduler import VOCAB, Harness, prompts

POLICIES: tuple[SchedulePolicy, ...] = ("fair", "fcfs", "lpm", "dfs-weight", "lof", "random", "priority")
EVICTIONS: tuple[Eviction, ...] = ("lru", "lfu", "fifo", "priority")

SEEDS = int(os.environ.get("LOOM_RANDOM_SEEDS", "16"))

COSTS = StepCosts(CostTable((1, 8, 64), (4.0, 4.4, 6.0)), CostTable((1, 8), (0.5, 0.6)))
"""With these, drafts pay in some steps."""
CHUNKS = ChunkCosts(CostTable((1, 4, 16), (1e-3, 2e-3, 8e-3)), 1e-5)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that prompts beside rows, and those of several callers, are held back in steps of 16 tokens too, and
    short texts have checkpoints."""
    monkeypatch.setattr(chunk_budget, "LEAST_CHUNK", 1)
    monkeypatch.setattr(prefill, "SHARED_CHUNK", 8)
    monkeypatch.setattr(chunk_budget, "SEVERAL", 2)
    monkeypatch.setattr(chunk_budget, "BESIDE", 1)
    monkeypatch.setattr(manager, "GAIN", 4)
    monkeypatch.setattr(manager, "INTERVAL", 8)


class Traffic:
    """Sends and aborts at random between turns."""

    def __init__(self, seed: int, drafts: int = 0) -> None:
        self.rng = rng = random.Random(seed)
        page_size = rng.choice([1, 4, 16])
        self.pages = rng.randrange(60, 120) // page_size + 4
        self.places = seed % 4
        self.harness = Harness(
            pages=self.pages,
            page_size=page_size,
            rows=rng.randrange(1, 10),
            drafts=drafts,
            samples=rng.choice([0, 20, 80]) if drafts else 0,
            seed=seed,
            costs=COSTS if seed % 2 else None,
            places=self.places,
            depth=rng.randrange(3),
            sizes=((), (4, 12, 16, 24, 40, 64))[seed // 2 % 2],
            cache=CacheConfig(radix_cache=rng.random() < 0.8, eviction=rng.choice(EVICTIONS)),
            step_tokens=rng.choice([16, 32, 64]),
            itl_target=rng.choice([0, 2, 12]),
            prefill_weight=rng.choice([0.0, 0.2, 32]),
            chunk_costs=CHUNKS,
            checkpoints=(None, 0, 3, 20)[seed // 2 % 4],
            order=POLICIES[seed // 4 % len(POLICIES)],  # in 28 seeds each with every number of places
            prefill_first=rng.random() < 0.3,
            conservativeness=rng.choice([0.01, 0.5, 1.0]),
            preemption_gap=rng.choice([1, 5]),
        )
        self.prompts = prompts(rng, 12)
        self.callers = ["x", "y", "z"][: 1 + seed % 3]
        self.sent: list[Request] = []

    def send(self) -> None:
        rng, prompt = self.rng, self.rng.choice(self.prompts)
        room = self.harness.executor.capabilities.context_length - len(prompt)
        options: dict[str, object] = {}
        if rng.random() < 0.2:
            options["stop_ids"] = frozenset(rng.sample(range(VOCAB), 10))
        if rng.random() < 0.2:
            options["frequency_penalty"] = 0.5
        if rng.random() < 0.2:
            options["prompt_logprobs"] = 0
        if rng.random() < 0.2:
            options["processor"] = "its rows have no drafts"
        adapter = rng.choice(["", *"abcd"]) if self.places else ""
        self.sent.append(
            self.harness.request(
                prompt,
                max_tokens=rng.randrange(0, max(min(room, 40), 1)),
                priority=rng.randrange(8),
                caller=rng.choice(self.callers),
                root=RootKey(adapter=adapter, salt=rng.choice(["", "", "b"])),
                **options,
            )
        )

    def abort(self) -> None:
        if self.sent:
            self.harness.scheduler.abort(self.rng.choice(self.sent))

    def play(self, turns: int) -> None:
        for _ in range(turns):
            if self.rng.random() < 0.5:
                self.send()
            if self.rng.random() < 0.08:
                self.abort()
            if self.rng.random() < 0.02:
                self.harness.scheduler.retract_all()
            self.harness.loads_at_once = self.rng.random() < 0.3
            executor = self.harness.executor
            executor.seconds = self.rng.choice([0.0, 1e-3, 8e-3])
            executor.token_seconds = self.rng.choice([0.0, 1e-4, 3e-3, 1e-2])
            self.harness.turn()
            self.harness.clock.now += self.rng.choice([0.0, PATIENCE])
            self.harness.scheduler.check_integrity()
        self.harness.loads_at_once = True
        self.harness.run()


@pytest.mark.parametrize(
    ("seed", "drafts"), [(seed, drafts) for seed in range(SEEDS) for drafts in (0, (1, 3, 7)[seed % 3])]
)
def test_every_request_ends_and_every_text_is_the_oracles(
    seed: int, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:  # short prompts beside some rows make steps shorter, not many rows
        monkeypatch.setattr(chunk_budget, "BESIDE", 6)
    traffic = Traffic(seed, drafts)
    traffic.play(120)
    h = traffic.harness
    for request in traffic.sent:
        if h.finishes[request.id].reason is FinishReason.ABORT:
            continue
        h.check(request)
        if request.params.prompt_logprobs >= 0:
            positions = [p.start + i for p in request.prompt_logprobs for i in range(len(p.values))]
            wanted = list(range(1, len(request.prompt)))
            assert [p for p in positions if p < len(request.prompt)] == wanted
    assert h.scheduler.running == 0
    assert h.scheduler.cache.available() == traffic.pages
    h.scheduler.cache.flush()
    assert h.scheduler.cache.statistics().free == traffic.pages


def test_the_same_seed_makes_the_same_plans() -> None:
    first, second = Traffic(7), Traffic(7)
    first.play(60)
    second.play(60)

    def trace(traffic: Traffic) -> list[tuple[object, ...]]:
        return [
            (p.step, p.decode_slots.tolist(), [(c.slot, c.start, len(c.tokens)) for c in p.chunks])
            for p in traffic.harness.executor.plans
        ]

    assert trace(first) == trace(second)
