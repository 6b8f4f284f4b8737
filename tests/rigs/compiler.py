"""A fake grammar compiler that a test controls."""

from __future__ import annotations

import asyncio
from typing import Any

from core.errors import RequestError
from core.grammar import CompiledGrammar, GrammarSpec


class FakeGrammar:
    """A compiled grammar without a matcher."""

    warnings: tuple[str, ...] = ()

    def matcher(self) -> Any:
        return None


class FakeCompiler:
    """Returns `grammar` or raises `error` once `ready` is set."""

    def __init__(self) -> None:
        self.asked: list[GrammarSpec] = []
        self.cancelled = 0
        self.ready = asyncio.Event()
        self.error: RequestError | None = None
        self.grammar = FakeGrammar()

    async def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        self.asked.append(spec)
        try:
            await self.ready.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return self.grammar

    def close(self) -> None:
        pass
