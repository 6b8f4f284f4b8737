"""Metrics of requests and steps for `/metrics`: latencies and token counts as histograms, rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from core.clock import Clock
from core.executor import Capabilities
from core.request import Request
from core.schedule.scheduler import Confirmed
from core.stats import DraftStatistics, EngineStatistics, Histogram, Histograms, SchedulerStatistics
from core.types import FinishReason

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds of latencies, from one fast decode step to the slowest answers."""

STEP_TOKENS = (1.0, *(float(2**n) for n in range(3, 15)))
"""Bounds of the tokens of a step, as vLLM's."""

CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
"""Bounds of the choices of a job, as vLLM's."""

WINDOW = 1.0
"""Seconds that a rate is measured over."""


def token_bounds(context_length: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to the context length, as vLLM's."""
    steps = (digit * 10.0**power for power in range(len(str(context_length))) for digit in (1, 2, 5))
    return tuple(bound for bound in steps if bound <= context_length)


def histograms(context_length: int) -> Histograms:
    """Empty histograms for a model of this context length."""
    times = ("ttft", "inter_token", "end_to_end", "queue", "prefill", "decode", "inference", "per_token")
    counts = ("prompt_tokens", "output_tokens", "max_tokens", "longest")
    bounds = {
        **dict.fromkeys(times, SECONDS),
        **dict.fromkeys(counts, token_bounds(context_length)),
        "choices": CHOICES,
        "step_tokens": STEP_TOKENS,
    }
    return Histograms(**{name: Histogram(each, [0] * (len(each) + 1)) for name, each in bounds.items()})


class Rate(msgspec.Struct):
    """Output tokens and seconds on the device, per second. Owner: event loop.

    A window ends with the first step after `WINDOW` seconds. When none comes, what is read is the mean since
    its start, so that an idle server's rate falls to 0 by itself.
    """

    since: float
    tokens: int = 0
    busy: float = 0.0
    last: tuple[float, float] = (0.0, 0.0)
    """Tokens per second and busy share of the last window that has ended."""

    def add(self, now: float, tokens: int, seconds: float) -> None:
        """Count one step."""
        self.tokens += tokens
        self.busy += seconds
        if now - self.since >= WINDOW:
            self.last = self.read(now)
            self.since, self.tokens, self.busy = now, 0, 0.0

    def read(self, now: float) -> tuple[float, float]:
        """Tokens per second and the busy share."""
        passed = now - self.since
        # Steps overlap in time where several are in flight: their sum may be a little more.
        return (self.tokens / passed, min(self.busy / passed, 1.0)) if passed >= WINDOW else self.last


class Recorder:
    """Collects what `/metrics` shows, per request and per step.

    Owner: event loop. `lag` is set by `Housekeeping`, `stream_interval` by the engine.
    """

    def __init__(self, clock: Clock, capabilities: Capabilities) -> None:
        self._clock = clock
        drafts = capabilities.max_drafts
        self.drafts = DraftStatistics([0] * drafts) if drafts else None
        """None without speculative decoding."""
        self._histograms = histograms(capabilities.context_length)
        self._rate = Rate(clock())
        self._last_step = 0.0
        self._seconds = 0.0
        self._spent = 0.0
        self.finished: Counter[str] = Counter()
        self.lag = 0.0
        self.stream_interval = 1
        self.steps = 0
        self.rows = 0
        """`steps` and `rows` are sums over all steps: two readings of both give the mean rows of a step."""

    def step(self, confirmed: Confirmed, seconds: float) -> None:
        """Record a step that was applied."""
        rows, tokens = confirmed.rows, len(confirmed.tokens)
        self.steps += 1
        self.rows += rows
        now = self._clock()
        self._histograms.step_tokens.add(tokens + confirmed.prompt_tokens)
        self._rate.add(now, tokens, seconds)
        self._last_step = now
        self._seconds = seconds
        self._spent += seconds

    def now(self) -> float:
        """Return the time of the recorder's clock."""
        return self._clock()

    def gaps(self, requests: Mapping[float, int]) -> None:
        """Record inter-token latencies: how many `requests` got tokens so many seconds after their previous
        ones. Tokens of several steps that are delivered together count as one gap, which the client sees."""
        for seconds, count in requests.items():
            self._histograms.inter_token.add(seconds, count)

    def first_token(self, request: Request) -> None:
        """Record that the first token of a request is delivered."""
        request.first_token_at = now = self._clock()
        self._histograms.ttft.add(now - request.arrival)
        self._prompt_read(request, now)

    def _prompt_read(self, request: Request, now: float) -> None:
        self._histograms.queue.add(request.started_at - request.arrival)
        self._histograms.prefill.add(now - request.started_at)

    def ended(self, request: Request) -> None:
        """Record that the last piece of a request is delivered; `output` is what its client got."""
        output, all_ = len(request.output), self._histograms
        request.ended_at = now = self._clock()
        assert request.finish is not None
        self.finished[request.finish.reason.value] += 1
        all_.end_to_end.add(now - request.arrival)
        all_.prompt_tokens.add(len(request.prompt))
        all_.output_tokens.add(output)
        all_.max_tokens.add(request.params.max_tokens)
        if first := request.first_token_at:
            all_.decode.add(now - first)
            all_.inference.add(now - request.started_at)
            if output > 1:
                all_.per_token.add((now - first) / (output - 1))
        elif not request.params.max_tokens and request.finish.reason is FinishReason.LENGTH:
            self._prompt_read(request, now)  # an embedding or a score: its prompt was all there was to run
            all_.inference.add(now - request.started_at)

    def job_ended(self, choices: Sequence[Request]) -> None:
        """Record that the last choice of a job has ended."""
        self._histograms.choices.add(len(choices))
        self._histograms.longest.add(max(len(request.output) for request in choices))

    def statistics(self, scheduler: SchedulerStatistics) -> EngineStatistics:
        """All statistics. The histograms are not copies: they go on growing."""
        output_rate, busy = self._rate.read(self._clock())
        return EngineStatistics(
            scheduler=scheduler,
            last_step_at=self._last_step,
            step_seconds=self._seconds,
            device_seconds=self._spent,
            loop_lag=self.lag,
            finished=dict(self.finished),
            stream_interval=self.stream_interval,
            output_rate=output_rate,
            busy=busy,
            histograms=self._histograms,
            drafts=self.drafts,
        )
