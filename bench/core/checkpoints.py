"""Prefix cache hits of models with linear attention, whose prefixes need a saved state.

    python -m bench.core.checkpoints [--trace FILE ...] [--checkpoints 128 512 2048]

Replays the requests through the server's cache in the order of arrival, one at a time, in pages of 16 tokens,
and compares the prompt tokens found with those of a model that attends only, whose every cached page is of
use, in the same pool: one of 3,200 tokens for each checkpoint, as a Qwen3.5-9B has it. FILE is a trace with
hash ids of prompts (Mooncake's format), whose answers are not known; `agents` is made up: agents that share
system prompts and call tools, each turn the text so far, its answer and a tool's result, with subagents that
begin as copies of a text; `chats` is that of bench.core.eviction.

Written to bench/results/checkpoints.json. Bias: requests that run at once hold pages and checkpoints, too.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from bench.core.eviction import Traffic, chats, recorded
from bench.flags import command
from bench.load.report import align
from bench.results import write
from core.cache.manager import CacheManager
from core.types import PLAIN_ROOT, Ints

SIZE: Final = 16
"""Tokens of a page of the cache."""
EACH: Final = 3200
"""Tokens of the pool for each checkpoint (`gpu.memory.CHECKPOINTS`)."""
AGENTS, AT_ONCE, SYSTEMS = 300, 40, 4
"""Agents in all, at a time, and their system prompts."""
TURNS = 60
"""Maximum turns of an agent: one in sixteen ends behind each."""
FORK = 0.04
"""Turns that begin a subagent."""


def agents(seed: int = 0) -> Traffic:
    """Agents at work. `page` is 1: their texts are tokens."""
    rng = np.random.default_rng(seed)

    def tokens(mean: float) -> list[int]:
        found: list[int] = rng.integers(0, 150_000, 1 + int(rng.exponential(mean))).tolist()
        return found

    systems = [tokens(4000) for _ in range(SYSTEMS)]
    queue: list[tuple[float, int, list[int], int]] = []
    started = 0
    prompts: list[Ints] = []
    kept: list[Ints] = []

    def start(at: float, text: list[int]) -> None:
        nonlocal started
        turns = min(int(rng.geometric(1 / 16)), TURNS)
        heapq.heappush(queue, (at + float(rng.exponential(1.0)), started, text, turns))
        started += 1

    for _ in range(AT_ONCE):
        start(0.0, systems[int(rng.integers(SYSTEMS))] + tokens(400))
    while queue:
        at, number, text, turns = heapq.heappop(queue)
        prompts.append(np.array(text, np.int32))
        text = text + tokens(150)
        kept.append(np.array(text[:-1], np.int32))  # the last token's keys and values are not computed
        text = text + tokens(600)
        if rng.random() < FORK:
            start(at, text + tokens(200))
        if turns > 1:
            heapq.heappush(queue, (at + float(rng.exponential(1.0)), number, text, turns - 1))
        elif started < AGENTS:
            start(at, systems[int(rng.integers(SYSTEMS))] + tokens(400))
    return Traffic("agents", 1, prompts, kept)


def in_tokens(traffic: Traffic) -> Traffic:
    """The traffic with each page's tokens in place of its number."""
    page = traffic.page
    if page == 1:
        return traffic
    prompts, kept = (
        [(each[:, None] * page + np.arange(page)).astype(np.int32).reshape(-1) for each in texts]
        for texts in (traffic.prompts, traffic.kept)
    )
    return Traffic(traffic.name, 1, prompts, kept)


def found_by(traffic: Traffic, tokens: int, checkpoints: int | None) -> float:
    """The share of prompt tokens found in a pool of `tokens` tokens; `checkpoints` None: of a model without
    states."""
    pages = tokens // SIZE
    cache, found, asked = CacheManager(pages + 1, SIZE).with_checkpoints(checkpoints), 0, 0
    for prompt, kept in zip(traffic.prompts, traffic.kept, strict=True):
        if len(kept) >= tokens:
            continue
        cache.next_step()
        match = cache.match(PLAIN_ROOT, prompt, len(prompt) - 1)
        hold = cache.try_reserve(match, len(prompt))
        assert hold is not None, "nothing else runs"
        cache.commit(hold, PLAIN_ROOT, prompt)
        for mark in hold.marks:
            cache.save(hold, mark)
        if more := -(-len(kept) // SIZE) - len(hold.pages):
            taken = cache.try_take(more)
            assert taken is not None
            hold.pages += taken.tolist()
        if interval := cache.interval:
            for at in range(len(prompt) // interval + 1, len(kept) // interval + 1):
                cache.save_ahead(hold, at * interval)
        cache.release(hold, PLAIN_ROOT, kept)
        found, asked = found + match.tokens, asked + len(prompt)
    return found / max(asked, 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write bench/results/checkpoints.json."""
    parser = command(__doc__)
    parser.add_argument("--trace", type=Path, nargs="*", default=[], help="with hash ids of prompts")
    parser.add_argument("--checkpoints", type=int, nargs="+", default=[128, 512, 2048])
    args = parser.parse_args(argv)
    rows: list[tuple[str, ...]] = [("traffic", "checkpoints", "tree", "with states", "of it")]
    results = {}
    for traffic in map(in_tokens, [*map(recorded, args.trace), agents(), chats()]):
        for number in args.checkpoints:
            tree, found = (found_by(traffic, number * EACH, states) for states in (None, number))
            shares = {"tree": round(tree, 4), "with states": round(found, 4), "of it": round(found / tree, 4)}
            results[f"{traffic.name}, {number} checkpoints"] = shares
            rows.append((traffic.name, str(number), *(f"{share:.3f}" for share in shares.values())))
    print(align(rows))
    write("checkpoints", {"unit": "share of prompt tokens found", "found": results})


if __name__ == "__main__":
    main()
