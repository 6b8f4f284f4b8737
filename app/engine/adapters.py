"""LoRA adapters of a running engine: their names, the requests that use them, and where they are."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from app.engine.adapter_memory import AdapterMemory, Use
from app.engine.replicas import Replicas
from app.engine.shielded import Shielded, shielded
from core.adapters import NAME, NAMING, AdapterInfo, AdapterLimits
from core.errors import ConfigError, NotFound, RequestError, field_error

log = logging.getLogger(__name__)

DISABLED = "adapters are not enabled: start the server with --enable-lora or --lora"


class AdapterStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a replica's adapters, by where they are."""

    places: int
    """Places on the device."""
    taken: int
    """Places with an adapter."""
    host: int
    """Adapters in host memory."""
    loaded: int
    """Adapters that requests may name."""


class Adapters(Shielded):
    """Loads and unloads adapters of all replicas while requests run.

    An adapter that is loaded was read once by every replica, so that a wrong one is refused then
    (`app/engine/adapter_memory.py`).

    Unloading takes two phases: the name is gone at once; the memory is freed when the jobs that have the
    adapter have ended. An adapter that is loaded under the same name meanwhile is another one.

    Owner: event loop.
    """

    def __init__(
        self,
        replicas: Replicas,
        limits: AdapterLimits | None = None,
        reserved: Collection[str] = (),
        roots: Sequence[Path] = (),
    ) -> None:
        """`limits` None: adapters are refused. `reserved` are names that none may have. Only directories in
        `roots` are loaded."""
        super().__init__()
        self._replicas = replicas
        self._limits = limits
        self._reserved = reserved
        self._roots = [root.expanduser().resolve() for root in roots]
        self._named: dict[str, AdapterInfo] = {}
        self._arriving: dict[str, bool] = {}
        """Names under which adapters are being loaded, and whether pinned."""
        self._uses: dict[str, Use] = {}
        host = 0 if limits is None else limits.host
        self._memories = {engine: AdapterMemory(engine, host, self._uses) for engine in replicas.engines}

    # -- by name ---------------------------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """Whether there can be adapters at all."""
        return self._limits is not None

    @property
    def listed(self) -> list[AdapterInfo]:
        """Adapters that requests may name, oldest first."""
        return list(self._named.values())

    def find(self, name: str) -> AdapterInfo | None:
        """The adapter of that name."""
        return self._named.get(name)

    def name(self, id: str) -> str | None:
        """The name of a loaded adapter, or of one that is being unloaded."""
        use = self._uses.get(id)
        return None if use is None else use.info.name

    def names(self, ids: Collection[str]) -> list[str]:
        """The names of loaded adapters, those being unloaded too."""
        return sorted(self._uses[id].info.name for id in ids if id in self._uses)

    @shielded
    async def load(self, name: str, path: str, pinned: bool = False, trusted: bool = False) -> AdapterInfo:
        """Read an adapter from a directory; `trusted`: from any. Raises `RequestError` with what is wrong."""
        self._check(name, pinned)
        self._arriving[name] = pinned
        try:
            found = await asyncio.to_thread(self._resolved, path, trusted)
            info = AdapterInfo(id=secrets.token_hex(16), name=name, path=str(found), pinned=pinned)
            use = Use(info)
            try:
                await self._replicas.together(
                    lambda engine: self._memories[engine].read(use),
                    lambda engine: self._memories[engine].free(info.id),
                )
            except RequestError as error:
                raise RequestError(error.message, "lora_path", "adapter_refused") from None
        finally:
            del self._arriving[name]
        self._uses[info.id] = use
        self._named[name] = info
        if pinned:
            for engine in self._replicas.engines:
                engine.places.pin(info.id)
        log.info("adapter %s: loaded from %s", name, found)
        return info

    @shielded
    async def unload(self, name: str) -> AdapterInfo:
        """Refuse new jobs with an adapter, wait until those under way have ended, and free its memory. Raises
        `NotFound`."""
        self._enabled()
        if (info := self._named.pop(name, None)) is None:
            raise NotFound(f"No adapter '{name[:200]}' is loaded.", "lora_name", "model_not_found")
        use = self._uses[info.id]
        use.closing = True
        while use.jobs or use.placing:
            use.changed.clear()
            await use.changed.wait()
        del self._uses[info.id]
        await asyncio.gather(*(memory.free(info.id) for memory in self._memories.values()))
        log.info("adapter %s: unloaded", name)
        return info

    async def start(self, adapters: Sequence[AdapterInfo]) -> None:
        """Load the adapters that the server starts with. Raises `ConfigError`."""
        for each in adapters:
            try:
                await self.load(each.name, each.path, each.pinned, trusted=True)
            except RequestError as error:
                raise ConfigError(f"--lora {each.name}={each.path}: {error}") from None

    def statistics(self, replica: int = 0) -> AdapterStatistics | None:
        """Numbers of adapters; None where there can be none."""
        if self._limits is None:
            return None
        engine = self._replicas.engines[replica]
        return AdapterStatistics(
            places=self._limits.places,
            taken=engine.places.taken,
            host=len(self._memories[engine]),
            loaded=len(self._named),
        )

    # -- by job ----------------------------------------------------------------------------------------

    def acquire(self, id: str) -> None:
        """Count a job with the adapter. Raises `NotFound` if the adapter was unloaded since it was found."""
        if not id:
            return
        use = self._uses.get(id)
        if use is None or use.closing:
            raise NotFound("The adapter was unloaded.", "model", "model_not_found")
        use.jobs += 1

    def release(self, id: str) -> None:
        """Uncount a job with the adapter, which has ended."""
        if id:
            use = self._uses[id]
            use.jobs -= 1
            use.changed.set()

    # -- checks ----------------------------------------------------------------------------------------

    def _enabled(self) -> AdapterLimits:
        if self._limits is None:
            raise RequestError(f"{DISABLED[0].upper()}{DISABLED[1:]}.", "lora_name", "adapters_off")
        return self._limits

    def _check(self, name: str, pinned: bool) -> None:
        limits = self._enabled()
        if not NAME.fullmatch(name):
            raise field_error("lora_name", f"is not a name: {NAMING}")
        if name in self._reserved:
            raise field_error("lora_name", "is a name of the model itself")
        if name in self._named or name in self._arriving:
            raise field_error("lora_name", f"is taken: an adapter '{name}' is loaded already")
        held = sum(use.info.pinned for use in self._uses.values()) + sum(self._arriving.values())
        if pinned and held + 1 >= min(limits.places, limits.host):
            raise field_error("pinned", f"is refused: {held} adapters are pinned, others need room")

    def _resolved(self, path: str, trusted: bool) -> Path:
        """The real directory at `path`, which is not left by links or dots."""
        try:
            found = Path(path).expanduser().resolve()
            inside = trusted or any(found.is_relative_to(root) for root in self._roots)
            if inside and found.is_dir():
                return found
        except (OSError, RuntimeError, ValueError):  # a name too long, a loop of links, a null byte
            inside = False
        if inside:
            raise field_error("lora_path", "is no directory on the server")
        raise field_error("lora_path", "is outside of the directories that --lora-root and --lora name")
