"""Schedule policies: which waiting request is admitted first.

A policy ranks some of the requests at the head of the queue; it adds none, drops none and changes nothing.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import chain
from math import inf
from operator import attrgetter

from core.cache.manager import CacheManager
from core.cache.node import RadixNode
from core.cache.radix import Prefix
from core.config import SchedulePolicy
from core.request import Request
from core.schedule.queue import Waiting

HEAD = 128
"""Requests that are ranked, the oldest; those behind them go by arrival. It bounds the work of a step
(SGLang ranks none at all when more than so many wait)."""

OVERTAKEN = 128
"""Later arrivals that a policy may put before a request, and those of one step: then it goes by arrival."""

LOOK = 32_768
"""Tokens of prompts that are looked up in the tree for one step, about 0.1 ms. Where more is due, what was
found before serves until the next step."""

LONGEST = 16_384
"""Tokens of a prompt that are looked up: among longer prefixes it matters little which is the longest."""

SHUFFLE_SEED = 0

Policy = Callable[[Waiting], Iterable[Request]]
Rank = Callable[[Request], float]
"""Sort key of a request: the smallest goes first."""
Ranking = Callable[[list[Request]], Rank]


def schedule_policy(name: SchedulePolicy, cache: CacheManager) -> Policy:
    """The policy of that name, for requests whose prefixes are looked up in `cache`."""
    prefixes = Prefixes(cache)
    policies: dict[SchedulePolicy, Policy] = {
        "fair": by_caller,
        "fcfs": list,
        "priority": by_priority,
        "lof": ranked(longest_output),
        "random": ranked(shuffled(random.Random(SHUFFLE_SEED))),
        "lpm": ranked(longest_prefix(prefixes)),
        "dfs-weight": ranked(heaviest_subtree(prefixes)),
    }
    return policies[name]


def by_caller(waiting: Waiting) -> Iterable[Request]:
    """First those of the caller who was served least, each caller's in order of arrival. Nobody starves: the
    counter of who waits stands still, those of the others grow."""
    return list(waiting) if len(waiting.lines) < 2 else _in_turn(waiting, lambda request: 0)


def by_priority(waiting: Waiting) -> Iterable[Request]:
    """Highest priority first, those of equal priority by caller."""
    if len(waiting.lines) < 2:
        return sorted(waiting, key=attrgetter("priority"), reverse=True)
    return _in_turn(waiting, lambda request: -request.priority)


def _in_turn(waiting: Waiting, rank: Rank) -> Iterator[Request]:
    """Yield requests by rank, the lowest first. Of equal rank, requests that ran before or that continue an
    answer come first, then those of the caller who was served least, counting what was planned since the
    previous request was taken from here. With n callers each request takes O(log n)."""
    heap: list[tuple[float, float, int, Request, Iterator[Request]]] = []

    def push(line: Iterator[Request]) -> None:
        request = next(line, None)
        if request is not None:
            first = request.retractions or request.continues
            served = -inf if first else waiting.callers.served(request.caller)
            heappush(heap, (rank(request), served, request.number, request, line))

    for requests in chain([waiting.retracted], waiting.lines.values()):
        push(iter(sorted(requests, key=rank)))
    while heap:
        *_, request, line = heappop(heap)
        yield request
        push(line)


def ranked(ranking: Ranking) -> Policy:
    """Order requests by rank, but put those that ran already and those that have been overtaken often enough
    first, in queue order."""

    def policy(waiting: Waiting) -> list[Request]:
        line, overdue = list(waiting), waiting.overdue(OVERTAKEN)
        head = line[overdue : overdue + HEAD]
        return line[:overdue] + sorted(head, key=ranking(head)) + line[overdue + HEAD :]

    return policy


def longest_output(_: list[Request]) -> Rank:
    """Longest output first: long answers overlap with everything that follows."""
    return lambda request: -request.params.max_tokens


def shuffled(rng: random.Random) -> Ranking:
    """A ranking in any order, from a seeded generator."""

    def ranking(head: list[Request]) -> Rank:
        return {request: rng.random() for request in head}.__getitem__

    return ranking


class Prefixes:
    """The cached prefixes of waiting prompts; each is looked up again when the tree has changed where
    its prefix ends.

    Owner: event loop.
    """

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._found: dict[Request, Prefix] = {}

    def of(self, requests: list[Request]) -> dict[Request, Prefix]:
        """The prefix of each, but of those for which `LOOK` left no time yet. Requests that are not among
        `requests` are forgotten."""
        cache, before = self._cache, self._found
        found: dict[Request, Prefix] = {}
        left = LOOK
        for request in requests:
            prefix = before.get(request)
            if left > 0 and (prefix is None or not cache.is_current(prefix)):
                length = min(len(request.prompt) - 1, LONGEST)
                prefix = cache.peek(request.root, request.prompt, length)
                left -= length
            if prefix is not None:
                found[request] = prefix
        self._found = found
        return found


def longest_prefix(prefixes: Prefixes) -> Ranking:
    """Most cached tokens first, so that what is cached is used before it is evicted."""

    def ranking(head: list[Request]) -> Rank:
        found = prefixes.of(head)
        return lambda request: -found[request].tokens if request in found else 0

    return ranking


def heaviest_subtree(prefixes: Prefixes) -> Ranking:
    """Depth first through the tree, the child with most waiting requests below it first
    (SGLang's dfs-weight): neighbours in the tree run together."""

    def ranking(head: list[Request]) -> Rank:
        at: dict[RadixNode | None, list[Request]] = defaultdict(list)
        for request, prefix in prefixes.of(head).items():
            at[prefix.below or prefix.node].append(request)
        places = {request: place for place, request in enumerate(_depth_first(at))}
        return lambda request: places.get(request, len(places))

    return ranking


def _depth_first(at: dict[RadixNode | None, list[Request]]) -> Iterable[Request]:
    """Requests in the order of the tree, by the nodes they are `at`. A node's own go after those below it,
    which need its pages too."""
    weight: dict[RadixNode | None, int] = defaultdict(int)
    children: dict[RadixNode | None, dict[RadixNode, None]] = defaultdict(dict)
    for node, requests in at.items():
        walk = node
        while walk is not None:
            weight[walk] += len(requests)
            children[walk.parent][walk] = None
            walk = walk.parent
    # The last pushed comes off first: the heaviest child, of equals the one that arrived first.
    stack: list[tuple[RadixNode | None, bool]] = [(None, False)]
    while stack:
        node, done = stack.pop()
        if done:
            yield from at.get(node, ())
            continue
        stack.append((node, True))
        below = sorted(children.get(node, {}), key=weight.__getitem__, reverse=True)
        stack.extend((child, False) for child in reversed(below))
