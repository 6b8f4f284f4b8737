"""Data parallelism: engines that have a model each, and which of them takes a job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import compress

from app.engine.job import Job
from app.engine.loop import Engine
from core.config import LoadBalance
from core.errors import EngineFailed, RequestError, field_error
from core.executor import Capabilities
from core.stats import EngineStatistics, Workload
from core.types import Ints

Act = Callable[[Engine], Awaitable[object]]
SLACK = 1 / 8
"""Replicas whose load is above the least by at most this share of it count as equally loaded: under many
requests loads always differ a little, and no prefix should be computed again for that."""


class Replicas:
    """The engines of a server, behind one submitter.

    A job goes to one of them with all its choices. By default that is where most of its prompt is cached,
    as long as the tokens that this saves are not fewer than those that the replica is to do beyond the least
    loaded one (and beyond `SLACK`). It does not wait for a slot there while another has one (`_by_prefix`).

    One loop delivers for all of them, about 100,000 tokens a second: four replicas of a model of 8B on H200s,
    with 512 rows each, nearly fill it.

    When one engine fails, all of them end: a server that answers with a part of its devices would be slow
    for no visible reason.

    Owner: event loop.
    """

    def __init__(self, engines: Sequence[Engine], balance: LoadBalance = "cached-prefix") -> None:
        self.engines = tuple(engines)
        self._balance = balance
        self._turn = 0
        self.failure: str | None = None
        self.hung = False
        """Whether the failure is a device that does not answer: its threads never end."""
        self.on_failure: Callable[[str], None] = lambda reason: None
        for engine in engines:
            engine.on_failure = partial(self._failed, engine)
            engine.share_loop(len(engines))

    def __len__(self) -> int:
        return len(self.engines)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """See `Engine.start`."""
        for engine in self.engines:
            engine.start(loop)

    def close(self) -> None:
        """See `Engine.close`."""
        for engine in self.engines:
            engine.close()

    # -- choice ------------------------------------------------------------------------------------

    def choose(self, job: Job, prompt: Ints) -> Engine:
        """The engine for a job that is about to be queued. Raises `RequestError` where the job names one
        that does not exist."""
        if job.replica is not None:
            if not 0 <= job.replica < len(self.engines):
                raise field_error("data_parallel_rank", f"must be 0 to {len(self) - 1}, got {job.replica}")
            return self.engines[job.replica]
        if len(self.engines) == 1:
            return self.engines[0]
        # Among equals the next in turn, so that cached prefixes spread while the server is idle.
        turn, self._turn = self._turn, (self._turn + 1) % len(self.engines)
        order = [*self.engines[turn:], *self.engines[:turn]]
        loads = [(engine, engine.workload()) for engine in order]
        if self._balance == "cached-prefix" or job.continues:
            return _by_prefix(loads, job, prompt)
        if self._balance == "shortest-queue":
            return min(loads, key=lambda each: each[1].requests)[0]
        if self._balance == "fewest-tokens":
            return min(loads, key=lambda each: each[1].tokens)[0]
        return order[0]

    # -- commands ----------------------------------------------------------------------------------

    async def together(self, act: Act, undo: Act) -> None:
        """Run `act` on all engines at once. If only some refuse, run `undo` on the others, so that all stay
        equal; they end if that is refused too. Raises `RequestError` and `EngineFailed`."""
        refused = await _refusals(self.engines, act)
        if not refused:
            return
        first, error = next(iter(refused.items()))
        others = [engine for engine in self.engines if engine not in refused]
        if not others or not isinstance(error, RequestError):
            raise error
        if lost := await _refusals(others, undo):
            first.fail(f"replicas differ: {error}; the others could not undo it: {next(iter(lost.values()))}")
            raise EngineFailed(self.failure or "")
        number = self.engines.index(first)
        message = f"Replica {number} refused, and on the others it was undone: {error.message}"
        raise RequestError(message, error.param, error.code)

    # -- failure -----------------------------------------------------------------------------------

    def _failed(self, failed: Engine, reason: str) -> None:
        self.failure, self.hung = reason, failed.hung
        self.on_failure(reason)
        for engine in self.engines:
            engine.hung = failed.hung  # the process ends without waiting for any device
            engine.end(reason)

    # -- state -------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the replica with the shortest context, which depends on free memory."""
        return min((engine.capabilities for engine in self.engines), key=lambda each: each.context_length)

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits or is still to be delivered in any of them."""
        return all(engine.idle for engine in self.engines)

    def check_integrity(self) -> None:
        """See `Engine.check_integrity`."""
        for engine in self.engines:
            engine.check_integrity()

    def flush(self) -> bool:
        """Drop all KV that is cached; False, without effect, while requests run in any of them."""
        # Steps in flight do not count: those that ended requests left behind only write, before
        # any later plan reads. A client that has had its last answer may flush at once.
        if any(load.running or load.waiting for load in (engine.load() for engine in self.engines)):
            return False
        for engine in self.engines:
            engine.flush()
        return True

    def statistics(self) -> list[EngineStatistics]:
        """Statistics of each replica."""
        return [engine.statistics() for engine in self.engines]


async def _refusals(engines: Sequence[Engine], act: Act) -> dict[Engine, BaseException]:
    """Run `act` on all engines at once. Returns the errors."""
    answers = await asyncio.gather(*(act(engine) for engine in engines), return_exceptions=True)
    return {
        engine: answer
        for engine, answer in zip(engines, answers, strict=True)
        if isinstance(answer, BaseException)
    }


def _by_prefix(loads: Sequence[tuple[Engine, Workload]], job: Job, prompt: Ints) -> Engine:
    """Choose the least loaded engine, cached tokens subtracted; among equals that with the fewest requests.

    A replica with slots for the job comes before one where the job would wait, unless the latter has cached
    half of the prompt more. If the job would wait on every replica, the queue is the load: the tokens that
    running requests hold do not tell when they end. By those, the replica with younger requests got all jobs.
    """
    ready = [load.free >= job.n for _, load in loads]
    at_once = any(ready)
    tokens = [load.tokens if at_once else load.waiting for _, load in loads]
    least = (1 + SLACK) * min(tokens)
    cached = [engine.cached(job.root, prompt) for engine, _ in loads]
    elsewhere = 0 if all(ready) else max(compress(cached, ready), default=0)
    costs = [
        (
            at_once and not ready[at] and 2 * (cached[at] - elsewhere) < len(prompt),
            max(tokens[at], least) - cached[at],
            load.requests,
            at,
        )
        for at, (_, load) in enumerate(loads)
    ]
    return loads[min(costs)[-1]][0]
