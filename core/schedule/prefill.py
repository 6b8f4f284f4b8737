"""Prompt chunks: continue those under way, then admit waiting requests."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice

from core.cache.hold import Hold
from core.cache.manager import CacheManager, worth_waiting
from core.executor import Capabilities
from core.plan import MOST_SAVES, Chunk
from core.request import Pinning, Request, State
from core.request.params import Hidden
from core.schedule.admission import Admission, hidden_from, owes_logprobs
from core.schedule.builder import PlanBuilder
from core.schedule.callers import SHARED_CHUNK
from core.schedule.chunk_budget import ChunkBudget
from core.schedule.ledger import InFlightStep
from core.schedule.new_token_ratio import NewTokenRatio
from core.schedule.policy import Policy, by_caller, by_priority
from core.schedule.queue import Waiting
from core.schedule.queue_time import QueueTime, tokens_before
from core.schedule.table import SlotTable
from core.types import Floats, Ints

OVERTAKING = 16
"""Waiting requests that are considered for the rest of a step behind a long prompt."""
MATCHED = 32_768
"""Tokens of these requests that are looked up in the tree, in 0.1 ms."""
STARTED = 2**18
"""Prompt tokens, cached ones included, from which on no further prompt starts in a step. A prompt of 100,000
tokens, all of them cached, takes 0.6 ms to plan: without this limit 128 choices of it keep the event loop for
75 ms, with it for 2 to 5."""


Prompt = tuple[Request, Ints]
"""A request, and all tokens that it computes before it decodes."""


class Prefills:
    """Requests whose prompt is not yet planned to its end, and the order in which others are admitted.

    Prompts are computed in the order of the policy. One that is too long for a step gets at least half of it:
    shorter ones behind it, of no lower priority, overtake it if the other half holds all that is left of
    them. None is overtaken for longer than that first one takes: then it is the first itself, and those
    behind it wait for its pages.

    Where the policy is fair, callers with long prompts take turns: one that is under way waits while a caller
    who was served less has another; by priority, while a more important one waits. While callers share the
    device steps are short (`SHARED_CHUNK`), because the step in flight is what each of them waits for.

    A chunk's full pages enter the tree as soon as it is planned: stream order makes them readable for every
    later plan, and for later rows of this one too, because a layer stores the whole step's K and V before
    any row attends. So equal prompts in one step are computed once.

    Owner: event loop.
    """

    def __init__(
        self,
        table: SlotTable,
        cache: CacheManager,
        waiting: Waiting,
        new_token_ratio: NewTokenRatio,
        policy: Policy,
        capabilities: Capabilities,
        budget: ChunkBudget,
    ) -> None:
        self.budget = budget
        self.admission = Admission(
            table, cache, waiting, new_token_ratio, capabilities, urgent=policy is by_priority
        )
        self._whole, self._most = not capabilities.causal, capabilities.max_step_tokens
        self._table = table
        self._cache = cache
        self._waiting = waiting
        self._policy = policy
        self._fair = policy in (by_caller, by_priority)
        self._time = QueueTime()
        self._under_way: list[Prompt] = []

    def __len__(self) -> int:
        return len(self._under_way)

    def check_time(self, requests: list[Request], now: float) -> None:
        """Raise `Overloaded` if these, which have one prompt, could not have their first token when it is
        due. One that waits for nobody is taken: there is no better time for it."""
        if not requests or not requests[0].due:
            return
        first = requests[0]
        line: Counter[str] = Counter()
        for request, tokens in self._under_way:
            line[request.caller] += self._left(request, tokens)
        if self._policy is by_priority:
            for request in chain.from_iterable(self._waiting.lines.values()):
                line[request.caller] += request.to_compute * (request.priority >= first.priority)
        else:
            line.update(self._waiting.prompts)
        first.cached = self.admission.prefix(first).tokens
        turns = self._waiting.callers if self._fair else None
        before = tokens_before(line, first.caller, first.to_compute, turns)
        first.expected = self._time.forecast(before + self._waiting.retracted_tokens)
        seconds, left = self._time.corrected(first.expected), first.due - now
        if seconds > left and (line or self._waiting.retracted):
            self._waiting.refuse(
                "ttft_slo", f"The first token would take about {seconds:.1f} s.", max(seconds - left, 1.0)
            )

    def spend(self, builder: PlanBuilder) -> None:
        """The step was planned."""
        self.budget.spend(builder)
        left = bool(self._under_way or len(self._waiting))
        self._time.planned(builder.now, builder.prompt_tokens, left)

    def learn(self, flight: InFlightStep, seconds: float, now: float) -> None:
        """The result of a step came; the step took the device `seconds`, or 0."""
        self.budget.learn(seconds)
        self._time.came(now)
        for request in flight.rows[flight.decoding :]:
            if request.expected and not request.output:
                self._time.learn(request.expected, request.due - request.arrival, now - request.arrival)

    def remove(self, request: Request) -> None:
        """Forget a request that was aborted or retracted."""
        self._under_way = [(r, t) for r, t in self._under_way if r is not request]

    def plan(self, builder: PlanBuilder) -> list[Request]:
        """Fill the step's room with chunks; returns the requests that decode from the next step on."""
        self.admission.begin(builder.now)
        whole, room = builder.room, self._limited(builder)
        done, remaining = list[Request](), list[Prompt]()
        under_way = deque(self._under_way)
        for request, tokens in self._line(builder, under_way):
            if self._left(request, tokens) > builder.room:
                remaining.append((request, tokens))
                break
            self._chunk(builder, request, tokens)
            builder.room = self.budget.behind(builder, request.to_compute)
            done.append(request)
        least = remaining[0][0].priority if remaining else -math.inf
        others = chain(under_way, self._overtaking(builder, least))
        if not room:
            short = min(self.budget.short_room(builder), whole)
            done, remaining = self._take(builder, chain(remaining, others), short, whole=True)
        elif remaining:
            rest = builder.room + builder.prompt_tokens
            taken, later = self._take(builder, others, builder.room // 2)
            done, remaining = done + taken, remaining + later
            builder.room = rest - builder.prompt_tokens
            self._chunk(builder, *remaining[0])
        self._under_way = remaining
        done = [request for request in done if request.params.max_tokens > 0]
        for request in done:
            request.move(State.DECODE)
        return done

    def _take(
        self, builder: PlanBuilder, prompts: Iterable[Prompt], room: int, whole: bool = False
    ) -> tuple[list[Request], list[Prompt]]:
        """Plan the rest of those that fit `room`; `whole`: if all of them would. Returns these and others."""
        taken, others = list[Request](), list[Prompt]()
        builder.room = room
        for request, tokens in prompts:
            left = self._left(request, tokens)
            if builder.full or (max(left, request.to_compute) if whole else left) > builder.room:
                others.append((request, tokens))
            else:
                self._chunk(builder, request, tokens)
                taken.append(request)
        return taken, others

    def _left(self, request: Request, tokens: Ints) -> int:
        """Tokens of a prompt that are not planned yet."""
        return len(tokens) - int(self._table.least[request.slot])

    def _limited(self, builder: PlanBuilder) -> int:
        """The step's room for prompts, as the budget and other callers limit it."""
        if prompts := len(self._under_way) + len(self._waiting):
            builder.prompts = prompts
            start = int(self._table.least[self._under_way[0][0].slot]) if self._under_way else 0
            whole = sum(request.to_compute for request, _ in self._under_way) + self._waiting.tokens
            builder.room = self.budget.room(builder, start, whole // prompts)
            self._share(builder)
            left = sum(self._left(request, tokens) for request, tokens in self._under_way)
            self.budget.fill_size(builder, left + self._waiting.tokens)
        return builder.room

    def shared(self, now: float) -> bool:
        """Whether callers share the device, in turns."""
        return self._fair and self._waiting.callers.share(now)

    def _share(self, builder: PlanBuilder) -> None:
        """Limit the step, and sort prompts under way, where callers share it. A prompt that must be computed
        in one step is not divided."""
        if self._whole or not self.shared(builder.now):
            return
        callers = self._waiting.lines.keys() | {request.caller for request, _ in self._under_way}
        builder.room = min(builder.room, SHARED_CHUNK * max(len(callers) - 1, 1))
        self._under_way.sort(key=lambda each: self._turn(each[0]))

    def _line(self, builder: PlanBuilder, under_way: deque[Prompt]) -> Iterator[Prompt]:
        """Prompts under way, which are taken from there, then those that are admitted from the queue. One
        whose turn is before that of a prompt under way is admitted first."""
        if self._policy is not by_priority and not (self._fair and self._waiting.callers.several):
            while under_way:
                yield under_way.popleft()
        for request, place in self._startable(builder):
            while under_way and self._turn(under_way[0][0]) <= self._turn(request):
                yield under_way.popleft()
            tokens = self._try_start(builder, request, place)
            if tokens is None:
                break
            yield request, tokens
        while under_way:
            yield under_way.popleft()

    def _turn(self, request: Request) -> tuple[int, float]:
        """Sort key of prompts where callers share the device: the smallest goes first."""
        priority = request.priority if self._policy is by_priority else 0
        return -priority, self._waiting.callers.served(request.caller)

    def must_wait(self, request: Request, left: int, gone: Collection[Request]) -> bool:
        """Whether a waiting request with `left` tokens to compute would get nothing of the next step: prompts
        under way, but for those in `gone`, fill it, and their turn is before. A short one would overtake."""
        turn, under_way = self._turn(request), (each for each in self._under_way if each[0] not in gone)
        before = sum(self._left(*each) for each in under_way if self._turn(each[0]) <= turn)
        return before >= self._most and left > self._most // 2

    def _startable(self, builder: PlanBuilder) -> Iterator[tuple[Request, int]]:
        """Waiting requests with the places of their adapters, until the first that does not fit: overtaking
        would starve it. A retracted request that still waits for in-flight tokens stops admission too: its
        pages are not for those behind it. One whose adapter has no place yet is overtaken."""
        if builder.room <= 0 or not self._table.free or not len(self._waiting):
            return
        started = 0
        for request in self._policy(self._waiting):
            if builder.room <= 0 or not self._table.free or request.state is State.RETRACTED:
                return
            place = self.admission.places.find(request)
            if place is not None:
                if started >= STARTED:
                    return
                started += request.num_tokens
                yield request, place

    def _overtaking(self, builder: PlanBuilder, least: float) -> Iterator[Prompt]:
        """Admit waiting requests of at least priority `least` whose whole prompts fit, while there are pages:
        none while a preempted one waits for its own. Without a `least` one that does not fit keeps a slot."""
        matched, kept = 0, False
        candidates = () if builder.full else islice(self._policy(self._waiting), OVERTAKING)
        for request in candidates:
            matched += request.num_tokens
            if builder.full or self._table.free <= kept or request.retractions or matched > MATCHED:
                return
            place = self.admission.places.find(request)
            if place is None or request.priority < least:
                continue
            match = self.admission.match(request)
            if request.num_tokens - match.tokens > builder.room or worth_waiting(match):
                kept = least == -math.inf
            elif self.admission.try_reserve(builder, request, place, match):
                yield request, request.tokens()
            else:
                return

    def _try_start(self, builder: PlanBuilder, request: Request, place: int) -> Ints | None:
        """Give the request its pages and slot, or leave everything as it is and return None. `place` is that
        of its adapter."""
        match = self.admission.match(request)
        if self._fits(request.num_tokens - match.tokens, builder.room) == 0 or worth_waiting(match):
            return None
        return request.tokens() if self.admission.try_reserve(builder, request, place, match) else None

    def _fits(self, wanted: int, room: int) -> int:
        """Tokens of a chunk: all `wanted`, or as many whole pages as fit. If less than a page fits it is used
        as it is: waiting for more could wait for ever."""
        if wanted <= room:
            return wanted
        if self._whole:
            return 0
        page = self._cache.page_size
        return room // page * page or room

    def _chunk(self, builder: PlanBuilder, request: Request, tokens: Ints) -> None:
        """Plan the next run of the prompt."""
        table, slot = self._table, request.slot
        start = int(table.least[slot])
        n = self._fits(len(tokens) - start, builder.room)
        if n == 0:
            return
        end = start + n
        last = end == len(tokens)
        known = end - 1 if last else end  # the last position whose target this chunk can see
        wants = owes_logprobs(request) and known >= max(request.logprobs_from, start + 1)
        hidden_start = hidden_from(request)
        builder.chunk(
            request,
            Chunk(
                slot=slot,
                start=start,
                tokens=tokens[start:end],
                samples=last and request.params.max_tokens > 0,
                logprobs=request.params.prompt_logprobs if wants else -1,
                logprobs_start=request.logprobs_from,
                target=-1 if last else int(tokens[end]),
                hidden=_hidden(request, start, end, hidden_start, last),
                hidden_start=hidden_start,
                pair=request.params.pair,
                logprob_ids=request.params.prompt_logprob_ids if wants else (),
                experts=request.params.experts_from >= 0 and end > hidden_start,
                embeds=_embeds(request, start, end),
            ),
        )
        request.hidden_from = max(hidden_start, end)
        if wants:
            request.logprobs_from = known + 1
        request.history.append((builder.now, "chunk", n))
        self._waiting.callers.prompt(request, n)
        table.least[slot] = table.most[slot] = end
        self.admission.spare.advance(request, start, end)
        assert request.hold is not None
        self._cache.commit(request.hold, request.root, tokens[:end], request.priority)
        self._save(builder, request.hold, slot, range(start + 1, end + 1))
        if last and request.pinning is not None:
            self._pin(request.hold, request.pinning, builder.now)

    def _save(self, builder: PlanBuilder, hold: Hold, slot: int, passed: range) -> None:
        """Keep the states of linear attention at the marks that a chunk passes."""
        for mark in [mark for mark in hold.marks if mark in passed][-MOST_SAVES:]:
            builder.save(slot, mark, self._cache.save(hold, mark))

    def _pin(self, hold: Hold, pinning: Pinning, now: float) -> None:
        """The whole prompt is in the tree now: pin the prefixes that its client marked."""
        pinning.kept = tuple(
            self._cache.pin(hold, pinning.owner, tokens, seconds, now) for tokens, seconds in pinning.marks
        )


def _embeds(request: Request, start: int, end: int) -> Floats | None:
    """Embeddings of the first tokens of the chunk `start` ... `end`, or None."""
    if request.embeds is None or start >= len(request.embeds):
        return None
    return request.embeds[start:end]


def _hidden(request: Request, start: int, end: int, owed: int, last: bool) -> Hidden:
    """The hidden states that a chunk has to return of those that were requested. Once there is output, those
    of the prompt alone were returned before: a preempted request computes it again."""
    match asked := request.params.hidden:
        case "last":
            due = last and not request.output
        case "output":
            return "last" if last else "none"
        case "sum":
            due = end > owed and not request.output
        case "first":
            due = start == owed == 0
        case _:
            due = end > owed
    return asked if due else "none"
