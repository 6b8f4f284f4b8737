"""`app.engine.operator.Operator` without an engine."""

from __future__ import annotations


class Idle:
    """An operator that does nothing, so that control routes answer."""

    paused = False
    asleep: frozenset[str] = frozenset()

    async def pause(self, mode: str) -> None: ...

    async def resume(self) -> None: ...

    def slow_down(self, seconds: float) -> None: ...

    async def start_profile(self) -> None: ...

    async def stop_profile(self) -> str:
        return "trace.json"

    async def load_weights(self, path: str) -> None: ...

    async def sleep(self, tags: tuple[str, ...]) -> None: ...

    async def wake(self, tags: tuple[str, ...]) -> None: ...
