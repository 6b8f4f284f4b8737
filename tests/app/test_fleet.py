"""Several servers behind a router that follows their cache events."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import cycle
from typing import Any

import msgspec
import pytest

from app.engine.kv_events import Publisher
from app.text.tokenizer import Tokenizer
from core.kv_events import KvEventsConfig
from tests.rigs.kv_events import Subscriber
from tests.rigs.picker import ROUTE, Backend, Picker
from tests.rigs.server import Start
from tests.rigs.step_loop import Bench

PAGE = 4
PAGES = 256
"""Cache pages of each of the two servers. The workload needs 1.7 times the pages of both together."""
PREFIXES = 48
CONFIG = KvEventsConfig(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")

Post = Callable[[dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]
Serve = Callable[[int], Awaitable[Backend]]


@pytest.fixture
async def serve(start: Start, tokenizer: Tokenizer) -> AsyncIterator[Serve]:
    """Starts servers, each with a cache of `pages` pages."""
    ends: list[Callable[[], None]] = []

    async def serve(pages: int) -> Backend:
        server = await start()
        bench, publisher = Bench(tokenizer, pages=pages + 1, events=True), Publisher(CONFIG)
        publisher.start(asyncio.get_running_loop(), bench.events[0], lambda id: None)
        server.service.ready(msgspec.structs.replace(server.service.loaded, engine=bench.submitter))
        subscriber = Subscriber(publisher)
        ends.extend((subscriber.close, publisher.close, bench.engine.close))
        return Backend(server, subscriber)

    yield serve
    for end in ends:
        end()


def requests() -> Iterator[dict[str, Any]]:
    """Prompts that begin with one of 48 prefixes of 20 to 60 tokens, some more popular than others."""
    rng = random.Random(1)
    prefixes = [[rng.randrange(3, 250) for _ in range(rng.randint(20, 60))] for _ in range(PREFIXES)]
    for _ in range(250):
        prefix = rng.choices(prefixes, [1 / (1 + at) for at in range(PREFIXES)])[0]
        prompt = prefix + [rng.randrange(3, 250) for _ in range(rng.randint(4, 12))]
        yield {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}


async def hits(post: Post) -> float:
    """Cache hit rate: the fraction of prompt tokens that were cached."""
    cached = asked = 0
    for body in requests():
        status, answer = await post(body)
        assert status == 200, answer
        cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        asked += answer["usage"]["prompt_tokens"]
    return cached / asked


async def test_two_servers_hit_like_one_with_the_pages_of_both(serve: Serve) -> None:
    """Hit rates are within 2% while pages are scarce; round robin, without the events, loses over 10%."""
    one = await serve(2 * PAGES)
    alone = await hits(lambda body: one.server.post(ROUTE, body))
    picker = Picker([await serve(PAGES), await serve(PAGES)], PAGE)
    together = await hits(picker.post)
    turns = cycle([await serve(PAGES), await serve(PAGES)])
    in_turn = await hits(lambda body: next(turns).server.post(ROUTE, body))
    assert abs(together - alone) < 0.02 * alone and in_turn < 0.9 * alone, (alone, together, in_turn)
    for each in (one, *picker.backends):
        assert each.server.service.loaded.engine.statistics()[0].scheduler.cache.evicted_pages
    assert all(each.subscriber.heard for each in picker.backends)
