"""Admission: gives a waiting request a slot, pages, and a place for its adapter."""

from __future__ import annotations

from collections.abc import Collection

from core.cache.manager import CacheManager, Match
from core.cache.radix import Prefix
from core.executor import Capabilities
from core.plan import NewSlot
from core.request import Request, State
from core.request.params import OF_CACHED
from core.schedule.adapters import Places
from core.schedule.builder import PlanBuilder
from core.schedule.new_token_ratio import NewTokenRatio
from core.schedule.queue import Waiting
from core.schedule.spare_pages import SparePages
from core.schedule.table import SlotTable


class Admission:
    """Gives waiting requests what they need, or tells whether they could have it.

    Owner: event loop.
    """

    def __init__(
        self,
        table: SlotTable,
        cache: CacheManager,
        waiting: Waiting,
        new_token_ratio: NewTokenRatio,
        capabilities: Capabilities,
        urgent: bool,
    ) -> None:
        """`urgent`: a request of higher priority takes the place of another's adapter."""
        self._table = table
        self._cache = cache
        self._waiting = waiting
        limits = capabilities.adapters
        self.places = Places(0 if limits is None else limits.places, urgent=urgent)
        self.spare = SparePages(table, new_token_ratio, cache.page_size)
        self.admitted: list[Request] = []
        """Requests that the last step admitted."""

    def begin(self, now: float) -> None:
        """Begin the planning of another step."""
        self.spare.begin()
        self.admitted = []
        if self._waiting.adapters:
            self.places.assign(self._waiting.adapters, now)

    def prefix(self, request: Request) -> Prefix:
        """The cached prefix of a request's prompt."""
        tokens = request.tokens()
        return self._cache.peek(request.root, tokens, _match_limit(request, len(tokens)))

    def match(self, request: Request) -> Match:
        """The cached prefix as `try_reserve` takes it."""
        tokens = request.tokens()
        return self._cache.match(request.root, tokens, _match_limit(request, len(tokens)))

    def would_fit(self, request: Request, prefix: Prefix, gone: Collection[Request] = ()) -> bool:
        """Whether there would be a slot and pages for `request`, of which `prefix` is cached, without the
        requests in `gone`."""
        if not self._table.free and not gone:
            return False
        holds = [r.hold for r in gone if r.hold is not None]
        return self._cache.would_fit(prefix, request.num_tokens, self.spare.pages(request, gone), holds)

    def try_reserve(self, builder: PlanBuilder, request: Request, place: int, match: Match) -> bool:
        """Give the request, whose cached prefix is `match`, its pages and slot, and return True; or leave
        everything as it is. `place` is that of its adapter."""
        tokens = request.tokens()
        hold = self._cache.try_reserve(match, len(tokens), self.spare.pages(request))
        if hold is None:
            return False
        self._waiting.remove(request)
        request.move(State.PREFILL)
        request.since = builder.now
        request.history.append((builder.now, "admitted", match.tokens))
        request.hold = hold
        slot = self._table.take(request, match.tokens, len(hold.pages) * self._cache.page_size)
        self.spare.add(request, match.tokens)
        self.places.enter(request.root.adapter)
        if request.started_at == 0.0:
            request.started_at = builder.now
            request.cached = match.tokens
        builder.new_slot(
            NewSlot(
                slot=slot,
                params=request.params,
                prompt=request.prompt,
                output=tokens[len(request.prompt) :],
                cached=match.tokens,
                grammar=request.grammar,
                embedded=request.embedded,
                limit=request.limit,
                drafts=bool(self._table.drafting[slot]),
                namespace=request.root.namespace(),
                place=place,
                checkpoint=match.checkpoint,
            ),
            hold.pages,
        )
        self.admitted.append(request)
        return True


def _match_limit(request: Request, tokens: int) -> int:
    """Tokens that may come from the cache: at least one must be computed, and every one whose logits, hidden
    state or experts were requested."""
    limit = tokens - 1
    if owes_logprobs(request):
        limit = max(request.logprobs_from - 1, 0)
    if request.params.hidden not in OF_CACHED or request.params.experts_from >= 0:
        limit = min(limit, hidden_from(request))
    return limit


def owes_logprobs(request: Request) -> bool:
    """Whether log-probabilities of its prompt are still to be reported."""
    return request.params.prompt_logprobs >= 0 and request.logprobs_from < len(request.prompt)


def hidden_from(request: Request) -> int:
    """First position whose hidden state or experts are still to be reported: once there is output, that of
    its last token."""
    return request.num_tokens - 1 if request.output else request.hidden_from
