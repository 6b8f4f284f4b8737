"""Hit rates of eviction orders on recorded and on made-up traffic.

    python -m bench.core.eviction [--trace FILE ...] [--tokens 65536 131072]

Plays the requests through the server's cache in the order of arrival, one at a time, with a KV pool of
--tokens tokens. FILE is a trace with hash ids of prompts (Mooncake's format). `chats` is
made up: conversations of several turns, of users who think in between, under a few system prompts. Printed
is the share of prompt tokens that each `--eviction` finds in the cache, and beside it

    clairvoyant  evicts what is asked for again last
    endless      never evicts

Written to bench/results/eviction.json. Bias: requests that run at once hold pages, which leaves less for
prefixes; answers of a trace are not known and so are not cached.
"""

from __future__ import annotations

import heapq
import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, get_args

import numpy as np

from bench.flags import command
from bench.load.report import align
from bench.load.traces import PAGE, load
from bench.results import write
from core.cache.manager import CacheManager
from core.config import Eviction
from core.types import PLAIN_ROOT, Ints

NEVER: Final = sys.maxsize
"""Time of the next use of a page that is not asked for again."""

USERS, CONVERSATIONS, SYSTEMS = 200, 3000, 8
"""Parameters of `chats`: users who talk at once, conversations in all, system prompts."""
LONGEST = 12
"""Turns of a conversation, at most: one in four ends behind each."""
BLOCK = 64
"""Tokens of a page of `chats`."""
SYSTEM, TURN, ANSWER = 16, 6, 3
"""Pages of a system prompt, and, on average, of a turn's question and of its answer."""


class Traffic(NamedTuple):
    """Prompts as the ids of their pages, each of `page` tokens. Equal ids are equal pages with equal ones
    before them. `kept` are the pages of a prompt and its answer."""

    name: str
    page: int
    prompts: Sequence[Ints]
    kept: Sequence[Ints]


def recorded(path: Path) -> Traffic:
    """A trace. ValueError where it does not say which prompts begin alike."""
    prompts = [np.array(entry.pages, np.int32) for entry in load(path)]
    if not any(len(prompt) for prompt in prompts):
        raise ValueError(f"{path} has no hash ids: it does not say which prompts begin alike")
    return Traffic(path.name, PAGE, prompts, prompts)


def chats(seed: int = 0) -> Traffic:
    """Conversations whose turns are spread by thinking times."""
    rng = np.random.default_rng(seed)
    fresh = iter(range(1, NEVER))

    def pages(count: int) -> list[int]:
        return [next(fresh) for _ in range(count)]

    systems = [pages(SYSTEM) for _ in range(SYSTEMS)]
    free = [float(at) for at in rng.exponential(1.0, USERS)]
    heapq.heapify(free)
    made: list[tuple[float, Ints, Ints]] = []
    for _ in range(CONVERSATIONS):
        at, text = heapq.heappop(free), list(systems[min(int(rng.zipf(1.6)), SYSTEMS) - 1])
        for _ in range(min(int(rng.geometric(0.25)), LONGEST)):
            text += pages(1 + int(rng.poisson(TURN - 1)))
            prompt = np.array(text, np.int32)
            text += pages(1 + int(rng.poisson(ANSWER - 1)))
            made.append((at, prompt, np.array(text, np.int32)))
            at += float(rng.exponential(1.0))
        heapq.heappush(free, at)
    made.sort(key=lambda turn: turn[0])
    return Traffic("chats", BLOCK, [prompt for _, prompt, _ in made], [kept for _, _, kept in made])


def found_by(order: Eviction, traffic: Traffic, pages: int) -> float:
    """The share of prompt pages that the server's own cache finds."""
    cache, found, asked = CacheManager(pages + 1, 1, eviction=order), 0, 0
    for prompt, kept in zip(traffic.prompts, traffic.kept, strict=True):
        if len(kept) > pages:
            continue
        match = cache.match(PLAIN_ROOT, prompt, len(prompt))
        hold = cache.try_reserve(match, len(kept))
        assert hold is not None, "nothing else runs"
        cache.release(hold, PLAIN_ROOT, kept)
        found, asked = found + match.tokens, asked + len(prompt)
    return found / max(asked, 1)


def found_by_clairvoyance(traffic: Traffic, pages: int) -> float:
    """The share that a cache finds that knows what comes (Belady's order). A page is asked for again no later
    than those behind it, so that what is evicted is always an end."""
    uses: dict[int, deque[int]] = defaultdict(deque)
    rounds = [(p, k) for p, k in zip(traffic.prompts, traffic.kept, strict=True) if len(k) <= pages]
    for at, (prompt, _) in enumerate(rounds):
        for page in prompt.tolist():
            uses[page].append(at)
    cached: dict[int, int] = {}
    queue: list[tuple[int, int, int]] = []
    found = asked = 0
    for prompt, kept in rounds:
        for page in prompt.tolist():
            uses[page].popleft()
        hits = next((i for i, page in enumerate(prompt.tolist()) if page not in cached), len(prompt))
        found, asked, now = found + hits, asked + len(prompt), set(kept.tolist())
        short = sum(page not in cached for page in now) - (pages - len(cached))
        spared = []
        while short > 0:
            entry = heapq.heappop(queue)
            again, _, page = -entry[0], entry[1], entry[2]
            if cached.get(page) != again:
                continue
            if page in now:
                spared.append(entry)
                continue
            del cached[page]
            short -= 1
        for entry in spared:
            heapq.heappush(queue, entry)
        for depth, page in enumerate(kept.tolist()):
            again = uses[page][0] if uses.get(page) else NEVER
            if cached.get(page) != again:
                cached[page] = again
                heapq.heappush(queue, (-again, -depth, page))
    return found / max(asked, 1)


def measured(traffic: Traffic, tokens: int) -> dict[str, float]:
    """The share of prompt pages found in a pool of `tokens` tokens, by eviction order."""
    pages = tokens // traffic.page
    found = {order: found_by(order, traffic, pages) for order in get_args(Eviction)}
    found["clairvoyant"] = found_by_clairvoyance(traffic, pages)
    fits = [each for each, kept in enumerate(traffic.kept) if len(kept) <= pages]
    fitting = traffic._replace(
        prompts=[traffic.prompts[each] for each in fits], kept=[traffic.kept[each] for each in fits]
    )
    found["endless"] = found_by("lru", fitting, sum(len(kept) for kept in fitting.kept))
    return {name: round(share, 4) for name, share in found.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write bench/results/eviction.json."""
    parser = command(__doc__)
    parser.add_argument("--trace", type=Path, nargs="*", default=[], help="with hash ids of prompts")
    parser.add_argument("--tokens", type=int, nargs="+", default=[65_536, 131_072], help="of the pool")
    args = parser.parse_args(argv)
    results = {}
    for traffic in [*map(recorded, args.trace), chats()]:
        for tokens in args.tokens:
            results[f"{traffic.name}, {tokens} tokens"] = measured(traffic, tokens)
    names = list(next(iter(results.values())))
    rows = [("hit share", *names)]
    rows += [(name, *(f"{found[each]:.3f}" for each in names)) for name, found in results.items()]
    print(align(rows))
    write("eviction", {"unit": "share of prompt tokens found", "found": results})


if __name__ == "__main__":
    main()
