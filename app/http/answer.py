"""One way from a request's jobs to its answer, for every route that generates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from aiohttp import web

from app.engine.job import Generator, Job, Run
from app.http.aside import aside
from app.http.delivery import Collector, Delivery, Frames, prompt_weight, running, spaced
from app.http.reply import long_response
from app.http.sse import OPENAI, Dialect, EventStream

T = TypeVar("T")


class AnswerSpec(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """What to run for one request, and who puts the answer into words."""

    engine: Generator
    jobs: Sequence[Job]
    frames: Callable[[Sequence[Run]], Frames[T]]
    """Called when all jobs are queued. Raises `RequestError` for limits that depend on prompt lengths."""
    every: int = 1
    """Tokens that an event of a stream tells at least."""
    dialect: Dialect = OPENAI
    tells_prompt: bool = True
    """Events tell the prompt's log-probabilities, where they are asked for."""

    @property
    def choices(self) -> int:
        """Of all jobs."""
        return sum(job.n for job in self.jobs)


async def answer(request: web.Request, spec: AnswerSpec[Any], stream: bool) -> web.StreamResponse:
    """Run the jobs and answer, with events as they come or at once. A client that leaves ends them."""
    if not stream:
        return await long_response(request, await whole_answer(spec))
    delivery = Delivery(spec.choices)
    sink = spaced(delivery.take, spec.every)
    async with running(spec.engine, spec.jobs, sink) as runs:
        frames = spec.frames(runs)
        weight = prompt_weight(runs) if spec.tells_prompt else 0
        # Prompt log-probabilities are complete once choice 0 has begun, not before.
        patient = weight > 0 and spec.jobs[0].n > 1
        async with EventStream(request, dialect=spec.dialect) as events:
            await delivery.run(events, frames, patient, weight)
        return events.response


async def whole_answer(spec: AnswerSpec[T]) -> T:
    """The whole answer, for whoever asks: a request, a line of a batch, `app.offline`."""
    collector = Collector(spec.choices)
    async with running(spec.engine, spec.jobs, collector.take) as runs:
        frames = spec.frames(runs)
        pieces = await collector.collect()
        # Log-probabilities take about 6 us a token.
        count = prompt_weight(runs) + sum(len(piece.logprobs or ()) for piece in pieces)
        return await aside(count, partial(frames.whole, pieces))
