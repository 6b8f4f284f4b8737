"""From a request's jobs to its answer, for every route that generates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from aiohttp import web

from app.engine.job import Generator, Job, Run
from app.http.aside import aside
from app.http.delivery import (
    Collector,
    Delivery,
    Frames,
    IntervalSink,
    logprob_weight,
    prompt_weight,
    running,
)
from app.http.reply import long_response
from app.http.sse import OPENAI, Dialect, EventStream

T = TypeVar("T")


class AnswerSpec(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """The jobs of one request, and the frames that its answer is made of."""

    engine: Generator
    jobs: Sequence[Job]
    frames: Callable[[Sequence[Run]], Frames[T]]
    """Called when all jobs are queued. Raises `RequestError` for limits that depend on prompt lengths."""
    every: int = 1
    """Minimum tokens in an event of a stream."""
    dialect: Dialect = OPENAI
    prompt_logprobs: bool = True
    """Events have the prompt's log-probabilities, if they are requested."""

    @property
    def choices(self) -> int:
        """Number of choices of all jobs."""
        return sum(job.n for job in self.jobs)


async def answer(request: web.Request, spec: AnswerSpec[Any], stream: bool) -> web.StreamResponse:
    """Run the jobs and answer, with events as they come or at once. A client that leaves ends them."""
    if not stream:
        return await long_response(request, await whole_answer(spec))
    delivery = Delivery(spec.choices)
    sink = delivery.take if spec.every == 1 else IntervalSink(delivery.take, spec.every).take
    async with running(spec.engine, spec.jobs, sink) as runs:
        frames = spec.frames(runs)
        weight = prompt_weight(runs) if spec.prompt_logprobs else 0
        # Prompt log-probabilities are complete once choice 0 has begun, not before.
        patient = weight > 0 and spec.jobs[0].n > 1
        async with EventStream(request, dialect=spec.dialect) as events:
            await delivery.run(events, frames, patient, weight)
        return events.response


async def whole_answer(spec: AnswerSpec[T]) -> T:
    """The whole answer, for requests, batches and `app.offline`."""
    collector = Collector(spec.choices)
    async with running(spec.engine, spec.jobs, collector.take) as runs:
        frames = spec.frames(runs)
        pieces = await collector.collect()
        count = prompt_weight(runs) + sum(map(logprob_weight, pieces))
        return await aside(count, partial(frames.whole, pieces))
