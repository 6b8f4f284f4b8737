"""The engine's step loop over a fake device, and its output."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from app.engine.adapters import Adapters
from app.engine.job import Job, Piece
from app.engine.loop import Engine
from app.engine.replicas import Replicas
from app.engine.submit import LiveRun, Submitter
from app.text.tokenizer import Tokenizer
from core.adapters import AdapterInfo
from core.cache.events import CacheEvents
from core.cache.manager import CacheManager
from core.clock import monotonic
from core.config import LoadBalance, ScheduleConfig
from core.executor import Capabilities
from core.request import SamplingParams
from core.schedule.scheduler import Scheduler
from core.types import FinishReason, RootKey
from tests.rigs.executor import FakeExecutor
from tests.rigs.wait import settle

VOCAB = 300
PROMPT = np.asarray([65, 66, 67], np.int32)
GREEDY = SamplingParams(temperature=0.0)


class Bench:
    """Engines over fake executors, one unless `replicas` says more, and the delivered pieces."""

    def __init__(self, tokenizer: Tokenizer, depth: int = 1, eager: bool = True, **options: object) -> None:
        """`adapters` limits adapters, which may lie in `roots`; `balance` chooses replicas. With
        `events` each cache records them."""
        count = int(str(options.pop("replicas", 1)))
        balance: LoadBalance = options.pop("balance", "cached-prefix")  # type: ignore[assignment]
        adapters = options.pop("adapters", None)
        roots = options.pop("roots", ())
        fail_at = int(str(options.pop("fail_at", -1)))
        pages = int(str(options.pop("pages", 129)))
        self.events = [CacheEvents(pages) for _ in range(count if options.pop("events", False) else 0)]
        capabilities = Capabilities(
            num_pages=pages,
            page_size=4,
            max_rows=int(str(options.pop("rows", 8))),
            context_length=512,
            vocab_size=VOCAB,
            max_step_tokens=int(str(options.pop("step_tokens", 2048))),
            max_drafts=int(str(options.pop("drafts", 0))),
            max_samples=100,
            adapters=adapters,  # type: ignore[arg-type]
        )
        self.executors = [FakeExecutor(capabilities, eager=eager, fail_at=fail_at) for _ in range(count)]
        config = ScheduleConfig(**options)  # type: ignore[arg-type]
        caches = [
            CacheManager(pages, 4, events=self.events[n] if self.events else None) for n in range(count)
        ]
        self.schedulers = [Scheduler(capabilities, cache, config, monotonic) for cache in caches]
        self.engines = [
            Engine(scheduler, executor, depth, monotonic)
            for scheduler, executor in zip(self.schedulers, self.executors, strict=True)
        ]
        self.executor, self.scheduler, self.engine = self.executors[0], self.schedulers[0], self.engines[0]
        self.replicas = Replicas(self.engines, balance)
        self.adapters = Adapters(self.replicas, adapters, ("org/tiny", "default"), roots)  # type: ignore[arg-type]
        self.submitter = Submitter(self.replicas, tokenizer, monotonic, adapters=self.adapters)
        self.replicas.start(asyncio.get_running_loop())
        self.pieces: dict[str, list[Piece]] = {}

    async def start(self, id: str, max_tokens: int | None = 8, **job: object) -> LiveRun:
        job = {"prompt": PROMPT, "sampling": GREEDY, "ignore_eos": True, **job}
        request = Job(id=id, max_tokens=max_tokens, **job)  # type: ignore[arg-type]
        run = await self.submitter.start(request, lambda index, piece: self._take(f"{id}-{index}", piece))
        assert isinstance(run, LiveRun)
        return run

    async def complete(self) -> None:
        """Run all submitted steps, and apply their results."""
        for executor in self.executors:
            executor.complete(len(executor.pending))
        await settle()

    async def work(self) -> None:
        """Let the devices work until nothing is left."""
        for _ in range(3000):
            await self.complete()
            if self.replicas.idle:
                break
        self.replicas.check_integrity()
        assert self.replicas.idle and self.replicas.failure is None

    def _take(self, id: str, piece: Piece) -> None:
        seen = self.pieces.setdefault(id, [])
        assert not seen or seen[-1].finish is None, "a piece after the last one"
        seen.append(piece)

    def tokens(self, id: str) -> list[int]:
        return [token for piece in self.pieces[id] for token in piece.tokens]

    def reason(self, id: str) -> FinishReason | None:
        finish = self.pieces[id][-1].finish
        return finish.reason if finish else None


async def load(bench: Bench, root: Path, name: str, pinned: bool = False) -> AdapterInfo:
    """Load the adapter `name` of the directory `root`."""
    return await bench.adapters.load(name, str(root / name), pinned)


def key(info: AdapterInfo) -> RootKey:
    """The root of the cached prefixes of an adapter's requests."""
    return RootKey(adapter=info.id)
