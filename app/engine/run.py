"""A job's requests while they run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from app.engine.job import DraftCounts, Job, Piece, Sink
from app.engine.loop import Engine
from core.plan import PromptLogprobs
from core.request import Request, SamplingParams, State
from core.types import Finish, FinishReason, Floats, Ints


class LiveRun:
    """A job's requests while they run. Owner: event loop."""

    def __init__(self, job: Job, prompt: Ints, params: SamplingParams, engine: Engine, sink: Sink) -> None:
        self.id = job.id
        self.prompt = prompt
        self.params = params
        self.choices = job.n
        self.requests: list[Request] = []
        self.engine = engine
        self.sink = sink
        self.stopped: Finish | None = None
        """See `app.engine.job.Run.stopped`."""
        self._left = job.n
        self._done = asyncio.get_running_loop().create_future()

    def last(self, index: int, piece: Piece) -> None:
        """The sink of each choice's last piece: counts it and passes it on."""
        self._left -= 1
        if self._left == 0 and not self._done.done():
            self._done.set_result(None)
        self.sink(index, piece)

    @property
    def cached(self) -> int:
        """See `app.engine.job.Run.cached`."""
        return self.requests[0].cached

    @property
    def output_tokens(self) -> int:
        """See `app.engine.job.Run.output_tokens`."""
        return sum(len(request.output) for request in self.requests)

    @property
    def first_token_at(self) -> float:
        """See `app.engine.job.Run.first_token_at`."""
        return min((r.first_token_at for r in self.requests if r.first_token_at), default=0.0)

    @property
    def reasoning_tokens(self) -> int:
        """See `app.engine.job.Run.reasoning_tokens`."""
        return 0

    def drafts(self, index: int) -> DraftCounts | None:
        """See `app.engine.job.Run.drafts`."""
        if not self.engine.capabilities.max_drafts:
            return None
        request = self.requests[index]
        counts = request.drafts
        return DraftCounts(counts.steps, counts.drafted, counts.delivered(len(request.output)))

    def request(self, index: int) -> Request:
        """See `app.engine.job.Run.request`."""
        return self.requests[index]

    def finish(self, index: int) -> Finish | None:
        """See `app.engine.job.Run.finish`."""
        return self.requests[index].finish

    def count(self, *states: State) -> int:
        """See `app.engine.job.Run.count`."""
        return sum(request.state in states for request in self.requests)

    def kept(self, seconds: float) -> int:
        """See `app.engine.job.Run.kept`."""
        pinning = self.requests[0].pinning
        if pinning is None:
            return 0
        # Empty where it ended before its prompt was planned.
        marks = zip(pinning.marks, pinning.kept, strict=False)
        return max((tokens for (_, asked), tokens in marks if asked == seconds), default=0)

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        """See `app.engine.job.Run.prompt_logprobs`."""
        return self.requests[0].prompt_logprobs

    def hidden(self, index: int) -> list[Floats]:
        """See `app.engine.job.Run.hidden`."""
        return self.requests[index].hidden

    def hidden_from(self, index: int) -> int:
        """See `app.engine.job.Run.hidden_from`."""
        return len(self.prompt) - 1 if self.params.hidden in ("last", "output") else 0

    def experts(self, index: int) -> list[Ints]:
        """See `app.engine.job.Run.experts`."""
        return self.requests[index].experts

    async def wait(self) -> None:
        await asyncio.shield(self._done)

    def abort(self, message: str | None = None) -> None:
        """End it; with a `message` the client gets an error."""
        self.stopped = self.stopped or Finish(FinishReason.ABORT, message=message)
        for request in self.requests:
            self.engine.abort(request, self.stopped)

    def end(self, index: int) -> None:
        """See `app.engine.job.Run.end`."""
        self.engine.abort(self.requests[index], Finish(FinishReason.ABORT))

    def on_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the last choice has ended."""
        self._done.add_done_callback(lambda _: callback())
