"""The scheduler: `plan`, `apply`, `abort`."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from core.cache.manager import CacheManager
from core.clock import Clock
from core.config import ScheduleConfig
from core.errors import ContextExceeded, RequestError, Unavailable
from core.executor import Capabilities
from core.plan import RowLogprobs, StepPlan, StepResult
from core.request import Request, State
from core.schedule.adapters import Places
from core.schedule.builder import PlanBuilder
from core.schedule.chunk_budget import ChunkBudget
from core.schedule.counters import Counters
from core.schedule.decode import DecodeRows
from core.schedule.ledger import Arrived, InFlightStep, arrive, by_request, renumbered
from core.schedule.new_token_ratio import NewTokenRatio
from core.schedule.policy import schedule_policy
from core.schedule.preempt import preempted
from core.schedule.prefill import Prefills
from core.schedule.queue import Waiting
from core.schedule.speculation import DraftBudget
from core.schedule.table import SlotTable
from core.stats import SchedulerStatistics, Workload
from core.types import NAN_TOKEN, Finish, FinishReason

ABORTED = Finish(FinishReason.ABORT)
TOO_LONG_WAITING = Finish(FinishReason.ABORT, message="The request waited too long.")
TOO_LONG_RUNNING = Finish(FinishReason.ABORT, message="The request ran too long.")
NOT_FINITE = "The model produced values that are not finite."

SHORT_STEP = 1.5e-3
"""Seconds of a step on a GPU below which an overlap depth of 1 means 2. From a result to the launch of the
step planned behind it the host takes about half a millisecond, and the GPU waits for it if the step in
between is shorter: with a simulated device of 0.5 ms and one client a step took 0.65 ms, now 0.57. Longer
steps hide the host, and there a deeper queue would only delay new requests."""
LONG_STEP = 10e-3
"""Seconds of a step from which on, while callers share the device, none is planned behind one with prompts: a
prompt of another caller would wait for both. The host's half millisecond is 5% of it at most."""


class Confirmed(NamedTuple):
    """The outcome of one result: aligned lists of requests and new tokens in row order, a request once for
    each of its tokens.

    `ends` maps an index in both to the finish that the token caused, which is the last of its request,
    `logprobs` to the log-probabilities that its request asked for. The tokens belong to `rows` requests;
    the step also computed `prompt_tokens`.
    `finished` are requests that ended without a token in this step.
    """

    requests: list[Request]
    tokens: list[int]
    ends: dict[int, Finish]
    logprobs: dict[int, RowLogprobs]
    finished: list[Request]
    rows: int = 0
    prompt_tokens: int = 0


class Scheduler:
    """Decides every step.

    The order on the loop is apply, plan, submit: `plan` may be called while earlier steps are in
    flight, and counts for each of their rows the least and the most tokens that it may grow by; `apply`
    replaces both by what came. Requests that `plan` or `abort` end are handed out by `take_finished`.

    Owner: event loop.
    """

    def __init__(
        self, capabilities: Capabilities, cache: CacheManager, config: ScheduleConfig, clock: Clock
    ) -> None:
        self.cache = cache
        self.counters = Counters()
        self._capabilities = capabilities
        self._config = config
        self._clock = clock
        self._waiting = Waiting(config.max_queued, config.max_queued_tokens)
        self._table = SlotTable(capabilities.max_rows, capabilities.max_drafts, capabilities.masked_drafts)
        self._new_token_ratio = NewTokenRatio(config.conservativeness)
        self._flights: deque[InFlightStep] = deque()  # executors answer in the order of submission
        self._budget = DraftBudget(capabilities)
        self._decodes = DecodeRows(self._table, cache, self._new_token_ratio, self._budget, self.retract)
        self._prefills = Prefills(
            self._table,
            cache,
            self._waiting,
            self._new_token_ratio,
            schedule_policy(config.order, cache),
            capabilities,
            ChunkBudget(config, capabilities),
        )
        self._draining: list[Request] = []
        self._finished: list[Request] = []
        self._stop_counts = np.zeros(capabilities.vocab_size, np.int32)
        self._step_seconds = 0.0

    # -- requests in and out ---------------------------------------------------------------------

    def add(self, requests: list[Request]) -> None:
        """Queue all `requests`, or raise (`RequestError`, `Overloaded`, `Unavailable`) and queue none."""
        for request in requests:
            _check(request, self._capabilities)
            if 0 < self._config.running_timeout < request.ran:
                raise Unavailable(str(TOO_LONG_RUNNING.message))
        self._waiting.check_room(requests)
        now = self._clock()
        self._prefills.check_time(requests, now)
        for request in requests:
            self._waiting.append(request, now)

    def finish(self, request: Request, finish: Finish) -> None:
        """End a request in any state; its pages and slot are free for the next plan.

        Tokens still in flight for it are dropped. Nothing happens when it has ended already.
        """
        if request.state is State.FINISHED:
            return
        if request.hold is None:
            self._leave_queue(request)
        else:
            self._leave_rows(request)
            self._release_pages(request, over=True)
            self._release_slot(request)
        request.move(State.FINISHED)
        request.finish = finish
        self._waiting.callers.leave(request.caller, self._clock())

    def abort(self, request: Request, finish: Finish = ABORTED) -> None:
        """End a request whose client has left or whose time is over."""
        if request.state is not State.FINISHED:
            self.finish(request, finish)
            self._finished.append(request)

    def take_finished(self) -> list[Request]:
        """Requests that ended outside `apply` since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def retract(self, request: Request) -> None:
        """Send a running request back to the queue. Its pages are free at once, its slot when its in-flight
        tokens have arrived: they count, and may even end it."""
        self._retract([request])

    def retract_all(self) -> None:
        """Send every running request back to the queue."""
        self._retract(list(self._table.running()))

    def _retract(self, requests: list[Request]) -> None:
        now = self._clock()
        for request in requests:
            self._leave_rows(request)
            self._release_pages(request, over=False)
            self._table.retract(request)
            request.retract(now)
        self.counters.retractions += len(requests)
        self._draining += requests
        self._waiting.put_back(requests, now)
        self._end_drains()

    # -- the step --------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to run."""
        now = self._clock()
        self.expire(now)
        self.cache.next_step()
        if self._config.order == "priority" and not self._draining:
            self._preempt()
        limits = self._capabilities
        grant, samples = self._budget.without_rows(), self._decode_samples()
        builder = PlanBuilder(limits.max_step_tokens, samples, now, grant, limits.max_chunks)
        if self._config.prefill_first:
            self._plan_prefills(builder)
            if not builder:
                self._decodes.plan(builder)
        else:
            self._decodes.plan(builder)
            self._plan_prefills(builder)
        if not builder:
            if not self.running:
                self._new_token_ratio.idle()
            return None
        plan, flight = builder.build(self.counters.steps, self._table)
        self.counters.steps += 1
        self._flights.append(flight)
        self._budget.spend(flight.grant, flight.decoding, flight.prompts)
        self._prefills.spend(builder)
        return plan

    def _decode_samples(self) -> int:
        """Rows of logits for the decode rows of the next step: one is left for each prompt that may end in
        it. There is one for every decode row, since each row and each prompt has a slot."""
        prompts = len(self._prefills) + min(len(self._waiting), self._table.free)
        return max(self._capabilities.max_samples, self._capabilities.max_rows) - prompts

    def expire(self, now: float | None = None) -> None:
        """End pins and requests whose time is over, at `now` or by the clock. `plan` does so first; while no
        step is planned, the caller has to."""
        now = self._clock() if now is None else now
        self.cache.expire(now)
        limits = self._config
        if limits.waiting_timeout:
            for request in self._waiting.late(now - limits.waiting_timeout):
                self.abort(request, TOO_LONG_WAITING)
        if limits.running_timeout:
            for request in list(self._table.running()):
                if request.ran + now - request.since > limits.running_timeout:
                    self.abort(request, TOO_LONG_RUNNING)

    def _plan_prefills(self, builder: PlanBuilder) -> None:
        self._decodes.add(self._prefills.plan(builder))
        for request in self._prefills.admission.admitted:
            for token in request.params.stop_ids:
                self._stop_counts[token] += 1
            if not request.retractions:
                self.counters.prompt_tokens += len(request.prompt)
                self.counters.cached_tokens += request.cached

    def may_plan(self, depth: int) -> bool:
        """Whether another step may be planned at this overlap depth; 1 is 2 for steps below `SHORT_STEP`, and
        0 behind `LONG_STEP` with prompts where callers share the device."""
        if self._step_seconds >= LONG_STEP and self._flights and self._flights[-1].prompts:
            depth = 0 if self._prefills.shared(self._clock()) else depth
        short = 0.0 < self._step_seconds < SHORT_STEP and self._capabilities.device != "cpu"
        return self.in_flight <= (2 if depth == 1 and short else depth)

    def apply(self, result: StepResult) -> Confirmed:
        """Apply one step's result. Raises for another than the first in flight: a broken executor."""
        flight, table = self._flights.popleft(), self._table
        self._step_seconds = result.seconds
        if flight.step != result.step:
            raise RuntimeError(f"step {result.step} was answered before step {flight.step}")
        self.places.applied = result.step + 1
        now = self._clock()
        busy_at = now if self._flights else 0.0
        self._budget.learn(flight.grant, flight.decoding, flight.prompts, result, busy_at)
        self._prefills.learn(flight, result.seconds, now)
        # Before the rows: a token that ends its request frees the slot the prompt's answer names.
        hidden = by_request(flight, result.hidden, table)
        experts = by_request(flight, result.experts, table)
        for request, logprobs in by_request(flight, result.prompt_logprobs, table):
            request.prompt_logprobs.append(logprobs)
        finished = self._apply_chunks(flight)
        arrived = arrive(flight, result, table)
        tokens = arrived.tokens.tolist()
        self._waiting.callers.output(arrived.requests)
        for request, token in zip(arrived.requests, tokens, strict=True):
            request.output.append(token)
        ends, cut = self._end_rows(arrived, tokens)
        over: Mapping[Request, int] = Counter(arrived.requests[at] for at in cut) if cut else {}
        for request, states in hidden:
            request.hidden.append(states[: len(states) - over.get(request, 0)])
        for request, chosen in experts:
            request.experts.append(chosen[: len(chosen) - over.get(request, 0)])
        if cut:
            keep = [at for at in range(len(tokens)) if at not in cut]
            arrived, ends = arrived.kept(keep), renumbered(ends, keep)
            tokens = arrived.tokens.tolist()
        requests = arrived.requests
        rows = len(requests) if not flight.grant.drafts else len(set(requests))
        self.counters.output_tokens += len(tokens)
        self._end_drains()
        return Confirmed(requests, tokens, ends, arrived.logprobs, finished, rows, flight.prompts)

    def _end_rows(self, arrived: Arrived, tokens: list[int]) -> tuple[dict[int, Finish], set[int]]:
        """Requests that end, by the index of the token that ends them, and the indices of the tokens behind
        those."""
        table, slots = self._table, arrived.slots
        # One look-up over all tokens finds the few that may end a request; -1 (a row without finite
        # logits) reads the last entry, and is caught by its own sign.
        suspects = table.made[slots] >= table.max_tokens[slots]
        suspects |= (self._stop_counts[arrived.tokens] > 0) | (arrived.tokens < 0)
        ends: dict[int, Finish] = {}
        cut: set[int] = set()
        for at in np.flatnonzero(suspects).tolist() if suspects.any() else ():
            if at in cut:
                continue
            request, last = arrived.requests[at], arrived.last(at)
            made = len(request.output) - (last - at)
            finish = _finish(request, tokens[at], made, arrived.failed.get(at, NOT_FINITE))
            if finish is not None:
                del request.output[made - (tokens[at] == NAN_TOKEN) :]
                ends[at] = finish
                cut.update(range(at + 1, last + 1))
                self.finish(request, finish)
        return ends, cut

    def _apply_chunks(self, flight: InFlightStep) -> list[Request]:
        """End requests without output whose prompt is complete; returns them."""
        finished: list[Request] = []
        for request, slot, epoch, ends in flight.chunks:
            if self._table.epoch[slot] != epoch:
                continue
            self._table.in_flight[slot] -= 1
            if ends:
                self.finish(request, Finish(FinishReason.LENGTH))
                finished.append(request)
        return finished

    # -- leaving -----------------------------------------------------------------------------------

    def _leave_queue(self, request: Request) -> None:
        self._waiting.remove(request)
        if request.state is State.RETRACTED:
            self._draining.remove(request)
            self._release_slot(request)
        if request.root.own and request.retractions:
            self.cache.forget(request.root, request.tokens())

    def _leave_rows(self, request: Request) -> None:
        if request.state is State.PREFILL:
            self._prefills.remove(request)
        else:
            self._decodes.remove(request)

    def _release_slot(self, request: Request) -> None:
        for token in request.params.stop_ids:
            self._stop_counts[token] -= 1
        self._table.release(request)
        self.places.leave(request.root.adapter, self.counters.steps)

    def _release_pages(self, request: Request, over: bool) -> None:
        """Commit the request's tokens to the tree and free the rest, or free all if nobody can match them
        again. Steps in flight may still write into these pages; every plan that can read or reuse them comes
        after in stream order."""
        assert request.hold is not None
        if over and request.root.own:
            self.cache.discard(request.hold)
        else:
            written = request.tokens()[: self._table.written(request)]
            self.cache.release(request.hold, request.root, written, request.priority)
        request.hold = None

    def _end_drains(self) -> None:
        """Make retracted requests whose in-flight tokens have all arrived ready to start again."""
        for request in list(self._draining):
            if self._table.in_flight[request.slot] == 0:
                self._draining.remove(request)
                self._release_slot(request)
                request.move(State.WAITING)

    def _preempt(self) -> None:
        gap = self._config.preemption_gap
        self._retract(preempted(self._waiting, self._table.running(), gap, self._prefills))

    # -- state -------------------------------------------------------------------------------------

    @property
    def places(self) -> Places:
        """The places of adapters on the device."""
        return self._prefills.admission.places

    def requests(self) -> list[Request]:
        """All requests, running ones first."""
        return list(self._table.running()) + list(self._waiting)

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return self._capabilities.max_rows - self._table.free

    @property
    def in_flight(self) -> int:
        """Steps submitted and not applied."""
        return len(self._flights)

    @property
    def idle(self) -> bool:
        return not (self.running or len(self._waiting) or self.in_flight)

    def workload(self) -> Workload:
        """Return the load, for the choice of a replica."""
        slots, queued, waiting = self._table.free, len(self._waiting), self._waiting.tokens
        size, available = self.cache.page_size, self.cache.available()
        free = max(slots - queued, 0) if waiting <= available * size else 0
        used = (self.cache.total - available) * size
        return Workload(self._capabilities.max_rows - slots + queued, waiting, waiting + used, free)

    def statistics(self) -> SchedulerStatistics:
        self.cache.expire(self._clock())  # pins end without a step too
        return SchedulerStatistics(
            waiting=len(self._waiting),
            waiting_tokens=self._waiting.tokens,
            retracted=len(self._waiting.retracted),
            running=self.running,
            in_flight=self.in_flight,
            steps=self.counters.steps,
            prompt_tokens=self.counters.prompt_tokens,
            cached_tokens=self.counters.cached_tokens,
            output_tokens=self.counters.output_tokens,
            retractions=self.counters.retractions,
            refused=dict(self._waiting.refused),
            running_adapters=self.places.running,
            waiting_adapters=list(self._waiting.adapters),
            cache=self.cache.statistics(),
        )

    def check_integrity(self) -> None:
        """Raise unless pages, slots, rows and holds agree. Slow: for tests and idle moments."""
        holders = [r for r in self._table.requests if r is not None]
        self.cache.check_integrity([r.hold for r in holders if r.hold is not None])
        self._decodes.check()
        self.places.check(holders)
        for request in holders:
            if (request.hold is None) != (request.state is State.RETRACTED):
                raise RuntimeError(f"request {request.id} in {request.state} and its pages disagree")
        if self.idle and self._stop_counts.any():
            raise RuntimeError("stop ids are counted for requests that are gone")


def _finish(request: Request, token: int, made: int, failure: str) -> Finish | None:
    """The finish that `token`, the `made`th of the request's output, causes. Stop ids do not count before
    min_tokens, except under a grammar: there they were sampled only because it is complete and allows nothing
    else."""
    if token == NAN_TOKEN:
        return Finish(FinishReason.ERROR, message=failure)
    may_stop = made > request.params.min_tokens or request.grammar is not None
    if may_stop and token in request.params.stop_ids:
        return Finish(FinishReason.STOP, token)
    return Finish(FinishReason.LENGTH) if made >= request.params.max_tokens else None


def _check(request: Request, capabilities: Capabilities) -> None:
    """Raise `RequestError` if the request could not run even alone."""
    context, step = capabilities.context_length, capabilities.max_step_tokens
    limit = context if capabilities.causal else min(context, step)
    if len(request.prompt) == 0:
        raise RequestError("The prompt must have at least one token.", "prompt")
    if len(request.prompt) + request.params.max_tokens > limit:
        raise ContextExceeded(limit, len(request.prompt), request.params.max_tokens)
