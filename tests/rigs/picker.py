"""A router that picks a server by cache events, as llm-d's does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.rigs.kv_events import Subscriber
from tests.rigs.server import Server

ROUTE = "/v1/completions"


class Backend(NamedTuple):
    """A server, and the pages that its events say are cached."""

    server: Server
    subscriber: Subscriber

    def cached(self, tokens: Sequence[int], page_size: int) -> int:
        """Number of tokens of a prompt that are cached on this server."""
        ends = range(page_size, len(tokens) + 1, page_size)
        found = (end for end in reversed(ends) if self.subscriber.follower.knows(tokens[:end]))
        return next(found, 0)


class Picker:
    """Sends a request to the server with its longest cached prefix. A request without a hit goes to the
    server that got such a request least recently, like llm-d's `no-hit-lru-scorer`: caches fill evenly."""

    def __init__(self, backends: Sequence[Backend], page_size: int) -> None:
        self.backends = list(backends)
        self._cold = list(backends)
        """Servers, least recently given a request without a hit first."""
        self._page_size = page_size

    async def post(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and answer to a completion. Its tokens are asked of a server, as llm-d asks vLLM."""
        status, rendered = await self.backends[0].server.post(f"{ROUTE}/render", body)
        assert status == 200, rendered
        tokens = rendered[0]["token_ids"]
        for each in self.backends:
            await each.subscriber.catch_up()
        found = [each.cached(tokens, self._page_size) for each in self._cold]
        best = self._cold[found.index(max(found))]
        if not any(found):
            self._cold.remove(best)
            self._cold.append(best)
        return await best.server.post(ROUTE, body)
