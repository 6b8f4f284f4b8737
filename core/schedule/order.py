"""In which order waiting requests are tried. Pure functions over the queue."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable

from core.request import Request

MATCH_LIMIT = 128
"""Above this many waiting requests the orders that look at the tree fall back to arrival: matching
every one of them for each step would cost more than it saves (SGLang's figure)."""

Prefix = Callable[[Request], tuple[object, int]]
"""The deepest tree node that a request's prompt reaches, and how many tokens lie above it."""

Ordering = Callable[[list[Request]], Iterable[Request]]


def fcfs(waiting: list[Request]) -> list[Request]:
    """Arrival; retracted requests stand first already."""
    return waiting


def lof(waiting: list[Request]) -> list[Request]:
    """Longest output first: the long ones overlap with everything that follows."""
    return sorted(waiting, key=lambda r: -r.params.max_tokens)


def priority(waiting: list[Request]) -> list[Request]:
    """Highest priority first, then arrival."""
    return sorted(waiting, key=lambda r: (-r.priority, r.arrival))


def shuffled(rng: random.Random) -> Ordering:
    """Any order, from a seeded generator."""

    def order(waiting: list[Request]) -> list[Request]:
        return rng.sample(waiting, len(waiting))

    return order


def longest_prefix(prefix: Prefix) -> Ordering:
    """Most cached tokens first, so that what is cached is used before it is evicted."""

    def order(waiting: list[Request]) -> list[Request]:
        if len(waiting) > MATCH_LIMIT:
            return waiting
        return sorted(waiting, key=lambda r: -prefix(r)[1])

    return order


def heaviest_subtree(prefix: Prefix, parent: Callable[[object], object | None]) -> Ordering:
    """Depth first through the tree, the child with most waiting requests below it first
    (SGLang's dfs-weight): neighbours in the tree run together."""

    def order(waiting: list[Request]) -> list[Request]:
        if len(waiting) > MATCH_LIMIT:
            return waiting
        at: dict[object, list[Request]] = defaultdict(list)
        weight: dict[object, int] = defaultdict(int)
        children: dict[object | None, dict[object, None]] = defaultdict(dict)
        for request in waiting:
            node, _ = prefix(request)
            at[node].append(request)
            walk: object | None = node
            while walk is not None:
                weight[walk] += 1
                above = parent(walk)
                children[above][walk] = None
                walk = above
        ordered: list[Request] = []
        # The last pushed comes off first: the heaviest child, of equals the one that arrived first.
        # A node's own requests go after those below it, which need its pages too.
        stack: list[tuple[object | None, bool]] = [(None, False)]
        while stack:
            node_or_top, done = stack.pop()
            if done:
                ordered.extend(at.get(node_or_top, ()))
                continue
            stack.append((node_or_top, True))
            below = list(children.get(node_or_top, {}))[::-1]
            below.sort(key=lambda n: weight[n])
            stack.extend((child, False) for child in below)
        return ordered

    return order
