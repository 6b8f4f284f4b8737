"""`app.engine.operator.Operator` and `app.engine.adapters.Adapters` without an engine."""

from __future__ import annotations

from typing import Any

from app.service import Loaded, ModelCard
from core.adapters import AdapterInfo


def make_loaded(card: ModelCard, tokenizer: Any, template: Any, engine: Any, **more: Any) -> Loaded:
    """A model that is served by `engine` alone."""
    beside = {"adapters": NoAdapters(enabled=False), "operator": Idle()}
    return Loaded(card, tokenizer, template, engine, **{**beside, **more})


class NoAdapters:
    """Adapters of which every one can be loaded and unloaded, and none is there."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled

    listed: tuple[AdapterInfo, ...] = ()

    def find(self, name: str) -> None: ...

    def statistics(self, replica: int = 0) -> None: ...

    async def load(self, name: str, path: str, pinned: bool = False) -> AdapterInfo:
        return AdapterInfo(name=name, path=path)

    async def unload(self, name: str) -> AdapterInfo:
        return AdapterInfo(name=name, path="")


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
