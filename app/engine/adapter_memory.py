"""Where the adapters of a replica are: read into host memory, copied to the device, dropped."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from app.engine.loop import Engine
from app.engine.shielded import Shielded
from core.adapters import AdapterInfo
from core.errors import RequestError

log = logging.getLogger(__name__)


class Use(msgspec.Struct, eq=False):
    """A loaded adapter, and what must end before it is unloaded."""

    info: AdapterInfo
    jobs: int = 0
    placing: int = 0
    """Number of replicas that are copying the adapter to their devices."""
    closing: bool = False
    """The adapter is being unloaded: no more jobs may use it."""
    changed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)


class AdapterMemory(Shielded):
    """Host memory of one replica, and copies from there to its device.

    When host memory is full, the least recently placed adapter is dropped; it is read again when needed.

    Owner: event loop.
    """

    def __init__(self, engine: Engine, limit: int, uses: Mapping[str, Use]) -> None:
        """`limit` is the most adapters in host memory. `uses` are the loaded adapters by id."""
        super().__init__()
        self._engine = engine
        self._limit = limit
        self._uses = uses
        self._host: OrderedDict[str, None] = OrderedDict()
        """Ids of the adapters in host memory, the least recently placed first."""
        self._placing: set[str] = set()
        """Ids of the adapters that are being copied to the device."""
        self._room = asyncio.Lock()
        """Held while host memory changes hands."""
        self._copied = asyncio.Event()
        engine.on_place = self._on_place

    def __len__(self) -> int:
        """Number of adapters in host memory."""
        return len(self._host)

    async def read(self, use: Use) -> None:
        """Read the adapter into host memory unless it is there; others are dropped when it is full. Raises
        `RequestError`."""
        id = use.info.id
        if id in self._host:  # without the lock, whose holder may wait for the copy of this one
            self._host.move_to_end(id)
            return
        async with self._room:
            while len(self._host) >= self._limit:
                await self._make_room()
            self._host[id] = None
            try:
                await self._engine.commands.carry_out("adapter_read", use.info.path, adapter=id)
            except RequestError as error:
                log.warning("adapter %s at %s: %s", use.info.name, use.info.path, error)
                await self._drop(id)  # some ranks may have it
                raise

    async def free(self, id: str) -> None:
        """Free the adapter's place and its host memory. No request may be using it."""
        self._engine.places.forget(id)
        async with self._room:
            if id in self._host:
                await self._drop(id)

    async def _make_room(self) -> None:
        """Drop an adapter, or wait until the copy of one is done. The others are never all pinned."""
        for id in self._host:
            use = self._uses.get(id)
            if use is None or not (use.info.pinned or id in self._placing):
                await self._drop(id)
                return
        self._copied.clear()
        await self._copied.wait()

    async def _drop(self, id: str) -> None:
        del self._host[id]
        await self._engine.commands.carry_out("adapter_drop", adapter=id)

    def _on_place(self, id: str, place: int) -> None:
        use = self._uses[id]
        use.placing += 1
        self._placing.add(id)
        self._begin(f"places {use.info.name}", self._place(use, place), logging.DEBUG)

    async def _place(self, use: Use, place: int) -> None:
        """Copy the adapter to the place. If that fails, its requests end with the reason."""
        id = use.info.id
        try:
            await self.read(use)
            await self._engine.commands.carry_out("adapter_place", adapter=id, place=place)
            self._engine.places.placed(id)
            self._engine.wake()
        except RequestError as error:
            self._engine.lose(id, f"The adapter '{use.info.name}' cannot be run: {error}")
        finally:
            self._placing.discard(id)
            use.placing -= 1
            use.changed.set()
            self._copied.set()
